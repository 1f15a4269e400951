"""Random numbers: a draw is a function of a seed and of an element's position (``random_ops.py``).

So it fuses like any pointwise operation, whatever the index it is read at. Draws that ``draws.py``
does not rewrite, such as those from a user's generator, run as eager kernels.

Worked example, the numbers of a dropout over ``x[m, c]``, the second draw of its graph::

    random_1[i0, i1] = f32(random(seeds[1], (768*i0 + i1):i64)) * 5.960464477539063e-08
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fusec.errors import InternalError
from fusec.frontend.call import AtenCall, Indices
from fusec.frontend.ops.arithmetic import add, mul, sub
from fusec.frontend.ops.random_ops import BITS
from fusec.frontend.ops.registry import lowers
from fusec.frontend.ops.views import linearise
from fusec.frontend.shapes import from_torch_dtype
from fusec.frontend.value import Value
from fusec.ir.dtype import F32, F64, I32, I64, DType, compute_type
from fusec.ir.expr import Const, Expr, IndexValue, cast, op
from fusec.ir.index import Index, index

aten = torch.ops.aten

_BITS = {from_torch_dtype(dtype): bits for dtype, bits in BITS.items()}


@lowers(torch.ops.fusec.random.default)
def random(
    call: AtenCall, _: Any, __: Any, seeds: Value, which: int, kind: str, ___: Any, *bounds: int
) -> Value:
    """Emit random numbers of a kind; ``random_ops.py`` defines each element."""

    def body(at: Indices) -> Expr:
        draw = _Draw(seeds.at((index(which),)), linearise(at, call.out.shape))
        match kind:
            case "uniform":
                return _uniform(draw, call.out.dtype)
            case "normal":
                return _normal(draw, call.out.dtype)
            case "integer":
                return _integer(draw, *bounds)
            case _:
                raise InternalError(kind, stage="frontend")

    return call.define(body)


class _Draw:
    """The random bits of one element: each kind of draw reads as many as it needs."""

    def __init__(self, seed: Expr, place: Index) -> None:
        self.seed = seed
        self.place = place

    def bits(self, which: int, each: int) -> Expr:
        """Return one of the ``each`` integers of 24 bits that belong to the element."""
        return op("random", self.seed, IndexValue(self.place * each + which))

    def number(self, which: int, each: int, kind: DType) -> Expr:
        """Return one of the element's ``each`` uniform numbers: 24 bits in f32, 48 in f64."""
        if kind is F32:
            return mul(cast(self.bits(which, each), F32), 2.0**-24)
        high, low = (cast(self.bits(2 * which + k, 2 * each), F64) for k in (0, 1))
        return add(mul(high, 2.0**-24), mul(low, 2.0**-48))


def _uniform(draw: _Draw, dtype: DType) -> Expr:
    if dtype not in _BITS:
        return draw.number(0, 1, dtype)
    upper = op("shr", draw.bits(0, 1), Const(24 - _BITS[dtype], I32))
    return mul(cast(upper, F32), 2.0 ** -_BITS[dtype])


def _normal(draw: _Draw, dtype: DType) -> Expr:
    radius, angle = (draw.number(k, 2, compute_type(dtype)) for k in (0, 1))
    one = Const(1.0, radius.dtype)
    length = op("sqrt", mul(op("log", sub(one, radius)), -2.0))
    return mul(length, op("cos", mul(angle, 2 * math.pi)))


def _integer(draw: _Draw, low: int, high: int) -> Expr:
    """Return low + floor((high - low) * u) for 48 bits u, in products of less than 63 bits."""
    upper, lower = (cast(draw.bits(k, 2), I64) for k in (0, 1))
    width, shift = Const(high - low, I64), Const(24, I64)
    carried = op("shr", op("mul", lower, width), shift)
    return add(op("shr", add(op("mul", upper, width), carried), shift), low)
