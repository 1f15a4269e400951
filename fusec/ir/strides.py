"""Strides of dense tensors, in elements, for extents that may be symbolic.

Worked example: ``x[B, T, 8]`` in row-major order has strides ``(8*T, 8, 1)``.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusec.ir.index import Index, index


def contiguous_strides(shape: tuple[Index, ...]) -> tuple[Index, ...]:
    """Return row-major strides of ``shape``, in elements."""
    strides: list[Index] = []
    step = index(1)
    for extent in reversed(shape):
        strides.append(step)
        step = step * extent
    return tuple(reversed(strides))


def begin_aligned(length: int, itemsizes: Iterable[int]) -> bool:
    """Return True if rows of so many elements begin at multiples of 8 bytes in each tensor.

    A GPU loads others element by element.
    """
    return all(length * size % 8 == 0 for size in itemsizes)
