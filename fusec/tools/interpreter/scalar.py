"""Reference semantics of element types and scalar operations, in NumPy.

NumPy has no bf16: a bf16 array is a float32 array that holds values of bf16 only. It is rounded, to
nearest even, wherever a value of that type is made: by a cast, an operation, a reduction, a store.
So are arrays of 8-bit floats. Torch's conversion rounds. An operation on f16 or bf16 is computed in
float32 and rounded once.

Worked example: ``scalar_operation("add", BF16)(a, b)`` is ``round_to(BF16)(a + b)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fusec.errors import InternalError
from fusec.ir.dtype import BF16, BOOL, F4X2, F8, F16, DType
from fusec.ir.monoid import EXPSUM, MIN, RECURRENCE, Monoid
from fusec.ir.scalar import COARSE_TERMS, ROUND

Array: TypeAlias = NDArray[Any]
Operation: TypeAlias = Callable[..., Array]

_NUMPY_TYPES: dict[str, type[np.generic]] = {
    "bool": np.bool_,
    **dict.fromkeys(("u8", F4X2.name), np.uint8),
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "f16": np.float16,
    **dict.fromkeys(("bf16", *(dtype.name for dtype in F8)), np.float32),
    "f32": np.float32,
    "f64": np.float64,
}


def numpy_type(dtype: DType) -> type[np.generic]:
    """Return the NumPy type that holds values of ``dtype``; float32 for bf16 and 8-bit floats.

    Raises:
        InternalError: for an opaque type: no expression has one.
    """
    if dtype.is_opaque:
        raise InternalError(f"no arithmetic of type {dtype}", stage="interpreter")
    return _NUMPY_TYPES[dtype.name]


def round_to(dtype: DType) -> Operation:
    """Return the operation that rounds float32 values to the nearest numbers of a narrow type."""
    kind, layout = getattr(torch, dtype.torch_name), dtype.format
    if layout is None:
        raise InternalError(f"{dtype} is not narrow", stage="interpreter")
    most = torch.finfo(kind).max if layout.saturates else math.inf  # torch does so from 2.13 on

    def rounded(values: Array) -> Array:
        wide = torch.from_numpy(np.array(values, np.float32)).clamp(-most, most)
        narrow = wide.to(kind).float()
        if dtype is BF16:  # vectors of torch give NaN a sign on some CPUs: each stays as it is
            narrow = narrow.where(wide == wide, wide)
        return np.asarray(narrow.numpy())

    return rounded


def convert(values: Array, dtype: DType) -> Array:
    """Return ``values`` as ``dtype``.

    To bool is ``!= 0``, floats to integers truncate, integers wrap. Opaque values stay as they are.
    """
    if dtype.is_opaque:
        return values
    if dtype is BOOL:
        return np.asarray(values != 0)
    if dtype.format is not None and dtype is not F16:
        return round_to(dtype)(values)
    target = numpy_type(dtype)
    if dtype.is_integer and values.dtype.kind == "f":
        return values.astype(np.int64).astype(target)
    return np.asarray(values, dtype=target)


def fill_value(dtype: DType) -> Any:
    """Return the value of unwritten memory, which shows in results that depend on it."""
    if dtype.is_float:
        return np.nan
    if dtype is BOOL:
        return False
    return MIN.identity(dtype)


# -- scalar operations ---------------------------------------------------------------------------


def _is_integer(values: Array) -> bool:
    return values.dtype.kind in "iu"


def _truncdiv(a: Array, b: Array) -> Array:
    if not _is_integer(a):
        return np.asarray(np.trunc(a / b))
    quotient = np.floor_divide(a, b)
    inexact = (quotient * b != a) & ((a < 0) != (b < 0))
    return np.asarray(quotient + inexact)


def _pow(a: Array, b: Array) -> Array:
    if not _is_integer(a):
        return np.asarray(np.power(a, b))
    positive = np.power(a, np.maximum(b, 0))
    odd = (b & 1) != 0
    inverse = np.where(a == 1, 1, np.where(a == -1, np.where(odd, -1, 1), 0))
    return np.asarray(np.where(b < 0, inverse, positive))


def _random(seed: Array, index: Array) -> Array:
    """Return the upper 24 bits of word index % 4 of counter index // 4 of Philox-4x32-10.

    Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011). Words are 32 bits in u64.
    """
    seed, index = np.broadcast_arrays(seed.astype(np.uint64), index.astype(np.uint64))
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    keys, counter = [seed & low, seed >> half], index >> np.uint64(2)
    a, b, c, d = counter & low, counter >> half, np.zeros_like(seed), np.zeros_like(seed)
    for _ in range(10):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (second >> half) ^ b ^ keys[0], second & low
        c, d = (first >> half) ^ d ^ keys[1], first & low
        keys = [(keys[0] + np.uint64(0x9E3779B9)) & low, (keys[1] + np.uint64(0xBB67AE85)) & low]
    word = np.choose((index & np.uint64(3)).astype(np.int64), [a, b, c, d])
    return np.asarray(word >> np.uint64(8))


def _in_torch(function: Callable[[torch.Tensor], torch.Tensor]) -> Operation:
    """Return a function of torch, which NumPy does not have, in f64."""
    return lambda a: np.asarray(function(torch.tensor(a, dtype=torch.float64)).numpy())


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate((_E2M1, -_E2M1))
"""The numbers that the codes of f4e2m1 stand for."""
_AS_IN_NUMPY = (
    "add", "remainder", "fmod", "minimum", "maximum", "copysign", "nextafter", "hypot", "abs",
    "floor", "ceil", "trunc", "sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p",
    "sin", "cos", "tan", "sinh", "cosh", "tanh", "isnan", "isinf",
)  # fmt: skip
"""Operations that NumPy has under the same name."""

OPERATIONS: dict[str, Operation] = {
    **{name: getattr(np, name) for name in _AS_IN_NUMPY},
    "sub": np.subtract,
    **dict.fromkeys(COARSE_TERMS, np.multiply),
    "div": np.true_divide,
    "floordiv": np.floor_divide,
    "truncdiv": _truncdiv,
    "nonzero": lambda a: a,
    "within": lambda k, n: k + 0 * n,
    "probability": lambda a: a,
    "pow": _pow,
    "atan2": np.arctan2,
    "neg": np.negative,
    "sign": lambda a: (a > 0).astype(a.dtype) - (a < 0).astype(a.dtype),
    "round": np.rint,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "reciprocal": lambda a: 1 / a,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
    "erf": _in_torch(torch.erf),
    "erfc": _in_torch(torch.erfc),
    "erfinv": _in_torch(torch.erfinv),
    "ndtr": _in_torch(lambda x: torch.erfc(-x * math.sqrt(0.5)) / 2),
    "lgamma": _in_torch(torch.lgamma),
    **{name: round_to(dtype) for dtype, name in ROUND.items()},
    "e2m1": lambda code: _E2M1[code.astype(np.int64) & 15],
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "hits": np.equal,
    "until": np.less_equal,
    "member": lambda s, begin, end: (begin <= s) & (s < end),
    "random": _random,
}


def scalar_operation(name: str, dtype: DType) -> Operation:
    """Return the operation on arrays of one type, with results of type ``dtype``."""
    operation = OPERATIONS[name]

    def computed(*args: Array) -> Array:
        if args[0].dtype == np.float16:
            args = tuple(a.astype(np.float32) for a in args)
        return convert(np.asarray(operation(*args)), dtype)

    return computed


# -- reductions ----------------------------------------------------------------------------------


def _ufunc(monoid: Monoid) -> np.ufunc:
    operation = OPERATIONS[monoid.combine]
    if len(monoid.fields) > 1 or not isinstance(operation, np.ufunc):
        raise InternalError(f"no reduction {monoid}", stage="interpreter")
    return operation


def find_first(extreme: Monoid, values: Array, places: Array, dims: tuple[int, ...]) -> Array:
    """Return the least of ``places`` over ``dims`` where values are extreme, or NaN."""
    best = _ufunc(extreme).reduce(values, axis=dims, keepdims=True)
    nowhere = np.iinfo(places.dtype).max
    found = (values == best) | (values != values)
    return np.asarray(np.where(found, places, nowhere).min(axis=dims, initial=nowhere))


def reduce_pairs(monoid: Monoid, first: Array, second: Array, dims: tuple[int, ...]) -> Array:
    """Return the reduction of pairs of values over ``dims``, which disappear."""
    if monoid is EXPSUM:
        return _weigh(first, second, dims)
    if monoid is RECURRENCE:
        (dim,) = dims
        return np.asarray(np.take(recur(first, second, dim), -1, dim))
    return find_first(monoid.fields[0], first, second, dims)


def _weigh(exponents: Array, weights: Array, dims: tuple[int, ...]) -> Array:
    """Return ``sum(w * exp(x - m))`` over ``dims``, where m is the greatest x."""
    wide = exponents.astype(np.float64)
    top = wide.max(axis=dims, keepdims=True, initial=-np.inf)
    away = np.where(wide == top, 0, wide - top)
    return np.asarray((weights * np.exp(away)).sum(axis=dims)).astype(weights.dtype)


def recur(factors: Array, terms: Array, dim: int) -> Array:
    """Return each h in ``h[t] = a[t] * h[t-1] + b[t]`` along a dimension, from h = 0."""
    found = np.moveaxis(np.array(terms, np.float64), dim, 0)
    steps, so_far = np.moveaxis(factors, dim, 0), np.zeros(found.shape[1:])
    product = np.multiply if steps.dtype != bool else lambda step, x: np.where(step, x, 0)
    for t in range(len(found)):
        found[t] = so_far = product(steps[t], so_far) + found[t]
    return np.moveaxis(found, 0, dim).astype(terms.dtype)


def reduce_array(monoid: Monoid, values: Array, dims: tuple[int, ...], dtype: DType) -> Array:
    """Return ``values`` reduced over ``dims``, which disappear.

    Float sums and products are accumulated in float64 and rounded once: a reduction has no order,
    so its meaning is the exact result.
    """
    wide = np.float64 if dtype.is_float else numpy_type(dtype)
    identity = np.asarray(monoid.identity(dtype), dtype=wide)
    reduced = _ufunc(monoid).reduce(
        values.astype(wide), axis=dims, dtype=wide, initial=identity[()]
    )
    return convert(np.asarray(reduced), dtype)


def scatter_array(
    monoid: Monoid, shape: tuple[int, ...], places: list[Array], values: Array, dtype: DType
) -> Array:
    """Return an array of ``shape`` whose elements combine the values at the places that are theirs.

    Args:
        places: of each value, one array for each dimension. What is out of range counts nowhere.
    """
    wide = np.float64 if dtype.is_float else numpy_type(dtype)
    found = np.full(shape, monoid.identity(dtype), wide)
    inside = np.ones(places[0].shape, bool)
    for place, extent in zip(places, shape, strict=True):
        inside &= (place >= 0) & (place < extent)
    _ufunc(monoid).at(found, tuple(p[inside] for p in places), values[inside].astype(wide))
    return convert(found, dtype)


def scan_array(monoid: Monoid, values: list[Array], dim: int, dtype: DType) -> Array:
    """Return the reductions of the prefixes of some arrays along a dimension."""
    if len(values) == 1:
        wide = np.float64 if dtype.is_float else numpy_type(dtype)
        return convert(_ufunc(monoid).accumulate(values[0].astype(wide), axis=dim), dtype)
    first, second = values
    if monoid is RECURRENCE:
        return recur(first, second, dim)
    ends = [np.arange(end) for end in range(1, first.shape[dim] + 1)]
    prefixes = ((first.take(end, dim), second.take(end, dim)) for end in ends)
    return np.stack([reduce_pairs(monoid, *pair, (dim,)) for pair in prefixes], dim)
