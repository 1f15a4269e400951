"""What a kernel that streams weights fetches ahead of its loads.

A load's own loop runs ahead of it by ``Program.stages`` iterations. Where the points of the last
grid axis share what a loop streams, as the parts of a block of rows share weights, the first point
would wait for memory and the others compute. So each of them fetches a share of what the points
behind them stream, a few elements in each iteration. Worked example, four columns of weights,
``w[4096*n + k]`` to ``w[4096*n + k + 3072]`` with k of 1024, of points (n, p), p of 8: each fetches
512 elements, ``4096*(n + 1) + 512*p + k//2``.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusec.ir.expr import Buffer, Load, substitute
from fusec.ir.index import Axis, Index, index
from fusec.ir.program import For, Let, Program, statements


def iterations_ahead(
    load: Load, loops: list[Axis], program: Program, lane: Axis | None
) -> Index | None:
    """Return the element that a later iteration loads first; None where others load it, too."""
    (offset,) = load.indices
    own = any(axis in offset.axes for axis in program.grid[:1])
    if not loops or not own or not _is_streamed(offset, lane):
        return None
    step = offset.coefficient(loops[-1])
    if step is None or step is index(0):
        return None
    return _without(offset, (lane,)) + step * program.stages


def points_ahead(loop: For, program: Program, lane: Axis | None) -> dict[Load, Index]:
    """Return the element that each iteration of a loop fetches for points behind, by a load."""
    if program.stages == 1 or len(program.grid) < 2:
        return {}
    found: dict[Buffer, Load] = {}
    loops = [loop.axis, *(s.axis for s in statements(loop.body) if isinstance(s, For))]
    for statement in statements(loop.body):
        match statement:
            case Let(value=Load(buffer=buffer, indices=(offset,)) as load):
                known = found.setdefault(buffer, load)
                if _is_streamed(offset, lane) and offset.const < known.indices[0].const:
                    found[buffer] = load
    ahead = {load: _share(load.indices[0], loops, program, lane) for load in found.values()}
    return {load: at for load, at in ahead.items() if at is not None}


def _share(offset: Index, loops: list[Axis], program: Program, lane: Axis | None) -> Index | None:
    """Return the element of the points behind that one of the points that share a load fetches."""
    *_, point, part = program.grid
    step = offset.coefficient(point)
    steps = {axis: offset.coefficient(axis) for axis in loops}
    if part in offset.axes or not _is_streamed(offset, lane) or step is None or None in steps:
        return None
    length = max((s * a.extent).hint() for a, s in steps.items() if s is not None)
    share = step // part.extent
    if not share.is_constant or not length or share.const < 1:
        return None
    walked = sum((index(a) * (s * share // length) for a, s in steps.items() if s), index(0))
    return _without(offset, (lane, *loops)) + step + index(part) * share + walked


def _is_streamed(offset: Index, lane: Axis | None) -> bool:
    return lane is not None and offset.coefficient(lane) is index(1)


def _without(offset: Index, axes: Iterable[Axis | None]) -> Index:
    """Return an offset where some axes are 0."""
    return substitute(offset, {axis: index(0) for axis in axes if axis is not None})
