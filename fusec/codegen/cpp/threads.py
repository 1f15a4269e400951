"""The OpenMP schedule of a kernel's grid.

Points of equal work are dealt out before the loop, by ``schedule(static)``. Tiles of products are
few and long, and those of a triangle unequal: ``schedule(dynamic)``. So a thread that another
program interrupts delays one chunk, not its half of a product.
"""

from __future__ import annotations

import math

from fusec.ir.dtype import F32
from fusec.ir.program import Multiply, Program, statements


def reads_panels(product: Multiply, program: Program) -> bool:
    """Return True if a product reads its right operand in place, as dense panels.

    A panel is dense if its terms are as far apart as it has columns; the next one follows. Values
    of an attention have this layout, too, but their left operand is computed in the kernel.
    """
    left, right = product.left.buffer, product.right.buffer
    in_place = right.dtype is F32 and {left, right} <= set(program.buffers)
    return in_place and product.right.row in {count * product.width for count in product.panels}


def omp_schedule(program: Program) -> str:
    """Return the schedule of a kernel's loop over its grid."""
    if not program.multiplies:
        return "static"
    products = [s for s in statements(program.body) if isinstance(s, Multiply)]
    extents = [axis.extent for axis in program.grid]
    known = all(extent.is_constant for extent in extents)
    if not known or not any(reads_panels(p, program) for p in products):
        return "dynamic"
    tiles = math.prod(extent.const for extent in extents)
    return f"dynamic, {max(1, min(program.code.chunk, tiles // program.code.chunks))}"
