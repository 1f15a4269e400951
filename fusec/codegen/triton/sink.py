"""Sink values of a program to their first use, to shorten live ranges.

A kernel that keeps a row in registers would otherwise hold values that lowering defined early, such
as the weights of a norm, while it reduces the row: 16 registers a thread for LayerNorm of 4096 bf16
columns in 4 warps (80 instead of 64, sm_90, Triton 3.7.1, 2026-11).

Stores beside matrix products sink, too: a store that shares values of a whole tile with a later
store moves to just before it, and the shared values are computed before both. Otherwise they would
stay live between the stores, or through a loop: in the gradient of a GELU that stores the GELU as
well, four tiles of 64 registers a thread (1320 bytes spilled at 255 registers; with sinking, none
at 149; 128x128 in 8 warps, sm_90, Triton 3.7.1, 2026-11).

Where a plan is ``packed``, what stands behind the sums of a row, in a loop over rows, is computed
again from the tiles that were loaded: ``x' = x`` names a tile anew, by an instruction that no
compiler sees through. 16 bits of it are live at the sums, instead of the f32 values that are
computed from it before and behind them (the gradient of a LayerNorm of 16384 columns: 272 bytes
spilled without, none with; sm_90, Triton 3.7.1, 2026-11). Elements that are loaded one by one would
have a register each: their tile is named anew at once, by which two are in one (14001 columns:
428 bytes spilled without, none with).

Worked example: ``w = load; s = sum(x); y = s * w`` becomes ``s = sum(x); w = load; y = s * w``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from fusec.ir.dtype import BOOL
from fusec.ir.expr import Buffer, Expr, Load, Op, Reduce, Select, Var, children, reach, rebuild
from fusec.ir.index import Axis
from fusec.ir.program import (
    Carry,
    For,
    Let,
    Program,
    Put,
    Statement,
    Update,
    accessed,
    needed_values,
    reads,
    statements,
)
from fusec.passes.schedule.access import vector_along


def sink(program: Program) -> Program:
    """Move each value down to the first statement of its block that needs it.

    Of two operands the one that depends on more reductions is computed first. A load stays above
    stores to its buffer, and a use of a carry above the carry's updates. Unused values are dropped.
    """
    body = _together(program.body) if program.multiplies else _each(program.body)
    sunk = _sink_block(body)
    if program.packed:
        sunk = tuple(replace(s, body=_again(s.body)) if isinstance(s, For) else s for s in sunk)
    return replace(program, body=sunk)


_Region: TypeAlias = tuple[Statement, ...]
"""Statements whose values are all computed before the first of them."""


def _each(body: Iterable[Statement]) -> Iterator[_Region]:
    return ((statement,) for statement in body)


def _sink_block(body: Iterable[_Region]) -> tuple[Statement, ...]:
    block = _Block()
    for group in body:
        if isinstance(group[0], Let):
            block.hold(group[0])
            continue
        inside = tuple(statements(group))
        for value in (v for s in inside for v in reads(s)):
            block.emit(value)
        written = frozenset(s.buffer.base for s in inside if isinstance(s, Put))
        block.flush(written.union(s.var for s in inside if isinstance(s, Update | Carry)))
        for statement in group:
            if isinstance(statement, For):
                statement = replace(statement, body=_sink_block(_each(statement.body)))
            block.done.append(statement)
    return tuple(block.done)


class _Block:
    """The statements emitted for one block, and the pending values, which have no use so far."""

    def __init__(self) -> None:
        self.done: list[Statement] = []
        self._pending: dict[Expr, Let] = {}
        self._reductions: dict[Expr, int] = {}

    def hold(self, let: Let) -> None:
        below = max((self._depth(child) for child in children(let.value)), default=0)
        self._reductions[let.var] = below + isinstance(let.value, Reduce)
        self._pending[let.var] = let

    def emit(self, root: Expr) -> None:
        """Append the pending values that ``root`` needs, operands before users."""

        def waiting(value: Expr) -> list[Expr]:
            let = self._pending.get(value)
            return [] if let is None else sorted(reads(let), key=self._depth)

        for value in reach((root,), waiting):
            if value in self._pending:
                self.done.append(self._pending.pop(value))

    def flush(self, changed: frozenset[Buffer | Expr]) -> None:
        """Append the pending values that read a buffer or carry that is about to change."""
        for var, let in list(self._pending.items()):
            if not changed.isdisjoint((accessed(let), *reads(let))):
                self.emit(var)

    def _depth(self, value: Expr) -> int:
        return self._reductions.get(value, 0)


# -- stores that share tiles -----------------------------------------------------------------------


def _together(body: Sequence[Statement]) -> Iterator[_Region]:
    """Yield the regions of a block: each store is grouped with the last that shares its tiles."""
    made: dict[Expr, Let] = {s.var: s for s in body if isinstance(s, Let)}
    waiting: dict[Statement, list[Statement]] = {}
    for place, statement in enumerate(body):
        last = None
        if isinstance(statement, Put) and statement not in waiting:
            last = _last_sharing(statement, body[place + 1 :], made)
        if last is None:
            yield (*waiting.get(statement, ()), statement)
        else:
            waiting.setdefault(last, []).append(statement)


def _last_sharing(
    store: Put, behind: Sequence[Statement], made: Mapping[Expr, Let]
) -> Statement | None:
    """Return the last later store that uses tiles of ``store``, and before which it can move."""
    for place in reversed(range(len(behind))):
        other = behind[place]
        if isinstance(other, Put) and _may_wait(store, other, behind[:place], made):
            return other
    return None


def _may_wait(
    store: Put, other: Put, between: Sequence[Statement], made: Mapping[Expr, Let]
) -> bool:
    """Return True if two stores share tiles that nothing between them uses, and may be adjacent."""
    own, others = needed_values([store], made), needed_values([other], made)
    inside = tuple(statements(between))
    others_between = statements(s for s in between if not isinstance(s, Let | Put))
    used = needed_values(others_between, made)
    if not any(_is_tile(made[v]) for v in own & others - used if v in made):
        return False
    changed = {s.var for s in inside if isinstance(s, Update | Carry)}
    return changed.isdisjoint(own) and store.buffer.base not in map(accessed, inside)


def _is_tile(let: Let) -> bool:
    """Return True for an elementwise operation on a tile whose result is not a mask."""
    computed = isinstance(let.value, Op | Select) and let.var.dtype is not BOOL
    return computed and len(let.var.axes) > 1


# -- rows that stay packed -------------------------------------------------------------------------


def _again(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Return a loop's body with the tiles that rows are summed of computed again behind a sum."""
    made: dict[Expr, Let] = {s.var: s for s in body if isinstance(s, Let)}
    loads = {v: let.value for v, let in made.items() if isinstance(let.value, Load)}
    tiles = {v for v in loads if v.axes and v.dtype.itemsize == 2}  # not a mean of each row in f32
    sums = [let for let in made.values() if isinstance(let.value, Reduce)]
    before = needed_values(sums, made).union(let.var for let in sums)
    if not sums:
        return body
    done: list[Statement] = []
    named: dict[Expr, Var] = {}

    def again(value: Expr) -> Expr:
        let = made.get(value)
        if let is None or value not in before or let in sums or not value.axes:
            return value
        if value in loads and value not in tiles:
            return value
        if value not in named:
            found = let.var if value in tiles else rebuilt(let.value)
            named[value] = Var(f"{let.var.name}_again", let.var.dtype, let.var.axes)
            done.append(Let(named[value], found))
        return named[value]

    def rebuilt(value: Expr) -> Expr:
        return rebuild(value, {child: again(child) for child in children(value)}, None)

    scalar = any(vector_along(loads[v], a) == 1 for v in tiles for a in _walked(loads[v]))
    for statement in body:
        if isinstance(statement, Let) and statement.var not in before and sums[0] in done:
            statement = replace(statement, value=rebuilt(statement.value))
        if isinstance(statement, Let) and scalar and statement.var in tiles:
            loaded = Var(f"{statement.var.name}_loaded", statement.var.dtype, statement.var.axes)
            done += [Let(loaded, statement.value), Let(statement.var, loaded)]
        else:
            done.append(statement)
    return tuple(done)


def _walked(load: Load) -> Iterator[Axis]:
    """Yield the axes along which a load walks memory."""
    return (a for a in load.axes if load.indices[0].steps_by_one(a))
