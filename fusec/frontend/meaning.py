"""What a library call computes, in index notation: products of matrices as sums of products.

A contraction is captured as the library's call, with its meaning beside it; where one kernel of
fusec's own is the better choice, the definitions take the call's place (``passes/contract.py``).
16-bit operands are read exactly: tensor cores multiply what eager's kernel would have stored.

Worked example: ``mm(x, w.t())`` means ``mm[m, n] = sum(k: f32(x[m, k]) * f32(w[n, k]))``, rounded
to the result's type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusec.errors import Unsupported
from fusec.frontend.call import Lines, read_exact
from fusec.frontend.value import Value, make_axes, positions
from fusec.ir.dtype import BF16, F16, F32, DType
from fusec.ir.expr import Buffer, Expr, Op, Reduce, cast
from fusec.ir.graph import Def, Origin
from fusec.ir.index import Axis, Index, contiguous_strides, index
from fusec.ir.monoid import SUM

aten = torch.ops.aten
Indices = tuple[Index, ...]


@dataclass(slots=True)
class Products:
    """The definitions of one call, as they are made.

    Attributes:
        outputs: the call's results: buffers that the definitions write.
    """

    lines: Lines
    name: str
    outputs: tuple[Buffer | None, ...]
    origin: Origin

    def define(self, buffer: Buffer, body: Callable[[Indices], Expr]) -> Def:
        """Return ``buffer[axes] = body(axes)``, cast to the buffer's type."""
        axes = make_axes(buffer.shape)
        return Def(buffer, axes, cast(body(positions(axes)), buffer.dtype), self.origin)

    def scratch(self, suffix: str, shape: Indices, dtype: DType) -> Buffer:
        """Return a new row-major intermediate."""
        return Buffer(self.lines.unique_name(suffix), shape, contiguous_strides(shape), dtype)

    def result(self, position: int = 0) -> Buffer:
        buffer = self.outputs[position]
        if buffer is None:
            raise Unsupported("a result that is no tensor")
        return buffer


def contraction(extent: Index, term: Callable[[Index], tuple[Expr, Expr]]) -> Expr:
    """Return ``sum(k: a(k) * b(k))`` for a pair of factors in f32."""
    over = Axis("k", extent)
    a, b = term(index(over))
    return Reduce(SUM, (over,), Op("mul", (a, b)))


def exact(value: Value, at: Indices) -> Expr:
    """Return an element in f32 as it is in memory: rounded, where its type is a 16-bit float."""
    return read_exact(value, at, F32)


def is_matrix(x: Any) -> bool:
    """Return True for a tensor of a type that tensor cores multiply."""
    return isinstance(x, Value) and x.dtype in (F32, F16, BF16)


def _matrices(*operands: Any) -> None:
    if not all(map(is_matrix, operands)):
        raise Unsupported("a product of a type without tensor cores")


def _mm(call: Products, a: Value, b: Value) -> tuple[Def, ...]:
    _matrices(a, b)

    def body(at: Indices) -> Expr:
        m, n = at
        return contraction(a.shape[1], lambda k: (exact(a, (m, k)), exact(b, (k, n))))

    return (call.define(call.result(), body),)


def _bmm(call: Products, a: Value, b: Value) -> tuple[Def, ...]:
    _matrices(a, b)

    def body(at: Indices) -> Expr:
        batch, m, n = at
        return contraction(a.shape[2], lambda k: (exact(a, (batch, m, k)), exact(b, (batch, k, n))))

    return (call.define(call.result(), body),)


MEANINGS: dict[Any, Callable[..., tuple[Def, ...]]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
}
"""What a call computes: FX target -> rule over ``Products`` and the call's arguments."""
