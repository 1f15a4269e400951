"""What a kernel that streams weights fetches ahead of its loads.

A load's own loop runs ahead of it by ``Program.stages`` iterations. Where these are more than it
has, it fetches what the next point streams, as that lies in memory: of several columns in turn, a
core's own prefetches keep up less well (four columns of weights of 4 bits: 1.13 times the time).
Where the points of the last grid axis share what a loop streams, as the parts of a block of rows
share weights, the first point would wait for memory and the others compute. So each of them fetches
a share of what the points behind them stream, a few elements in each iteration. Worked example,
four columns of weights, ``w[4096*n + k]`` to ``w[4096*n + k + 3072]`` with k of 1024, of points
(n, p), p of 8: each fetches 512 elements, ``4096*(n + 1) + 512*p + k//2``.

A tile's computed operand is read by short pieces of rows, which no processor foresees. So its loads
fetch what they read in the next trip of the loop over terms, while the tile is multiplied (int4,
4096 x 4096, in ms without: 16 rows 5.0 for 7.0, 128 rows 25.9 for 28.4; AVX-512, 2026-11-30).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusec.ir.expr import Buffer, Load, postorder, substitute
from fusec.ir.index import Axis, Index, index
from fusec.ir.program import For, Let, Program, statements
from fusec.ir.streamed import WIDEST_PANEL


def iterations_ahead(
    load: Load, loops: list[Axis], program: Program, lane: Axis | None
) -> Index | None:
    """Return the element that a later iteration loads first; None where points share the loads.

    Terms that are rows of a matrix are fetched nevertheless: a processor's own prefetches do not
    follow steps that far.
    """
    (offset,) = load.indices
    if not loops or not _is_streamed(offset, lane):
        return None
    step = offset.coefficient(loops[-1])
    if step is None or step is index(0):
        return None
    far = step.is_constant and step.const > WIDEST_PANEL
    if not far and not any(axis in offset.axes for axis in program.grid[:1]):
        return None
    return _without(offset, (lane,)) + step * program.stages


def next_tile(load: Load, tiles: Axis, lane: Axis | None) -> Index | None:
    """Return the element that a load reads in the next trip of a loop with a product, or None."""
    (offset,) = load.indices
    step = offset.coefficient(tiles)
    if step is None or step is index(0) or not _is_streamed(offset, lane):
        return None
    return _without(offset, (lane,)) + step


def points_ahead(loop: For, program: Program, lane: Axis | None) -> dict[Load, Index | None]:
    """Return the element that each iteration of a loop fetches for points behind.

    By the load of the first of some columns; the loads of others have None.
    """
    if program.stages == 1 or not program.grid:
        return {}
    found: dict[Buffer, list[Load]] = {}
    loops = [loop.axis, *(s.axis for s in statements(loop.body) if isinstance(s, For))]
    for statement in statements(loop.body):
        match statement:
            case Let(value=Load(buffer=buffer, indices=(offset,)) as load):
                if _is_streamed(offset, lane):
                    found.setdefault(buffer, []).append(load)
    ahead: dict[Load, Index | None] = {}
    for columns in found.values():
        first = min(columns, key=lambda load: load.indices[0].const)
        at = _share(first.indices[0], len(columns), loops, program, lane)
        if at is not None:
            ahead |= dict.fromkeys(columns) | {first: at}
    return ahead


def own_loads(loop: For) -> list[Load]:
    """Return the distinct loads of a loop's own iterations, whose places are known ahead.

    That of a gather is not where the iteration computes its index.
    """
    inside: set[object] = {s.var for s in statements(loop.body) if isinstance(s, Let)}
    loads = (s.value for s in loop.body if isinstance(s, Let) and isinstance(s.value, Load))
    return [load for load in dict.fromkeys(loads) if inside.isdisjoint(postorder(load.gathers))]


def lines_of(places: Mapping[Load, Index | None], line: int) -> dict[Load, Index]:
    """Return the places to fetch without those less than ``line`` bytes behind another one."""
    found: dict[Load, Index] = {}
    for load, at in sorted(places.items(), key=lambda place: place[1].const if place[1] else 0):
        size = load.buffer.dtype.itemsize
        near = (at - other for n, other in found.items() if at and n.buffer is load.buffer)
        if at is not None and not any(n.is_constant and n.const * size < line for n in near):
            found[load] = at
    return found


def lines_apart(offset: Index, loop: Axis, line: int) -> int:
    """Return how many iterations of a loop fetch from one line of ``line`` elements.

    Each of them would take a slot of a load (eight bytes an iteration, weights of 4 bits: 1.14
    times the time; AVX2, 2026-11-29).
    """
    step = offset.coefficient(loop)
    return max(1, line // step.const) if step and step.is_constant and step.const > 0 else 1


def _share(
    offset: Index, columns: int, loops: list[Axis], program: Program, lane: Axis | None
) -> Index | None:
    """Return the element of the points behind that one of the points that share a load fetches."""
    *around, last = program.grid
    shared = last not in offset.axes and bool(around)
    point, parts = (around[-1], last.extent) if shared else (last, index(1))
    step = offset.coefficient(point)
    steps = {axis: offset.coefficient(axis) for axis in loops}
    if step is None or None in steps.values():
        return None
    walks = {a: s for a, s in steps.items() if s}
    length = max(((s * a.extent).hint() for a, s in walks.items()), default=0)
    share = step // parts
    if not share.is_constant or not 0 < share.const <= columns * length:
        return None
    far = min(s.hint() for s in walks.values()) * program.stages
    own = program.grid[0] in offset.axes
    if own is shared or (own and far < length):
        return None  # rows that points read again, or an iteration of its own is far enough ahead
    walked = sum((index(a) * (s * share // length) for a, s in walks.items()), index(0))
    part = index(last) * share if shared else index(0)
    return _without(offset, (lane, *loops)) + step * max(1, far // step.hint()) + part + walked


def _is_streamed(offset: Index, lane: Axis | None) -> bool:
    return lane is not None and offset.coefficient(lane) is index(1)


def _without(offset: Index, axes: Iterable[Axis | None]) -> Index:
    """Return an offset where some axes are 0."""
    return substitute(offset, {axis: index(0) for axis in axes if axis is not None})
