"""Products of matrices in C++ against NumPy in double, over shapes, steps and instruction sets."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
from typing import Any

import numpy as np
import pytest
import torch

from fusec.codegen.cpp.prelude import prelude
from fusec.runtime.kernels.cpp_kernel import FLAGS, OPTIMISE, find_compiler, vector_width
from tests.guarded_page import GuardedPage

EXPORTS = """
extern "C" long long tiles_in_use() {
#ifdef __AMX_BF16__
  unsigned low, high;  // XINUSE: which states hold anything; 17 is the tiles' shapes
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
  return low >> 17 & 1;
#else
  return 0;
#endif
}
extern "C" void multiply_f32(
    float *c, const float *a, long long ar, long long ak, const float *b, long long rows,
    long long columns, long long terms, bool adds) {
  f_multiply(c, columns, FUSEC_W, a, ar, ak, b, columns, FUSEC_W, rows, columns, terms, adds);
}
extern "C" void multiply_bf16(
    float *c, const m_bf16 *a, long long ar, long long ak, const m_bf16 *b, long long bk,
    long long bc, long long rows, long long columns, long long terms, bool adds) {
  const fusec_tiles_in_use tiles;
  f_multiply_bf16(c, columns, FUSEC_W, a, ar, ak, b, bk, bc, rows, columns, terms, adds);
}
extern "C" void multiply_pairs(
    float *c, const m_bf16 *a, long long ar, long long ak, const m_pair *b, long long bk,
    long long rows, long long columns, long long terms, bool adds) {
  const fusec_tiles_in_use tiles;
  f_multiply_bf16(c, columns, FUSEC_W, a, ar, ak, b, bk, 1, rows, columns, terms, adds);
}
extern "C" void multiply_i8(
    int *c, const m_i8 *a, long long ar, long long ak, const m_i8 *b, long long bk,
    long long bc, long long rows, long long columns, long long terms, bool adds) {
  const fusec_tiles_in_use tiles;
  f_multiply_i8(c, columns, FUSEC_W, a, ar, ak, b, bk, bc, rows, columns, terms, adds);
}
extern "C" void exp_rounded(float *y, const float *x, long long n) {
  for (long long i = 0; i < n; i += FUSEC_W) st_f32(y + i, f_exp_rounded_flushed(ld_f32(x + i)));
}
extern "C" void exp_flushed(float *y, const float *x, long long n) {
  for (long long i = 0; i < n; i += FUSEC_W) st_f32(y + i, f_exp_flushed(ld_f32(x + i)));
}
extern "C" void store_operand(m_bf16 *p, const float *x, long long n) {
  for (long long i = 0; i < n; i += FUSEC_W) st_operand_bf16(p + i, ld_f32(x + i));
}
extern "C" void store_pairs(m_bf16 *p, const float *x, long long n) {
  for (long long i = 0; i < n; i += FUSEC_W * 2)
    stp_operand_bf16(p + i, ldp_f32<0>(x + i), ldp_f32<1>(x + i));
}
"""
FORMS = {
    "16 lanes": (16, ()),
    "16 lanes, no tiles": (16, ("-mno-amx-bf16",)),
    "16 lanes, widened": (16, ("-mno-amx-bf16", "-mno-avx512bf16", "-mno-avx512vnni")),
    "8 lanes": (8, ()),
    "4 lanes": (4, ()),
}
FAST = ("16 lanes", "16 lanes, no tiles", "16 lanes, widened")
"""The narrower ones are the same text by other types."""

RNG = np.random.default_rng(3)


@pytest.fixture(
    scope="module",
    params=[pytest.param(f, marks=() if f in FAST else pytest.mark.slow) for f in FORMS],
)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, ctypes.CDLL]:
    """Return lanes, and both functions built for them."""
    width, more = FORMS[request.param]
    compiler = find_compiler(None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    if width > vector_width():
        pytest.skip(f"this CPU has no vectors of {width} floats")
    folder = tmp_path_factory.mktemp("products")
    text = prelude(width, products=True) + EXPORTS
    (folder / "all.cpp").write_text(text)
    command = [compiler, *FLAGS, *OPTIMISE, *more, "-Wall", "-Werror", "all.cpp", "-o", "all.so"]
    subprocess.run(command, cwd=folder, check=True)
    return width, ctypes.CDLL(str(folder / "all.so"))


def bf16(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bits of random numbers, and their values."""
    bits = (RNG.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def integers(*values: int) -> tuple[ctypes.c_longlong, ...]:
    return tuple(map(ctypes.c_longlong, values))


SHAPES = [
    (1, 1, 1), (12, 2, 64), (13, 1, 7), (31, 3, 31), (32, 2, 32), (33, 4, 33), (96, 8, 64),
    (128, 4, 80), (129, 5, 256), (40, 2, 257), (200, 3, 513), (16, 2, 0),
]  # fmt: skip
"""Rows, panels of columns, terms."""
STEPS = {
    "terms, terms": ("rows", "columns"),
    "terms, columns": ("rows", "terms"),
    "rows, terms": ("terms", "columns"),
    "rows, columns": ("terms", "terms"),
}
"""What is a neighbour in each operand; what is named here are the lines of its memory."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("adds", (False, True))
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_of_bf16_is_that_of_its_values(library, shape, steps, adds):
    width, functions = library
    rows, terms = shape[0], shape[2]
    columns = shape[1] * width
    lines = STEPS[steps]
    a_bits, a = bf16(*((rows, terms) if lines[0] == "rows" else (terms, rows)))
    b_bits, b = bf16(*((terms, columns) if lines[1] == "terms" else (columns, terms)))
    left = a if lines[0] == "rows" else a.T
    right = b if lines[1] == "terms" else b.T
    a_steps = (terms, 1) if lines[0] == "rows" else (1, rows)
    b_steps = (columns, 1) if lines[1] == "terms" else (1, terms)
    found = np.full((rows, columns), 1.5 if adds else np.nan, np.float32)
    functions.multiply_bf16(
        pointer(found), pointer(a_bits), *integers(*a_steps), pointer(b_bits),
        *integers(*b_steps, rows, columns, terms), ctypes.c_bool(adds),
    )  # fmt: skip
    np.testing.assert_allclose(found, left @ right + 1.5 * adds, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("adds", (False, True))
@pytest.mark.parametrize("turned", (False, True))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_terms_that_lie_in_pairs_are_multiplied_as_others(library, shape, turned, adds):
    width, functions = library
    rows, terms = shape[0], shape[2]
    columns = shape[1] * width
    a_bits, a = bf16(*((terms, rows) if turned else (rows, terms)))
    b_bits, b = bf16(terms, columns)
    pairs = np.full(((terms + 1) // 2, columns, 2), 0x7FC0, np.uint16)  # NaN behind the last term
    for half in range(2):
        pairs[: (terms + 1 - half) // 2, :, half] = b_bits[half::2]
    found = np.full((rows, columns), 1.5 if adds else np.nan, np.float32)
    functions.multiply_pairs(
        pointer(found), pointer(a_bits), *integers(*((1, rows) if turned else (terms, 1))),
        pointer(pairs), *integers(columns // 2, rows, columns, terms), ctypes.c_bool(adds),
    )  # fmt: skip
    wanted = (a.T if turned else a) @ b + 1.5 * adds
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("adds", (False, True))
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_of_int8_is_equal_bit_by_bit(library, shape, steps, adds):
    width, functions = library
    rows, terms = shape[0], shape[2]
    columns = shape[1] * width
    lines = STEPS[steps]
    a, b = (
        RNG.integers(-128, 128, size, np.int8)
        for size in (
            (rows, terms) if lines[0] == "rows" else (terms, rows),
            (terms, columns) if lines[1] == "terms" else (columns, terms),
        )
    )
    left = a if lines[0] == "rows" else a.T
    right = b if lines[1] == "terms" else b.T
    a_steps = (terms, 1) if lines[0] == "rows" else (1, rows)
    b_steps = (columns, 1) if lines[1] == "terms" else (1, terms)
    found = np.full((rows, columns), 2**31 - 1, np.int32)  # what is added to it may wrap
    functions.multiply_i8(
        pointer(found), pointer(a), *integers(*a_steps), pointer(b),
        *integers(*b_steps, rows, columns, terms), ctypes.c_bool(adds),
    )  # fmt: skip
    wanted = left.astype(np.int64) @ right.astype(np.int64) + (2**31 - 1) * adds
    np.testing.assert_array_equal(found, wanted.astype(np.int32))


@pytest.mark.parametrize("odd", (False, True))
@pytest.mark.parametrize("terms", (1, 2, 17, 32, 33, 64))
def test_terms_beside_others_may_be_the_last_of_memory(library, terms, odd):
    width, functions = library
    page = GuardedPage().bytes.view(np.uint16)[: mmap.PAGESIZE // 2]
    bits, b = bf16(width, terms)
    held = page[len(page) - 2 * terms * width :].reshape(width, 2 * terms)[:, int(odd) :: 2]
    held[:] = bits
    a_bits, a = bf16(3, terms)
    found = np.empty((3, width), np.float32)
    functions.multiply_bf16(
        pointer(found), pointer(a_bits), *integers(terms, 1), pointer(held),
        *integers(2, 2 * terms, 3, width, terms), ctypes.c_bool(False),
    )  # fmt: skip
    np.testing.assert_allclose(found, a @ b.T, rtol=1e-5, atol=1e-4)


def test_steps_of_any_size_and_odd_addresses(library):
    width, functions = library
    rows, terms, columns = 37, 45, 2 * width
    a_bits, a = bf16(rows, 3 * terms)
    b_bits, b = bf16(terms * columns * 2 + 3)
    right = b[3 : 3 + 2 * terms * columns : 2].reshape(columns, terms).T
    found = np.empty((rows, columns), np.float32)
    functions.multiply_bf16(
        pointer(found), pointer(a_bits), *integers(3 * terms, 3), pointer(b_bits[3:]),
        *integers(2, 2 * terms, rows, columns, terms), ctypes.c_bool(False),
    )  # fmt: skip
    np.testing.assert_allclose(found, a[:, ::3] @ right, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("adds", (False, True))
@pytest.mark.parametrize("turned", (False, True))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_of_f32_is_that_of_its_values(library, shape, turned, adds):
    width, functions = library
    rows, terms = shape[0], shape[2]
    columns = shape[1] * width
    a, b = (RNG.standard_normal(s).astype(np.float32) for s in ((rows, terms), (terms, columns)))
    held = np.ascontiguousarray(a.T) if turned else a
    found = np.full((rows, columns), 1.5 if adds else np.nan, np.float32)
    functions.multiply_f32(
        pointer(found), pointer(held), *integers(*((1, rows) if turned else (terms, 1))),
        pointer(b), *integers(rows, columns, terms), ctypes.c_bool(adds),
    )  # fmt: skip
    np.testing.assert_allclose(found, a.astype(np.float64) @ b + 1.5 * adds, rtol=1e-4, atol=1e-4)


def test_tiles_are_given_back(library):
    """Else their shapes would stand in the way of a library that has others."""
    width, functions = library
    (a, _), (b, _) = bf16(32, 32), bf16(32, width)
    found = np.empty((32, width), np.float32)
    functions.multiply_bf16(
        pointer(found), pointer(a), *integers(32, 1), pointer(b),
        *integers(width, 1, 32, width, 32), ctypes.c_bool(False),
    )  # fmt: skip
    assert functions.tiles_in_use() == 0


SPECIAL = (float("inf"), float("-inf"), float("nan"))


@pytest.mark.parametrize("store", ("store_operand", "store_pairs"))
def test_an_operand_is_rounded_to_the_nearest_and_to_even(
    library: tuple[int, ctypes.CDLL], store: str
) -> None:
    _, functions = library
    values = torch.tensor([1.0, 1.00390625, 1.01171875, -3e38, 3.4e38, 2e-38, 0.0, -0.0, *SPECIAL])
    values = torch.cat((values, torch.randn(53, generator=torch.Generator().manual_seed(0))))
    found = torch.empty(64, dtype=torch.bfloat16)
    functions[store](
        ctypes.c_void_p(found.data_ptr()), ctypes.c_void_p(values.data_ptr()), ctypes.c_longlong(64)
    )
    torch.testing.assert_close(found, values.bfloat16(), rtol=0, atol=0, equal_nan=True)


def exponentials(function: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, what a form of exp makes of them, and exact results, 0 if subnormal."""
    x = torch.cat(
        (torch.linspace(-87, 88, 16368), torch.tensor([0.0, -0.0, 89, -88, -200, *SPECIAL]))
    )
    x = torch.cat((x, torch.zeros(-len(x) % 16)))
    found = torch.empty_like(x)
    function(
        ctypes.c_void_p(found.data_ptr()), ctypes.c_void_p(x.data_ptr()), ctypes.c_longlong(len(x))
    )
    return x, found, torch.where(x < -87, 0.0, x.double().exp()).float()


def test_an_exponential_for_16_bits_is_exact_to_17(library: tuple[int, ctypes.CDLL]) -> None:
    x, found, exact = exponentials(library[1].exp_rounded)
    torch.testing.assert_close(found, exact, rtol=2**-17 + 1e-5, atol=0, equal_nan=True)
    assert (found[x == 0] == 1).all()


def test_an_exponential_relative_to_the_largest_is_never_subnormal(
    library: tuple[int, ctypes.CDLL],
) -> None:
    _, found, exact = exponentials(library[1].exp_flushed)
    torch.testing.assert_close(found, exact, rtol=2**-22, atol=0, equal_nan=True)
