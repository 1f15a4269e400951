"""Special values through functions and pairs of them: what is NaN, infinite or a negative zero.

Each table of functions is one compiled graph, called with parts of a list of special numbers. A
part of one to three elements runs as scalars, one of 16 as lanes, and 17 as both: their bits are
equal, whatever the part. Where eager itself depends on where an element stands (its vectors are not
its tails), either of its results will do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

Function = Callable[..., torch.Tensor]

INF, NAN = math.inf, math.nan
NUMBERS = (
    *(0.0, NAN, INF, 1.0, 0.5, 1.5, 2.5, 2.0, 3.0, 7.0, 10.0, 100.0, 88.7, 89.0, 104.0, 128.0),
    *(151.0, 709.0, 745.0, 1e4, 1e-4, 1e-30, 1e30, 1e19, 1e6, 2e6, 1e-8, 0.3, 0.99, 2.0**24 + 1),
    *(2.0**31, 2.0**63, 8388607.5, 4194304.5, math.pi, math.pi / 2, 2 * math.pi),
)
FEW = (0.0, -0.0, NAN, INF, -INF, 1.0, -1.0, 0.5, -2.5, 3.0, 100.0, -100.0)


def words(text: str) -> list[str]:
    return text.split()


def special(dtype: torch.dtype) -> torch.Tensor:
    """Return special numbers of a type, and those where it ends."""
    info = torch.finfo(dtype)
    ends = (info.tiny, info.tiny / 4, info.max, info.max / 2, 1 + info.eps, 1 - info.eps / 2)
    numbers = [sign * x for x in (*NUMBERS, *ends) for sign in (1, -1)]
    return torch.tensor(numbers, dtype=torch.float64).to(dtype)


UNARY: dict[str, Function] = {
    name: getattr(torch, name)
    for name in words(
        "abs neg exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh "
        "asinh acosh atanh sigmoid erf erfc erfinv lgamma sqrt rsqrt reciprocal floor ceil trunc "
        "round sign angle isnan isinf isfinite isposinf isneginf signbit frac square sgn sinc "
        "logit deg2rad nan_to_num logical_not"
    )
}
UNARY |= {
    name: getattr(F, name)
    for name in words(
        "relu relu6 gelu silu elu selu celu softplus softsign mish hardswish hardsigmoid hardtanh "
        "leaky_relu logsigmoid softshrink hardshrink"
    )
}
UNARY |= {
    f"pow {p}": lambda x, p=p: x**p
    for p in (0, 1, 2, 3, 4, 5, -1, -2, -3, 0.5, -0.5, 0.25, 1.5, 2.5, -2.5, 10)
}
UNARY |= {f"{b} to the": lambda x, b=b: b**x for b in (0.0, 1.0, 2.0, -1.0, 0.5, 10.0)}
UNARY |= {
    f"clamp {low} {high}": lambda x, low=low, high=high: torch.clamp(x, low, high)
    for low, high in (
        *((NAN, None), (None, NAN), (-1, NAN), (2, 1), (0, None), (-INF, INF), (-0.0, 0.0)),
    )
}
UNARY |= {
    "over zero": lambda x: x / 0.0, "zero over": lambda x: 0.0 / x, "times zero": lambda x: x * 0,
    "plus zero": lambda x: x + 0.0, "minus zero": lambda x: x - 0, "zero minus": lambda x: 0 - x,
    "minus zero minus": lambda x: -0.0 - x, "times minus one": lambda x: x * -1,
    "times one": lambda x: x * 1, "over two": lambda x: x / 2, "over three": lambda x: x / 3,
    "% 2": lambda x: x % 2, "% -2": lambda x: x % -2, "% inf": lambda x: x % INF,
    "% 0": lambda x: x % 0.0, "// 2": lambda x: x // 2, "// 0": lambda x: x // 0.0,
    "// inf": lambda x: x // INF, "fmod": lambda x: torch.fmod(x, 0.25), "itself": lambda x: x - x,
    "by itself": lambda x: x / x, "times inf": lambda x: x * INF, "plus inf": lambda x: x + INF,
    "plus nan": lambda x: x + NAN, "equal": lambda x: x == x, "unequal": lambda x: x != x,
    "at most": lambda x: x <= x, "where": lambda x: torch.where(x > 0, x, -x),
    "truncated": lambda x: torch.div(x, 3, rounding_mode="trunc"),
}  # fmt: skip
BINARY: dict[str, Function] = {
    name: getattr(torch, name)
    for name in words(
        "maximum minimum atan2 hypot copysign fmod remainder pow logaddexp logaddexp2 xlogy "
        "heaviside nextafter true_divide floor_divide add sub mul eq ne lt le gt ge ldexp"
    )
}
PAIRS = (
    "log exp, exp log, sin atan, cos atan, tan atan, atan tan, sin asin, cos acos, asin sin, "
    "sqrt square, square sqrt, log2 exp2, exp2 log2, log1p expm1, expm1 log1p, sinh asinh, "
    "cosh asinh, sinh acosh, cosh acosh, tanh atanh, sinh atanh, cosh atanh, neg neg, abs neg, "
    "reciprocal reciprocal, abs abs, abs square, sqrt exp, log sqrt, rsqrt square, "
    "reciprocal sqrt, reciprocal rsqrt, reciprocal exp, log10 exp, floor floor, sign neg, "
    "sigmoid neg, cos neg, sin neg, tan neg, erf neg, cos abs, sqrt abs, logit sigmoid, "
    "log sigmoid, erfinv erf, tanh neg"
)
COMPOSED: dict[str, Function] = {
    f"{f} {g}": lambda x, f=UNARY[f], g=UNARY[g]: f(g(x)) for f, g in map(words, PAIRS.split(", "))
}
COMPOSED |= {
    "exp x exp -x": lambda x: x.exp() * (-x).exp(), "exp / exp": lambda x: x.exp() / x.exp(),
    "sqrt sqrt": lambda x: x.sqrt() * x.sqrt(), "sin / cos": lambda x: x.sin() / x.cos(),
    "tan / sin": lambda x: x.tan() / x.sin(), "x / sqrt": lambda x: x / x.sqrt(),
    "x / abs": lambda x: x / x.abs(), "x rsqrt": lambda x: x * x.rsqrt(),
    "x / x": lambda x: x * x.reciprocal(), "root of square": lambda x: (x**2) ** 0.5,
    "2 x / 2": lambda x: (x * 2) / 2, "x + 1 - 1": lambda x: x + 1 - 1,
    "log of square": lambda x: (x * x).log(), "log of cube": lambda x: (x**3).log(),
    "1 / (1 / x)": lambda x: 1 / (1 / x),
    "no nan": lambda x: torch.where(x.isnan(), torch.zeros_like(x), x),
    "positive x": lambda x: (x > 0) * x, "0 log x": lambda x: 0 * x.log(),
    "angle": lambda x: torch.atan2(x.sin(), x.cos()), "-(x - 1)": lambda x: -(x - 1),
    "x - -x": lambda x: x - (-x), "not less": lambda x: ~(x < 1),
    "where not": lambda x: torch.where(~(x >= 0), x, 1.0), "1 - cos2": lambda x: 1 - x.cos() ** 2,
}  # fmt: skip


def run(table: dict[str, Function], n: int, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return each function of the inputs, compiled, in parts of ``n`` elements."""

    def fn(*parts: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: function(*parts) for name, function in table.items()}

    torch.compiler.reset()
    options = {"strict": True, "precision": "eager"}
    compiled = torch.compile(fn, backend="fusec", dynamic=False, options=options)
    count = len(inputs[0])
    around = [torch.cat([x, x[:n], x[:n]]) for x in inputs]
    found = [compiled(*[x[k : k + n].clone() for x in around]) for k in range(0, count, n)]
    return {name: torch.cat([part[name] for part in found])[:count] for name in table}


def wrong(
    found: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, absolute: float
) -> torch.Tensor:
    """Return where a result is not as eager's, or farther from the exact one than allowed."""
    if not found.dtype.is_floating_point:
        return found != eager
    info = torch.finfo(found.dtype)
    a, b, exact = eager.double(), found.double(), exact.double()
    kind = (a.isnan() != b.isnan()) | (a.isinf() != b.isinf()) | (a.isinf() & b.isinf() & (a != b))
    finite = a.isfinite() & b.isfinite()
    sign = finite & (a == 0) & (b == 0) & (a.signbit() != b.signbit())
    floor = 8 * info.eps * torch.maximum(exact.abs(), a.abs()) + 4 * info.tiny * info.eps + absolute
    near = (b - exact).abs() <= torch.maximum(4 * (a - exact).abs(), floor)
    return kind | sign | (finite & exact.isfinite() & ~near)


def assert_as_eager(
    table: dict[str, Function], lengths: list[int], *inputs: torch.Tensor, absolute: float = 0.0
) -> None:
    """Assert that functions are as eager's at all lengths, and their bits equal in all of them.

    Args:
        absolute: how far a result may be from the exact one beside what is a part of it.
    """
    by_length = {n: run(table, n, *inputs) for n in lengths}
    count = len(inputs[0])
    for name, function in table.items():
        exact = function(*[x.double() for x in inputs])
        lanes = function(*[torch.cat([x] * 4) for x in inputs])[count : 2 * count]
        alone = torch.cat([function(*[x[k : k + 1] for x in inputs]) for k in range(count)])
        first = by_length[lengths[0]][name]
        assert first.dtype is lanes.dtype, name
        bad = wrong(first, lanes, exact, absolute) & wrong(first, alone, exact, absolute)
        at = [float(x[bad][0]) for x in inputs] if bad.any() else []
        assert not bad.any(), f"{name} at {at}: {first[bad][0]}, eager {lanes[bad][0]}"
        for n, found in by_length.items():
            zero = torch.zeros((), dtype=first.dtype)
            same = [
                torch.where(r[name] != r[name], zero, r[name]).view(torch.uint8)
                for r in (by_length[lengths[0]], found)
            ]
            assert torch.equal(*same), f"{name}: other bits in {n} elements than in {lengths[0]}"
            assert torch.equal(first != first, found[name] != found[name]), name


LENGTHS = [17, 1]
ALL_LENGTHS = [17, *(n for n in range(1, 34) if n != 17)]
TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]


def without(table: dict[str, Function], dtype: torch.dtype) -> dict[str, Function]:
    """Return a table without the functions whose eager 16-bit results are of another kind."""
    if dtype in (torch.float32, torch.float64):
        return table
    return {name: f for name, f in table.items() if name not in OTHERWISE_OF_16_BITS}


OTHERWISE_OF_16_BITS: set[str] = set()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_functions_of_one_are_as_eager_s_for_scalars_and_lanes(dtype: torch.dtype) -> None:
    assert_as_eager(without(UNARY, dtype), LENGTHS, special(dtype))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_no_pair_of_functions_becomes_another_function(dtype: torch.dtype) -> None:
    # The exact result of float64 is eager's own. What a function of it has rounded otherwise near 1
    # (the square root of MKL on AMD's processors, a cosine), the next one may make a digit of 0.
    absolute = 2 * torch.finfo(dtype).eps if dtype is torch.float64 else 0.0
    assert_as_eager(without(COMPOSED, dtype), LENGTHS, special(dtype), absolute=absolute)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_functions_of_two_are_as_eager_s_for_scalars_and_lanes(dtype: torch.dtype) -> None:
    numbers = torch.tensor(FEW, dtype=dtype)
    x, y = zip(*itertools.product(numbers, numbers), strict=True)
    assert_as_eager(without(BINARY, dtype), LENGTHS, torch.stack(x), torch.stack(y))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_functions_of_all_pairs_of_numbers_are_as_eager_s(dtype: torch.dtype) -> None:
    numbers = special(dtype)
    x, y = zip(*itertools.product(numbers, numbers), strict=True)
    assert_as_eager(without(BINARY, dtype), [3, 17], torch.stack(x), torch.stack(y))


@pytest.mark.slow
@pytest.mark.parametrize("table", [UNARY, COMPOSED], ids=["unary", "composed"])
def test_functions_have_the_same_bits_at_all_lengths(table: dict[str, Function]) -> None:
    assert_as_eager(table, ALL_LENGTHS, special(torch.float32))
