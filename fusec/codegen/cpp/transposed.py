"""Recognize loops that load a block of memory transposed, to print them as one call.

Where lanes run along one axis and memory is contiguous along another (a transposed copy), a load
touches W cache lines for one element each. A plan may bind the other axis in chunks of W
(``transposed`` in ``passes/schedule/plan.py``): then lowering copies W x W elements into a private
array before the loop over a chunk, and the loop reads that. In the program this is an ordinary loop
of loads and puts; the printer replaces a loop found here by one call that transposes the block in
registers.

Worked example, lanes j of 16 and a chunk of 16 rows i::

    for io in 0 .. 16:
      v<ji> = x[N*(j*16 + ji) + 16*i + io]
      a[16*io + ji] = v
"""

from __future__ import annotations

from dataclasses import dataclass

from fusec.ir.expr import Buffer, Load, Var
from fusec.ir.index import Axis, Index, index
from fusec.ir.program import For, Let, Put
from fusec.passes.schedule.access import is_transposed


@dataclass(frozen=True, slots=True)
class Block:
    """``array[k*W + lane] = memory[start + lane*step + k]`` for ``k < min(counts)``.

    Attributes:
        guard: mask of the lanes that are read; the others are 0. None: all.
    """

    array: Buffer
    memory: Buffer
    start: Index
    step: Index
    counts: tuple[Index, ...]
    guard: Var | None


def transposed_block(loop: For, lane: Axis | None) -> Block | None:
    """Return the block that a loop copies transposed, or None if the loop does anything else."""
    match loop.body:
        case (Let(value=Load() as load, var=var), Put(value=value, guard=None) as put):
            guard = load.guard
        case _:
            return None
    if lane is None or value is not var or not is_transposed(load, loop.axis, lane):
        return None
    whole = index(loop.axis) * lane.extent + index(lane)
    if put.offset is not whole or load.buffer.dtype is not put.buffer.dtype:
        return None
    if loop.start is not index(0) or loop.axis.extent is not lane.extent:
        return None
    if guard is not None and (not isinstance(guard, Var) or lane not in guard.axes):
        return None
    step = load.indices[0].coefficient(lane)
    assert step is not None
    start = load.indices[0] - step * index(lane) - index(loop.axis)
    return Block(put.buffer, load.buffer, start, step, loop.stops, guard)
