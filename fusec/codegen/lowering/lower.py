"""Lowering: (kernel, plan) -> program. One generic walk; all decisions are in the plan.

Each axis becomes at most three: a grid or loop part and a lane part (``c = co*16 + ci``). The rest
is done region by region: a list of tasks (stores, and updates of reductions) below some bound
loops. Lowering a region

1. collects the reductions that it computes: their free loops are bound, the reduced ones not;
2. assigns each task to the first sweep it can run in: the one after the reductions it reads;
3. emits the sweeps: tasks of one sweep over one loop share that loop, whose body is a region again.

A reduction over an outer loop whose value varies along an inner one (dgamma in a kernel over rows,
dq where the loop over keys is outside the loop over queries) accumulates in a private array. An
expensive value that two sweeps need (``exp`` of a softmax) is kept in such an array if the plan
allows it. Masks: a ragged lane axis is either peeled (a loop of full tiles, then one masked tile)
or masked throughout; in masked lanes, reductions combine their identity and loads touch no memory.

Worked example, ``y[m, c] = x[m, c] / sum(c: x[m, c])`` with m on the grid and c looped: sweep 0 is
``for co: acc += x``, sweep 1 ``for co: y = x / s``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from fusec.codegen.lowering.band import loop_bounds, mask_free_part, needed_before, tile_groups
from fusec.codegen.lowering.bounds import LoopBounds, extent_if, extent_times, later, not_below_zero
from fusec.codegen.lowering.layout import below
from fusec.codegen.lowering.tasks import (
    Accumulate,
    Depth,
    Keep,
    Task,
    by_factor,
    cost_along,
    evaluated,
    roots,
    summed,
)
from fusec.codegen.lowering.transformed import lower_transformed
from fusec.codegen.lowering.values import Scope
from fusec.errors import InternalError
from fusec.ir.combine import State, combine, identities
from fusec.ir.dtype import BOOL
from fusec.ir.expr import (
    Cast,
    Const,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Scan,
    Select,
    Var,
    axes_in,
    postorder,
    substitute,
)
from fusec.ir.graph import FlatKernel, Store, kernel_nodes
from fusec.ir.index import Axis, Index, Runtime, index, most, product
from fusec.ir.linear import dependents
from fusec.ir.machine import CodeTuning
from fusec.ir.monoid import SUM
from fusec.ir.online import find_row_maxima, growth, reference, scale_of
from fusec.ir.program import For, LaunchSettings, Let, Program, Put, Update
from fusec.ir.rewrite import is_checked
from fusec.ir.serial import Hit, hits_of, serial_axes
from fusec.ir.transformed import has_transformed
from fusec.passes.schedule.access import is_transposed
from fusec.passes.schedule.plan import Plan


class _Lowering(LoopBounds):
    def __init__(self, kernel: FlatKernel, plan: Plan) -> None:
        super().__init__(kernel, plan)
        self.row_maxima = self._find_row_maxima() if plan.online else {}

    def _find_row_maxima(self) -> dict[Reduce, Reduce]:
        """Return sum -> maximum for the sums that can share their maximum's single loop."""
        row_maxima = find_row_maxima(s.expr for s in self.stores)
        loops = self.layout.loops_of
        return {
            n: m for n, m in row_maxima.items() if len(loops(n.over)) == len(loops(m.over)) == 1
        }

    # -- regions -----------------------------------------------------------------------------------

    def region(self, tasks: list[Task]) -> None:
        """Emit tasks in the current scope, sweep by sweep."""
        homes = self._home_reductions(tasks)
        depth = Depth(homes, self.row_maxima)
        sweeps: dict[int, list[Task | Reduce]] = {}
        for reduction in homes:
            sweeps.setdefault(depth.below(reduction), []).append(reduction)
        made = [self.scattered[node].store for node in homes if node in self.scattered]
        for task in tasks:
            if task not in made:
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
            if self._known(node) is not None or node in self.arrays or node in self.running:
                continue
            free = self.layout.loops_of(node.axes) - stop
            if not free or self.layout.first(self.layout.loops_of(node.over)) < self.layout.first(
                free
            ):
                found.append(node)
        return found

    def _loops_left(self, task: Task | Reduce) -> set[Axis]:
        reduction = task.reduction if isinstance(task, Accumulate) else task
        over = reduction.over if isinstance(reduction, Reduce) else ()
        slot = task.slot if isinstance(task, Accumulate) else None
        axes = (*axes_in(roots(task)), *over, *(slot.axes if slot is not None else ()))
        return self.layout.loops_of(axes) - self.here.bound

    def _sweep(self, items: list[Task | Reduce], later: list[Task | Reduce]) -> None:
        groups: dict[Axis | None, list[Task]] = {}
        done: list[tuple[Reduce, Accumulate]] = []
        cascade: list[tuple[Var, Var, Expr | None]] = []
        partial = self._partial_sums(items)
        apart: dict[tuple[Reduce, frozenset[Axis]], tuple[Var, ...]] = {}
        blocks: list[tuple[Accumulate, Accumulate]] = []
        kept: list[Keep] = []
        for total, row_max in self.row_maxima.items():
            if total in items and row_max in items:
                self.running[row_max] = ()
        for item in items:
            left = self._loops_left(item)
            first = self.nest[self.layout.first(left)] if left else None
            if isinstance(item, Reduce):
                done.append((item, self._start(item)))
                task: Task = done[-1][1]
            elif isinstance(item, Accumulate) and item.reduction in partial:
                for factor, term in partial[item.reduction].items():
                    (outer,) = item.carries
                    if (key := (term, outer.axes)) not in apart:
                        apart[key] = self._carries(term, outer.axes)
                        groups.setdefault(first, []).append(Accumulate(term, apart[key]))
                    cascade += ((outer, carry, factor) for carry in apart[key])
                continue
            elif isinstance(item, Accumulate) and self._is_block(item, left):
                task = self._start(item.reduction)
                blocks.append((item, task))
            else:
                task = item
            groups.setdefault(first, []).append(task)
        if self.plan.kept_bytes:
            for loop, group in groups.items():
                if loop is not None:
                    keeps = self._worth_keeping(loop, group, later)
                    group.extend(keeps)
                    kept.extend(keeps)
        for task in groups.pop(None, []):
            self._emit(task)
        for loop in sorted((g for g in groups if g is not None), key=self.nest.index):
            if loop in self.layout.transposed:
                self._copy_transposed(loop, groups[loop])
            if self.plan.kept_bytes:
                self._hoist(loop, groups[loop])
            self._run(loop, groups[loop])
        for outer, inner, factor in cascade:
            part = inner if factor is None else Op("mul", (inner, self.value(factor)))
            (added,) = self._steps(self.here, (Op("add", (outer, part)),))
            self.here.body.append(Update(outer, added))
        for whole, block in blocks:
            self._add_slots(whole, block)
        for reduction, finished in done:
            self._finish(reduction, finished)
        beside = [r for r, _ in done if self.row_maxima.get(r) in self.running]
        for reduction, _ in done:
            self.running.pop(reduction, None)
        for reduction in beside:
            self._finish_online(reduction, self.row_maxima[reduction])
        for keep in kept:
            self.arrays[keep.value] = (keep.array, keep.slot)

    def _finish_online(self, reduction: Reduce, row_max: Reduce) -> None:
        """Make a sum NaN where its maximum is infinite: its terms are ``exp(-inf - -inf)`` there.

        The loop has added 0 instead. Terms below a ``Select`` may really be 0, and stay so.
        """
        changing = dependents(reduction.bodies, (row_max,))
        if any(isinstance(node, Select) for node in changing):
            return
        total, top = self._atom(reduction), self._atom(row_max)
        zero: Expr = self._once(self.here, Op("sub", (top, top)))
        if zero.dtype is not reduction.dtype:
            zero = self._once(self.here, Cast(zero, reduction.dtype))
        self._let(self.here, reduction, Op("add", (total, zero)))

    def _run(self, loop: Axis, tasks: list[Task]) -> None:
        """Emit one loop; a scatter's is the one iteration that the source hits."""
        others: list[Task] = []
        around = (dict(self.so_far), dict(self.rows))
        hitting: dict[Hit, list[Task]] = {}
        for task in tasks:
            hits = hits_of(task.reduction) if isinstance(task, Accumulate) else ()
            hit = next((h for h in hits if h.axis is loop), None)
            (others if hit is None else hitting.setdefault(hit, [])).append(task)
        for hit, found in hitting.items():
            point, extent = hit.point, loop.extent
            first = Op("maximum", (point, Const(0, point.dtype)))
            ends = *self.layout.loops[loop].stops, index(Runtime(point, extent)) + 1
            start = index(Runtime(first, extent))
            self._loop(loop, start, ends, found, masked=False, truth={hit.condition: True})
        if others:
            self._run_whole(loop, others)
        self.so_far, self.rows = around  # another sweep over the loop scans anew

    def _run_whole(self, loop: Axis, tasks: list[Task]) -> None:
        """Emit a loop's full tiles and, if the axis is ragged, a masked remainder."""
        info = self.layout.loops[loop]
        ragged = info.full is not info.stops and info.full != info.stops
        start, last, mask_free = index(0), None, None
        reductions = summed(tasks)
        # Loop bounds must not depend on lanes or inner loops: they have no value before it.
        inside = self.layout.loops.keys() - self.here.bound - {loop}
        needed = needed_before(reductions, frozenset((loop, *self.lanes, *inside)))
        known = dict.fromkeys(needed, True)
        groups = tile_groups(loop, reductions, frozenset((*self.lanes, *inside)))
        if groups is not None:
            first, end = self.group_bounds(loop, groups)
            self._loop(loop, first, (*info.stops, *end), tasks, masked=False, rows=groups.rows)
            return
        whole_or_none = tuple(extent_if(c, info.stops[0]) for c in needed)
        if self.here.rows is not None:
            whole_or_none += (extent_times(self.here.rows, info.stops[0]),)
        if self.plan.dots and reductions:
            start, last = loop_bounds(loop, reductions, frozenset((*self.lanes, *inside)))
            start = not_below_zero(start)
            if self.plan.mask_free:
                mask_free = mask_free_part(loop, reductions, frozenset(self.lanes), inside)
        variants = [(info.full, False), (info.stops, True)] if ragged else [(info.stops, False)]
        if ragged and not self.plan.peel:
            variants = [(info.stops, True)]
        for stops, masked in variants:
            if len(stops) == 1 and (stops[0] - start).is_constant and (stops[0] - start).const <= 0:
                continue
            ends = (*stops, *whole_or_none) if last is None else (*stops, *whole_or_none, last)
            if mask_free is None or (masked and self.plan.peel):
                self._loop(loop, start, ends, tasks, masked, known)
                start = later(start, stops[-1]) if not masked else start
                continue
            truth = {**known, **mask_free.truth}
            if mask_free.stop is not None:
                self._loop(loop, start, (*ends, mask_free.stop), tasks, masked, truth)
                self._loop(loop, not_below_zero(mask_free.stop), ends, tasks, masked, known)
            elif mask_free.first is not None:
                self._loop(loop, start, (*ends, mask_free.first), tasks, masked, known)
                first = not_below_zero(mask_free.first)
                self._loop(loop, first, ends, tasks, masked, truth)
            start = later(start, stops[-1]) if not masked else start

    def _loop(
        self,
        loop: Axis,
        start: Index,
        ends: tuple[Index, ...],
        tasks: list[Task],
        masked: bool,
        truth: Mapping[Expr, bool] | None = None,
        rows: Expr | None = None,
    ) -> None:
        """Emit a range of iterations of a loop.

        Args:
            truth: condition -> its value, for conditions that are constant over the range.
            rows: as of ``Scope``.
        """
        first, *stops = (substitute(bound, {}, self.value) for bound in (start, *ends))
        info, masks = self.layout.loops[loop], dict(self.here.masks)
        if masked:
            assert info.lane is not None and info.position is not None
            mask = masks[info.lane] = below(info.position, *info.ends)
            for share, of in self.layout.shares.get(info.lane, ()):
                masks[share] = mask.substitute({info.lane: index(share) * of})
        self.scopes.append(Scope(loop, self.here.bound | {loop}, masks, rows))
        self.here.memo.update({c: Const(value, BOOL) for c, value in (truth or {}).items()})
        outside = dict(self.arrays)
        self.region(tasks)
        self.arrays = outside  # arrays declared in the loop's body are not visible after it
        scope = self.scopes.pop()
        if scope.body:
            self.here.body.append(For(loop, first, tuple(stops), tuple(scope.body)))

    # -- tasks -------------------------------------------------------------------------------------

    def _start(self, reduction: Reduce) -> Accumulate:
        """Declare a reduction's accumulators: carries, or private arrays with slots."""
        free = self.layout.loops_of(reduction.axes) - self.here.bound
        if not free:
            return Accumulate(reduction, self._carries(reduction))
        if (stored := self.scattered.get(reduction)) is not None:
            store = stored.store
            self.region([replace(store, expr=stored.start)])
            return Accumulate(reduction, (), (store.buffer,), store.indices[0])
        made = [self._array(self.here, reduction, n.dtype) for n in identities(reduction)]
        for (array, slot), neutral in zip(made, identities(reduction), strict=True):
            self._fill(self.here, array, slot, neutral)
        arrays, (slot, *_) = zip(*made, strict=True)
        return Accumulate(reduction, (), arrays, slot)

    def _carries(self, reduction: Reduce, around: frozenset[Axis] = frozenset()) -> tuple[Var, ...]:
        """Declare carries for partial results of a reduction, with the lanes of its bodies, or, if
        these are the same in all lanes, those ``around``: they are broadcast to other terms anyway.
        """
        lanes = frozenset(a for a in (*reduction.axes, *reduction.over) if a in self.lanes)
        lanes -= frozenset(self._folds(reduction))
        return self._declared(self.here, reduction, lanes or around)

    def _folds(self, reduction: Reduce) -> tuple[Axis, ...]:
        """Return the lanes that each iteration reduces, which the carry therefore does not have.

        Beside products these are all lanes of a maximum and of the sums relative to it, since each
        iteration rescales these sums, one value a row. Otherwise the lanes that the plan names: a
        thread reduces the elements it has loaded, and threads combine only after the loop.
        """
        lanes = tuple(a for a in reduction.over if a in self.lanes)
        if reduction in self.dots:
            return lanes
        if self.dots and (reduction in self.running or reduction in self.row_maxima):
            return lanes
        single = len(reduction.bodies) == 1
        return tuple(a for a in lanes if single and a in self.layout.folded)

    def _cascades(self, task: Accumulate) -> bool:
        """Return True if each loop of a reduction should have its own partial sum.

        Adding n floats one by one has an error of order n; with a partial sum a loop, it is of the
        order of the longest loop. Tiles of products are excluded: their second accumulator would
        not fit in registers.
        """
        reduction = task.reduction
        summed = reduction.monoid is SUM and reduction.dtype.is_float
        return summed and reduction not in self.dots

    def _partial_sums(self, items: list[Task | Reduce]) -> dict[Reduce, dict[Expr | None, Reduce]]:
        """Return the partial sums of tasks whose loops have some, by what multiplies them."""
        inner: dict[Reduce, set[Axis]] = {}
        for item in items:
            if isinstance(item, Accumulate) and item.carries and self._cascades(item):
                node, left = item.reduction, self._loops_left(item)
                if left:
                    inner[node] = left | {a for a in node.over if a in self.lanes}
        return by_factor(inner, whole=self.row_maxima)

    def _is_block(self, task: Accumulate, loops: set[Axis]) -> bool:
        """Return True if some loops take a block of the terms of an array's sums, which is summed
        apart for the same reason."""
        inner = loops & self.layout.loops_of(task.reduction.over)
        begun = {loop for axis in inner for loop in self.layout.whole.get(axis, ())}
        apart = not task.carries and task.reduction not in self.scattered
        return apart and not begun.isdisjoint(self.here.bound) and self._cascades(task)

    def _finish(self, reduction: Reduce, task: Accumulate) -> None:
        lanes = tuple(a for a in reduction.over if a in self.lanes)
        if not task.carries:
            if lanes and reduction not in self.dots:
                raise InternalError("a private array over reduced lanes", stage="codegen.lower")
            assert task.slot is not None
            stored = self.scattered.get(reduction)
            made = reduction if stored is None else stored.store.expr
            self.arrays[made] = (task.arrays[-1], task.slot)
            return
        state: State = task.carries
        lanes = tuple(a for a in lanes if a not in self._folds(reduction))
        if not lanes:
            self.here.memo[reduction] = task.carries[-1]
            return
        row_max = self.row_maxima.get(reduction)
        if row_max in self.running:  # each lane's sum refers to the lane's maximum
            total = Op("mul", (*task.carries, self._growth(reduction)))
            state = (self._let(self.here, total, total),)
        self._let_folded(self.here, reduction, lanes, state)
        if reduction in self.running:
            self._refer(reduction, task.carries[-1], self._atom(reduction))

    def _emit(self, task: Task) -> None:
        """Emit a task whose loops are all bound."""
        match task:
            case Store():
                value, at = self.value(task.expr), task.indices[0]
                offset = substitute(at, {}, self.value)  # names its gather indices
                guard = self._conjunction(self.here, [task.guard, *self._masks_of(at.axes)])
                assert guard is None or isinstance(guard, Var)
                self.here.body.append(Put(task.buffer, offset, value, guard, task.adds))
            case Keep():
                value = self.value(task.value)
                self.here.body.append(Put(task.array.flat(), task.slot, value, None))
            case Accumulate():
                self._accumulate(task)

    def _accumulate(self, task: Accumulate) -> None:
        reduction = task.reduction
        if self.row_maxima.get(reduction) in self.running and task.carries:
            (carry,) = task.carries
            self.here.body.append(Update(carry, Op("mul", (carry, self._growth(reduction)))))
        if reduction in self.dots:
            for operand in self._dot_operands(reduction):
                self.value(operand)
            if not task.carries:
                self._multiply_slot(task)
                return
            (carry,) = task.carries
            apart = self.plan.promotes and any(p.is_promoted for p in self.dots[reduction])
            for dot in self._products(reduction, None if apart else carry):
                value: Expr = dot
                if apart:
                    part = self._var("part", dot.dtype, carry.axes)
                    self.here.body.append(Let(part, dot))
                    value = Op("add", (carry, part))
                self.here.body.append(Update(carry, value))
            return
        if task.carries and (added := self._in_turn(reduction, *task.carries)) is not None:
            self.here.body.append(Update(task.carries[-1], added))
            return
        for body in reduction.bodies:
            self.value(body)
        state = self._masked(self.here, reduction)
        if not task.carries:
            self._combine_slot(task, state)
            return
        if lanes := self._folds(reduction):
            total = Reduce(reduction.monoid, lanes, self._along_all(self.here, lanes, *state))
            state = (self._let(self.here, total, total),)
        old = task.carries[-1]
        if reduction in self.running:
            old = self._var("old", reduction.dtype, old.axes)
            self.here.body.append(Let(old, task.carries[-1]))
        new = combine(reduction.monoid, task.carries, state)
        for carry, value in zip(task.carries, self._steps(self.here, new), strict=True):
            self.here.body.append(Update(carry, value))
        if reduction in self.running:
            self.here.memo[reduction] = self._refer(reduction, old, task.carries[-1])

    def _in_turn(self, node: Reduce, *carries: Var) -> Expr | None:
        """Return a sum so far plus two products, one after the other, so that each is a
        multiply-add; None for anything else, and in masked lanes."""
        match node.bodies, carries:
            case (Op(name="add", args=(Op(name="mul") as a, Op(name="mul") as b)),), (carry,) if (
                node.monoid is SUM and node.dtype.is_float and node not in self.row_maxima
            ):
                if self._folds(node) or [*self._masks_of(node.over)]:
                    return None
                for factor in (*a.args, *b.args):
                    self.value(factor)  # a sum between the two adds would split their loop
                first = Op("add", (carry, self.value(a)))
                return Op("add", (self._named(self.here, first), self.value(b)))
        return None

    def _combine_slot(self, task: Accumulate, state: State) -> None:
        """Combine a state into a slot of private arrays."""
        assert task.slot is not None
        lanes = frozenset(a for a in task.slot.axes if a in self.lanes)
        old = tuple(self._var("old", array.dtype, lanes) for array in task.arrays)
        guard = None
        if task.reduction in self.scattered:  # a private array has whole tiles
            guard = self._conjunction(self.here, [*self._masks_of(task.slot.axes)])
        assert guard is None or isinstance(guard, Var)
        here = self.here.body
        for var, array in zip(old, task.arrays, strict=True):
            here.append(Let(var, Load(array.flat(), (task.slot,), guard)))
        new = self._steps(self.here, combine(task.reduction.monoid, old, state))
        for array, value in zip(task.arrays, new, strict=True):
            var = self._var("new", array.dtype, lanes | value.axes)
            here += [Let(var, value), Put(array.flat(), task.slot, var, guard)]

    def _refer(self, maximum: Reduce, old: Expr, top: Expr) -> Var:
        """Name what terms refer to once their maximum has grown from ``old`` to ``top``.

        The factors that rescale its sums are named as well, before any loop that needs them.
        """
        (shown,) = self._steps(self.here, (reference(top),))
        chosen = self._let(self.here, shown, shown)
        self.running[maximum] = old, chosen
        for reduction, row_max in self.row_maxima.items():
            if row_max is maximum:
                self._growth(reduction)
        return chosen

    def _growth(self, reduction: Reduce) -> Var | Const:
        """Name the factor that rescales a sum to its running maximum."""
        row_max = self.row_maxima[reduction]
        factor = growth(scale_of(reduction, row_max), *self.running[row_max])
        return self._named(self.here, *self._steps(self.here, (factor,)))

    def _copy_transposed(self, loop: Axis, tasks: list[Task]) -> None:
        """Copy loads that are contiguous along a loop, not along the lanes, to private arrays."""
        (lane,) = self.lanes
        for node in evaluated(tasks, self.arrays):
            if not isinstance(node, Load) or not is_transposed(node, loop, lane):
                continue
            if self.layout.loops_of(node.axes) - self.here.bound == {loop}:
                array, slot = self._array(self.here, node, node.dtype)
                self._run(loop, [Keep(node, array, slot)])
                self.arrays[node] = (array, slot)

    # -- keeping values between sweeps ------------------------------------------------------------

    def _worth_keeping(
        self, loop: Axis, group: list[Task], later: list[Task | Reduce]
    ) -> list[Keep]:
        """Return ``Keep``s for expensive values that a later sweep over the same loop needs."""
        again = [
            t
            for t in later
            if (left := self._loops_left(t)) and self.layout.first(left) == self.nest.index(loop)
        ]
        if not again:
            return []
        now = set(evaluated(group, self.arrays))
        return self._keeps([n for n in evaluated(again, self.arrays) if n in now], loop)

    def _hoist(self, loop: Axis, tasks: list[Task]) -> None:
        """Keep expensive values of inner loops that each iteration of a loop would compute anew.

        And those beside scans in lanes, which each iteration waits for: too few are in flight
        with what takes long (``sigmoid`` and ``cumsum`` of 256 x 4096: 1595 us, kept 1223).
        """
        nodes = postorder(root for task in tasks for root in roots(task))
        apart: set[Expr] = {n for n in nodes if isinstance(n, Scan) or is_checked(n)}
        apart |= dependents(nodes, apart)
        found = [n for n in nodes if loop not in n.axes and n not in apart]
        for inner in self.nest[self.nest.index(loop) + 1 :] if loop.extent is not index(1) else ():
            self._keep_first(found, inner)
        scans = [n for n in nodes if isinstance(n, Scan) and any(a in self.lanes for a in n.over)]
        if scans and any(self.layout.loop_of.get(lane) is loop for lane in self.lanes):
            narrow = (n for n in nodes if not isinstance(n, Cast))
            self._keep_first([n for n in narrow if n not in apart], loop)

    def _keep_first(self, nodes: list[Expr], loop: Axis) -> None:
        """Write expensive ones of some values along a loop to arrays, by a loop of their own."""
        for keep in self._keeps(nodes, loop):
            self._run(loop, [keep])
            self.arrays[keep.value] = (keep.array, keep.slot)

    def _keeps(self, nodes: list[Expr], loop: Axis) -> list[Keep]:
        """Return ``Keep``s for expensive ones of some values, in post-order, along a loop alone."""
        unbound = set(self.layout.loops) - self.here.bound
        kept: list[Keep] = []
        covered: set[Expr] = set()
        parts = self.layout.whole.get(loop, frozenset((loop,))) & unbound
        if loop is not min(parts, key=self.nest.index, default=loop):
            return []  # the loop over its blocks, outside, keeps them
        length = most(product(a.extent for a in parts))
        for node in reversed(nodes):
            if node in covered or node in self.arrays or node.dtype is BOOL:
                continue
            if isinstance(node, Load | Reduce | IndexValue) or unbound & node.axes != parts:
                continue
            if cost_along(node, loop, self.arrays) < self.plan.kept_cost:
                continue
            covered.update(postorder((node,)))
            if length is None or length * 16 * node.dtype.itemsize > self.plan.kept_bytes:
                continue
            array, slot = self._array(self.here, node, node.dtype)
            kept.append(Keep(node, array, slot))
        return kept


def lower(kernel: FlatKernel, plan: Plan, code: CodeTuning | None = None) -> Program:
    """Lower a kernel (see ``passes.coalesce``) to a program under a plan.

    Raises:
        InternalError: if the plan binds the axes in a way the kernel cannot run.
    """
    if not plan.warps and has_transformed(kernel):  # a CPU's plan
        return lower_transformed(kernel, plan, code or CodeTuning())
    lowering = _Lowering(kernel, plan)
    lowering.region(list(lowering.stores))
    return Program(
        kernel.name,
        kernel.reads,
        kernel.writes,
        kernel.sizes,
        tuple(lowering.layout.grid),
        tuple(lowering.lanes),
        tuple(lowering.scopes[0].body),
        (),
        kernel.origin.source,
        product(a.extent for a in kernel.axes if a not in serial_axes(kernel_nodes(kernel))),
        **{one.name: getattr(plan, one.name) for one in fields(LaunchSettings)},
        counts=tuple(lowering.layout.counts.items()) if plan.dots else (),
        code=code or CodeTuning(),
    )
