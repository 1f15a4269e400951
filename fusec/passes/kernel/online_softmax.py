"""Move a softmax's division out of the weighted sum, so that one loop computes both online.

Spec: ``kernel -> kernel``; same values up to the rounding of the weights. A softmax whose weights
are summed at once, as in an attention, divides each weight; with one division after the sum, the
sum is linear in the exponentials and runs in the loop of the maximum (``ir/online.py``).

Worked example: ``sum(n: round(exp(s - m) / l) * v)`` becomes ``sum(n: round(exp(s - m)) * v) / l``.
"""

from __future__ import annotations

from fusec.ir.graph import Kernel
from fusec.ir.online import ONLINE_RULES
from fusec.ir.rewrite import rewrite
from fusec.passes.graph.simplify import rounding_dropper


def online_softmax(kernel: Kernel) -> Kernel:
    """Return the kernel with divisors moved out of sums that can then be computed online."""
    return kernel.map(lambda exprs: rounding_dropper()(rewrite(exprs, ONLINE_RULES)))
