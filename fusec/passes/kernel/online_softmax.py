"""Let a softmax and what it weights run in one loop: divide after the sum, not inside it.

Spec: ``kernel -> kernel``; same values up to the rounding of the weights. A softmax that is summed
over right away, as in an attention, divides each weight; divided once, at the end, the sum is
linear in the exponentials and the loop that finds the maximum computes it too (``ir/online.py``).

Worked example: ``sum(n: round(exp(s - m) / l) * v)`` becomes ``sum(n: round(exp(s - m)) * v) / l``.
"""

from __future__ import annotations

from fusec.ir.graph import Kernel
from fusec.ir.online import factor_out
from fusec.passes.graph.simplify import rounding_dropper


def online_softmax(kernel: Kernel) -> Kernel:
    """Return the kernel with divisors outside the sums that become online by it."""
    return kernel.map(lambda exprs: rounding_dropper()(factor_out(exprs)))
