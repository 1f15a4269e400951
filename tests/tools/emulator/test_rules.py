"""Single instructions, each beside NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.tools.emulator.ptx import each_lane

I8, U8, I16, U16 = np.int8, np.uint8, np.int16, np.uint16
I32, U32, I64, U64 = np.int32, np.uint32, np.int64, np.uint64
F16, F32, F64, BOOL = np.float16, np.float32, np.float64, np.bool_


class Brain:
    """Stands for bf16, which NumPy has not: its bits are U16."""


BF16 = Brain


def sample(kind: Any, seed: int) -> np.ndarray:
    """Return 32 values of a type, the awkward ones among them."""
    random = np.random.default_rng(seed)
    if kind is BF16:
        return bits(random.normal(size=32).astype(F32) * 3)
    if kind is BOOL:
        return random.integers(0, 2, 32).astype(bool)
    if np.issubdtype(kind, np.floating):
        values = (random.normal(size=32) * 10.0 ** random.integers(-3, 3, 32)).astype(kind)
        values[:4] = [0.0, -0.0, 1.0, -2.5]
        return values
    limits = np.iinfo(kind)
    values = random.integers(limits.min, limits.max, 32, dtype=kind, endpoint=True)
    values[:5] = [0, 1, limits.max, limits.min, 7]
    return values


def bits(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()


def single(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).view(torch.bfloat16).float().numpy()


def in_halves(half: Any, f: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Return an operation on both halves of registers."""
    return lambda a, b: f(a.view(half), b.view(half)).view(U32)


Row = tuple[str, Any, tuple[Any, ...], Callable[..., np.ndarray]]

INTEGERS: list[Row] = [
    ("add.s32 {d}, {0}, {1};", I32, (I32, I32), lambda a, b: a + b),
    ("sub.s64 {d}, {0}, {1};", I64, (I64, I64), lambda a, b: a - b),
    ("add.s16 {d}, {0}, {1};", I16, (I16, I16), lambda a, b: a + b),
    *(
        (f"{name}.{kind} {{d}}, {{0}}, {{1}};", U32, (U32, U32), in_halves(half, f))
        for name, f in (
            ("add", np.add),
            ("sub", np.subtract),
            ("min", np.minimum),
            ("max", np.maximum),
        )
        for kind, half in (("s16x2", I16), ("u16x2", U16))
    ),
    ("mul.lo.s32 {d}, {0}, {1};", I32, (I32, I32), lambda a, b: a * b),
    ("mul.lo.s64 {d}, {0}, {1};", I64, (I64, I64), lambda a, b: a * b),
    ("mul.hi.u32 {d}, {0}, {1};", U32, (U32, U32), lambda a, b: high(a, b)),
    ("mul.hi.s32 {d}, {0}, {1};", I32, (I32, I32), lambda a, b: high(a, b)),
    ("mul.wide.u32 {d}, {0}, {1};", U64, (U32, U32), lambda a, b: a.astype(U64) * b.astype(U64)),
    ("mul.wide.s32 {d}, {0}, {1};", I64, (I32, I32), lambda a, b: a.astype(I64) * b.astype(I64)),
    ("mul.wide.s16 {d}, {0}, {1};", I32, (I16, I16), lambda a, b: a.astype(I32) * b.astype(I32)),
    ("mul.hi.s64 {d}, {0}, {1};", I64, (I64, I64), lambda a, b: high(a, b)),
    ("mad.lo.s32 {d}, {0}, {1}, {2};", I32, (I32, I32, I32), lambda a, b, c: a * b + c),
    (
        "mad.wide.u32 {d}, {0}, {1}, {2};",
        U64,
        (U32, U32, U64),
        lambda a, b, c: a.astype(U64) * b + c,
    ),
    ("div.s32 {d}, {0}, 7;", I32, (I32,), lambda a: np.trunc(a / 7).astype(I32)),
    ("rem.s32 {d}, {0}, 7;", I32, (I32,), lambda a: np.fmod(a, 7)),
    ("div.u32 {d}, {0}, 10;", U32, (U32,), lambda a: a // U32(10)),
    ("min.s32 {d}, {0}, {1};", I32, (I32, I32), np.minimum),
    ("max.u64 {d}, {0}, {1};", U64, (U64, U64), np.maximum),
    ("neg.s32 {d}, {0};", I32, (I32,), lambda a: -a),
    ("abs.s32 {d}, {0};", I32, (I32,), lambda a: np.abs(a)),
    ("and.b32 {d}, {0}, {1};", U32, (U32, U32), lambda a, b: a & b),
    ("xor.b64 {d}, {0}, {1};", U64, (U64, U64), lambda a, b: a ^ b),
    ("not.b16 {d}, {0};", U16, (U16,), lambda a: ~a),
    ("shl.b32 {d}, {0}, 5;", U32, (U32,), lambda a: a << U32(5)),
    ("shl.b32 {d}, {0}, 40;", U32, (U32,), lambda a: a * U32(0)),
    ("shr.u32 {d}, {0}, 3;", U32, (U32,), lambda a: a >> U32(3)),
    ("shr.s32 {d}, {0}, 3;", I32, (I32,), lambda a: a >> 3),
    ("shr.s32 {d}, {0}, 99;", I32, (I32,), lambda a: a >> 31),
    ("shf.l.wrap.b32 {d}, {0}, {1}, 5;", U32, (U32, U32), lambda a, b: b << U32(5) | a >> U32(27)),
    ("shf.r.wrap.b32 {d}, {0}, {1}, 5;", U32, (U32, U32), lambda a, b: b << U32(27) | a >> U32(5)),
    ("bfe.u32 {d}, {0}, 4, 7;", U32, (U32,), lambda a: a >> U32(4) & U32(127)),
    ("bfe.s32 {d}, {0}, 4, 7;", I32, (I32,), lambda a: a << 21 >> 25),
    (
        "bfi.b32 {d}, {0}, {1}, 8, 4;",
        U32,
        (U32, U32),
        lambda a, b: b & U32(0xFFFFF0FF) | (a & U32(15)) << U32(8),
    ),
    ("popc.b32 {d}, {0};", U32, (U32,), lambda a: np.array([int(x).bit_count() for x in a])),
    ("clz.b32 {d}, {0};", U32, (U32,), lambda a: np.array([32 - int(x).bit_length() for x in a])),
    ("brev.b32 {d}, {0};", U32, (U32,), lambda a: np.array([int(f"{x:032b}"[::-1], 2) for x in a])),
    ("prmt.b32 {d}, {0}, {1}, 0x5410U;", U32, (U32, U32), lambda a, b: a & 0xFFFF | b << U32(16)),
    ("prmt.b32 {d}, {0}, {1}, 0x0123;", U32, (U32, U32), lambda a, b: a.byteswap()),
    ("prmt.b32 {d}, {0}, 0, 0x8888;", U32, (U32,), lambda a: (a >> U32(7) & 1) * 0xFFFFFFFF),
    ("lop3.b32 {d}, {0}, {1}, {2}, 0xe8;", U32, (U32,) * 3, lambda a, b, c: a & b | a & c | b & c),
    ("selp.b32 {d}, {0}, {1}, {2};", U32, (U32, U32, BOOL), lambda a, b, c: np.where(c, a, b)),
    ("and.pred {d}, {0}, {1};", BOOL, (BOOL, BOOL), lambda a, b: a & b),
    ("xor.pred {d}, {0}, !{1};", BOOL, (BOOL, BOOL), lambda a, b: a ^ ~b),
    ("setp.lt.s32 {d}, {0}, {1};", BOOL, (I32, I32), lambda a, b: a < b),
    ("setp.lt.u32 {d}, {0}, {1};", BOOL, (U32, U32), lambda a, b: a < b),
    ("setp.hs.u16 {d}, {0}, {1};", BOOL, (U16, U16), lambda a, b: a >= b),
    ("setp.ge.and.s64 {d}, {0}, {1}, {2};", BOOL, (I64, I64, BOOL), lambda a, b, c: (a >= b) & c),
    ("mov.b32 {d}, {{%h20, %h21}};", U32, (U16, U16), lambda a, b: a | b.astype(U32) << U32(16)),
    ("mov.b64 {d}, {{%r20, %r21}};", U64, (U32, U32), lambda a, b: a | b.astype(U64) << U64(32)),
    ("mov.b32 {{_, {d}}}, {0};", U16, (U32,), lambda a: (a >> U32(16)).astype(U16)),
]


def high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the upper half of a product."""
    shift = 8 * a.dtype.itemsize
    products = [int(x) * int(y) >> shift for x, y in zip(a, b, strict=True)]
    return np.array(products).astype(a.dtype)


FLOATS: list[Row] = [
    ("add.f32 {d}, {0}, {1};", F32, (F32, F32), lambda a, b: a + b),
    ("sub.rn.f32 {d}, {0}, {1};", F32, (F32, F32), lambda a, b: a - b),
    ("mul.f32 {d}, {0}, {1};", F32, (F32, F32), lambda a, b: a * b),
    ("fma.rn.f32 {d}, {0}, {1}, {2};", F32, (F32,) * 3, lambda a, b, c: fused(a, b, c)),
    ("div.full.f32 {d}, {0}, {1};", F32, (F32, F32), lambda a, b: a / b),
    ("div.rn.f64 {d}, {0}, {1};", F64, (F64, F64), lambda a, b: a / b),
    ("add.f64 {d}, {0}, {1};", F64, (F64, F64), lambda a, b: a + b),
    ("neg.f32 {d}, {0};", F32, (F32,), lambda a: -a),
    ("abs.ftz.f32 {d}, {0};", F32, (F32,), np.abs),
    ("min.f32 {d}, {0}, {1};", F32, (F32, F32), np.fmin),
    ("max.NaN.f32 {d}, {0}, {1};", F32, (F32, F32), np.maximum),
    (
        "max.NaN.f32 {d}, {0}, {1}, {2};",
        F32,
        (F32, F32, F32),
        lambda a, b, c: np.maximum(np.maximum(a, b), c),
    ),
    ("copysign.f32 {d}, {0}, {1};", F32, (F32, F32), lambda a, b: np.copysign(b, a)),
    ("sqrt.rn.f32 {d}, {0};", F32, (F32,), np.sqrt),
    ("rcp.approx.ftz.f32 {d}, {0};", F32, (F32,), lambda a: 1 / a),
    ("rsqrt.approx.ftz.f32 {d}, {0};", F32, (F32,), lambda a: 1 / np.sqrt(a)),
    ("ex2.approx.ftz.f32 {d}, {0};", F32, (F32,), np.exp2),
    ("lg2.approx.f32 {d}, {0};", F32, (F32,), np.log2),
    ("tanh.approx.f32 {d}, {0};", F32, (F32,), np.tanh),
    ("sin.approx.f32 {d}, {0};", F32, (F32,), np.sin),
    ("cos.approx.f32 {d}, {0};", F32, (F32,), np.cos),
    ("add.sat.f32 {d}, {0}, {1};", F32, (F32, F32), lambda a, b: abs(np.clip(a + b, 0, 1))),
    ("add.f16 {d}, {0}, {1};", F16, (F16, F16), lambda a, b: a + b),
    ("mul.f16 {d}, {0}, {1};", F16, (F16, F16), lambda a, b: a * b),
    ("add.rn.f32.bf16 {d}, {0}, {1};", F32, (BF16, F32), lambda a, b: single(a) + b),
    ("sub.f32.f16 {d}, {0}, {1};", F32, (F16, F32), lambda a, b: a.astype(F32) - b),
    (
        "fma.rn.f32.bf16 {d}, {0}, {1}, {2};",
        F32,
        (BF16, BF16, F32),
        lambda a, b, c: fused(single(a), single(b), c),
    ),
    ("setp.neu.f32 {d}, {0}, {1};", BOOL, (F32, F32), lambda a, b: ~(a == b)),
    ("setp.gt.f64 {d}, {0}, {1};", BOOL, (F64, F64), lambda a, b: a > b),
    ("setp.nan.f32 {d}, {0}, {1};", BOOL, (F32, F32), lambda a, b: np.isnan(a) | np.isnan(b)),
    ("setp.num.f32 {d}, {0}, {1};", BOOL, (F32, F32), lambda a, b: ~np.isnan(a) & ~np.isnan(b)),
    ("cvt.rn.f32.s32 {d}, {0};", F32, (I32,), lambda a: a.astype(F32)),
    ("cvt.rn.f64.s64 {d}, {0};", F64, (I64,), lambda a: a.astype(F64)),
    ("cvt.rzi.s32.f32 {d}, {0};", I32, (F32,), lambda a: np.trunc(a).astype(I32)),
    ("cvt.rni.s32.f32 {d}, {0};", I32, (F32,), lambda a: np.rint(a).astype(I32)),
    ("cvt.rzi.s64.f64 {d}, {0};", I64, (F64,), lambda a: np.trunc(a).astype(I64)),
    ("cvt.rni.f32.f32 {d}, {0};", F32, (F32,), np.rint),
    ("cvt.rmi.ftz.f32.f32 {d}, {0};", F32, (F32,), np.floor),
    ("cvt.f64.f32 {d}, {0};", F64, (F32,), lambda a: a.astype(F64)),
    ("cvt.rn.f32.f64 {d}, {0};", F32, (F64,), lambda a: a.astype(F32)),
    ("cvt.rn.f16.f32 {d}, {0};", F16, (F32,), lambda a: a.astype(F16)),
    ("cvt.f32.f16 {d}, {0};", F32, (F16,), lambda a: a.astype(F32)),
    ("cvt.u16.u32 {d}, {0};", U16, (U32,), lambda a: a.astype(U16)),
    ("cvt.s64.s32 {d}, {0};", I64, (I32,), lambda a: a.astype(I64)),
    ("cvt.u64.u32 {d}, {0};", U64, (U32,), lambda a: a.astype(U64)),
    ("cvt.s32.s8 {d}, {0};", I32, (I16,), lambda a: a.astype(I8).astype(I32)),
    ("cvt.sat.s8.s32 {d}, {0};", I16, (I32,), lambda a: np.clip(a, -128, 127).astype(I16)),
    ("cvt.rn.bf16.f32 {d}, {0};", U16, (F32,), bits),
    ("cvt.f32.bf16 {d}, {0};", F32, (BF16,), single),
    (
        "cvt.rn.bf16x2.f32 {d}, {0}, {1};",
        U32,
        (F32, F32),
        lambda a, b: bits(a).astype(U32) << U32(16) | bits(b),
    ),
    ("fma.rn.bf16 {d}, {0}, {1}, {2};", U16, (BF16,) * 3, lambda a, b, c: brain_fma(a, b, c)),
    ("cvt.rna.tf32.f32 {d}, {0};", F32, (F32,), lambda a: tf32(a)),
]


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.longdouble) * b + c).astype(F32)


def brain_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    exact = single(a).astype(F64) * single(b) + single(c)
    return torch.from_numpy(exact).bfloat16().view(torch.uint16).numpy()


def tf32(a: np.ndarray) -> np.ndarray:
    return ((a.view(U32) + U32(0x1000)) & U32(0xFFFFE000)).view(F32)


@pytest.mark.parametrize("row", [*INTEGERS, *FLOATS], ids=lambda row: row[0].split()[0])
def test_an_instruction_computes_what_numpy_does(row: Row) -> None:
    text, result, kinds, meaning = row
    arguments = [sample(kind, seed) for seed, kind in enumerate(kinds)]
    with np.errstate(all="ignore"):
        expected = meaning(*arguments).astype(result)
    found = each_lane(text, result, *arguments)
    if result in (F32, F64, F16):
        epsilon = np.finfo(result).eps if "approx" in text or "full" in text else 0
        np.testing.assert_allclose(found, expected, rtol=4 * epsilon)
        assert (np.signbit(found) == np.signbit(expected))[~np.isnan(expected)].all()
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("opcode", "terms", "meaning"),
    [
        ("add.rn", 2, lambda a, b: a + b),
        ("sub", 2, lambda a, b: a - b),
        ("mul.ftz", 2, lambda a, b: a * b),
        ("fma.rn", 3, lambda a, b, c: fused(a, b, c)),
    ],
)
def test_pairs_of_f32_are_two_operations(
    opcode: str, terms: int, meaning: Callable[..., np.ndarray]
) -> None:
    pairs = [np.stack([sample(F32, 2 * n), sample(F32, 2 * n + 1)], 1) for n in range(terms)]
    names = ", ".join(f"{{{n}}}" for n in range(terms))
    found = each_lane(f"{opcode}.f32x2 {{d}}, {names};", U64, *(pair.view(U64) for pair in pairs))
    np.testing.assert_array_equal(found.view(F32).reshape(32, 2), meaning(*pairs))


def test_directed_roundings_bracket_the_exact_sum() -> None:
    a, b, c = (sample(F32, seed) for seed in range(3))
    exact = a.astype(np.longdouble) * b + c
    down, up, zero = (
        each_lane(f"fma.{mode}.f32 {{d}}, {{0}}, {{1}}, {{2}};", F32, a, b, c)
        for mode in ("rm", "rp", "rz")
    )
    assert (down <= exact).all() and (exact <= up).all()
    assert (np.nextafter(down, F32(np.inf)) >= up).all()
    np.testing.assert_array_equal(zero, np.where(exact > 0, down, up))


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("shfl.sync.bfly.b32 {d}, {0}, 4, 31, -1;", lambda lane: lane ^ 4),
        ("shfl.sync.idx.b32 {d}, {0}, 9, 31, -1;", lambda lane: 9 + 0 * lane),
        ("shfl.sync.up.b32 {d}, {0}, 3, 0, -1;", lambda lane: np.where(lane < 3, lane, lane - 3)),
        ("shfl.sync.down.b32 {d}, {0}, 3, 31, -1;", lambda lane: np.minimum(lane + 3, 31 + 0)),
        ("shfl.sync.bfly.b32 {d}, {0}, 1, 7199, -1;", lambda lane: lane ^ 1),
    ],
)
def test_lanes_exchange_values(text: str, source: Callable[[np.ndarray], np.ndarray]) -> None:
    a, lane = sample(U32, 0), np.arange(32)
    expected = a[source(lane)]
    if "down" in text:
        expected = np.where(lane + 3 < 32, a[np.minimum(lane + 3, 31)], a)
    np.testing.assert_array_equal(each_lane(text, U32, a), expected)


@pytest.mark.parametrize(
    ("text", "result", "kind", "meaning"),
    [
        ("redux.sync.add.s32 {d}, {0}, -1;", I32, I32, lambda a: a.sum(dtype=I32)),
        ("redux.sync.min.s32 {d}, {0}, -1;", I32, I32, np.min),
        ("redux.sync.max.u32 {d}, {0}, -1;", U32, U32, np.max),
        ("redux.sync.or.b32 {d}, {0}, -1;", U32, U32, np.bitwise_or.reduce),
        ("vote.sync.any.pred {d}, {0}, -1;", BOOL, BOOL, np.any),
        ("vote.sync.all.pred {d}, {0}, -1;", BOOL, BOOL, np.all),
        (
            "vote.sync.ballot.b32 {d}, {0}, -1;",
            U32,
            BOOL,
            lambda a: sum(1 << n for n, yes in enumerate(a) if yes),
        ),
    ],
)
def test_a_warp_agrees(text: str, result: Any, kind: Any, meaning: Any) -> None:
    a = sample(kind, 1)
    expected = np.full(32, meaning(a)).astype(result)
    np.testing.assert_array_equal(each_lane(text, result, a), expected)


@pytest.mark.parametrize("combined", (False, True))
def test_a_comparison_of_pairs_has_a_result_for_each_half(combined: bool) -> None:
    a, b, third = sample(U32, 0) & 0xBFFFBFFF, sample(U32, 1) & 0xBFFFBFFF, sample(BOOL, 2)
    a[:4] = b[:4]
    text = (
        "setp.le.and.bf16x2 %p1|%p2, {0}, {1}, {2};"
        if combined
        else ("setp.le.bf16x2 %p1|%p2, {0}, {1};")
    )
    low, high = (x.astype(U16) for x in (a & 0xFFFF, a >> 16))
    ends = [(x & 0xFFFF).astype(U16) for x in (b, b >> 16)]
    for place, (x, y) in enumerate(zip((low, high), ends, strict=True), 1):
        expected = (single(x) <= single(y)) & (third if combined else True)
        given = (a, b, third) if combined else (a, b)
        found = each_lane(f"{text} selp.u32 {{d}}, 1, 0, %p{place};", U32, *given)
        np.testing.assert_array_equal(found, expected.astype(U32))


def test_carries_make_a_sum_of_64_bits() -> None:
    a, b = sample(U64, 0), sample(U64, 1)
    split = "mov.b64 {{%r1, %r2}}, {0}; mov.b64 {{%r3, %r4}}, {1};"
    add = "add.cc.u32 %r5, %r1, %r3; addc.u32 %r6, %r2, %r4; mov.b64 {d}, {{%r5, %r6}};"
    np.testing.assert_array_equal(each_lane(split + add, U64, a, b), a + b)


def test_fp8_rounds_as_torch_does() -> None:
    a, b = sample(F32, 0), sample(F32, 1)
    for name, dtype in (("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2)):
        made = each_lane(f"cvt.rn.satfinite.{name}.f32 {{d}}, {{0}}, {{1}};", U16, a, b)
        limit = torch.finfo(dtype).max
        high, low = (torch.from_numpy(x).clamp(-limit, limit).to(dtype) for x in (a, b))
        expected = high.view(torch.uint8).int() << 8 | low.view(torch.uint8).int()
        np.testing.assert_array_equal(made, expected.numpy())
        back = each_lane(f"cvt.rn.f16x2.{name} {{d}}, {{0}};", U32, made)
        np.testing.assert_array_equal(
            (back & 0xFFFF).astype(U16).view(F16), low.to(torch.float16).numpy()
        )
