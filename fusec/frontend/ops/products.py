"""Lower matrix products to index notation: sums of products.

A contraction is captured as the library's call, with its decomposition; where a kernel of fusec's
own is the better candidate, the decomposition replaces the call (``passes/fusion/contract.py``).
16-bit operands are read exactly: tensor cores multiply the values that eager's kernel would have
stored. Products in f64 run in the library; where none may be called, they are ordinary sums. So are
small products (``FusionTuning.small_product``) of floats: a call costs more than they do.

Worked example: ``mm(x, w.t())`` means ``mm[m, n] = sum(k: f32(x[m, k]) * f32(w[n, k]))``, rounded
to the result's type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Indices, read_exact
from fusec.frontend.fallbacks import CONTRACTION
from fusec.frontend.ops.registry import aten, defines, lowers
from fusec.frontend.shapes import TensorType
from fusec.frontend.value import Value, make_axes, positions
from fusec.ir.dtype import BF16, F16, F32, F64, I32
from fusec.ir.expr import Expr, Op, Reduce, cast
from fusec.ir.index import Axis, Index, index
from fusec.ir.monoid import SUM


def contraction(
    extent: Index, term: Callable[[Index], tuple[Expr, Expr]], name: str = "mul"
) -> Expr:
    """Return ``sum(k: a(k) * b(k))`` for a pair of factors of one type, by a product's ``name``."""
    over = Axis("k", extent)
    return Reduce(SUM, (over,), Op(name, term(index(over))))


def exact(value: Value, at: Indices) -> Expr:
    """Return an element in f32, rounded to its own type if that is a 16-bit float."""
    return read_exact(value, at, F32)


def is_matrix(x: Any) -> bool:
    """Return True for a tensor of a type that tensor cores multiply."""
    return isinstance(x, Value) and x.dtype in (F32, F16, BF16)


def _matrices(*operands: Any) -> None:
    if not all(map(is_matrix, operands)):
        raise Unsupported("a product of a type without tensor cores")


def is_small(call: AtenCall, b: TensorType | Value) -> bool:
    """Return True for few rows, columns and terms: a library's call costs more than the product."""
    rows, side = call.lines.fusion.small_product
    limits = zip((call.out.shape[-2], *b.shape[-2:]), (rows, side, side), strict=True)
    return all(extent.is_constant and 0 < extent.const <= most for extent, most in limits)


def _library(call: AtenCall, a: TensorType, b: TensorType) -> str | None:
    """Return why the library computes a product: it is not small, and there may be a library."""
    alone = call.lines.alone and call.out.dtype is F64
    return None if alone or is_small(call, b) else CONTRACTION


@defines()
def multiplied(
    call: AtenCall, at: Indices, a: Value, b: Value, element: Callable[[Value, Indices], Expr]
) -> Expr:
    """Return the product of two matrices, or of pairs in a batch, given how an element is read."""
    *batch, m, n = at
    return contraction(
        a.shape[-1], lambda k: (element(a, (*batch, m, k)), element(b, (*batch, k, n)))
    )


@lowers(aten.mm.default, aten.bmm.default, library=_library)
def product(call: AtenCall, a: Value, b: Value) -> Value:
    kind = F64 if call.out.dtype is F64 and (call.lines.alone or is_small(call, b)) else F32
    if kind is F32:  # of other types only the library multiplies
        _matrices(a, b)
    return multiplied(call, a, b, lambda x, at: read_exact(x, at, kind))


@lowers(aten._int_mm.default, library=lambda call, *_: CONTRACTION)
def integer_product(call: AtenCall, a: Value, b: Value) -> Value:
    """Emit the product of two matrices of int8, whose sums are i32."""
    return multiplied(call, a, b, lambda x, at: cast(x.at(at), I32))


def by_panels(call: AtenCall, a: Value, b: Value, panels: Value) -> Value:
    """Emit ``mm`` with the second factor in panels (``frontend/fx_passes/packing.py``).

    The rows are converted to f32 once, since each panel of columns reads all of them.
    """
    _matrices(a, b)
    wide = call.scratch("wide", a.shape, F32, lambda at: exact(a, at))
    axes = make_axes(b.shape)
    k, n = positions(axes)
    width = panels.shape[2]
    columns = Value(b.shape, b.dtype, axes, panels.at((n // width, k, n % width)))
    return product(call, wide, columns)
