"""The OpenMP schedule of a kernel's grid.

Points of equal work are dealt out before the loop, by ``schedule(static)``. Tiles of products are
few and long, and those of a triangle unequal: ``schedule(dynamic)``. So a thread that another
program interrupts delays one chunk, not its half of a product.
"""

from __future__ import annotations

import math

from fusec.ir.dtype import F32
from fusec.ir.program import Multiply, Program, statements


def read_ahead(product: Multiply, program: Program) -> str:
    """Return how a product prefetches its right operand, as of ``products.h``: not, unless it
    reads both operands in place.

    A panel is dense if its terms are as far apart as it has columns; the next one follows. Values
    of an attention have this layout, too, but their left operand is computed in the kernel.
    """
    left, right = product.left.buffer, product.right.buffer
    if right.dtype is not F32 or not {left, right} <= set(program.buffers):
        return ""
    dense = product.right.row in {count * product.width for count in product.panels}
    return "<DENSE>" if dense else "<APART>"


def omp_schedule(program: Program) -> str:
    """Return the schedule of a kernel's loop over its grid."""
    if not program.multiplies:
        return "static"
    products = [s for s in statements(program.body) if isinstance(s, Multiply)]
    extents = [axis.extent for axis in program.grid]
    known = all(extent.is_constant for extent in extents)
    if not known or not any(read_ahead(p, program) == "<DENSE>" for p in products):
        return "dynamic"
    tiles = math.prod(extent.const for extent in extents)
    return f"dynamic, {max(1, min(program.code.chunk, tiles // program.code.chunks))}"
