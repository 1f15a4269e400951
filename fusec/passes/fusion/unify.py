"""Axis unification: may these definitions share one kernel, and over which axes?

The rule. For each load of an internal buffer, match its indices with the producer's axes: a plain
axis is united with the producer's axis; where a reshape merged or split axes, both sides are first
cut to their common refinement (``m`` of extent B*T becomes ``(b, t)``), so that no division is
left; a pointwise producer loaded at any other index is recomputed at that index; anything else is
rejected, with the reason. Axes that some definition reduces are *inside*, the rest is the *grid*.

Loads of one buffer from outside of the kernel are matched too, but optionally: a failure only costs
the sharing of these loads.

Worked example: ``mu[m] = sum(c': x[m, c'])/C`` and ``y[n, c] = x[n, c] - mu[n]`` unite n with m
(the internal edge) and c' with c (both load x), giving grid {m}, inside {c}.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from fusec.ir.contraction import is_product, uncut_operands
from fusec.ir.definition import NOWHERE
from fusec.ir.expr import Buffer, Load, Reduce, postorder, reductions
from fusec.ir.graph import Def, Kernel, axes_of
from fusec.ir.index import Axis, FloorDiv, Index, Mod, floordiv, index, mod
from fusec.ir.serial import hits_of, serial_axes
from fusec.passes.fusion.axis_classes import AxisClasses
from fusec.passes.fusion.parts import CutProducts, cut_products
from fusec.passes.fusion.resolve import (
    Learned,
    Rejection,
    axes_of_line,
    bound_axes,
    digits,
    loads_of,
    resolve_values,
)

__all__ = ["Learned", "Rejection", "unify"]


class _Unifier:
    """One unification of definitions; refines ``classes``.

    Args:
        cuts: (axis, inner extent) -> (outer, inner) axes of earlier cuts; None for no memo.
    """

    def __init__(
        self, defs: tuple[Def, ...], cuts: dict[tuple[Axis, Index], tuple[Axis, Axis]] | None
    ) -> None:
        self.defs = defs
        self.cuts = cuts
        self.classes = AxisClasses()
        self.resolve, self.fine_axes = self.classes.resolve, self.classes.fine_axes
        self.producer = {d.buffer: d for d in defs}
        one = index(1)
        for line in defs:
            for axis in axes_of_line(line.axes, line.expr):
                if axis.extent is one:
                    self.classes.define(axis, index(0), ())
        self.axes_of_lines = [self._axes_of_line(line) for line in defs]
        self.lines_with: dict[Axis, set[int]] = {}
        for position, axes in enumerate(self.axes_of_lines):
            for axis in axes:
                self.lines_with.setdefault(axis, set()).add(position)

    # -- classes ---------------------------------------------------------------------------------

    def _unite(self, a: Axis, b: Axis) -> None:
        if a is b:
            return
        if a in self.classes.parts or b in self.classes.parts:
            raise Rejection(f"{a.name} or {b.name} stands for other axes already")
        if a.extent is not b.extent:
            raise Rejection(f"extents {a.extent} of {a.name} and {b.extent} of {b.name} differ")
        self.classes.define(b, index(a), (a,))

    def _split(self, axis: Axis, inner: Index) -> tuple[Axis, Axis]:
        """Cut an axis into ``outer*inner + fine``."""
        if axis.limit is not None:
            raise Rejection(f"ragged axis {axis.name} cannot be cut again")
        parts = self.cuts.get((axis, inner)) if self.cuts is not None else None
        if parts is None:
            outer = Axis(f"{axis.name}o", floordiv(axis.extent, inner))
            parts = outer, Axis(f"{axis.name}i", inner)
            if self.cuts is not None:
                self.cuts[axis, inner] = parts
        outer, fine = parts
        self.classes.define(axis, index(outer) * inner + index(fine), (outer, fine))
        return outer, fine

    # -- divisions ---------------------------------------------------------------------------------

    def remove_divisions(self, value: Index) -> Index:
        """Resolve ``value``, cutting plain axes so that its divisions by them disappear."""
        for _ in range(8):
            value = self.resolve(value)
            divisions = [x for m, _ in value.terms for x in m if isinstance(x, FloorDiv | Mod)]
            cut = next((c for x in divisions if (c := self._cut_for(x))), None)
            if cut is None:
                return value
            self._split(*cut)
        return value

    def _cut_for(self, atom: object) -> tuple[Axis, Index] | None:
        if not isinstance(atom, FloorDiv | Mod) or atom.divisor.axes:
            return None
        for inner in (x for m, _ in atom.dividend.terms for x in m):
            if isinstance(inner, FloorDiv | Mod) and (cut := self._cut_for(inner)):
                return cut
        if atom.dividend.const:
            return None
        for monomial, coefficient in atom.dividend.terms:
            axis = monomial[-1] if len(monomial) == 1 else None
            if not isinstance(axis, Axis) or axis.limit is not None:
                continue
            step = _exact_quotient(atom.divisor, index(coefficient))
            if step is None or (step.is_constant and step.const <= 1) or step is axis.extent:
                continue
            if _exact_quotient(axis.extent, step) is not None:
                return axis, step
        return None

    # -- matching ----------------------------------------------------------------------------------

    def match(self, left: Index, right: Index) -> None:
        """Make two indices equal by uniting and cutting axes, or raise Rejection."""
        left, right = self.remove_divisions(left), self.remove_divisions(right)
        if left is right:
            return
        a, b = digits(left), digits(right)
        if a is None or b is None:
            raise Rejection(f"index {left if a is None else right} is computed, not an axis")
        self._match_digits([*a], [*b])

    def _match_digits(self, left: list[Axis], right: list[Axis]) -> None:
        while self._refresh(left) and self._refresh(right):
            a, b = left[-1], right[-1]
            if a is b or (a.extent is b.extent and a.limit is b.limit is None):
                self._unite(a, b)
                left.pop()
                right.pop()
            elif a.limit is not None and b.limit is not None:
                self._unite_ragged(left, right)
            elif a.limit is not None and b.limit is None:
                self._join_ragged(left, right)
            elif b.limit is not None and a.limit is None:
                self._join_ragged(right, left)
            elif _exact_quotient(a.extent, b.extent) is not None:
                self._peel(left, right)
            elif _exact_quotient(b.extent, a.extent) is not None:
                self._peel(right, left)
            else:
                raise Rejection(f"extents {a.extent} and {b.extent} have no common refinement")
        if any(axis.extent is not index(1) for axis in (*left, *right)):
            raise Rejection("index maps cover different numbers of elements")

    def _refresh(self, digits: list[Axis]) -> bool:
        """Expand last digits that earlier matches united or cut; return False if none is left."""
        while digits and digits[-1] in self.classes.parts:
            digits.extend(self.classes.parts[digits.pop()])
        return bool(digits)

    def _peel(self, longer: list[Axis], shorter: list[Axis]) -> None:
        """Cut the last digit of ``longer`` at the extent of the last digit of ``shorter``."""
        fine = shorter.pop()
        outer, inner = self._split(longer.pop(), fine.extent)
        self._unite(fine, inner)
        longer.append(outer)

    def _unite_ragged(self, left: list[Axis], right: list[Axis]) -> None:
        """Unite two ragged axes that are equal cuts of one extent; the outer axes match next."""
        a, b = left[-1], right[-1]
        if a.extent is not b.extent or self._covered(left) is not self._covered(right):
            raise Rejection(f"ragged axes {a.name} and {b.name} cut different extents")
        self.classes.define(b, index(a), (a,))
        left.pop()
        right.pop()

    def _covered(self, digits: list[Axis]) -> Index:
        """Return the extent E that a ragged last digit and the one before it cover."""
        inner = digits[-1]
        if len(digits) < 2 or inner.limit is None:
            raise Rejection(f"ragged axis {inner.name} stands alone")
        return self.resolve(inner.limit) + index(digits[-2]) * inner.extent

    def _join_ragged(self, ragged: list[Axis], plain: list[Axis]) -> None:
        """Replace an axis of extent E by ``outer*R + inner``, inner's limit ``E - outer*R``."""
        whole = plain.pop()
        if self._covered(ragged) is not whole.extent:
            raise Rejection(f"a ragged axis covers another extent than {whole.name}")
        inner, outer = ragged.pop(), ragged.pop()
        self.classes.define(whole, index(outer) * inner.extent + index(inner), (outer, inner))

    def cut_groups(self) -> None:
        """Cut axes that the index of a product's operand divides; their inner parts become rows.

        Four heads of queries that read one head of keys, ``k[h // 4]``, are four rows of its tile.
        Numbers of 4 bits, and scales of blocks of terms, are operands as they lie.
        """
        mark = len(self.classes)
        for line in self.defs:
            for node in reductions(line.expr):
                if is_product(node):
                    uncut = uncut_operands(node)
                    for load in loads_of(node.body):
                        for position in load.indices if load not in uncut else ():
                            self.remove_divisions(position)
        self._check_distinct(mark)

    # -- the walk ----------------------------------------------------------------------------------

    def unify_internal(self) -> None:
        """Match every load of an internal buffer with its producer."""
        for line in self.defs:
            for load in loads_of(line.expr):
                producer = self.producer.get(load.buffer)
                if producer is None or producer is line:
                    continue
                mark = len(self.classes)
                try:
                    for position, axis in zip(load.indices, producer.axes, strict=True):
                        self.match(position, index(axis))
                    self._check_distinct(mark)
                except Rejection as rejection:
                    self.classes.undo(mark)
                    if reductions(producer.expr):
                        raise Rejection(
                            line.buffer,
                            " reads ",
                            load.buffer,
                            " at another place: ",
                            *rejection.parts,
                        ) from None
                    continue  # pointwise: recomputed at this index

    def unify_shared(self) -> None:
        """Match loads of one outside buffer with each other, where that is consistent."""
        first: dict[Buffer, list[Load]] = {}
        for line in self.defs:
            uncut = {x for node in reductions(line.expr) for x in uncut_operands(node)}
            for load in loads_of(line.expr):
                if load.buffer not in self.producer and load.axes and load not in uncut:
                    first.setdefault(load.buffer, []).append(load)
        for group in first.values():
            reference = next((x for x in group if x.guard is None), group[0])
            for load in group:
                if load is not reference:
                    self._try(functools.partial(self._match_loads, reference, load))

    def _match_loads(self, a: Load, b: Load) -> None:
        for left, right in zip(a.indices, b.indices, strict=True):
            self.match(left, right)

    def unify_siblings(self) -> None:
        """Unite, by position, axes of equal extents that no load relates yet.

        First the axes of definitions of one rank, then reduced axes with each other and with the
        fastest axes of the definition with most axes: loops of equal extents are fused.
        """
        head = max(self.defs, key=lambda d: len(self.fine_axes(d.axes)))
        for line in self.defs:
            if line is not head:
                self._try(functools.partial(self._match_axes, head.axes, line.axes))
        loops: list[tuple[Axis, ...]] = [head.axes]
        for line in self.defs:
            for node in reductions(line.expr):
                for known in loops:
                    mine, theirs = self.fine_axes(node.over), self.fine_axes(known)
                    if set(mine) <= set(theirs):
                        break
                    tail = theirs[len(theirs) - len(mine) :]
                    if len(mine) <= len(theirs) and _same_extents(mine, tail):
                        self._try(functools.partial(self._match_axes, tail, mine))
                else:
                    loops.append(node.over)

    def _match_axes(self, left: tuple[Axis, ...], right: tuple[Axis, ...]) -> None:
        a, b = self.fine_axes(left), self.fine_axes(right)
        if a == b:
            return
        if not _same_extents(a, b):
            raise Rejection("extents differ")
        for x, y in zip(a, b, strict=True):  # (m, n), (n, m): one union changes the other axes
            self._match_digits([x], [y])

    def _try(self, action: Callable[[], None]) -> None:
        mark = len(self.classes)
        try:
            action()
            self._check_distinct(mark)
        except Rejection:
            self.classes.undo(mark)

    def resolve_limits(self) -> None:
        """Restate the limits of ragged axes over the finest axes."""
        for line in self.defs:
            for axis in self.fine_axes((*line.axes, *bound_axes(line.expr))):
                if axis.limit is not None and (limit := self.resolve(axis.limit)) is not axis.limit:
                    resolved = Axis(axis.name, axis.extent, limit)
                    self.classes.define(axis, index(resolved), (resolved,))

    def _check_distinct(self, mark: int) -> None:
        """Reject definitions that use one axis twice, and reductions that capture a free axis.

        Both conditions held at ``mark``, so only lines with an axis defined since are checked.
        """
        new = self.classes.since(mark)
        if not new:
            return
        changed: list[tuple[int, frozenset[Axis]]] = []
        for position in sorted(set().union(*(self.lines_with.get(axis, ()) for axis in new))):
            axes = self.axes_of_lines[position]
            moved = axes & new
            fine = self.fine_axes(moved)
            if len(set(fine)) < len(fine) or not axes.isdisjoint(fine):
                self._check_line(self.defs[position])
            changed.append((position, (axes - moved).union(fine)))
        for position, axes in changed:
            for axis in axes - self.axes_of_lines[position]:
                self.lines_with.setdefault(axis, set()).add(position)
            self.axes_of_lines[position] = axes

    def _check_line(self, line: Def) -> None:
        own = self.fine_axes(line.axes)
        if len(set(own)) != len(own):
            raise Rejection("two axes of ", line.buffer, " would become one")
        for node in reductions(line.expr):
            over = self.fine_axes(node.over)
            free = set(self.fine_axes(node.axes))
            if len(set(over)) != len(over) or free & set(over):
                raise Rejection("a reduction in ", line.buffer, " would capture an axis")

    def _axes_of_line(self, line: Def) -> frozenset[Axis]:
        """Return the finest axes of a definition and of its reductions."""
        of_reductions = (a for n in reductions(line.expr) for a in (*n.over, *n.axes))
        return frozenset(self.fine_axes((*line.axes, *of_reductions)))


def _same_extents(a: tuple[Axis, ...], b: tuple[Axis, ...]) -> bool:
    """Return True for axes that may be united by position: equal extents, none ragged."""
    return len(a) == len(b) and all(
        x is y or (x.extent is y.extent and x.limit is None and y.limit is None)
        for x, y in zip(a, b, strict=True)
    )


def _exact_quotient(a: Index, b: Index) -> Index | None:
    """Return a/b where b provably divides a, else None."""
    return floordiv(a, b) if mod(a, b) is index(0) else None


def unify(
    defs: tuple[Def, ...],
    live_out: frozenset[Buffer],
    name: str = "k",
    learned: Learned | None = None,
) -> Kernel:
    """Return one kernel that computes all of ``defs`` (in execution order).

    Args:
        live_out: buffers that are needed outside; the others are never stored.
        learned: memo shared with other unifications, which is extended.
    Raises:
        Rejection: if the definitions may not share a kernel.
    """
    cut = cut_products(defs, live_out)
    try:
        return _unify(cut, live_out, name, learned)
    except Rejection as rejection:  # it names buffers of the graph
        whole = {part: buffer for part, (buffer, _) in cut.whole.items()}
        parts = (whole.get(p, p) if isinstance(p, Buffer) else p for p in rejection.parts)
        raise Rejection(*parts) from None


def _unify(
    cut: CutProducts, live_out: frozenset[Buffer], name: str, learned: Learned | None
) -> Kernel:
    defs = cut.defs
    live_out |= {part for part, (whole, _) in cut.whole.items() if whole in live_out}
    unifier = _Unifier(defs, None if learned is None else learned.cuts)
    unifier.unify_internal()
    unifier.unify_shared()
    unifier.cut_groups()
    if len(defs) > 1:
        unifier.unify_siblings()
    unifier.resolve_limits()
    stored = tuple(d for d in defs if d.buffer in live_out)
    grid, inside = _bind(unifier, defs, stored)
    resolved = resolve_values(defs, live_out, unifier.resolve, learned or Learned())
    stores = tuple(cut.store(d, resolved[d.buffer], unifier.resolve) for d in stored)
    used = axes_of(stores)
    made = (b for d in defs for b in (*d.covers, d.buffer))
    for node in postorder(s.expr for s in stores):
        if isinstance(node, Reduce):  # a guard may have given a reduction fresh bound axes
            inside += tuple(a for a in node.over if a not in inside and a not in grid)
            if hits_of(node) and reductions(node.body):
                raise Rejection("each thread would reduce all sources of a scatter")
    return Kernel(
        name,
        tuple(a for a in grid if a in used),
        tuple(a for a in inside if a in used),
        stores,
        sum((d.origin for d in defs), NOWHERE),
        tuple(b for b in dict.fromkeys(made) if b not in cut.whole),
        tuple((expr, buffer.name) for buffer, expr in resolved.items()),
    )


def _bind(
    unifier: _Unifier, defs: tuple[Def, ...], stored: tuple[Def, ...]
) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Split the unified axes into grid and inside."""
    order = _axis_order(unifier, defs)
    inside = {axis for d in defs for n in reductions(d.expr) for axis in unifier.fine_axes(n.over)}
    for line in defs:
        for axis in serial_axes(reductions(line.expr)):
            parts = unifier.fine_axes((axis,))
            if len(parts) != 1:
                raise Rejection(line.buffer, " scatters or scans along an axis that others cut")
            inside.update(parts)
    grid = [a for a in order if a not in inside]
    for line in defs:
        heavy = line in stored or reductions(line.expr)
        if not heavy:
            continue
        own = set(unifier.fine_axes(line.axes))
        missing = [a for a in grid if a not in own]
        if not missing:
            continue
        # An axis that a stored definition lacks must run inside. Only the fastest axes may, or
        # neighbouring grid points would access memory with large strides.
        last_kept = max((grid.index(a) for a in grid if a in own), default=-1)
        if any(grid.index(a) < last_kept for a in missing):
            raise Rejection(line.buffer, f" lacks the outer axis {missing[0].name} of the others")
        inside.update(missing)
        grid = [a for a in grid if a in own]
    for axis in list(grid):
        if axis.limit is not None:  # a ragged axis is a loop with a bound
            inside.add(axis)
            grid.remove(axis)
    return tuple(grid), tuple(a for a in order if a in inside)


def _axis_order(unifier: _Unifier, defs: tuple[Def, ...]) -> list[Axis]:
    """Return all axes, slowest first, in the order of the definition with most axes."""
    candidates: list[tuple[Axis, ...]] = []
    for line in defs:
        own = unifier.fine_axes(line.axes)
        candidates.append(own)
        for node in reductions(line.expr)[:1]:
            candidates.append(own + unifier.fine_axes(node.over))
    candidates.sort(key=len, reverse=True)
    merged: list[Axis] = []
    for axes in candidates:
        merged.extend(a for a in axes if a not in merged)
    for line in defs:
        for node in reductions(line.expr):
            merged.extend(a for a in unifier.fine_axes(node.over) if a not in merged)
    return merged
