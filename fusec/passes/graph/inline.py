"""Inline pointwise definitions that are not worth a buffer into their consumers.

Spec: ``graph -> graph``. Inlined are (a) definitions that read no memory, or one value for all
elements (masks, ranges, constants, random numbers, which need a seed only), (b) a pointwise
definition with one consumer, (c) a cheap pointwise definition of one full-size operand, into all
its consumers: recomputation costs less than a store and a load. Live-out definitions stay; those of
kind (a) are inlined as well, so that consumers do not wait for memory.

Substitution needs no unification: any index map will do, so chains through reshapes, slices and
cats fuse here, whatever their axes. A scan is not inlined; one that is only read from its end is
defined in that order instead, so that its readers share its kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.ir.contraction import is_window, multiplied
from fusec.ir.dtype import F8, HALF
from fusec.ir.expr import (
    Buffer,
    Cast,
    Const,
    Expr,
    Load,
    Op,
    Reduce,
    Select,
    loads,
    postorder,
    reductions,
)
from fusec.ir.graph import Def, Graph
from fusec.ir.index import Axis, Index, index
from fusec.ir.machine import Machine
from fusec.ir.rewrite import inline_loads, rewrite
from fusec.ir.scalar import SCALAR_OPS
from fusec.ir.serial import from_the_end, scan_of, serial_axes, turned
from fusec.ir.streamed import (
    conversions,
    copies_from_tables,
    reading_weights,
    stored_rows,
    takes_exact_weights,
    unrounded_operands,
)
from fusec.ir.transformed import channel_loads, is_contiguous
from fusec.passes.dag import find_uses
from fusec.passes.fusion.cost import numel
from fusec.passes.graph.reduction_rules import AXIS_RULES
from fusec.passes.graph.simplify import simplifier
from fusec.passes.schedule.access import count


def inline(graph: Graph, machine: Machine) -> Graph:
    """Return the graph with trivial definitions substituted into their consumers.

    The operand with the rows of a skinny product stays stored.
    """
    inliner = _Inliner(graph, machine)
    return _turn_scans(graph.map_defs(inliner.take))


class _Inliner:
    """The inlined definitions so far, rewritten over a common set of axes.

    There is one axis for each position and extent, so a value loaded at its own indices goes into
    its consumer unchanged: the operations below it are neither renamed nor simplified again. A
    chain of n operations costs n steps, not n*n.
    """

    def __init__(self, graph: Graph, machine: Machine) -> None:
        self.graph, self.tuning, self.machine = graph, machine.fusion, machine
        self.uses = find_uses(graph)
        self.products = {line.buffer for line in graph.defs if multiplied(line.expr)}
        self.shared: dict[tuple[int, Index], Axis] = {}
        self.definitions: dict[Buffer, Def] = {}
        self.sites: dict[int, dict[Buffer, list[frozenset[Axis]]]] = {}
        self.simplify = simplifier(AXIS_RULES)
        self.converted = conversions(graph, self.simplify) if machine.skinny_rows else {}
        self.weights = {**copies_from_tables(graph), **self.converted}

    def take(self, line: Def) -> tuple[Def, ...]:
        """Return a definition with its producers inlined; none if it is itself only inlined."""
        line = self._with_weights(line)
        there = self._shared_axes(line)
        back = {target: index(axis) for axis, target in there.items()}
        expr = line.expr.substitute({axis: index(target) for axis, target in there.items()})
        own = replace(line, axes=tuple(there.get(a, a) for a in line.axes), expr=expr)
        found = inline_loads(own, self.definitions, self.simplify)
        if self._is_inlined(line, found):
            self.definitions[line.buffer] = found
            if line.buffer not in self.uses.live_out:
                return ()
        if found is own:
            return (line,)
        return (replace(found, axes=line.axes, expr=found.expr.substitute(back)),)

    def _with_weights(self, line: Def) -> Def:
        """Return a product with weights that it reads as they lie, if it need not round them.

        Where the user rounds them, they say so themselves.
        """
        (expr,) = rewrite((line.expr,), unrounded_operands)
        if expr is line.expr:
            return line
        given = replace(line, expr=expr)
        whole = reading_weights(given, self.converted, self.simplify)
        exact = (takes_exact_weights(n, self.machine) for n in reductions(whole.expr))
        return whole if whole is not given and any(exact) else line

    def _shared_axes(self, line: Def) -> dict[Axis, Axis]:
        """Return own axis -> common axis; empty if any axis is ragged."""
        bound = (a for n in reductions(line.expr) for a in n.over)
        if any(a.limit is not None for a in (*line.axes, *bound)):
            return {}
        return {
            axis: self.shared.setdefault((k, axis.extent), Axis(axis.name, axis.extent))
            for k, axis in enumerate(line.axes)
        }

    def _is_inlined(self, line: Def, found: Def) -> bool:
        """Return whether to inline a definition, given as captured and over common axes."""
        readers = self.uses.readers.get(line.buffer, ())
        if not readers:
            return False
        nodes = postorder((found.expr,))
        if len(nodes) > self.tuning.inlined_nodes or any(isinstance(n, Reduce) for n in nodes):
            return False
        sources = [n for n in nodes if isinstance(n, Load)]
        if not self.uses.may_move((n.buffer for n in sources), line.buffer):
            return False
        points = count(line.axes)
        cost, cheap = _cost_of_a_point(nodes, max(points, 1)), self.tuning.cheap
        if not any(n.axes for n in sources):
            return cost <= 4 * cheap
        if line.buffer in self.uses.live_out:
            return False
        computed = cost > 0 or any(isinstance(n, Cast) and n.arg.dtype in F8 for n in nodes)
        if any(self._is_streamed_by(r, found, computed=computed) for r in readers):
            return False
        halves = computed and line.buffer.dtype in HALF
        if halves and any(self._widens_rows(r, line.buffer) for r in readers):
            return False
        if not self.machine.is_cpu and self._is_between_products(line.buffer, sources, readers):
            return False
        if any(self._scatters_channels(r, found) for r in readers):
            return False
        if any(self._is_turned_for_windows(r, line, found) for r in readers):
            return False
        if len(readers) == 1:
            sites = self._sites(readers[0]).get(line.buffer, [])
            again = count(sites[0]) / points if sites else 1
            return len(sites) <= 2 and (again <= 1 or cost * again <= 2 * cheap)
        full_size = sum(numel(n.buffer) >= points for n in sources)
        return cost <= cheap and full_size <= 1

    def _is_streamed_by(self, reader: int, rows: Def, *, computed: bool) -> bool:
        """Return True if a consumer reads a definition as rows that are stored before."""
        match self.graph.nodes[reader]:
            case Def() as line if self.machine.skinny_rows:
                sums = reductions(reading_weights(line, self.weights, self.simplify).expr)
                copied = isinstance(rows.expr, Load)
                how = {"computed": computed, "copied": copied, "cast": not computed and not copied}
                found = (stored_rows(n, self.machine, **how) for n in sums)
                return any(rows.buffer is n.buffer for few in found if few for n in loads((few,)))
            case _:
                return False

    def _widens_rows(self, reader: int, rows: Buffer) -> bool:
        """Return True if a consumer widens rows of 16 bits for a product that need not store them.

        They are stored as they are: a pair of them in one word takes two instructions to widen, a
        pair of wide ones six to tell apart (weights of 4 bits: 0.75 of the time; AVX2, 2026-11-29).
        """
        match self.graph.nodes[reader]:
            case Def(expr=Cast(arg=Load(buffer=buffer))) as wide if buffer is rows:
                products = self.uses.readers.get(wide.buffer, ())
                given, made = (
                    any(self._is_streamed_by(r, wide, computed=how) for r in products)
                    for how in (False, True)
                )
                return made and not given
        return False

    def _is_between_products(
        self, buffer: Buffer, sources: list[Load], readers: Sequence[int]
    ) -> bool:
        """Return True for what is computed of a product's result and multiplied by another.

        As the first one's epilogue it is computed once, as an operand for each tile of columns. On
        CPUs, where products mostly run in the library, operands are computed once, too.
        """
        if self.products.isdisjoint(n.buffer for n in sources):
            return False
        return any(self._multiplies(reader, buffer) for reader in readers)

    def _multiplies(self, reader: int, buffer: Buffer) -> bool:
        match self.graph.nodes[reader]:
            case Def(expr=expr):
                return buffer in (multiplied(expr) or ())
            case _:
                return False

    def _scatters_channels(self, reader: int, found: Def) -> bool:
        """Return True if a consumer's transformed product would load channels that lie apart."""
        match self.graph.nodes[reader]:
            case Def(axes=axes, expr=expr):
                return any(
                    channels in at.axes and not is_contiguous(found.expr, axis)
                    for read, channels in channel_loads(expr, axes)
                    if read.buffer is found.buffer
                    for at, axis in zip(read.indices, found.axes, strict=True)
                )
            case _:
                return False

    def _is_turned_for_windows(self, reader: int, line: Def, found: Def) -> bool:
        """Return True for a copy that lies side by side where its source does not, and that sums
        over windows read: on a CPU each of them would gather it from the source.
        """
        match self.graph.nodes[reader]:
            case Def(expr=expr) if self.machine.vector > 1 and any(
                is_window(n) and any(x.buffer is line.buffer for x in loads(n.bodies))
                for n in reductions(expr)
            ):
                sides = zip(found.axes, line.buffer.strides, strict=True)
                lanes = [axis for axis, stride in sides if stride is index(1)]
                return any(not is_contiguous(found.expr, axis) for axis in lanes)
            case _:
                return False

    def _sites(self, reader: int) -> dict[Buffer, list[frozenset[Axis]]]:
        """Return the axes over which a definition evaluates each of its loads, by buffer.

        Memoised: a cat of many parts has many.
        """
        known = self.sites.get(reader)
        if known is None:
            known = self.sites[reader] = {}
            match self.graph.nodes[reader]:
                case Def(expr=expr):
                    for load, axes in _evaluated_over(expr).items():
                        known.setdefault(load.buffer, []).append(axes)
        return known


def _evaluated_over(root: Expr) -> dict[Load, frozenset[Axis]]:
    """Return each load of an expression, with its axes and those of its guard.

    A guard may stand around the load: ``where(i == 2, part[j], 0)`` reads a part for each i.
    """
    found: dict[Load, frozenset[Axis]] = {}
    for node in postorder((root,)):
        match node:
            case Load():
                found[node] = node.axes
            case Select(condition=guard, then=Load() as load, other=Const(value=0)):
                found[load] |= guard.axes
            case Reduce() if steps := serial_axes((node,)):  # each of its points is read once
                inner = (n for n in postorder(node.bodies) if isinstance(n, Load))
                found.update((load, found[load] - steps) for load in inner)
    return found


def _cost_of_a_point(nodes: list[Expr], points: int) -> int:
    """Return multiply-adds an element; an operation over fewer axes is shared by many elements.

    ``x[m, c] - log(s[m])`` costs a subtraction: consumers compute the logarithm once a row, too.
    """
    total = sum(SCALAR_OPS[n.name].cost * count(n.axes) for n in nodes if isinstance(n, Op))
    return -(-total // points)


def _turn_scans(graph: Graph) -> Graph:
    """Return the graph with scans that are only read from their end defined in that order.

    y[i] = sum(j: where(until(j, i), x[j], 0)),      z[i] = 2 * y[n-1-i]    becomes
    y[i] = sum(j: where(until(i, j), x[n-1-j], 0)),  z[i] = 2 * y[i]

    Its buffer is another one, because it does not hold what the scan's operation returns.
    """
    places: dict[Buffer, list[tuple[Index, ...]]] = {}
    for load in loads(line.expr for line in graph.defs):
        places.setdefault(load.buffer, []).append(load.indices)
    kept = find_uses(graph).live_out
    found: dict[Buffer, int] = {}
    for line in graph.defs:
        scans = serial_axes(n for n in reductions(line.expr) if scan_of(n))
        for k, axis in enumerate(line.axes if line.buffer not in kept else ()):
            read = [_from_end(line.buffer, at, k) for at in places.get(line.buffer, ())]
            if axis in scans and read and all(any(map(i.steps_by_one, i.axes)) for i in read):
                found[line.buffer] = k
    made = {b: Buffer(b.name, b.shape, b.strides, b.dtype, b.form) for b in found}

    def redirect(node: Expr) -> Expr:
        if not isinstance(node, Load) or (k := found.get(node.buffer)) is None:
            return node
        at = _from_end(node.buffer, node.indices, k)
        indices = (*node.indices[:k], at, *node.indices[k + 1 :])
        return Load(made[node.buffer], indices, node.guard)

    def turn(line: Def) -> tuple[Def, ...]:
        line = line.map(lambda exprs: rewrite(exprs, redirect))
        if (k := found.get(line.buffer)) is not None:
            expr = line.expr.substitute({line.axes[k]: turned(line.axes[k])})
            (expr,) = rewrite((expr,), from_the_end)
            line = replace(line, buffer=made[line.buffer], expr=expr)
        return (line,)

    return graph.map_defs(turn) if found else graph


def _from_end(buffer: Buffer, at: tuple[Index, ...], k: int) -> Index:
    """Return an index into a buffer, counted from the end."""
    return buffer.shape[k] - 1 - at[k]
