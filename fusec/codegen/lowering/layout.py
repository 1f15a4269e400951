"""Cut a kernel's axes as a plan says: grid, loop and lane parts, loop bounds and lane masks.

An axis becomes at most three: a grid part, a loop part and a lane part. ``cut`` maps the kernel's
axes to indices over these parts; ``loops`` holds the bounds of each loop part.

Worked example, ``Binding(c, LOOP, tile=16)`` with c of extent 40: ``c = co*16 + ci``, co runs full
tiles to 2 and the masked rest to 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fusec.errors import InternalError
from fusec.ir.dtype import I32, I64
from fusec.ir.expr import Const, Expr, IndexValue, Op, both, index_exprs, index_of, substitute
from fusec.ir.index import Axis, Index, floordiv, index, mod, most
from fusec.passes.schedule.plan import Binding, LoopKind, Plan


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop part's bounds: full tiles end at the least of ``full``, all at that of ``stops``."""

    full: tuple[Index, ...]
    stops: tuple[Index, ...]
    lane: Axis | None = None
    position: Index | None = None  # of the cut axis, for the mask of ragged tiles
    ends: tuple[Index, ...] = ()


class Layout:
    """The parts of all axes under a plan.

    Attributes:
        grid: grid parts, outermost first.
        nest: loop parts, outermost first.
        lanes: lane parts.
        loops: bounds of each loop part.
        loop_of: loop part, or lane part of a loop -> the loop part.
        folded: lane parts that each iteration of their loop reduces.
        whole: loop part of an axis that runs in chunks -> both its loop parts.
        cut: axis of the kernel -> index over its parts, for axes that are cut.
        masks: lane part -> condition, for lanes that are ragged in every tile.
        counts: lane part -> bounds of its elements that exist, for lanes that may be ragged.
        transposed: loop parts whose loads may go through a private array.
        shares: lane part -> the lanes that stand for several of its lanes each, and for how many.
        dots: as of the plan.
    """

    def __init__(self, plan: Plan) -> None:
        self.grid: list[Axis] = []
        self.nest: list[Axis] = []
        self.lanes: list[Axis] = []
        self.loops: dict[Axis, Loop] = {}
        self.loop_of: dict[Axis, Axis] = {}
        self.whole: dict[Axis, frozenset[Axis]] = {}
        self.cut: dict[Axis, Index] = {}
        self.masks: dict[Axis, Expr] = {}
        self.counts: dict[Axis, tuple[Index, ...]] = {}
        self.transposed: set[Axis] = set()
        self.folded: set[Axis] = set()
        self.shares: dict[Axis, list[tuple[Axis, int]]] = {}
        self.dots = plan.dots
        for binding in plan.bindings:
            self._bind(binding)
        for loop, info in self.loops.items():
            self.loop_of[loop] = loop
            if info.lane is not None:
                self.loop_of[info.lane] = loop
                assert info.position is not None
                self._count(info.lane, info.position, info.ends)

    def loops_of(self, axes: Iterable[Axis]) -> set[Axis]:
        """Return the loop parts of some axes; a lane counts as its loop, because of its mask."""
        return {loop for a in axes if (loop := self.loop_of.get(a)) is not None}

    def add_share(self, lane: Axis, share: Axis, of: int) -> None:
        """Add a lane axis whose lanes stand for ``of`` lanes each, in the loop of those."""
        self.lanes.append(share)
        self.shares.setdefault(lane, []).append((share, of))
        if lane in self.loop_of:
            self.loop_of[share] = self.loop_of[lane]
        if lane in self.masks:
            self.masks[share] = self.masks[lane].substitute({lane: index(share) * of})

    def first(self, loops: set[Axis]) -> int:
        """Return the nesting position of the outermost of some loops."""
        return min(self.nest.index(a) for a in loops)

    def _bind(self, binding: Binding) -> None:
        axis, tile = binding.axis, binding.tile
        lane = Axis(f"{axis.name}i", index(tile)) if tile > 1 else None
        if lane is not None:
            self.lanes.append(lane)
        tiles = floordiv(axis.extent + (tile - 1), index(tile))
        match binding.kind:
            case LoopKind.LANES:
                assert lane is not None
                self.cut[axis] = index(lane)
                if binding.fold > 1:
                    lane = self._fold(axis, binding, index(0))
                    self.lanes.insert(0, self.lanes.pop(-2))
                self._mask_always(axis, lane, tile)
            case LoopKind.GRID | LoopKind.LOOP if binding.chunk:
                self._bind_chunked(binding, lane, tiles)
            case LoopKind.GRID:
                outer = axis if lane is None else Axis(f"{axis.name}o", tiles)
                self.grid.append(outer)
                if lane is not None:
                    self.cut[axis] = index(outer) * tile + index(lane)
                    self._mask_always(axis, lane, tile)
            case LoopKind.LOOP:
                self._bind_loop(binding, lane, tiles)

    def _bind_chunked(self, binding: Binding, lane: Axis | None, tiles: Index) -> None:
        axis, tile, chunk = binding.axis, binding.tile, binding.chunk
        outer = Axis(f"{axis.name}g", floordiv(tiles + (chunk - 1), index(chunk)))
        loop = Axis(f"{axis.name}o", index(chunk))
        if binding.kind is LoopKind.GRID:
            self.grid.append(outer)
        else:
            self.nest.append(outer)
            self.loops[outer] = Loop((outer.extent,), (outer.extent,))
            self.whole[outer] = self.whole[loop] = frozenset((outer, loop))
        self.nest.append(loop)
        if binding.transposed:
            self.transposed.add(loop)
        here = index(outer) * chunk + index(loop)
        self.cut[axis] = here * tile + index(lane) if lane is not None else here
        left = tiles - index(outer) * chunk
        stops = (index(chunk),) if mod(tiles, index(chunk)) is index(0) else (index(chunk), left)
        full = stops
        if mod(axis.extent, index(tile)) is not index(0):
            whole = floordiv(axis.extent, index(tile)) - index(outer) * chunk
            full = (index(chunk), whole)
        self.loops[loop] = Loop(full, stops, lane, self.cut[axis], (axis.extent,))

    def _bind_loop(self, binding: Binding, lane: Axis | None, tiles: Index) -> None:
        axis, tile = binding.axis, binding.tile
        if lane is None:
            self.nest.append(axis)
            stops = (axis.extent, *self._limit(axis))
            self.loops[axis] = Loop(stops, stops)
            return
        loop = Axis(f"{axis.name}o", tiles)
        self.nest.append(loop)
        self.cut[axis] = index(loop) * tile + index(lane)
        if binding.fold > 1:
            lane = self._fold(axis, binding, index(loop))
            self.folded.add(self.lanes[-2])
            self.loop_of[self.lanes[-2]] = loop
        if axis.limit is not None:  # every tile may be ragged
            here, ends = self.cut[axis], self._ends(axis, tile)
            self.loops[loop] = Loop((index(0),), self._stops(axis, tile, tiles), lane, here, ends)
            return
        exact = mod(axis.extent, index(tile)) is index(0)
        full = (tiles,) if exact else (floordiv(axis.extent, index(tile)),)
        self.loops[loop] = Loop(full, (tiles,), lane, self.cut[axis], self._ends(axis, tile))

    def _stops(self, axis: Axis, tile: int, tiles: Index) -> tuple[Index, ...]:
        """Return the stops of a ragged axis's loop of ``tiles`` tiles.

        Loops of products run over all tiles: those beyond the limit add 0, and the last part takes
        no longer than the others. With the limit as a second stop, LLVM splits the edge around the
        loop, and ptxas serializes the products (its C7515, sm_90, Triton 3.7.1, 2026-11).
        """
        if self.dots:
            return (tiles,)
        (limit,) = self._limit(axis)
        return (tiles, floordiv(limit + (tile - 1), index(tile)))

    def _fold(self, axis: Axis, binding: Binding, tile: Index) -> Axis:
        """Cut a tile's lanes into ``fold`` rows, and return the lane axis of one row."""
        self.lanes.pop()
        rows = Axis(f"{axis.name}f", index(binding.fold))
        lane = Axis(f"{axis.name}i", index(binding.tile // binding.fold))
        self.lanes += [rows, lane]
        self.cut[axis] = tile * binding.tile + index(rows) * lane.extent + index(lane)
        return lane

    def _mask_always(self, axis: Axis, lane: Axis, tile: int) -> None:
        ends = self._ends(axis, tile)
        if ends:
            self.masks[lane] = below(self.cut[axis], *ends)
        self._count(lane, self.cut[axis], ends)

    def _count(self, lane: Axis, position: Index, ends: tuple[Index, ...]) -> None:
        if ends and lane not in self.folded:
            self.counts[lane] = tuple(end - position + index(lane) for end in ends)

    def _limit(self, axis: Axis) -> tuple[Index, ...]:
        """Return a ragged axis's limit over the parts of the axes that it mentions, or ()."""
        return () if axis.limit is None else (substitute(axis.limit, self.cut),)

    def _ends(self, axis: Axis, tile: int) -> tuple[Index, ...]:
        """Return the bounds that tiles of an axis may cross: its extent, and a ragged limit."""
        exact = mod(axis.extent, index(tile)) is index(0)
        return self._limit(axis) if exact else (axis.extent, *self._limit(axis))


def ends_of(guard: Expr | None, values: Mapping[Expr, Expr]) -> list[tuple[Index, Index]] | None:
    """Return each position and its end in a guard of ``below``, or None for any other guard.

    Args:
        values: name -> definition, in a program.
    """
    match None if guard is None else values.get(guard, guard):
        case None | Const(value=True):
            return []
        case Op(name="and", args=args):
            parts = [ends_of(arg, values) for arg in args]
            return None if None in parts else [pair for part in parts for pair in part or ()]
        case Op(name="lt", args=(a, b)):
            here, end = (index_of(values.get(side, side)) for side in (a, b))
            if here is None or end is None or any(index_exprs(here)):
                return None
            return [(here, end)]
        case _:
            return None


def below(position: Index, *ends: Index) -> Expr:
    """Return the mask ``position < end`` for each end, in 32 bits where that is provably enough."""
    high = most(position)
    dtype = I32 if high is not None and high < 2**31 - 1 else I64
    here = IndexValue(position, dtype)
    mask: Expr | None = None
    for end in ends:
        mask = both(mask, Op("lt", (here, IndexValue(end, dtype))))
    if mask is None:
        raise InternalError(f"no end for {position}", stage="codegen.layout")
    return mask
