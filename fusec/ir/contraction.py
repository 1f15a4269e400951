"""Contractions: sums of products whose factors own different axes, such as matrix products.

Worked example: ``sum(k: f32(a[m, k]) * f32(b[k, n]))`` has the factors a, which owns m, and b,
which owns n; with bf16 tensors both are bf16 operands of a ``Dot``. Floats of 8 bits are operands
where the product is a ``mul8``, whose sums may be coarse (``COARSE_TERMS``); otherwise they widen.
A factor with a scale for each block of terms is a narrow operand with its scales, where a machine
has an instruction for that (``ir/scaled.py``), and else one in bf16.
Of ``i32(a[m, k]) * i32(b[k, n])`` with int8 tensors, whose sum is i32, both are int8 operands. A
product of int8 that wraps, ``i8(i32(a) * i32(b))``, is none.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from fusec.ir.dtype import BF16, F4X2, F8, F32, HALF, I8, I32, DType
from fusec.ir.expr import Buffer, Cast, Expr, Op, Reduce, cast, loads, reductions
from fusec.ir.index import Axis
from fusec.ir.monoid import SUM
from fusec.ir.ranges import holds
from fusec.ir.scalar import COARSE_TERMS, ROUND
from fusec.ir.scaled import scaled_factor
from fusec.ir.serial import hits_of

_INTEGERS: dict[DType, tuple[DType, ...]] = {I32: (I8,)}
"""Type of a sum -> the integers that tensor cores multiply and add in it."""
_ROUNDED: dict[str, DType] = {name: dtype for dtype, name in ROUND.items()}


@dataclass(frozen=True, slots=True)
class Factors:
    """The operands of a contraction, in one type, and the axes that each of them owns.

    Attributes:
        shared: axes of both that are not summed over: a batch.
        coarse: how many terms in a row may be added with 14 bits (``COARSE_TERMS``).
        scales: of both, one for each block of terms, if they have any: loads.
        block: terms of a block.
    """

    left: Expr
    right: Expr
    left_axes: frozenset[Axis]
    right_axes: frozenset[Axis]
    shared: frozenset[Axis]
    coarse: int
    scales: tuple[Expr, ...] = ()
    block: int = 0

    @property
    def is_promoted(self) -> bool:
        """Whether f32 takes its sum after each tile where tensor cores add 8 bits coarsely."""
        return self.left.dtype in F8 and self.coarse < COARSE_TERMS["mul8_fast"]


def factors(node: Expr) -> Factors | None:
    """Return the factors of a contraction in f32, or None if ``node`` is anything else."""
    parts = cut_factors(node)
    if parts is None or not isinstance(node, Reduce):
        return None
    over = frozenset(node.over)
    return parts if over <= parts.left.axes & parts.right.axes else None


def cut_factors(node: Expr) -> Factors | None:
    """Return the factors of a contraction whose axes were cut into tiles, or None.

    A part of a summed axis may be in one factor alone: ``b[k//16, n]`` with k cut into
    ``ko*16 + ki`` has only ko.
    """
    found = sides(node)
    if found is None or not found.left_axes or not found.right_axes:
        return None
    if (scaled := _scaled(node, found)) is not None:
        return scaled
    narrow = F8 if found.coarse else HALF
    x, y = narrow_operand(found.left, narrow), narrow_operand(found.right, narrow)
    if x.dtype is not y.dtype and not {x.dtype, y.dtype} <= set(F8):
        kind = next((k.dtype for k in (x, y) if k.dtype in HALF and _both(k.dtype, x, y)), F32)
        x, y = _as_type(x, kind), _as_type(y, kind)
    return replace(found, left=x, right=y)


def _scaled(node: Expr, found: Factors) -> Factors | None:
    """Return the numbers and scales of factors that both have a scale for each block of terms."""
    assert isinstance(node, Reduce)
    left, right = (scaled_factor(side, node.over) for side in (found.left, found.right))
    if left is None or right is None or found.coarse:
        return None
    if (left.along, left.block) != (right.along, right.block):
        return None
    scales = left.scale, right.scale
    return replace(found, left=left.value, right=right.value, scales=scales, block=left.block)


@functools.lru_cache(maxsize=1 << 13)
def uncut_operands(node: Expr) -> tuple[Expr, ...]:
    """Return the scales and pairs that a product multiplies as they lie; none of another node.

    An index of theirs divides the axis of the terms, which is no reason to cut it.
    """
    parts = factors(node)
    if parts is None or not parts.scales:
        return ()
    return (*parts.scales, *(side for side in (parts.left, parts.right) if side.dtype is F4X2))


def without_scales(node: Expr, parts: Factors) -> Factors:
    """Return a product's factors with their scales multiplied in, in bf16, which holds them."""
    whole = sides(node) if parts.scales else None
    if whole is None:
        return parts
    return replace(whole, left=_as_type(whole.left, BF16), right=_as_type(whole.right, BF16))


def vector_factors(node: Expr) -> Factors | None:
    """Return the factors of a matrix times a vector, which owns no axis; None for anything else."""
    found = sides(node)
    if found is None or not isinstance(node, Reduce):
        return None
    if bool(found.left_axes) is bool(found.right_axes):
        return None
    return found if frozenset(node.over) <= found.left.axes & found.right.axes else None


def is_product(node: Expr) -> bool:
    """Return True for a product of matrices, or of a matrix and a vector."""
    return factors(node) is not None or vector_factors(node) is not None


@functools.lru_cache(maxsize=1 << 13)
def multiplied(root: Expr) -> frozenset[Buffer] | None:
    """Return the buffers that the products in an expression multiply; None if it has no product."""
    products = tuple(n for n in reductions(root) if is_product(n))
    return frozenset(n.buffer for n in loads(products)) if products else None


def is_window(node: Reduce) -> bool:
    """Return True for a sum along several axes, as over a window: no product, and no scatter."""
    return len(node.over) > 1 and not hits_of(node)


def sides(node: Expr) -> Factors | None:
    """Return the two factors of a sum in f32, or of int8s in i32, unchanged; else None."""
    if not isinstance(node, Reduce) or node.monoid is not SUM or node.dtype not in (F32, I32):
        return None
    body, over = node.body, frozenset(node.over)
    if not isinstance(body, Op) or body.name not in COARSE_TERMS:
        return None
    a, b = body.args
    if node.dtype is I32 and not all(isinstance(x, Cast) and x.arg.dtype is I8 for x in (a, b)):
        return None
    left, right = a.axes - b.axes - over, b.axes - a.axes - over
    return Factors(a, b, left, right, (a.axes & b.axes) - over, COARSE_TERMS[body.name])


def _both(kind: DType, *operands: Expr) -> bool:
    """Return True if a type of 16 bits has the values of both operands: integers, perhaps."""
    return all(x.dtype is kind or holds(kind, x) for x in operands)


def _as_type(operand: Expr, kind: DType) -> Expr:
    return operand if operand.dtype is kind else cast(cast(operand, F32), kind)


def narrow_operand(factor: Expr, narrow: tuple[DType, ...]) -> Expr:
    """Return the narrow value that a factor was converted from or rounded to, else the factor."""
    integers = _INTEGERS.get(factor.dtype, ())
    if isinstance(factor, Cast) and factor.arg.dtype in (*narrow, *integers):
        return factor.arg
    if isinstance(factor, Op) and _ROUNDED.get(factor.name) in narrow:
        return cast(factor.args[0], _ROUNDED[factor.name])
    return factor
