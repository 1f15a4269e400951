"""How threads share a kernel's grid: the schedule of its OpenMP loop.

Points of equal work are dealt out before the loop. Tiles of products are few and long, and those of
a triangle unequal: a thread takes the next when it has done one, and no thread waits for all that
was dealt to another, which some other program may have interrupted.
"""

from __future__ import annotations

import math

from fusec.ir.dtype import F32
from fusec.ir.program import Multiply, Program, statements


def streams(product: Multiply, program: Program) -> bool:
    """Return True if a product reads panels of weights, which follow each other in memory.

    Values of an attention lie like panels, but are multiplied with what a kernel computes.
    """
    left, right = product.left.buffer, product.right.buffer
    in_place = right.dtype is F32 and {left, right} <= set(program.buffers)
    return in_place and product.right.row in {n * product.width for n in product.panels}


def schedule(program: Program) -> str:
    """Return the schedule of a kernel's loop over its grid."""
    if not program.multiplies:
        return "static"
    products = [s for s in statements(program.body) if isinstance(s, Multiply)]
    extents = [axis.extent for axis in program.grid]
    if not any(streams(p, program) for p in products) or not all(e.is_constant for e in extents):
        return "dynamic"
    tiles = math.prod(extent.const for extent in extents)
    return f"dynamic, {max(1, min(program.code.adjacent, tiles // program.code.shares))}"
