"""Lower products of scaled matrices of 8-bit floats: sums of products, times scales.

A scale belongs to a tensor, to each row of the first matrix and each column of the second, or to
blocks of 128 terms of a row or column, or of 128 of these. It does not depend on the terms that it
scales, so it is a factor of their sum, and all else is what any product has around it. Worked
examples, scales of rows and columns, and of blocks as DeepSeek-V3 has them::

    y[m, n] = sum(k: a[m, k] * b[k, n]) * sa[m] * sb[n] + bias[n]
    y[m, n] = sum(j: sum(i: a[m, 128*j + i] * b[128*j + i, n]) * sa[m, j] * sb[j, n//128])

Eager multiplies the numbers of 8 bits on GPUs: there the products say how exact their sums have to
be (``COARSE_TERMS``). On CPUs eager scales both operands first and multiplies them in f32. Results
differ only where that overflows or underflows: an infinite scale times a term of 0 is NaN in eager,
here the sum of all terms has to be 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Indices, read
from fusec.frontend.fallbacks import CONTRACTION
from fusec.frontend.fx_passes.widening import NARROWEST
from fusec.frontend.ops.pointwise import rounded
from fusec.frontend.ops.products import exact, is_small
from fusec.frontend.ops.registry import lowers
from fusec.frontend.shapes import TensorType
from fusec.frontend.value import ONE, ZERO, Value
from fusec.ir.dtype import DTYPES, F8, F32
from fusec.ir.expr import Expr, Reduce, op
from fusec.ir.index import Axis, Index, index, mod
from fusec.ir.monoid import SUM

aten = torch.ops.aten
BLOCK = 128
"""Terms, rows and columns of a block that has one scale."""

_At: TypeAlias = Callable[[Index, Index], Indices]
_ON_GPUS = {DTYPES["f8e4m3fn"], DTYPES["f8e5m2"]}


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a matrix.

    Attributes:
        at: the row or column of the result, and the block of terms -> where their scale is.
        in_blocks: whether it depends on the block.
    """

    values: Value
    at: _At
    in_blocks: bool

    def of(self, row: Index, block: Index) -> Expr:
        """Return the scale of a row or column, in f32."""
        return read_scale(self.values, self.at(row, block))


def read_scale(scale: Value, at: Indices) -> Expr:
    """Return a scale at indices of a matrix, of which a tensor of one element has none."""
    place = at if len(scale.shape) == len(at) else (ZERO,) * len(scale.shape)
    return read(scale, place, F32)


def _library(call: AtenCall, a: TensorType, b: TensorType, *_: TensorType) -> str | None:
    return None if is_small(call, b) else CONTRACTION


@lowers(aten._scaled_mm.default, library=_library)
def scaled_mm(
    call: AtenCall,
    a: Value,
    b: Value,
    scale_a: Value,
    scale_b: Value,
    bias: Value | None = None,
    scale_result: Value | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Value:
    """Emit a product whose scales are told apart by their shapes."""
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    rows, columns = _scale_by_shape(scale_a, m, k), _scale_by_shape(scale_b, n, k, swapped=True)
    result = scale_result if out_dtype in NARROWEST else None
    return _product(call, (a, b), (rows, columns), bias, result, fast=use_fast_accum)


@lowers("aten._scaled_mm_v2.default", library=_library)
def scaled_mm_v2(
    call: AtenCall,
    a: Value,
    b: Value,
    scale_a: tuple[Value, ...],
    recipe_a: tuple[int, ...],
    swizzle_a: tuple[int, ...],
    scale_b: tuple[Value, ...],
    recipe_b: tuple[int, ...],
    swizzle_b: tuple[int, ...],
    bias: Value | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: tuple[int, ...] = (),
    use_fast_accum: bool = False,
) -> Value:
    """Emit a product whose recipes say what has a scale; each matrix has one in f32."""
    if any((*swizzle_a, *swizzle_b)) or contraction_dim:
        raise Unsupported("scales in an order of their own")
    if call.is_cpu and len(scale_b[0].shape) == 2 and scale_b[0].shape[0] is not ONE:
        raise Unsupported("scales that eager refuses")
    rows = _scale_by_recipe(scale_a, recipe_a)
    scales = rows, _scale_by_recipe(scale_b, recipe_b, swapped=True)
    return _product(call, (a, b), scales, bias, None, fast=use_fast_accum)


# -- scales ----------------------------------------------------------------------------------------


def _scale_by_shape(scale: Value, rows: Index, terms: Index, *, swapped: bool = False) -> Scales:
    """Return a matrix's scales: one for each row (of ``b`` column), or 128 of them, and block.

    Args:
        swapped: its rows are the tensor's columns.
    """
    if all(extent is ONE for extent in scale.shape):
        return Scales(scale, lambda row, block: (ZERO, ZERO), False)
    if len(scale.shape) != 2:
        raise Unsupported("scales that eager refuses")
    own, blocks = scale.shape[::-1] if swapped else scale.shape

    def at(row: Index, block: Index) -> Indices:
        row = row if own is rows else row // BLOCK
        block = block if blocks is not ONE else ZERO
        return (block, row) if swapped else (row, block)

    if own is rows and blocks is ONE:
        return Scales(scale, at, False)
    if own not in (rows, _blocks(rows)) or blocks is not _blocks(terms):
        raise Unsupported("scales that eager refuses")
    return Scales(scale, at, True)


def _blocks(extent: Index) -> Index:
    return (extent + (BLOCK - 1)) // BLOCK


def _scale_by_recipe(
    scales: tuple[Value, ...], recipe: tuple[int, ...], *, swapped: bool = False
) -> Scales:
    """Return a matrix's scales by torch's ``ScalingType``: scales of blocks lie row by row."""
    kinds = torch.nn.functional.ScalingType
    if len(scales) != 1 or len(recipe) != 1 or scales[0].dtype is not F32:
        raise Unsupported("scales of several levels, or of another type than f32")
    (scale,) = scales
    match kinds(recipe[0]):
        case kinds.TensorWise:
            return Scales(scale, lambda row, block: (ZERO, ZERO), False)
        case kinds.RowWise if swapped and scale.shape[0] is ONE:
            return Scales(scale, lambda row, block: (ZERO, row), False)
        case kinds.RowWise if not swapped and scale.shape[1:] == (ONE,):
            return Scales(scale, lambda row, block: (row, ZERO), False)
        case kinds.RowWise:
            raise Unsupported("scales that eager refuses")
        case kinds.BlockWise1x128:
            return Scales(scale, lambda row, block: (row, block), True)
        case kinds.BlockWise128x128:
            return Scales(scale, lambda row, block: (block, row // BLOCK), True)
        case _:
            raise Unsupported("scales of blocks of 16 or 32 terms")


# -- the product -----------------------------------------------------------------------------------


def _product(
    call: AtenCall,
    matrices: tuple[Value, Value],
    scales: tuple[Scales, Scales],
    bias: Value | None,
    scale_result: Value | None,
    *,
    fast: bool,
) -> Value:
    a, b = matrices
    rows, columns = scales
    blocked = rows.in_blocks or columns.in_blocks
    _check(call, matrices, bias, scale_result, blocked)
    name = "mul" if call.is_cpu else "mul8_fast" if fast else "mul8"

    def term(m: Index, k: Index, n: Index) -> Expr:
        return op(name, exact(a, (m, k)), exact(b, (k, n)))

    def total(m: Index, n: Index) -> Expr:
        if not blocked:
            over = Axis("k", a.shape[1])
            scale = op("mul", rows.of(m, ZERO), columns.of(n, ZERO))
            return op("mul", Reduce(SUM, (over,), term(m, index(over), n)), scale)
        block, inner = Axis("j", a.shape[1] // BLOCK), Axis("i", index(BLOCK))
        part = Reduce(SUM, (inner,), term(m, index(block) * BLOCK + index(inner), n))
        scale = op("mul", rows.of(m, index(block)), columns.of(n, index(block)))
        return Reduce(SUM, (block,), op("mul", part, scale))

    def body(at: Indices) -> Expr:
        m, n = at
        value = total(m, n)
        if bias is not None:
            value = op("add", value, read(bias, (n,), F32))
        if scale_result is not None:
            value = op("mul", value, op("reciprocal", read_scale(scale_result, (ZERO, ZERO))))
        return rounded(value, call.out.dtype) if call.out.dtype in F8 else value

    return call.define(body)


def _check(
    call: AtenCall,
    matrices: tuple[Value, Value],
    bias: Value | None,
    scale_result: Value | None,
    blocked: bool,
) -> None:
    """Check what eager refuses when it runs, and torch does not when it traces.

    Raises:
        Unsupported: for such a call; and for an empty sum, and a result that cuBLAS scales.
    """
    a, b = matrices
    if any(x.dtype not in F8 or x.dtype is DTYPES["f8e8m0fnu"] for x in matrices):
        raise Unsupported("a product of other types than floats of 8 bits")
    if a.shape[1] is ZERO or a.shape[1] is not b.shape[0]:
        raise Unsupported("an empty sum, or sizes whose equality is known only at run time")
    if scale_result is not None and scale_result.dtype is not F32:
        raise Unsupported("a scale that eager refuses")
    if bias is not None and bias.shape != (b.shape[1],):
        raise Unsupported("a bias that eager refuses")
    if call.is_cpu and blocked:
        raise Unsupported("scales that eager refuses")
    if blocked and mod(a.shape[1], index(BLOCK)) is not ZERO:
        raise Unsupported("a block of fewer terms")
    if not call.is_cpu and (
        scale_result is not None
        or not {x.dtype for x in matrices} <= _ON_GPUS
        or {x.dtype for x in matrices} == {DTYPES["f8e5m2"]}
    ):
        raise Unsupported("types or a scaled result that the library may refuse")
