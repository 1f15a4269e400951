"""Random numbers. Each draw runs as an eager kernel, so that results follow eager's stream.

The reason is in ``contractions.py``'s table; what is here is the part of dropout that draws
nothing.
"""

from __future__ import annotations

import torch

from fusec.frontend.call import Call, Scalar
from fusec.frontend.registry import lowers
from fusec.frontend.value import Value
from fusec.ir.expr import op

aten = torch.ops.aten


@lowers(aten.native_dropout_backward.default)
def native_dropout_backward(call: Call, gradient: Value, mask: Value, scale: Scalar) -> Value:
    """gradient * mask * scale"""
    return call.pointwise(lambda g, m, s: op("mul", op("mul", g, m), s), gradient, mask, scale)
