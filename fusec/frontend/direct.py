"""How much a lowering may compute again where an eager kernel would remember: its *direct form*.

A prefix sum, a scatter or a search is, in index notation, a reduction for each element: a sum of
what lies before it, of what is sent to it, of what is less. That is one kernel, which fuses, is the
same in each run, and takes (elements of the result) x (terms of each) steps where the eager kernel
takes their sum. Up to ``MOST_STEPS`` it costs less than calling one.
"""

from __future__ import annotations

from fusec.errors import Unsupported
from fusec.ir.index import Index, product

MOST_STEPS = 1 << 15
"""Twice as many cost what the eager kernel's call does: cumsum, scatter_add, index_add, bucketize
on one core with 16 lanes, 2026-11."""


def check_steps(shape: tuple[Index, ...], terms: tuple[Index, ...], reason: str) -> None:
    """Let a direct form pass if it is short.

    Args:
        shape: of the result.
        terms: the extents that are reduced for each of its elements.
    Raises:
        Unsupported: with the reason, if it is long or of symbolic size.
    """
    steps = product((*shape, *terms))
    if not steps.is_constant or steps.const > MOST_STEPS:
        raise Unsupported(reason)
