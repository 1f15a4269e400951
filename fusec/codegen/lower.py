"""Lowering: (kernel, plan) -> program. One generic walk; the plan decides, this only carries out.

Each axis becomes at most three: a grid or loop part and a lane part (``c = co*16 + ci``). What is
left are regions: a list of tasks (stores, and updates of reductions) below some bound loops. A
region

1. collects the reductions that are at home in it: their free loops are bound, the reduced ones not;
2. gives each task the first sweep it can run in: one more than the reductions it reads;
3. runs the sweeps: tasks of one sweep over one loop share that loop, whose body is a region again.

A reduction over an outer loop whose value varies along an inner one (dgamma in a kernel over rows)
accumulates in a private array. What is dear and needed in two sweeps (``exp`` of a softmax) is kept
in one, where the plan allows it. Masks: a ragged lane axis is either peeled (a loop of full tiles,
then one masked tile) or masked throughout; a reduction sees its identity there, a load touches no
memory.

Worked example, ``y[m, c] = x[m, c] / sum(c: x[m, c])`` with m on the grid and c looped: sweep 0 is
``for co: acc += x``, sweep 1 ``for co: y = x / s``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fusec.codegen.layout import Layout, below
from fusec.codegen.peephole import uniform_comparisons
from fusec.codegen.tasks import Accumulate, Depth, Keep, Task, roots
from fusec.errors import InternalError
from fusec.ir.contraction import Factors, factors
from fusec.ir.dtype import BOOL, DType
from fusec.ir.expr import (
    Buffer,
    Cast,
    Const,
    Dot,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Select,
    Var,
    both,
    children,
    postorder,
    rebuild,
    substitute_all,
)
from fusec.ir.graph import Kernel, Store, kernel_sizes
from fusec.ir.index import (
    Axis,
    Index,
    index,
    most,
    product,
    substitute,
)
from fusec.ir.monoid import SUM, Monoid
from fusec.ir.program import Carry, For, Let, Program, Put, Scratch, Statement, Update
from fusec.ir.scalar import SCALAR_OPS
from fusec.passes.schedule.plan import Plan

KEEP_COST = 8
"""Multiply-adds a point from which a value is kept for the next sweep instead of computed again."""
KEEP_BYTES = 1 << 19
"""The longest array kept for that: it has to stay in a core's cache."""


@dataclass(slots=True, eq=False)
class _Scope:
    """One open loop (or the program's top level): its statements and the values named in it."""

    loop: Axis | None
    bound: frozenset[Axis]
    masks: dict[Axis, Expr]
    body: list[Statement] = field(default_factory=list)
    memo: dict[Expr, Var | Const] = field(default_factory=dict)


class _Lowering:
    def __init__(self, kernel: Kernel, plan: Plan) -> None:
        self.kernel = kernel
        self.plan = plan
        self.layout = Layout(plan)
        self.nest, self.lanes = self.layout.nest, self.layout.lanes
        self.arrays: dict[Expr, tuple[Buffer, Index]] = {}
        self.names: dict[str, int] = {}
        self.serial = 0
        cut = self.layout.cut
        roots = (*(s.expr for s in kernel.stores), *(e for e, _ in kernel.labels))
        exprs = uniform_comparisons(substitute_all(roots, cut), tuple(self.lanes))
        self.stores = [
            Store(s.buffer, (substitute(s.indices[0], cut),), e)
            for s, e in zip(kernel.stores, exprs, strict=False)
        ]
        names = (n for _, n in kernel.labels)
        self.labels = dict(zip(exprs[len(self.stores) :], names, strict=True))
        self.dots = self._find_dots(exprs) if plan.dots else {}
        self.scopes = [_Scope(None, frozenset(), self.layout.masks)]

    def _find_dots(self, exprs: tuple[Expr, ...]) -> dict[Reduce, Factors]:
        """Return the contractions of two tiles: each factor owns one lane, and they share one."""
        found: dict[Reduce, Factors] = {}
        for node in postorder(exprs):
            if not isinstance(node, Reduce) or (parts := factors(node)) is None:
                continue
            owned = [parts.left_axes, parts.right_axes, frozenset(node.over)]
            lanes = frozenset(self.lanes)
            if all(len(axes & lanes) == 1 for axes in owned) and not parts.shared & lanes:
                found[node] = parts
        return found

    # -- values ------------------------------------------------------------------------------------

    @property
    def here(self) -> _Scope:
        return self.scopes[-1]

    def _home(self, node: Expr) -> _Scope:
        """Return the outermost open scope in which all loops the node depends on are bound."""
        needed = self.layout.loops_of(node.axes)
        for scope in self.scopes:
            if needed <= scope.bound:
                return scope
        raise InternalError(f"{node} is needed outside its loops", stage="codegen.lower")

    def _known(self, node: Expr) -> Var | Const | None:
        if isinstance(node, Const | Var):
            return node
        for scope in reversed(self.scopes):
            found = scope.memo.get(node)
            if found is not None:
                return found
        return None

    def value(self, root: Expr) -> Var | Const:
        """Return the name of a value, naming what it needs first, each in its home scope."""
        stack = [root]
        while stack:
            node = stack[-1]
            if self._known(node) is not None:
                stack.pop()
                continue
            below = [c for c in self._operands(node) if self._known(c) is None]
            if below:
                stack.extend(below)
                continue
            stack.pop()
            self._name(node)
        known = self._known(root)
        assert known is not None
        return known

    def _operands(self, node: Expr) -> tuple[Expr, ...]:
        """Return what must be named before ``node``: its children, and the masks it runs under."""
        if node in self.arrays:
            return ()
        if isinstance(node, Reduce) and self.layout.loops_of(node.over):
            raise InternalError(f"reduction {node} was not swept", stage="codegen.lower")
        if isinstance(node, Reduce) and node in self.dots:
            return self._dot_operands(node)
        masks: tuple[Expr, ...] = ()
        if isinstance(node, Load):
            masks = tuple(self._masks_of(node.axes))
        elif isinstance(node, Reduce):
            masks = tuple(self._masks_of(node.over))
        return (*children(node), *masks)

    def _masks_of(self, axes: Iterable[Axis]) -> list[Expr]:
        masks = self.here.masks
        return [masks[a] for a in sorted(axes, key=lambda a: a.serial) if a in masks]

    def _name(self, node: Expr) -> None:
        scope = self._home(node)
        if node in self.arrays:
            array, slot = self.arrays[node]
            self._let(scope, node, Load(array.flat(), (slot,)))
            return
        if isinstance(node, Reduce) and node in self.dots:
            self._let(scope, node, self._dot(node, None))
            return
        new = {child: self._atom(child) for child in children(node)}
        shown = rebuild(node, new, None)
        match node:
            case Load():
                guard = self._conjunction(scope, [node.guard, *self._masks_of(node.axes)])
                assert isinstance(shown, Load)
                self._let(scope, node, Load(shown.buffer, shown.indices, guard))
            case Reduce():
                body = self._masked(scope, node, self._atom(node.body))
                self._let(scope, node, self._folded(scope, node.monoid, node.over, body))
            case _:
                self._let(scope, node, shown)

    def _masked(self, scope: _Scope, node: Reduce, body: Expr) -> Expr:
        """Replace ragged lanes of a reduction's body by the identity."""
        guard = self._conjunction(scope, [*self._masks_of(node.over)])
        if guard is None:
            return body
        neutral = Const(node.monoid.identity(node.dtype), node.dtype)
        chosen = Select(guard, body, neutral)
        known = self._known(chosen)
        return known if known is not None else self._let(scope, chosen, chosen)

    def _dot_operands(self, node: Reduce) -> tuple[Expr, Expr]:
        """Return a contraction's factors, 0 in ragged lanes that it sums over."""
        left, right = self.dots[node].left, self.dots[node].right
        for mask in self._masks_of(node.over):
            left, right = (
                f if _is_loaded(f) else Select(mask, f, Const(0, f.dtype)) for f in (left, right)
            )
        return left, right

    def _dot(self, node: Reduce, into: Var | None) -> Dot:
        left, right = map(self._atom, self._dot_operands(node))
        return Dot(left, right, tuple(a for a in node.over if a in self.lanes), into)

    def _folded(self, scope: _Scope, monoid: Monoid, over: tuple[Axis, ...], body: Expr) -> Reduce:
        """Fold lanes; a value that lacks some of them is the same in each, and counts as often."""
        for lane in over:
            if lane not in body.axes:
                tile = Select(self.value(below(index(lane), lane.extent)), body, body)
                body = self._let(scope, tile, tile)
        return Reduce(monoid, over, body)

    def _conjunction(self, scope: _Scope, guards: list[Expr | None]) -> Expr | None:
        """Return one named guard for several, or None."""
        total: Expr | None = None
        for guard in guards:
            if guard is None:
                continue
            total = both(total, self._atom(guard))
            if isinstance(total, Op):
                known = self._known(total)
                total = known if known is not None else self._let(scope, total, total)
        return total

    def _atom(self, node: Expr) -> Var | Const:
        known = self._known(node)
        if known is None:
            raise InternalError(f"{node} has no name yet", stage="codegen.lower")
        return known

    def _let(self, scope: _Scope, key: Expr, shown: Expr) -> Var:
        lanes = frozenset(a for a in shown.axes if a in self.lanes)
        var = self._var(self._hint(key), shown.dtype, lanes)
        scope.body.append(Let(var, shown))
        scope.memo[key] = var
        return var

    def _hint(self, node: Expr) -> str:
        label = self.labels.get(node)
        if label is not None:
            return label
        match node:
            case Load():
                return node.buffer.name
            case Reduce():
                return node.monoid.name
            case Op():
                return "t" if SCALAR_OPS[node.name].infix else node.name
            case IndexValue():
                return "i"
            case _:
                return "t"

    def _var(self, hint: str, dtype: DType, lanes: frozenset[Axis]) -> Var:
        self.serial += 1
        return Var(self._unique(f"v_{hint}"), dtype, lanes, self.serial)

    def _unique(self, wanted: str) -> str:
        """Return ``wanted`` as an identifier, with the first free number if it is taken."""
        wanted = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in wanted)
        name, count = wanted, self.names.get(wanted, 0)
        while name in self.names:
            count += 1
            name = f"{wanted}_{count}"
        self.names[wanted] = count
        self.names[name] = 0
        return name

    # -- regions -----------------------------------------------------------------------------------

    def region(self, tasks: list[Task]) -> None:
        """Emit some tasks in the current scope, sweep by sweep."""
        homes = self._home_reductions(tasks)
        depth = Depth(homes)
        sweeps: dict[int, list[Task | Reduce]] = {}
        for reduction in homes:
            sweeps.setdefault(depth.below(reduction), []).append(reduction)
        for task in tasks:
            sweeps.setdefault(depth.of(roots(task)), []).append(task)
        for level in sorted(sweeps):
            later = [t for other in sorted(sweeps) if other > level for t in sweeps[other]]
            self._sweep(sweeps[level], later)

    def _home_reductions(self, tasks: list[Task]) -> list[Reduce]:
        found: list[Reduce] = []
        stop = self.here.bound
        for node in postorder(root for t in tasks for root in roots(t)):
            if not isinstance(node, Reduce) or not self.layout.loops_of(node.over):
                continue
            if self._known(node) is not None or node in self.arrays:
                continue
            free = self.layout.loops_of(node.axes) - stop
            if not free or self.layout.first(self.layout.loops_of(node.over)) < self.layout.first(
                free
            ):
                found.append(node)
        return found

    def _loops_left(self, task: Task | Reduce) -> set[Axis]:
        match task:
            case Reduce():
                axes: frozenset[Axis] = frozenset(task.over) | task.body.axes
            case Store():
                axes = task.indices[0].axes | task.expr.axes
            case Accumulate():
                axes = frozenset(task.reduction.over) | task.reduction.body.axes
            case Keep():
                axes = task.value.axes
        return self.layout.loops_of(axes) - self.here.bound

    def _sweep(self, items: list[Task | Reduce], later: list[Task | Reduce]) -> None:
        groups: dict[Axis | None, list[Task]] = {}
        done: list[tuple[Reduce, Accumulate]] = []
        cascade: list[tuple[Var, Var]] = []
        kept: list[Keep] = []
        for item in items:
            left = self._loops_left(item)
            first = self.nest[self.layout.first(left)] if left else None
            task: Task
            if isinstance(item, Reduce):
                task = self._start(item)
                done.append((item, task))
            elif isinstance(item, Accumulate) and item.carry and left and _cascades(item.reduction):
                inner = self._carry(item.reduction)
                cascade.append((item.carry, inner))
                task = Accumulate(item.reduction, inner)
            else:
                task = item
            groups.setdefault(first, []).append(task)
        if self.plan.scratch:
            for loop, group in groups.items():
                if loop is not None:
                    keeps = self._worth_keeping(loop, group, later)
                    group.extend(keeps)
                    kept.extend(keeps)
        for task in groups.pop(None, []):
            self._emit(task)
        for loop in sorted((g for g in groups if g is not None), key=self.nest.index):
            self._run(loop, groups[loop])
        for outer, inner in cascade:
            self.here.body.append(Update(outer, Op("add", (outer, inner))))
        for reduction, finished in done:
            self._finish(reduction, finished)
        for keep in kept:
            self.arrays[keep.value] = (keep.array, keep.slot)

    def _run(self, loop: Axis, tasks: list[Task]) -> None:
        """Emit one loop: full tiles and, where the axis is ragged, a masked rest."""
        info = self.layout.loops[loop]
        ragged = info.full is not info.stops and info.full != info.stops
        start = index(0)
        variants = [(info.full, False), (info.stops, True)] if ragged else [(info.stops, False)]
        if ragged and not self.plan.peel:
            variants = [(info.stops, True)]
        for stops, masked in variants:
            if len(stops) == 1 and (stops[0] - start).is_constant and (stops[0] - start).const <= 0:
                continue
            masks = dict(self.here.masks)
            if masked:
                assert info.lane is not None and info.position is not None
                masks[info.lane] = below(info.position, *info.ends)
            self.scopes.append(_Scope(loop, self.here.bound | {loop}, masks))
            outside = dict(self.arrays)
            self.region(tasks)
            self.arrays = outside  # those declared in the loop end with it
            scope = self.scopes.pop()
            if scope.body:
                self.here.body.append(For(loop, start, stops, tuple(scope.body)))
            start = stops[-1] if not masked else start

    # -- tasks -------------------------------------------------------------------------------------

    def _start(self, reduction: Reduce) -> Accumulate:
        """Declare what a reduction accumulates in: a carry, or a private array with slots."""
        free = self.layout.loops_of(reduction.axes) - self.here.bound
        if not free:
            return Accumulate(reduction, self._carry(reduction))
        array, slot = self._array(reduction, self._hint(reduction))
        self._fill(array, slot, _neutral(reduction))
        return Accumulate(reduction, None, array, slot)

    def _carry(self, reduction: Reduce) -> Var:
        """Declare a carry that holds part of a reduction, in every lane its body has."""
        lanes = frozenset(a for a in (*reduction.body.axes, *reduction.over) if a in self.lanes)
        if reduction in self.dots:
            lanes -= frozenset(reduction.over)
        carry = self._var(f"{self._hint(reduction)}_acc", reduction.dtype, lanes)
        self.here.body.append(Carry(carry, _neutral(reduction)))
        return carry

    def _array(self, node: Expr, hint: str) -> tuple[Buffer, Index]:
        """Declare a private array with a slot for each point of a node's free loops and lanes."""
        axes = sorted(self.layout.loops_of(node.axes) - self.here.bound, key=self.nest.index)
        axes += [a for a in self.lanes if a in node.axes]
        slot = index(0)
        for axis in axes:
            slot = slot * axis.extent + index(axis)
        length = product(a.extent for a in axes)
        name = self._unique(f"a_{hint}")
        array = Buffer(name, (length,), (index(1),), node.dtype)
        self.here.body.append(Scratch(array, length))
        return array, slot

    def _fill(self, array: Buffer, slot: Index, value: Const) -> None:
        body: tuple[Statement, ...] = (Put(array.flat(), slot, value, None),)
        for loop in reversed([a for a in self.nest if a in slot.axes]):
            body = (For(loop, index(0), self.layout.loops[loop].stops, body),)
        self.here.body.extend(body)

    def _finish(self, reduction: Reduce, task: Accumulate) -> None:
        lanes = tuple(a for a in reduction.over if a in self.lanes)
        if task.carry is None:
            if lanes:
                raise InternalError("a private array over reduced lanes", stage="codegen.lower")
            assert task.array is not None and task.slot is not None
            self.arrays[reduction] = (task.array, task.slot)
        elif lanes and reduction not in self.dots:
            self._let(self.here, reduction, Reduce(reduction.monoid, lanes, task.carry))
        else:
            self.here.memo[reduction] = task.carry

    def _emit(self, task: Task) -> None:
        """Emit a task whose loops are all bound."""
        match task:
            case Store():
                value = self.value(task.expr)
                offset = self._offset(task.indices[0])
                guards = self._masks_of(task.indices[0].axes)
                self.here.body.append(Put(task.buffer, offset, value, self._guard(guards)))
            case Keep():
                value = self.value(task.value)
                self.here.body.append(Put(task.array.flat(), task.slot, value, None))
            case Accumulate():
                self._accumulate(task)

    def _guard(self, masks: list[Expr]) -> Var | None:
        for mask in masks:
            self.value(mask)
        guard = self._conjunction(self.here, list(masks))
        assert guard is None or isinstance(guard, Var)
        return guard

    def _offset(self, value: Index) -> Index:
        """Return an offset whose gathers are named values."""
        probe = IndexValue(value)
        new = {child: self.value(child) for child in children(probe)}
        shown = rebuild(probe, new, None)
        assert isinstance(shown, IndexValue)
        return shown.index

    def _accumulate(self, task: Accumulate) -> None:
        reduction = task.reduction
        if reduction in self.dots:
            assert task.carry is not None
            for operand in self._dot_operands(reduction):
                self.value(operand)
            self.here.body.append(Update(task.carry, self._dot(reduction, task.carry)))
            return
        body: Expr = self.value(reduction.body)
        for mask in self._masks_of(reduction.over):
            self.value(mask)
        body = self._masked(self.here, reduction, body)
        if task.carry is not None:
            self.here.body.append(
                Update(task.carry, Op(reduction.monoid.combine, (task.carry, body)))
            )
            return
        assert task.array is not None and task.slot is not None
        old = self._var(
            "old", reduction.dtype, frozenset(a for a in task.slot.axes if a in self.lanes)
        )
        new = self._var("new", reduction.dtype, old.axes | body.axes)
        self.here.body += [
            Let(old, Load(task.array.flat(), (task.slot,))),
            Let(new, Op(reduction.monoid.combine, (old, body))),
            Put(task.array.flat(), task.slot, new, None),
        ]

    # -- keeping values between sweeps ------------------------------------------------------------

    def _worth_keeping(
        self, loop: Axis, group: list[Task], later: list[Task | Reduce]
    ) -> list[Keep]:
        """Return what this sweep computes dearly and a later one over the same loop needs again."""
        again = [
            t
            for t in later
            if (left := self._loops_left(t)) and self.layout.first(left) == self.nest.index(loop)
        ]
        if not again:
            return []
        now = set(postorder(r for t in group for r in roots(t)))
        unbound = set(self.layout.loops) - self.here.bound
        kept: list[Keep] = []
        covered: set[Expr] = set()
        parts = self.layout.whole_loop(loop)
        length = most(product(a.extent for a in parts))
        for node in reversed(postorder(r for t in again for r in roots(t))):
            if node not in now or node in covered or node.dtype is BOOL or isinstance(node, Load):
                continue
            if isinstance(node, Reduce | IndexValue) or unbound & node.axes != parts:
                continue
            if self._varying_cost(node, loop) < KEEP_COST or node in self.arrays:
                continue
            covered.update(postorder((node,)))
            if length is None or length * 16 * node.dtype.itemsize > KEEP_BYTES:
                continue
            array, slot = self._array(node, self._hint(node))
            kept.append(Keep(node, array, slot))
        return kept

    def _varying_cost(self, root: Expr, loop: Axis) -> int:
        total = 0
        stack = [root]
        seen: set[Expr] = set()
        while stack:
            node = stack.pop()
            if node in seen or loop not in node.axes or node in self.arrays:
                continue
            seen.add(node)
            if isinstance(node, Op):
                total += SCALAR_OPS[node.name].cost
            stack.extend(children(node))
        return total


def _is_loaded(factor: Expr) -> bool:
    """Return True for what is 0 in masked lanes by itself: a load, in another type or not."""
    return isinstance(factor.arg if isinstance(factor, Cast) else factor, Load)


def _neutral(reduction: Reduce) -> Const:
    return Const(reduction.monoid.identity(reduction.dtype), reduction.dtype)


def _cascades(reduction: Reduce) -> bool:
    """Return True if each loop of a reduction should have a partial sum of its own.

    A sum of n floats one by one has an error of order n; of sums of sums, of the longest loop.
    """
    return reduction.monoid is SUM and reduction.dtype.is_float


def lower(kernel: Kernel, plan: Plan, notation: tuple[str, ...] = ()) -> Program:
    """Return the program of a kernel with flat accesses (see ``passes.coalesce``) under a plan.

    Raises:
        InternalError: if the plan binds the axes in a way the kernel cannot run.
    """
    lowering = _Lowering(kernel, plan)
    lowering.region(list(lowering.stores))
    reads = [n.buffer.base for n in postorder(s.expr for s in kernel.stores) if isinstance(n, Load)]
    writes = [s.buffer.base for s in kernel.stores]
    return Program(
        kernel.name,
        tuple(dict.fromkeys(reads)),
        tuple(dict.fromkeys(writes)),
        kernel_sizes(kernel),
        tuple(lowering.layout.grid),
        tuple(lowering.lanes),
        tuple(lowering.scopes[0].body),
        notation,
        kernel.origin.source,
        plan.warps,
        plan.stages,
        plan.group,
        product(a.extent for a in kernel.axes),
    )
