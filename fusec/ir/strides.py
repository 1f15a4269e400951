"""Strides of dense tensors, in elements, for extents that may be symbolic.

Worked example: ``x[B, T, 8]`` in row-major order has strides ``(8*T, 8, 1)``.
"""

from __future__ import annotations

from fusec.ir.index import Index, index


def contiguous_strides(shape: tuple[Index, ...]) -> tuple[Index, ...]:
    """Return row-major strides of ``shape``, in elements."""
    strides: list[Index] = []
    step = index(1)
    for extent in reversed(shape):
        strides.append(step)
        step = step * extent
    return tuple(reversed(strides))
