"""The C++ prelude against NumPy and torch in double: every operation, load, store and conversion.

One shared library a vector width, built with the flags of generated kernels; each operation is a
loop over lanes (``v_...``) and one over scalars (``s_...``) in it.
"""

from __future__ import annotations

import itertools
import mmap
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusec.codegen.cpp.prelude import prelude
from fusec.frontend.shapes import to_torch_dtype
from fusec.ir.dtype import DTYPES, F8
from fusec.runtime.kernels.cpp_kernel import FLAGS, OPTIMISE, find_compiler, vector_width
from tests.codegen.prelude_library import MEMORY, VALUES, Array, Library, source
from tests.float_cases import floats_near, narrowed
from tests.guarded_page import GuardedPage
from tests.philox import random_bits
from tests.quick_build import QUICK as QUICK_BUILD

WIDTHS = {16: "-march=native", 8: "-march=x86-64 -mavx2 -mfma -mf16c", 4: "-march=x86-64"}
"""Lanes and instruction sets: all there is; AVX2; SSE2, without FMA or F16C."""

# Largest error of f32 lanes in ulp. `None`: it comes from libm, as do the scalars.
UNARY: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float | None]] = {
    "exp": (torch.exp, 1.1), "exp2": (torch.exp2, 1.1), "expm1": (torch.expm1, 2.0),
    "log": (torch.log, 1.1), "log2": (torch.log2, 1.5), "log10": (torch.log10, 2.0),
    "log1p": (torch.log1p, 1.5), "erf": (torch.erf, 2.0), "tanh": (torch.tanh, 1.5),
    "sigmoid": (torch.sigmoid, 2.5), "sin": (torch.sin, 1.6), "cos": (torch.cos, 1.6),
    "tan": (torch.tan, 3.5), "sqrt": (torch.sqrt, 0.5), "rsqrt": (torch.rsqrt, 1.6),
    "reciprocal": (torch.reciprocal, 0.5), "abs": (torch.abs, 0.0), "floor": (torch.floor, 0.0),
    "ceil": (torch.ceil, 0.0), "trunc": (torch.trunc, 0.0), "round": (torch.round, 0.0),
    "sign": (torch.sign, 0.0), "asin": (torch.asin, None), "acos": (torch.acos, None),
    "atan": (torch.atan, None), "sinh": (torch.sinh, None), "cosh": (torch.cosh, None),
    "asinh": (torch.asinh, None), "acosh": (torch.acosh, None), "atanh": (torch.atanh, None),
    "erfc": (torch.erfc, None), "erfinv": (torch.erfinv, None), "lgamma": (torch.lgamma, None),
}  # fmt: skip
LIBM_ULP = 8.0
BINARY: dict[str, tuple[Callable[..., torch.Tensor], float]] = {
    "pow": (torch.pow, 0.9), "atan2": (torch.atan2, 0.6), "hypot": (torch.hypot, 0.6),
    "maximum": (torch.maximum, 0.0), "minimum": (torch.minimum, 0.0),
    "copysign": (torch.copysign, 0.0), "fmod": (torch.fmod, 0.0),
    "remainder": (torch.remainder, 0.51),
}  # fmt: skip
INTEGER: dict[str, Callable[[Array, Array], Array]] = {
    "floordiv": np.floor_divide, "remainder": np.remainder, "fmod": np.fmod,
    "maximum": np.maximum, "minimum": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip
COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip


def exports() -> list[str]:
    """Return the operations to export, as macros of the library."""
    floats, integers = ("f32", "f64"), ("i32", "i64")
    lines = [f"UNARY({f}, {d}, {d})" for f in (*UNARY, "ndtr") for d in floats]
    lines += [f"UNARY({f}, f32, f32)" for f in ("ndtr_rounded", "erf_rounded")]
    lines += [f"UNARY({f}, {d}, bool)" for f in ("isnan", "isinf") for d in floats]
    lines += [f"UNARY({f}, {d}, {d})" for f in ("abs", "sign", "not") for d in integers]
    lines += [f"BINARY({f}, {d}, {d})" for f in (*BINARY, "floordiv", "truncdiv") for d in floats]
    integer_only = (*INTEGER, "truncdiv", "pow", "shl", "shr")
    lines += [f"BINARY({f}, {d}, {d})" for f in integer_only for d in integers]
    lines += [f"BINARY({f}, {d}, bool)" for f in COMPARE for d in VALUES]
    lines += [f"BINARY({f}, bool, bool)" for f in ("and", "or", "xor")]
    return [*lines, "UNARY(not, bool, bool)", "UNARY(e2m1, i32, f32)"]


# The narrowest is the same text by other types, and only old machines run it.
QUICK = [16, 8, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=QUICK, ids=lambda width: f"W{width}")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    width = request.param
    compiler = find_compiler(None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    if width > vector_width():
        pytest.skip(f"this CPU has no vectors of {width} floats")
    directory = tmp_path_factory.mktemp("prelude")
    (directory / "all.cpp").write_text(source(width, exports()))
    flags = [f for f in (*FLAGS, *OPTIMISE) if f not in ("-march=native", "-fopenmp")] + WIDTHS[
        width
    ].split()
    quick = [] if request.config.getoption("--slow") else [QUICK_BUILD]
    command = [compiler, *flags, *quick, "-Wall", "-Werror", "all.cpp", "-o", "all.so"]
    subprocess.run(command, cwd=directory, check=True)
    return Library(directory / "all.so", width)


RNG = np.random.default_rng(7)
SPECIAL = [
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 2.0, 3.0, np.inf, -np.inf, np.nan, 1e-45,
    -1e-45, 1.1754942e-38, 1.17549435e-38, 3.4028235e38, -3.4028235e38, 88.722, 88.73, -87.34,
    -103.97, -104.1, 128.0, -149.0, -150.0, 0.625, 0.75, 4.0, 8388607.5, 8388609.0, -8388607.5,
    4194304.5, 1e30, -17.4, 16777216.0, 2147483648.0, 0.99999994, 1.0000001, 0.70710678,
    1.41421356, 3.1415927, 1e4, 1e6, 2e6,
]  # fmt: skip


def floats(dtype: str, count: int) -> Array:
    """Return special values, any bit patterns, and values near where functions bend."""
    kind = MEMORY[dtype]
    bits = np.frombuffer(RNG.bytes(count * np.dtype(kind).itemsize), kind)
    near = [RNG.uniform(-s, s, count // 4) for s in (1, 5, 30, 110, 1e4, 1e6)]
    values = np.concatenate([np.array(SPECIAL), bits.astype("f8"), *near])
    return padded(values.astype(kind))


def padded(values: Array) -> Array:
    """Return the values, the first ones repeated up to a multiple of the widest vector."""
    return np.ascontiguousarray(np.resize(values, -(-len(values) // 16) * 16))


def ulps(result: Array, exact: Array) -> Array:
    """Return errors in units of the last place; infinite where only one side is NaN or infinite."""
    rounded = exact.astype(result.dtype)
    same = (result == rounded) | (np.isnan(result) & np.isnan(exact))
    unit = np.spacing(np.maximum(np.abs(rounded), np.finfo(result.dtype).tiny))
    error = np.abs(result.astype("f8") - exact) / unit
    return np.where(same, 0, np.where(np.isnan(error), np.inf, error))


def assert_close(result: Array, exact: Array, limit: float, *inputs: Array) -> None:
    error = ulps(result, exact)
    worst = int(error.argmax())
    at = [float(i[worst]) for i in inputs]
    assert error[worst] <= limit, f"{error[worst]} ulp at {at}: {result[worst]} {exact[worst]}"
    zero = (exact == 0) & (result == 0) & ~np.isnan(exact)
    wrong = zero & (np.signbit(exact) != np.signbit(result))
    assert not wrong.any(), f"sign of zero at {[float(i[wrong][0]) for i in inputs]}"


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> Any:
    global RNG
    RNG = np.random.default_rng(7)
    with np.errstate(all="ignore"):
        yield


# -- arithmetic ------------------------------------------------------------------------------------


def test_floats_of_4_bits_are_read_from_the_low_bits(library: Library) -> None:
    codes = np.arange(-64, 64, dtype="i4")
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], "f4")[codes & 7]
    wanted = np.where(codes & 8, -sizes, sizes)
    for found in library.both("e2m1", "i32", "f32", codes):
        np.testing.assert_array_equal(found.view("i4"), wanted.view("i4"))


@pytest.mark.parametrize("name", UNARY)
def test_unary_operations_are_accurate_to_a_few_ulp(library: Library, name: str) -> None:
    reference, limit = UNARY[name]
    x = floats("f32", 4096 if limit is None else 1 << 16)
    exact = reference(torch.from_numpy(x.astype("f8"))).numpy()
    if name == "sigmoid":  # 1 / (1 + exp(-x)) is 0 where exp(-x) overflows, as torch's is
        exact = np.where(np.abs(exact) < np.finfo("f4").tiny, 0, exact)
    lanes, scalars = library.both(name, "f32", "f32", x)
    if name == "sigmoid":
        lanes, scalars = (np.where(r < np.finfo("f4").tiny, 0, r) for r in (lanes, scalars))
    assert_close(lanes, exact, LIBM_ULP if limit is None else limit, x)
    assert_close(scalars, exact, max(LIBM_ULP if limit is None else limit, 2.5), x)
    x = floats("f64", 1024)
    exact = reference(torch.from_numpy(x)).numpy()
    for result in library.both(name, "f64", "f64", x):
        loose = np.abs(result - exact) <= 1e-13 * np.abs(exact) + 1e-300
        assert (loose | (result == exact) | (np.isnan(result) & np.isnan(exact))).all()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", UNARY)
def test_a_scalar_function_of_one_has_the_bits_of_its_lanes(
    library: Library, name: str, dtype: str
) -> None:
    x = floats(dtype, 1 << 14 if dtype == "f32" else 1 << 10)
    same_bits(*library.both(name, dtype, dtype, x), x)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", [*BINARY, "floordiv", "truncdiv"])
def test_a_scalar_function_of_two_has_the_bits_of_its_lanes(
    library: Library, name: str, dtype: str
) -> None:
    special = np.array(list(itertools.product(SPECIAL, SPECIAL))).astype(MEMORY[dtype])
    x = padded(np.concatenate([special[:, 0], floats(dtype, 4096)]))
    y = padded(np.concatenate([special[:, 1], floats(dtype, 4096)[::-1]]))
    same_bits(*library.both(name, dtype, dtype, x, y), x, y)


def same_bits(lanes: Array, scalars: Array, *inputs: Array) -> None:
    """Assert that results are equal to the sign of zero; which NaN it is means nothing."""
    bits = f"u{lanes.dtype.itemsize}"
    differ = (lanes.view(bits) != scalars.view(bits)) & ~(np.isnan(lanes) & np.isnan(scalars))
    if differ.any():
        k = int(differ.argmax())
        at = [float(i[k]) for i in inputs]
        raise AssertionError(f"{differ.sum()} differ; {lanes[k]} and {scalars[k]} at {at}")


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_normal_distribution_serves_gelu_of_any_size(library: Library, dtype: str) -> None:
    x = np.linspace(-40, 40, 1 << 16, dtype=MEMORY[dtype])
    lanes, scalars = library.both("ndtr", dtype, dtype, x)
    same_bits(lanes, scalars, x)
    theirs = torch.nn.functional.gelu(torch.from_numpy(x)).numpy()
    assert np.abs(x * lanes - theirs).max() < (4e-6 if dtype == "f32" else 1e-14)
    assert (lanes[x < -9] == 0).all()


@pytest.mark.parametrize("name", ["ndtr", "erf"])
def test_forms_for_16_bits_keep_the_digits_of_both_tails(library: Library, name: str) -> None:
    x = padded(np.concatenate([floats("f32", 4096), np.linspace(-7, 7, 1 << 16)]).astype("f4"))
    lanes, scalars = library.both(f"{name}_rounded", "f32", "f32", x)
    same_bits(lanes, scalars, x)
    y = torch.from_numpy(x.astype("f8")) * (2**0.5 if name == "erf" else 1)
    tail = torch.where(y.abs() > 6, 0, torch.special.ndtr(-y.abs()))
    exact = torch.where(y < 0, tail, 1 - tail)
    exact = (exact if name == "ndtr" else y.sign() * (1 - 2 * tail)).numpy()
    rounding = 1e-7 if name == "erf" else torch.where(y < 0, 0, 6e-8)
    near = (1.2e-5 * tail * (2 if name == "erf" else 1) + rounding).numpy()
    assert (np.isnan(x) == np.isnan(lanes)).all()
    close = np.isnan(x) | (np.abs(lanes - exact) <= near)
    assert close.all(), (x[~close], lanes[~close], exact[~close], near[~close])


@pytest.mark.parametrize("name", BINARY)
def test_binary_operations_agree_with_torch(library: Library, name: str) -> None:
    reference, limit = BINARY[name]
    special = np.array(list(itertools.product(SPECIAL, SPECIAL)))
    x = padded(np.concatenate([special[:, 0], floats("f32", 4096), RNG.uniform(0, 9, 8192)]))
    y = padded(np.concatenate([special[:, 1], floats("f32", 4096)[::-1], RNG.normal(0, 9, 8192)]))
    for dtype, kind in (("f32", "f4"), ("f64", "f8")):
        a, b = x.astype(kind), y.astype(kind)
        exact = reference(
            torch.from_numpy(a.astype("f8")), torch.from_numpy(b.astype("f8"))
        ).numpy()
        for result in library.both(name, dtype, dtype, a, b):
            if name in ("maximum", "minimum"):
                assert ((result == exact) | (np.isnan(result) & np.isnan(exact))).all()
            else:
                assert_close(result, exact, limit if dtype == "f32" else 4, a, b)


def test_float_division_rounds_down_or_to_zero(library: Library) -> None:
    x = padded(
        np.concatenate([RNG.normal(0, 50, 4096), [1.0, -1.0, 0.0, np.inf, 5.0, np.nan, 6.0]])
    )
    y = padded(np.concatenate([RNG.normal(0, 3, 4096), [0.0, 0.0, 0.0, 2.0, np.inf, 1.0, 0.1]]))
    for dtype, kind in (("f32", "f4"), ("f64", "f8")):
        a, b = x.astype(kind), y.astype(kind)
        for name, mode in (("floordiv", "floor"), ("truncdiv", "trunc")):
            exact = torch.div(torch.from_numpy(a), torch.from_numpy(b), rounding_mode=mode).numpy()
            for result in library.both(name, dtype, dtype, a, b):
                np.testing.assert_array_equal(result, exact)


@pytest.mark.parametrize("dtype", ["i32", "i64"])
def test_integer_operations_agree_with_numpy(library: Library, dtype: str) -> None:
    kind = np.dtype(MEMORY[dtype])
    least, most = np.iinfo(kind).min, np.iinfo(kind).max
    edge = [
        0,
        1,
        -1,
        2,
        -2,
        7,
        -7,
        1 << 30,
        least,
        most,
        least + 1,
        most // 2,
        1 << kind.itemsize * 7,
    ]
    pairs = np.array(list(itertools.product(edge, edge)), kind)
    x = padded(np.concatenate([pairs[:, 0], RNG.integers(least, most, 4096, kind),
                               RNG.integers(-999, 999, 4096, kind)]))  # fmt: skip
    y = padded(np.concatenate([pairs[:, 1], RNG.integers(-99, 99, 4096, kind),
                               RNG.integers(-9, 9, 4096, kind)]))  # fmt: skip
    for name, reference in INTEGER.items():
        for result in library.both(name, dtype, dtype, x, y):
            np.testing.assert_array_equal(result, reference(x, y), name)
    defined = ~((x == least) & (y == -1)) & (y != 0)
    truncated = np.where(
        defined, (x - np.fmod(x, np.where(defined, y, 1))) // np.where(defined, y, 1), 0
    )
    truncated = np.where((x == least) & (y == -1), least, truncated)
    for result in library.both("truncdiv", dtype, dtype, x, y):
        np.testing.assert_array_equal(result, truncated)
    for name, reference in (("abs", np.abs), ("sign", np.sign), ("not", np.invert)):
        for result in library.both(name, dtype, dtype, x):
            np.testing.assert_array_equal(result, reference(x), name)


@pytest.mark.parametrize("dtype", ["i32", "i64"])
def test_integer_shifts_and_powers_agree_with_torch(library: Library, dtype: str) -> None:
    kind = np.dtype(MEMORY[dtype])
    x = padded(RNG.integers(-(1 << 30), 1 << 30, 4096, kind))
    y = padded(np.arange(-4, 70, dtype=kind))
    y = np.resize(y, len(x))
    a, b = torch.from_numpy(x), torch.from_numpy(y)
    for name, exact in (("shl", a << b), ("shr", a >> b)):
        for result in library.both(name, dtype, dtype, x, y):
            np.testing.assert_array_equal(result, exact.numpy(), name)
    x = np.resize(np.arange(-7, 8, dtype=kind), 240)
    y = np.resize(np.arange(-3, 13, dtype=kind), 240)
    one = np.where(y % 2 == 0, 1, x)
    exact_power = np.where(y >= 0, x ** np.maximum(y, 0), np.where(np.abs(x) == 1, one, 0))
    for result in library.both("pow", dtype, dtype, x, y):
        np.testing.assert_array_equal(result, exact_power)


@pytest.mark.parametrize("dtype", VALUES)
def test_comparisons_and_selection_work_on_every_type(library: Library, dtype: str) -> None:
    kind = MEMORY[dtype]
    pool = np.array([0, 1]) if dtype == "bool" else np.array([-3, 0, 1, 2, 1 << 30], "f8")
    if dtype in ("f32", "f64"):
        pool = np.append(pool, [np.nan, np.inf, -np.inf, -0.0])
    if dtype == "i64":
        pool = np.append(pool, [1 << 40, -(1 << 40), (1 << 40) + (1 << 20)])
    x, y = (RNG.choice(pool, 1024).astype(kind) for _ in range(2))
    for name, reference in COMPARE.items():
        for result in library.both(name, dtype, "bool", x, y):
            np.testing.assert_array_equal(result, reference(x, y), name)
    condition = RNG.integers(0, 2, 1024, "u1")
    result = np.empty_like(x)
    library(f"select_{dtype}", condition, x, y, result, 1024)
    np.testing.assert_array_equal(result, np.where(condition, x, y))


def test_logic_on_masks_and_classes_of_floats(library: Library) -> None:
    x, y = (RNG.integers(0, 2, 1024, "u1") for _ in range(2))
    logic = (("and", x & y), ("or", x | y), ("xor", x ^ y))
    for name, exact in logic:
        for result in library.both(name, "bool", "bool", x, y):
            np.testing.assert_array_equal(result, exact)
    for result in library.both("not", "bool", "bool", x):
        np.testing.assert_array_equal(result, 1 - x)
    for dtype in ("f32", "f64"):
        values = floats(dtype, 1024)
        for name in ("isnan", "isinf"):
            for result in library.both(name, dtype, "bool", values):
                np.testing.assert_array_equal(result, getattr(np, name)(values))


# -- conversions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [*VALUES, "i16", "i8", "u8"])
@pytest.mark.parametrize("origin", VALUES)
def test_conversions_between_every_pair_of_types(
    library: Library, origin: str, target: str
) -> None:
    kind = MEMORY[origin]
    if origin == "bool":
        x = RNG.integers(0, 2, 1024, "u1")
    elif origin in ("i32", "i64"):
        x = padded(
            np.append(RNG.integers(np.iinfo(kind).min, np.iinfo(kind).max, 1024), [0, -1, 1])
        )
        x = x.astype(kind)
    else:
        bound = 2.0**62 if target == "i64" else 2.0**30
        scales = (2.0, 300.0, bound) if target.startswith(("i", "u")) else (2.0, 1e30, 1e300)
        x = padded(
            np.concatenate([[0.0, -0.0, 0.5, -0.9], *(RNG.uniform(-s, s, 300) for s in scales)])
        )
        x = x.astype(kind)
    wanted = x != 0 if target == "bool" else x
    if target in ("i16", "i8", "u8") and origin in ("f32", "f64"):
        wanted = x.astype("i4")
    for result in library.both(f"to_{target}", origin, target, x):
        np.testing.assert_array_equal(result, wanted.astype(MEMORY[target]))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_sixteen_bit_floats_round_as_torch_does_bit_by_bit(library: Library, dtype: str) -> None:
    torch_dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    every = np.arange(1 << 16, dtype="u2")
    exact = torch.from_numpy(every.view("i2")).view(torch_dtype).to(torch.float32).numpy()
    lanes, scalars = np.empty(1 << 16, "f4"), np.empty(1 << 16, "f4")
    library(f"load_{dtype}", every, lanes, scalars, 1 << 16)
    for loaded in (lanes, scalars):
        np.testing.assert_array_equal(np.isnan(loaded), np.isnan(exact))
        number = ~np.isnan(exact)
        np.testing.assert_array_equal(loaded[number].view("u4"), exact[number].view("u4"))
    # Every value, every point halfway to the next one, and their neighbours; then any f32.
    half = (exact.view("u4").astype("i8") + (0x8000 if dtype == "bf16" else 0x1000)).astype("u4")
    near = [(half + np.uint32(d)).view("f4") for d in (0, 1, 2**32 - 1)]
    tiny = np.arange(-4096, 4096) * 2.0**-26
    bits = np.frombuffer(RNG.bytes(1 << 18), "f4")
    x = padded(
        np.concatenate([exact, *near, tiny.astype("f4"), bits, np.array([65519, 65520.0], "f4")])
    )
    stored = torch.from_numpy(x).to(torch_dtype)
    number = ~np.isnan(x)
    lanes16, scalars16 = np.empty(len(x), "u2"), np.empty(len(x), "u2")
    library(f"store_{dtype}", x, lanes16, scalars16, len(x))
    for bits16 in (lanes16, scalars16):
        np.testing.assert_array_equal(
            bits16[number], stored.view(torch.int16).numpy().view("u2")[number]
        )
        nans = torch.from_numpy(bits16.view("i2")).view(torch_dtype)[torch.from_numpy(~number)]
        assert nans.isnan().all()
    for kind in "vs":
        rounded = np.empty_like(x)
        library(f"{kind}_round_{dtype}", x, rounded, len(x))
        np.testing.assert_array_equal(rounded, stored.to(torch.float32).numpy())


@pytest.mark.parametrize("dtype", [dtype.name for dtype in F8])
def test_eight_bit_floats_are_torchs_bit_by_bit(library: Library, dtype: str) -> None:
    """Read every code; write every bf16 and f16, ties and their neighbours, and any f32."""
    kind = to_torch_dtype(DTYPES[dtype])
    every = np.arange(256, dtype="u1")
    exact = torch.from_numpy(every).view(kind).float().numpy()
    lanes, scalars = np.empty(256, "f4"), np.empty(256, "f4")
    library(f"load_{dtype}", every, lanes, scalars, 256)
    for loaded in (lanes, scalars):
        np.testing.assert_array_equal(loaded, exact)
        number = ~np.isnan(exact)
        np.testing.assert_array_equal(np.signbit(loaded)[number], np.signbit(exact)[number])
    x = padded(floats_near(exact))
    stored = narrowed(torch.from_numpy(x), DTYPES[dtype])
    lanes8, scalars8 = np.empty(len(x), "u1"), np.empty(len(x), "u1")
    library(f"store_{dtype}", x, lanes8, scalars8, len(x))
    for codes in (lanes8, scalars8):
        np.testing.assert_array_equal(codes, stored.view(torch.uint8).numpy())
    for how in "vs":
        rounded = np.empty_like(x)
        library(f"{how}_round_{dtype}", x, rounded, len(x))
        np.testing.assert_array_equal(rounded, stored.float().numpy())


# -- memory ----------------------------------------------------------------------------------------


def tail(page: GuardedPage, dtype: str, count: int) -> Array:
    """Return the last ``count`` elements before the guard."""
    size = count * np.dtype(MEMORY[dtype]).itemsize
    return page.bytes[mmap.PAGESIZE - size : mmap.PAGESIZE].view(MEMORY[dtype])


def some(dtype: str, count: int) -> Array:
    """Return values that survive a load and a store unchanged."""
    if dtype == "bool":
        return RNG.integers(0, 2, count, "u1")
    if dtype in ("bf16", "f16"):
        return RNG.integers(1, 0x7000, count, "u2")
    if dtype.startswith("f8"):
        return RNG.integers(1, 0x70, count, "u1")
    if dtype in ("f32", "f64"):
        return RNG.normal(size=count).astype(MEMORY[dtype])
    info = np.iinfo(MEMORY[dtype])
    return RNG.integers(info.min, info.max, count, MEMORY[dtype])


WHOLE, MASKED, STRIDED, STRIDED_MASKED, INDEXED, INDEXED_MASKED, ONE = range(7)


def accesses(width: int) -> list[tuple[int, int, Array, Array]]:
    """Return (kind of access, its integer, the offset of each lane, whether it is accessed)."""
    lanes, every = np.arange(width), np.ones(width, "u1")
    random = RNG.permutation(40)[:width].astype("i8")
    cases = [(WHOLE, 0, lanes, every), (ONE, 0, lanes, (lanes == 0).astype("u1"))]
    cases += [(MASKED, 0, lanes, (lanes < n).astype("u1")) for n in range(width + 1)]
    cases += [(STRIDED, s, lanes * s, every) for s in (1, 3)] + [(INDEXED, 0, random, every)]
    for mask in (every, 0 * every, *(RNG.integers(0, 2, width, "u1") for _ in range(6))):
        cases += [(MASKED, 0, lanes, mask), (INDEXED_MASKED, 0, random, mask)]
        cases += [(STRIDED_MASKED, 3, lanes * 3, mask)]
    return cases


@pytest.mark.parametrize("dtype", MEMORY)
def test_loads_and_stores_touch_only_their_lanes(library: Library, dtype: str) -> None:
    page, width = GuardedPage(), library.width
    for how, k, offsets, mask in accesses(width):
        touched = mask.astype(bool)
        count = int(offsets[touched].max(initial=-1)) + 1
        indices = np.where(touched, offsets, 1 << 40)  # far outside where it must not be read
        memory = tail(page, dtype, count)
        memory[:] = some(dtype, count)
        got = np.zeros(width, MEMORY[dtype])
        library(f"get_{dtype}", how, memory, got, k, indices, mask)
        wanted = np.zeros(width, MEMORY[dtype])
        wanted[touched] = memory[offsets[touched]]
        np.testing.assert_array_equal(got, wanted, f"load {how} {k} {mask}")

        before, values = memory.copy(), some(dtype, width)
        library(f"put_{dtype}", how, memory, values, k, indices, mask)
        before[offsets[touched]] = values[touched]
        np.testing.assert_array_equal(memory, before, f"store {how} {k} {mask}")


@pytest.mark.parametrize("dtype", MEMORY)
def test_blocks_are_turned_and_touch_only_their_lanes(library: Library, dtype: str) -> None:
    page, width = GuardedPage(), library.width
    lanes = np.arange(width)
    for n, stride, valid in itertools.product((1, width - 1, width), (width, 21), (1, 3, width)):
        count = (valid - 1) * stride + n
        memory = tail(page, dtype, count)
        memory[:] = some(dtype, count)
        block = np.zeros((width, width), MEMORY[dtype])
        library(f"turn_{dtype}", memory, block, stride, n, (lanes < valid).astype("u1"))
        wanted = np.zeros((width, width), MEMORY[dtype])
        wanted[:n, :valid] = memory[np.arange(n)[:, None] + stride * lanes[:valid]]
        np.testing.assert_array_equal(block, wanted, f"{n} {stride} {valid}")


def test_lane_numbers_and_first_lanes(library: Library) -> None:
    lanes = np.arange(library.width)
    for n in (0, 1, library.width - 1, library.width, library.width + 5):
        iota, first = np.empty(library.width, "i8"), np.empty(library.width, "u1")
        library("iota", iota, n, first)
        np.testing.assert_array_equal(iota, lanes + n)
        np.testing.assert_array_equal(first, lanes < n)


# -- across lanes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", VALUES[:4])
def test_reductions_across_lanes(library: Library, dtype: str) -> None:
    kind = MEMORY[dtype]
    result = np.empty(4, kind)
    for _ in range(20):
        x = RNG.choice([-2, -1, 1, 2], library.width).astype(kind)  # exact in any order
        library(f"reduce_{dtype}", x, result)
        np.testing.assert_array_equal(
            result, [x.sum(dtype=kind), x.prod(dtype=kind), x.max(), x.min()]
        )
    if dtype.startswith("f"):
        for lane in range(library.width):
            x = np.ones(library.width, kind)
            x[lane] = np.nan
            library(f"reduce_{dtype}", x, result)
            assert np.isnan(result).all()


def test_any_and_all_of_a_mask(library: Library) -> None:
    width, result = library.width, np.empty(2, "u1")
    one = np.eye(width, dtype="u1")
    for mask in (*one, *(1 - one), np.zeros(width, "u1"), np.ones(width, "u1")):
        library("masks", mask, result)
        assert result.tolist() == [mask.any(), mask.all()]


# -- random numbers, machine code ------------------------------------------------------------------


LAST = [2**32 - 1, 2**32, 2**34 - 2, 2**34 + 5, 2**62 + 7]
"""Indices around those at which the counter's upper word changes."""


@pytest.mark.parametrize("seed", [0, 1, -1, 0x0123456789ABCDEF])
def test_random_numbers_are_philox(library: Library, seed: int) -> None:
    indices = np.array([*range(64), *LAST, *range(11)], dtype="i8")
    wanted = random_bits(seed, indices)
    for kind in "vs":
        result = np.empty(len(indices), "i4")
        library(f"{kind}_random", seed, indices, result, len(indices))
        np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 7, 64, 2**34 - 8, 2**34 - 5])
def test_a_run_of_random_numbers_may_start_anywhere(library: Library, first: int) -> None:
    for seed in (3, -(2**63) + 9):
        result = np.empty(library.width, "i4")
        library("run_random", seed, first, result)
        np.testing.assert_array_equal(
            result, random_bits(seed, range(first, first + library.width))
        )


@pytest.mark.parametrize(("each", "name"), [(2, "pairs"), (4, "fours")])
@pytest.mark.parametrize("first", [0, 4, 12, 2**34 - 8])
def test_several_random_numbers_an_element(
    library: Library, each: int, name: str, first: int
) -> None:
    for start in (first, first + 2) if each == 2 else (first,):
        result = np.empty(each * library.width, "i4")
        library(f"{name}_random", 11, start, result)
        wanted = random_bits(11, range(start, start + each * library.width))
        np.testing.assert_array_equal(result.reshape(each, -1).T.ravel(), wanted)


HOT = """
#define LOOP(f) extern "C" void loop_##f(const m_bf16 *x, m_bf16 *y, long long n) {               \\
    for (long long i = 0; i < n; i += FUSEC_W) st_bf16(y + i, f(ld_bf16(x + i))); }
LOOP(f_exp) LOOP(f_log) LOOP(f_erf) LOOP(f_tanh) LOOP(f_sigmoid) LOOP(f_rsqrt) LOOP(f_log1p)
"""


@pytest.mark.parametrize("width", [16, 8])
def test_hot_functions_compile_to_vector_code_alone(width: int, tmp_path: Path) -> None:
    compiler = find_compiler(None)
    if compiler is None or width > vector_width():
        pytest.skip("needs a C++ compiler and vectors of this width")
    flags = [f for f in (*FLAGS, *OPTIMISE) if f not in ("-march=native", "-fopenmp", "-shared")]
    flags += WIDTHS[width].split()
    (tmp_path / "hot.cpp").write_text(prelude(width) + HOT)
    command = [compiler, *flags, "-S", "hot.cpp", "-o", "-"]
    text = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    mnemonics = {line.split()[0] for line in text.splitlines() if line.startswith("\t")}
    assert {m for m in mnemonics if m.startswith(("call", "vpinsr", "vpextr"))} == set()
    assert any(m.startswith("vfmadd") for m in mnemonics)
