"""Factors with a scale for each block of terms, which some tensor cores multiply as they lie there.

A factor of a sum of products may be a number of 8 or 4 bits times a scale that a block of terms
shares, as in the formats of the Open Compute Project (MX, 2023) and in NVIDIA's::

    mxfp8   f32(a[m, k]) * f32(s[m, k//32])                        s: powers of two (e8m0)
    mxfp4   e2m1(i32(a[m, k//2]) >> 4*(k%2)) * f32(s[m, k//32])    a: pairs of numbers in bytes
    nvfp4   e2m1(i32(a[m, k//2]) >> 4*(k%2)) * f32(s[m, k//16])    s: e4m3

Blackwell's tensor cores take the numbers, pairs and scales. Others multiply the factor in bf16,
which holds it exactly: it has at most 6 bits, and the exponents of f32.

Worked example: with k cut into ``ko*128 + ki``, the tile of ``s[m, k//32]`` is ``s[m, ko*4 + kb]``
for ``ki = kb*32``, and that of the pairs ``a[m, ko*64 + kp]`` for ``ki = kp*2``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusec.ir.dtype import F4X2, F8, F8E4M3FN, F8E8M0FNU, I32, DType
from fusec.ir.expr import Cast, Expr, IndexValue, Load, Op
from fusec.ir.index import Axis, index
from fusec.ir.ranges import unrounded

BLOCK: dict[tuple[bool, DType], int] = {
    (False, F8E8M0FNU): 32,
    (True, F8E8M0FNU): 32,
    (True, F8E4M3FN): 16,
}
"""Whether two numbers are in a byte, and the type of scales -> terms that share a scale."""
TILE = 4
"""Blocks of a row whose scales may lie next to each other, apart from the next ones."""
SCALED_TERMS = 64
"""Fewest terms of a product in blocks: two blocks of 32, or 32 bytes of 4-bit numbers."""
_MULTIPLIED = frozenset(d for d in F8 if d.name in ("f8e4m3fn", "f8e5m2"))


@dataclass(frozen=True, slots=True)
class ScaledFactor:
    """A factor whose numbers and scales are loads.

    Attributes:
        value: numbers of 8 bits, or pairs of numbers of 4 bits.
        scale: of each block of terms.
        along: the axis of the terms.
        block: terms of a block.
    """

    value: Load
    scale: Load
    along: Axis
    block: int


def scaled_factor(factor: Expr, over: Iterable[Axis]) -> ScaledFactor | None:
    """Return a factor that has a scale for each block of terms along one of some axes, or None."""
    factor = unrounded(factor)
    if not isinstance(factor, Op) or factor.name != "mul":
        return None
    a, b = map(unrounded, factor.args)
    for number, scale in ((a, b), (b, a)):
        value = _numbers(number)
        if value is None or not isinstance(scale, Cast) or not isinstance(scale.arg, Load):
            continue
        block = BLOCK.get((value.dtype is F4X2, scale.arg.dtype), 0)
        for axis in over if block else ():
            packed = value.dtype is not F4X2 or _shares(number, axis)
            if axis in value.axes and packed and _is_constant_in(scale.arg, axis, block):
                return ScaledFactor(value, scale.arg, axis, block)
    return None


def _numbers(number: Expr) -> Load | None:
    """Return the load of numbers of 8 bits, or of pairs, that a value in f32 is made of."""
    match number:
        case Cast(arg=Load() as value) if value.dtype in _MULTIPLIED:
            return value
        case Op(name="e2m1", args=(Op(name="shr", args=(Cast(arg=Load() as value), _)),)):
            return value if value.dtype is F4X2 else None
        case _:
            return None


def _is_constant_in(load: Load, axis: Axis, block: int) -> bool:
    """Return True if a load is the same for all places of an axis in one block."""
    tile, place, rest = (
        Axis("tile", axis.extent),
        Axis("block", index(TILE)),
        Axis("rest", index(block)),
    )
    moved = load.substitute({axis: (index(tile) * TILE + index(place)) * block + index(rest)})
    return rest not in moved.axes


def _shares(number: Expr, axis: Axis) -> bool:
    """Return True if the even places of an axis are the low halves of bytes, the odd ones high."""
    half, rest = Axis("pair", axis.extent), Axis("rest", index(2))
    moved = number.substitute({axis: index(half) * 2 + index(rest)})
    assert isinstance(moved, Op) and isinstance(moved.args[0], Op)
    pair, shift = moved.args[0].args
    return rest not in pair.axes and shift is IndexValue(index(rest) * 4, I32)
