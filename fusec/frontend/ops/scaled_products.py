"""Lower products of scaled matrices of 8-bit floats: sums of products, times scales.

A scale belongs to a tensor, to each row of the first matrix and each column of the second, or to
blocks of 128 terms of a row or column, or of 128 of these. It does not depend on the terms that it
scales, so it is a factor of their sum, and all else is what any product has around it. Worked
examples, scales of rows and columns, and of blocks as DeepSeek-V3 has them::

    y[m, n] = sum(k: a[m, k] * b[k, n]) * sa[m] * sb[n] + bias[n]
    y[m, n] = sum(j: sum(i: a[m, 128*j + i] * b[128*j + i, n]) * sa[m, j] * sb[j, n//128])
    y[m, n] = sum(k: (a[m, k] * sa[m, k//32]) * (b[k, n] * sb[n, k//32]))

The last form is that of ``mxfp8``, ``mxfp4`` and ``nvfp4``, for whose scales some tensor cores have
an instruction (``ir/scaled.py``); where they lie, ``in_tiles`` says.

Eager multiplies the numbers of 8 bits on GPUs: there the products say how exact their sums have to
be (``COARSE_TERMS``). On CPUs eager scales both operands first and multiplies them in f32. Results
differ only where that overflows or underflows: an infinite scale times a term of 0 is NaN in eager,
here the sum of all terms has to be 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Indices, read
from fusec.frontend.fallbacks import CONTRACTION
from fusec.frontend.fx_passes.widening import NARROWEST, product_saturates
from fusec.frontend.ops.pointwise import rounded
from fusec.frontend.ops.products import exact, is_small
from fusec.frontend.ops.registry import aten, lowers
from fusec.frontend.ops.views import delinearise
from fusec.frontend.shapes import TensorType, to_torch_dtype
from fusec.frontend.value import ONE, ZERO, Value
from fusec.ir.dtype import DTYPES, F4X2, F8, F8E8M0FNU, F32, I32
from fusec.ir.expr import Expr, Reduce, as_value, cast, op
from fusec.ir.index import Axis, Index, index, mod, product
from fusec.ir.monoid import SUM
from fusec.ir.scaled import BLOCK as TERMS
from fusec.ir.scaled import TILE

BLOCK = 128
"""Terms, rows and columns of a block that has one scale in f32."""
TILE_ROWS, TILE_BLOCKS = 128, TILE
"""Rows and blocks of terms of a tile of scales of fewer terms."""

_At: TypeAlias = Callable[[Index, Index], Indices]
_AtTerm: TypeAlias = Callable[[Index], Indices]
_REFUSED = "scales that eager refuses"
_ON_GPUS = {DTYPES["f8e4m3fn"], DTYPES["f8e5m2"], F4X2}


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a matrix.

    Attributes:
        at: the row or column of the result, and the block of terms -> where their scale is.
        block: terms that share a scale; 0 for all.
        whole: a further scale, of the whole matrix, if there is one.
    """

    values: Value
    at: _At
    block: int = 0
    whole: Value | None = None

    def of(self, row: Index, block: Index) -> Expr:
        """Return the scale of a row or column, in f32."""
        return read_scale(self.values, self.at(row, block))

    @property
    def is_of_terms(self) -> bool:
        """Whether a block is short, so that terms are scaled, and not their sums."""
        return 0 < self.block < BLOCK


def read_scale(scale: Value, at: Indices) -> Expr:
    """Return a scale at indices of a matrix, of which a tensor of one element has none."""
    place = at if len(scale.shape) == len(at) else (ZERO,) * len(scale.shape)
    return read(scale, place, F32)


def _library(call: AtenCall, a: TensorType, b: TensorType, *_: object) -> str | None:
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
    """Emit a product whose scales are told apart by their types and shapes."""
    m, n, k = a.shape[0], b.shape[1], _terms(a)
    if scale_a.dtype is F32:
        rows, columns = _scale_by_shape(scale_a, m, k), _scale_by_shape(scale_b, n, k, swapped=True)
    else:
        rows, columns = in_tiles(a, scale_a, m, k), in_tiles(b, scale_b, n, k)
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
    """Emit a product whose recipes say what has a scale."""
    m, n, k = a.shape[0], b.shape[1], _terms(a)
    if contraction_dim:
        raise Unsupported("a product along other axes")
    if call.is_cpu and len(scale_b[0].shape) == 2 and scale_b[0].shape[0] is not ONE:
        raise Unsupported(_REFUSED)
    if any((*swizzle_a, *swizzle_b)):
        rows = _by_levels(in_tiles(a, scale_a[0], m, k), scale_a, recipe_a, swizzle_a)
        columns = _by_levels(in_tiles(b, scale_b[0], n, k), scale_b, recipe_b, swizzle_b)
    else:
        rows = _scale_by_recipe(scale_a, recipe_a)
        columns = _scale_by_recipe(scale_b, recipe_b, swapped=True)
    return _product(call, (a, b), (rows, columns), bias, None, fast=use_fast_accum)


# -- scales ----------------------------------------------------------------------------------------


def _scale_by_shape(scale: Value, rows: Index, terms: Index, *, swapped: bool = False) -> Scales:
    """Return a matrix's scales: one for each row (of ``b`` column), or 128 of them, and block.

    Args:
        swapped: its rows are the tensor's columns.
    """
    if all(extent is ONE for extent in scale.shape):
        return Scales(scale, lambda row, block: (ZERO, ZERO))
    if len(scale.shape) != 2:
        raise Unsupported(_REFUSED)
    own, blocks = scale.shape[::-1] if swapped else scale.shape

    def at(row: Index, block: Index) -> Indices:
        row = row if own is rows else row // BLOCK
        block = block if blocks is not ONE else ZERO
        return (block, row) if swapped else (row, block)

    if own is rows and blocks is ONE:
        return Scales(scale, at)
    if own not in (rows, _blocks(rows)) or blocks is not _blocks(terms):
        raise Unsupported(_REFUSED)
    return Scales(scale, at, BLOCK)


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
            return Scales(scale, lambda row, block: (ZERO, ZERO))
        case kinds.RowWise if swapped and scale.shape[0] is ONE:
            return Scales(scale, lambda row, block: (ZERO, row))
        case kinds.RowWise if not swapped and scale.shape[1:] == (ONE,):
            return Scales(scale, lambda row, block: (row, ZERO))
        case kinds.RowWise:
            raise Unsupported(_REFUSED)
        case kinds.BlockWise1x128:
            return Scales(scale, lambda row, block: (row, block), BLOCK)
        case kinds.BlockWise128x128:
            return Scales(scale, lambda row, block: (block, row // BLOCK), BLOCK)
        case _:
            raise Unsupported("scales of blocks of 16 or 32 terms, row by row")


def in_tiles(x: Value, scale: Value, rows: Index, terms: Index) -> Scales:
    """Return scales of 16 or 32 terms, which lie in tiles of 128 rows and 4 blocks, row by row.

    In a tile, block j of row r is at ``r%32*16 + r//32*4 + j``; so cuBLAS reads them (``32_4_4``).
    """
    block = TERMS.get((x.dtype is F4X2, scale.dtype), 0)
    if not block:
        raise Unsupported(_REFUSED)
    across = (terms + (block * TILE_BLOCKS - 1)) // (block * TILE_BLOCKS)
    down = (rows + (TILE_ROWS - 1)) // TILE_ROWS
    if product(scale.shape) is not down * across * (TILE_ROWS * TILE_BLOCKS):
        raise Unsupported(_REFUSED)

    def at(row: Index, block: Index) -> Indices:
        tile = row // TILE_ROWS * across + block // TILE_BLOCKS
        inside = row % 32 * 16 + row % TILE_ROWS // 32 * TILE_BLOCKS + block % TILE_BLOCKS
        return delinearise(tile * (TILE_ROWS * TILE_BLOCKS) + inside, scale.shape)

    return Scales(scale, at, block)


def _by_levels(
    scales: Scales, given: tuple[Value, ...], recipe: tuple[int, ...], swizzle: tuple[int, ...]
) -> Scales:
    """Return scales of terms, checked by torch's ``ScalingType``, with that of the whole matrix."""
    kinds, orders = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
    levels = [kinds.BlockWise1x16 if scales.block == 16 else kinds.BlockWise1x32]
    levels += [kinds.TensorWise] * (len(given) - 1)
    known = [kinds(level) for level in recipe] == levels and len(levels) <= 32 // scales.block
    if not known or orders(swizzle[0]) != orders.SWIZZLE_32_4_4:
        raise Unsupported(_REFUSED)
    if len(given) == 1:
        return scales
    if given[1].dtype is not F32 or product(given[1].shape) is not ONE:
        raise Unsupported(_REFUSED)
    return replace(scales, whole=given[1])


# -- the product -----------------------------------------------------------------------------------


def _terms(x: Value) -> Index:
    """Return how many numbers a row of a matrix has, of which a byte may hold two."""
    return x.shape[1] * (2 if x.dtype is F4X2 else 1)


def _number(x: Value, term: Index, at: _AtTerm) -> Expr:
    """Return a term of a matrix in f32, given where its element, or its pair, is."""
    if x.dtype is not F4X2:
        return exact(x, at(term))
    pair = cast(x.at(at(term // 2)), I32)
    return op("e2m1", op("shr", pair, cast(as_value(term % 2 * 4), I32)))


def _product(
    call: AtenCall,
    matrices: tuple[Value, Value],
    scales: tuple[Scales, Scales],
    bias: Value | None,
    scale_result: Value | None,
    *,
    fast: bool,
) -> Value:
    _check(call, matrices, bias, scale_result, scales)
    name = "mul" if call.is_cpu else "mul8_fast" if fast else "mul8"

    def body(at: Indices) -> Expr:
        m, n = at
        value = _total(name, matrices, scales, m, n)
        if bias is not None:
            value = value + read(bias, (n,), F32)
        if scale_result is not None:
            value = value * op("reciprocal", read_scale(scale_result, (ZERO, ZERO)))
        return rounded(value, call.out.dtype, saturates) if call.out.dtype in F8 else value

    kinds = map(to_torch_dtype, (*(x.dtype for x in matrices), call.out.dtype))
    saturates = product_saturates(*kinds) if call.is_cpu else None
    return call.define(body)


def _total(
    name: str, matrices: tuple[Value, Value], scales: tuple[Scales, Scales], m: Index, n: Index
) -> Expr:
    """Return the scaled sum of the products of terms, by the operation ``name``."""
    (a, b), (rows, columns) = matrices, scales
    of_terms, blocked = rows.is_of_terms, rows.block or columns.block

    def term(k: Index) -> Expr:
        left, right = _number(a, k, lambda k: (m, k)), _number(b, k, lambda k: (k, n))
        if not of_terms:
            return op(name, left, right)
        scale = rows.of(m, k // rows.block), columns.of(n, k // columns.block)
        return left * scale[0] * (right * scale[1])

    def scale(block: Index) -> Expr:
        return rows.of(m, block) * columns.of(n, block)

    if of_terms or not blocked:
        over = Axis("k", _terms(a))
        found = Reduce(SUM, (over,), term(index(over)))
        if not of_terms:
            return found * scale(ZERO)
        levels = [read_scale(one.whole, (ZERO, ZERO)) for one in scales if one.whole is not None]
        return found * op("mul", *levels) if levels else found
    block, inner = Axis("j", a.shape[1] // BLOCK), Axis("i", index(BLOCK))
    part = Reduce(SUM, (inner,), term(index(block) * BLOCK + index(inner)))
    return Reduce(SUM, (block,), part * scale(index(block)))


def _check(
    call: AtenCall,
    matrices: tuple[Value, Value],
    bias: Value | None,
    scale_result: Value | None,
    scales: tuple[Scales, Scales],
) -> None:
    """Check what eager refuses when it runs, and torch does not when it traces.

    Raises:
        Unsupported: for such a call; and for an empty sum, and a result that cuBLAS scales.
    """
    (a, b), types = matrices, {x.dtype for x in matrices}
    of_terms, blocked = scales[0].is_of_terms, any(one.block for one in scales)
    alike = not (of_terms or scales[1].is_of_terms) or scales[0].block == scales[1].block
    mixed = F4X2 in types and (len(types) > 1 or not of_terms)
    levels = {one.whole is None for one in scales}
    known = types <= _ON_GPUS and types != {DTYPES["f8e5m2"]} and scale_result is None
    terms, sums = "a block of fewer terms", "sizes whose equality is known only at run time"
    for refused, reason in (
        (not types <= {*F8, F4X2} - {F8E8M0FNU}, "a product of other types than floats of 8 bits"),
        (not alike or mixed or len(levels) > 1, _REFUSED),
        (call.out.dtype is F4X2, "a result of 4 bits"),
        (a.shape[1] is ZERO or a.shape[1] is not b.shape[0], f"an empty sum, or {sums}"),
        (scale_result is not None and scale_result.dtype is not F32, "a scale that eager refuses"),
        (bias is not None and bias.shape != (b.shape[1],), "a bias that eager refuses"),
        (call.is_cpu and blocked, _REFUSED),
        (blocked and not of_terms and mod(a.shape[1], index(BLOCK)) is not ZERO, terms),
        (not (call.is_cpu or known), "types or a scaled result that the library may refuse"),
    ):
        if refused:
            raise Unsupported(reason)
