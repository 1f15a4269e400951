"""Lower grouped products: each row is multiplied with the matrix of its group, as in experts.

Rows of a group follow each other; ``offs[e]`` is where group e ends. On GPUs this is a sum over
groups, and the gradient of matrices a sum over the rows of each (``ir/groups.py``)::

    y[s, n] = sum(e: where(member(s, offs[e-1], offs[e]), sum(k: x[s, k] * w[e, k, n]), 0))
    d[e, k, n] = sum(s: x[s, k] * y[s, n] if member(s, offs[e-1], offs[e]))

On CPUs rows are taken in *blocks* of rows of one group, a block in parts of a few rows: a weight
that is loaded once is multiplied with all rows of a part, and stays in the nearest cache for all
parts. A group's last block may have fewer rows; what is computed of the missing rows is not read. A
part without rows has no terms. Worked example, blocks of 4 in parts of 2, E groups, S rows::

    ends[e]       = sum(f: where(f <= e, (offs[f] - offs[f - 1] + 3)//4, 0))  after its blocks
    group[b]      = sum(e: ends[e] <= b)                                       of a block
    first[b]      = offs[group - 1] + 4*(b - ends[group - 1])                  its first row, or S
    y[b, p, r, n] = sum(k: x[first[b] + 2*p + r, k] * w[group[b], k, n]
                           if first[b] + 2*p < offs[group[b]])
    place[s]      = 4*ends[g - 1] + s - offs[g - 1]                            of a row in y, or -1
    out[s, n]     = where(place[s] >= 0, y[place[s]//4, place[s]//2%2, place[s]%2, n], 0)

where g is the row's group. A block of one row is that row, so that ``out`` is ``y`` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Indices
from fusec.frontend.fallbacks import CONTRACTION
from fusec.frontend.ops.arithmetic import add, less, mul, select, sub
from fusec.frontend.ops.products import contraction, exact, is_matrix, product
from fusec.frontend.ops.registry import lowers
from fusec.frontend.ops.scaled_products import TILE_ROWS, in_tiles
from fusec.frontend.shapes import TensorType
from fusec.frontend.value import ZERO, Value
from fusec.ir.dtype import F8E4M3FN, F8E8M0FNU, F32, HALF, I32
from fusec.ir.expr import Const, Expr, Load, Reduce, as_value, cast, op, read_index
from fusec.ir.index import Axis, Index, floordiv, index, mod
from fusec.ir.index import product as extent_of
from fusec.ir.monoid import SUM
from fusec.ir.rewrite import read_at
from fusec.ir.scalar import ROUND
from fusec.ir.scaled import BLOCK, TILE

aten = torch.ops.aten
TERMS = BLOCK[False, F8E8M0FNU]
"""Terms of 8 bits that share a scale in ``e8m0``."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of consecutive rows.

    Attributes:
        ends: where each group ends: ``offs[e]``.
        rows: the number of rows, of which the last may be in no group.
        block: rows of a block.
    """

    call: AtenCall
    ends: Value
    rows: Index
    block: int

    @property
    def count(self) -> Index:
        """The number of groups."""
        return self.ends.shape[0]

    @property
    def blocks(self) -> Index:
        """The most blocks that the groups can have: the last block of each may be partly empty."""
        missing = (self.block - 1) * self.count
        return floordiv(self.rows + missing, index(self.block)) if self.block > 1 else self.rows

    def begin(self, group: Index, ends: Value | None = None) -> Expr:
        """Return where a group begins, the end of the group before; of rows, or of other ends."""
        ends = ends or self.ends
        return cast(ends.at((group - 1,), op("ge", _i32(group), Const(1, I32))), I32)

    def blocks_of(self, group: Index) -> Expr:
        """Return the number of blocks of a group; on CPUs, offsets that descend are reported."""
        begin = self.begin(group)
        size = sub(cast(self.ends.at((group,)), I32), begin)
        if self.call.is_cpu:
            size = op("within", size, sub(_i32(self.rows + 1), begin))
        return op("floordiv", add(size, self.block - 1), Const(self.block, I32))

    def named(self, ends: Value, position: Index) -> tuple[Expr, Index]:
        """Return whether a position is in a group, given where groups end, and which it is."""
        over = Axis("e", self.count)
        before = op("le", cast(ends.at((index(over),)), I32), _i32(position))
        passed = Reduce(SUM, (over,), cast(before, I32))
        last = op("minimum", passed, _i32(self.count - 1))
        return less(passed, _i32(self.count)), read_index(last, self.count)


def _i32(value: Index) -> Expr:
    return cast(as_value(value), I32)


def grouped_rows(call: AtenCall, x: Value, w: Value, offs: Value) -> Value:
    """Emit ``out[s, n] = sum(k: x[s, k] * w[group of s, k, n])``; 0 for rows in no group."""
    if not (call.is_cpu and is_matrix(x) and is_matrix(w)):
        raise Unsupported(CONTRACTION)
    rows, part = _rows_of_block(call, x, w, offs.shape[0])
    groups = Groups(call, offs, x.shape[0], rows)
    ends = call.scratch("ends", offs.shape, I32, lambda at: _end_of_blocks(groups, at[0]))
    group, first = _blocks(groups, ends)

    def body(at: Indices) -> Expr:
        block, number, row, n = at if rows > 1 else (at[0], ZERO, ZERO, at[1])
        e = read_index(group.at((block,)), groups.count)
        if rows == part == call.lines.fusion.groups.tile_block:
            source, used, own = _row_of_tile(groups, e, first.at((block,)), row)
        else:
            start = add(first.at((block,)), _i32(number * part))
            used = own = less(start, cast(offs.at((e,)), I32))
            last = op("minimum", add(start, _i32(row)), _i32(groups.rows - 1))
            source = read_index(last, groups.rows)
        return contraction(
            x.shape[1],
            lambda k: (_exact(x.at((source, k), own)), _exact(w.at((e, k, n), used))),
        )

    if rows == 1:
        return call.define(body)
    shape = (groups.blocks, index(rows // part), index(part), w.shape[2])
    blocks = call.scratch("blocks", shape, call.out.dtype, body)
    place = call.scratch("place", (groups.rows,), I32, lambda at: _place(groups, ends, at[0]))

    def row(at: Indices) -> Expr:
        s, n = at
        own = place.at((s,))
        there = read_index(op("maximum", own, Const(0, I32)), groups.blocks * rows)
        block, within = floordiv(there, index(rows)), mod(there, index(rows))
        value = blocks.at((block, floordiv(within, index(part)), mod(within, index(part)), n))
        return select(op("ge", own, Const(0, I32)), value, Const(0, value.dtype))

    return call.define(row)


def _row_of_tile(groups: Groups, group: Index, first: Expr, row: Index) -> tuple[Index, Expr, Expr]:
    """Return a row's place, whether its block has any rows, and whether it has this one.

    The place is linear in the row, and the rows that a block has are its first: a product of tiles
    reads them where they are, and stops behind them.
    """
    end = op("minimum", cast(groups.ends.at((group,)), I32), _i32(groups.rows))
    most = Const(groups.block, I32)
    count = op("minimum", op("maximum", sub(end, first), Const(0, I32)), most)
    own = op("lt", as_value(row), as_value(read_index(count, index(groups.block + 1))))
    used = op("gt", count, Const(0, I32))
    return read_index(first, groups.rows) + row, used, op("and", used, own)


def _factor(x: Value, at: Indices, guard: Expr) -> Expr:
    return _exact(read_at(x.at(at, guard), at))


def _exact(x: Expr) -> Expr:
    """Return an element in f32, rounded to its own type if that is a 16-bit float."""
    value = cast(x, F32)
    return op(ROUND[x.dtype], value) if x.dtype in ROUND else value


def _end_of_blocks(groups: Groups, group: Index) -> Expr:
    over = Axis("f", groups.count)
    counts = op("le", _i32(index(over)), _i32(group))
    return Reduce(SUM, (over,), select(counts, groups.blocks_of(index(over)), Const(0, I32)))


def _blocks(groups: Groups, ends: Value) -> tuple[Value, Value]:
    """Emit each block's group, and its first row, or the number of rows if it has none."""

    def own(at: Indices) -> Expr:
        return op("add", _i32(groups.named(ends, at[0])[1]), Const(0, I32))

    def first(at: Indices) -> Expr:
        used, e = groups.named(ends, at[0])
        blocks = sub(_i32(at[0]), groups.begin(e, ends))
        row = add(groups.begin(e), mul(blocks, groups.block)) if groups.block > 1 else _i32(at[0])
        return select(used, row, _i32(groups.rows))

    shape = (groups.blocks,)
    return (
        groups.call.scratch("group", shape, I32, own),
        groups.call.scratch("first", shape, I32, first),
    )


def _place(groups: Groups, ends: Value, s: Index) -> Expr:
    """Return a row's place among the rows of all blocks, or -1 if it is in no group."""
    used, e = groups.named(groups.ends, s)
    row = sub(_i32(s), groups.begin(e))
    return select(used, add(mul(groups.begin(e, ends), groups.block), row), Const(-1, I32))


def _lies_along_terms(w: Value) -> bool:
    """Return True if neighbours in memory are terms of one sum: others are strided."""
    if w.buffer is None or not isinstance(w.expr, Load):
        return False
    return w.buffer.offset(w.expr.indices).coefficient(w.axes[1]) is index(1)


def _rows_of_block(call: AtenCall, x: Value, w: Value, groups: Index) -> tuple[int, int]:
    """Return how many rows a block and a part of it have, for as many as a group has on average.

    Raises:
        Unsupported: where the library's product of each group is as fast.
    """
    tuning, slow = call.lines.fusion.groups, x.dtype in call.lines.slow
    each = x.shape[0].hint() / max(groups.hint(), 1)
    along = slow or _lies_along_terms(w)
    block = next(((rows, part) for few, rows, part in tuning.blocks if along and each <= few), None)
    if along and not slow and x.dtype in HALF and each > tuning.half_rows:
        raise Unsupported(CONTRACTION)
    least, most = tuning.tiled_rows
    if block is None and (slow or (not along and least <= each <= most)):
        return tuning.tile_block, tuning.tile_block
    if block is None:
        raise Unsupported(CONTRACTION)
    return block


# -- GPUs: an ordinary product for each group ------------------------------------------------------


def _where(offs: Value, group: Index, row: Index, rows: Index) -> Expr:
    """Return whether a row is in a group; ends out of range are those of the rows."""

    def bounded(end: Expr) -> Expr:
        most = cast(as_value(rows), end.dtype)
        return cast(op("minimum", op("maximum", end, Const(0, end.dtype)), most), I32)

    first = op("ge", _i32(group), Const(1, I32))
    return op(
        "member", _i32(row), bounded(offs.at((group - 1,), first)), bounded(offs.at((group,)))
    )


_Scaled: TypeAlias = Callable[[Expr, Index, Index, Index], Expr]
"""A group's sum, the group, row and column of the result -> the scaled sum."""
_ScaledTerms: TypeAlias = Callable[
    [tuple[Expr, Expr], Index, Index, Index, Index], tuple[Expr, Expr]
]
"""Two factors, the group, row, column and term -> the scaled factors."""


def product_of_groups(
    call: AtenCall,
    a: Value,
    b: Value,
    offs: Value,
    result: int = 0,
    scaled: _Scaled = lambda total, *_: total,
    name: str = "mul",
    terms: _ScaledTerms = lambda factors, *_: factors,
) -> Value:
    """Emit the products of groups: of rows of ``a``, columns of ``b``, or terms of both.

    Args:
        scaled: is put around each group's sum.
        name: the product of two terms.
        terms: are put around the factors of each, where groups are of rows or columns.
    """

    def of_group(e: Index, m: Index, n: Index) -> Expr:
        def factors(k: Index) -> tuple[Expr, Expr]:
            left = exact(a, (m, k) if len(a.shape) == 2 else (e, m, k))
            right = exact(b, (k, n) if len(b.shape) == 2 else (e, k, n))
            return terms((left, right), e, m, n, k)

        return scaled(contraction(a.shape[-1], factors, name), e, m, n)

    def over_groups(at: Indices) -> Expr:
        m, n = at
        row, rows = (m, a.shape[0]) if len(a.shape) == 2 else (n, b.shape[1])
        over = Axis("e", offs.shape[0])
        own, value = _where(offs, index(over), row, rows), of_group(index(over), m, n)
        return Reduce(SUM, (over,), select(own, value, Const(0, value.dtype)))

    def over_terms(at: Indices) -> Expr:
        e, m, n = at

        def term(s: Index) -> tuple[Expr, Expr]:
            own = _where(offs, e, s, b.shape[0])
            return _factor(a, (m, s), own), _factor(b, (s, n), own)

        return scaled(contraction(b.shape[0], term, name), e, m, n)

    match len(a.shape), len(b.shape):
        case (2, 3) | (3, 2):
            return call.define(over_groups, result)
        case 2, 2:
            return call.define(over_terms, result)
        case _:
            raise Unsupported(CONTRACTION)


def _library(call: AtenCall, *_: TensorType) -> str | None:
    return None if call.is_cpu else CONTRACTION


@lowers("transformers.grouped_mm_fallback.default", library=_library)
def grouped_mm_fallback(call: AtenCall, x: Value, w: Value, offs: Value) -> Value:
    """Emit the grouped product of ``transformers``."""
    _check_matrices(x, w)
    return grouped_rows(call, x, w, offs) if call.is_cpu else product_of_groups(call, x, w, offs)


@lowers("transformers.grouped_mm_fallback_backward.default", library=_library)
def grouped_mm_fallback_backward(
    call: AtenCall, x: Value, w: Value, offs: Value, grad: Value
) -> tuple[Value, Value]:
    """Emit the gradients of rows and of matrices."""
    if call.is_cpu:
        raise Unsupported(CONTRACTION)
    _check_matrices(x, w, grad)
    own = product_of_groups(call, grad, transposed(w), offs)
    return own, product_of_groups(call, transposed(x), grad, offs, 1)


@lowers(aten._grouped_mm.default, library=_library)
def grouped_mm(
    call: AtenCall,
    a: Value,
    b: Value,
    offs: Value | None = None,
    bias: Value | None = None,
    out_dtype: torch.dtype | None = None,
) -> Value:
    """Emit PyTorch's grouped product."""
    if bias is not None:
        raise Unsupported(CONTRACTION)
    _check_matrices(a, b)
    if offs is None:
        return product(call, a, b)
    if not call.is_cpu:
        return product_of_groups(call, a, b, offs)
    if (len(a.shape), len(b.shape)) != (2, 3):
        raise Unsupported(CONTRACTION)
    return grouped_rows(call, a, b, offs)


def _check_matrices(*operands: Value) -> None:
    if not all(map(is_matrix, operands)):
        raise Unsupported(CONTRACTION)


@lowers("aten._scaled_grouped_mm.default", library=_library)
def scaled_grouped_mm(
    call: AtenCall,
    a: Value,
    b: Value,
    scale_a: Value,
    scale_b: Value,
    offs: Value | None = None,
    bias: Value | None = None,
    scale_result: Value | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Value:
    """Emit the grouped product of 8 bits, with a scale for each row and column of each group.

    Scales in ``e8m0`` belong to 32 terms of a row or column.
    """
    kinds = (a.dtype, b.dtype), (scale_a.dtype, scale_b.dtype)
    if call.is_cpu or offs is None or kinds[0] != (F8E4M3FN, F8E4M3FN):
        raise Unsupported("groups of products that only the library has")
    if bias is not None or scale_result is not None:
        raise Unsupported("a bias or a scaled result that eager refuses")
    if kinds[1] == (F8E8M0FNU, F8E8M0FNU):
        return _scaled_by_terms(call, a, b, scale_a, scale_b, offs)
    if kinds[1] != (F32, F32):
        raise Unsupported("scales that eager refuses")

    def scale(x: Value, of: Value, e: Index, row: Index, rows: Index) -> Expr:
        if len(of.shape) == 2:
            return of.at((e, row))
        return of.at((e * rows + row if len(a.shape) == len(b.shape) else row,))

    def scaled(total: Expr, e: Index, m: Index, n: Index) -> Expr:
        own = scale(a, scale_a, e, m, a.shape[-2]), scale(b, scale_b, e, n, b.shape[-1])
        return op("mul", total, op("mul", *own))

    name = "mul8_fast" if use_fast_accum else "mul8"
    return product_of_groups(call, a, b, offs, 0, scaled, name)


@lowers("aten._scaled_grouped_mm_v2.default", library=_library)
def scaled_grouped_mm_v2(
    call: AtenCall,
    a: Value,
    b: Value,
    scale_a: tuple[Value, ...],
    recipe_a: tuple[int, ...],
    swizzle_a: tuple[int, ...],
    scale_b: tuple[Value, ...],
    recipe_b: tuple[int, ...],
    swizzle_b: tuple[int, ...],
    offs: Value | None = None,
    bias: Value | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: tuple[int, ...] = (),
    use_fast_accum: bool = False,
) -> Value:
    """Emit the grouped product whose recipes say what has a scale."""
    kinds, orders = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
    recipes = (*recipe_a, *recipe_b)
    swizzled = all(map(bool, (*swizzle_a, *swizzle_b))) and bool(swizzle_a and swizzle_b)
    by_rows = recipes == (kinds.RowWise.value,) * 2 and scale_a[0].dtype is F32 and not swizzled
    by_terms = recipes == (kinds.BlockWise1x32.value,) * 2 and swizzled
    by_terms = by_terms and orders(swizzle_a[0]) == orders(swizzle_b[0]) == orders.SWIZZLE_32_4_4
    if contraction_dim or not (by_rows or by_terms):
        raise Unsupported("groups of products that only the library has")
    scales = scale_a[0], scale_b[0]
    return scaled_grouped_mm(
        call, a, b, *scales, offs, bias, None, out_dtype, use_fast_accum=use_fast_accum
    )


def _scaled_by_terms(
    call: AtenCall, a: Value, b: Value, scale_a: Value, scale_b: Value, offs: Value
) -> Value:
    """Emit a product of groups of rows with scales of 32 terms, which lie in tiles.

    The scales of each group begin a tile: they are found by the tiles of the groups before, as
    blocks of rows on CPUs.
    """
    if (len(a.shape), len(b.shape)) != (2, 3):
        raise Unsupported("scales of 32 terms of groups of columns or terms")
    groups = Groups(call, offs, a.shape[0], TILE_ROWS)
    tiles = call.scratch("tiles", offs.shape, I32, lambda at: _end_of_blocks(groups, at[0]))
    count = a.shape[1]
    wide = floordiv(count + (TERMS * TILE - 1), index(TERMS * TILE)) * TILE
    rows = floordiv(extent_of(scale_a.shape), wide)
    of_rows = in_tiles(a, scale_a, rows, count)

    def terms(
        factors: tuple[Expr, Expr], e: Index, m: Index, n: Index, k: Index
    ) -> tuple[Expr, Expr]:
        first = mul(groups.begin(e, tiles), TILE_ROWS)
        place = op("maximum", add(first, sub(_i32(m), groups.begin(e))), Const(0, I32))
        row = read_index(op("minimum", place, _i32(rows - 1)), rows)
        own = scale_b.expr.substitute({scale_b.axes[0]: e})
        part = Value(scale_b.shape[1:], scale_b.dtype, scale_b.axes[1:], own)
        of_columns = in_tiles(b, part, b.shape[2], count)
        scales = of_rows.of(row, k // TERMS), of_columns.of(n, k // TERMS)
        left, right = (op("mul", *pair) for pair in zip(factors, scales, strict=True))
        return left, right

    return product_of_groups(call, a, b, offs, terms=terms)


def transposed(x: Value) -> Value:
    """Return a value with its last two axes swapped."""
    *batch, m, n = x.axes
    shape = (*x.shape[:-2], x.shape[-1], x.shape[-2])
    return Value(shape, x.dtype, (*batch, n, m), x.expr)
