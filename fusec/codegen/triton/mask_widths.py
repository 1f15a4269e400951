"""Narrow the loads of masks to the vector width of the wider tiles that they are used with.

Triton gives each load its own layout, 16 bytes a thread: 16 elements of a mask, 8 of the scores
that it masks. Where the two are combined, one is converted through shared memory, with two barriers
a tile. A mask that is loaded 8 by 8 needs none, and a warp's 256 bytes are still whole lines.

Worked example: the softmax of 2048 scores in ``bf16`` and a mask of ``bool`` in 2 warps has 5
barriers, not 9; of ``f32``, 5 and not 21 (sm_90, Triton 3.7.1, 2026-11).
"""

from __future__ import annotations

from collections.abc import Mapping

from fusec.ir.expr import Load
from fusec.ir.index import Axis
from fusec.ir.program import Let, Program, Update, statements
from fusec.passes.schedule.access import VECTOR_BYTES


def mask_lanes(program: Program) -> Mapping[Load, tuple[Axis, int]]:
    """Return load of a mask -> its contiguous axis, and the elements that a thread loads."""
    loads = {
        s.value: None
        for s in statements(program.body)
        if isinstance(s, Let | Update) and isinstance(s.value, Load)
    }
    lanes = frozenset(program.lanes)
    tiles = {load: axis for load in loads if (axis := _contiguous(load, lanes)) is not None}
    wide = {
        (axis, load.dtype.itemsize)
        for load, axis in tiles.items()
        if load.dtype.itemsize > 1 and not load.indices[0].axes <= lanes
    }
    found = {}
    for load, axis in tiles.items():
        sizes = [size for other, size in wide if other is axis]
        if load.dtype.itemsize == 1 and sizes:
            together = VECTOR_BYTES // min(sizes)
            if axis.extent.const % together == 0:
                found[load] = (axis, together)
    return found


def _contiguous(load: Load, lanes: frozenset[Axis]) -> Axis | None:
    """Return the lane axis along which a load is contiguous, or None."""
    return next((a for a in lanes & load.axes if load.indices[0].steps_by_one(a)), None)
