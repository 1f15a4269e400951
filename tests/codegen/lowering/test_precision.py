"""Values that only ever reach memory rounded to 16 bits may be computed with less accuracy."""

from __future__ import annotations

import pytest

from fusec.codegen.lowering.precision import relative_to_maximum, rounded_to_16_bits
from fusec.ir.dtype import BF16, F32, DType
from fusec.ir.expr import Expr, Op
from fusec.ir.index import Axis, index
from fusec.ir.monoid import MAX, SUM
from fusec.ir.program import Program
from tests.codegen.programs import Builder, buffer, f32


def softmax_tail(*, keep_sum: bool) -> tuple[Program, dict[str, object]]:
    c = Axis("c", index(8))
    b = Builder("k", (), (c,))
    x = b.load_f32(buffer("x", BF16, 8), c)
    e = b.op("exp", x)
    total = b.reduce(SUM, (c,), e)
    ratio = b.op("div", e, total)
    b.put(buffer("y", BF16, 8), c, b.cast(ratio, BF16))
    if keep_sum:
        b.put(buffer("s", F32, 1), 0, total)
    return b.program(), {"x": x, "exp": e, "sum": total, "div": ratio}


def test_all_uses_end_in_a_16_bit_store() -> None:
    program, values = softmax_tail(keep_sum=False)
    assert rounded_to_16_bits(program) == set(values.values())


def test_full_precision_store_keeps_what_feeds_it_exact() -> None:
    program, values = softmax_tail(keep_sum=True)
    assert rounded_to_16_bits(program) == {values["div"]}


def test_compared_value_is_exact() -> None:
    c = Axis("c", index(8))
    b = Builder("k", (), (c,))
    x = b.load(buffer("x", F32, 8), c)
    e = b.op("exp", x)
    shown = b.select(b.op("gt", e, f32(1.0)), e, f32(0.0))
    b.put(buffer("y", BF16, 8), c, b.cast(shown, BF16))
    assert rounded_to_16_bits(b.program()) == {shown}


def test_error_is_followed_through_a_carry() -> None:
    c, k = Axis("c", index(8)), Axis("k", index(4))
    for out in (BF16, F32):
        b = Builder("k", (), (c,))
        acc = b.carry(f32(0.0), c)
        with b.loop(k, 4):
            e = b.op("exp", b.load(buffer("x", F32, 32), index(k) * 8 + c))
            b.update(acc, Op("add", (acc, e)))
        b.put(buffer("y", out, 8), c, b.cast(acc, BF16) if out is BF16 else acc)
        assert (e in rounded_to_16_bits(b.program())) == (out is BF16)


def test_weights_of_a_product_are_cheap_although_their_sum_is_kept() -> None:
    r, c = Axis("r", index(4)), Axis("c", index(8))
    for rounds in (True, False):
        b = Builder("k", (), (r, c))
        score = b.load(buffer("s", F32, 4, 8), index(r) * 8 + c)
        top = b.reduce(MAX, (c,), score)
        e = b.op("exp", b.op("sub", score, top))
        b.put(buffer("l", F32, 4), r, b.reduce(SUM, (c,), e))
        if rounds:
            b.put(buffer("w", BF16, 4, 8), index(r) * 8 + c, b.cast(e, BF16))
        assert (e in rounded_to_16_bits(b.program())) == rounds


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("read", ["summed", "masked and summed", "stored", "compared"])
def test_an_exponential_of_a_16_bit_score_that_is_only_summed_is_cheap(
    dtype: DType, read: str
) -> None:
    r, c = Axis("r", index(4)), Axis("c", index(8))
    b = Builder("k", (), (r, c))
    place = index(r) * 8 + c
    score: Expr = b.load(buffer("s", dtype, 4, 8), place)
    if dtype is BF16:
        score = b.cast(score, F32)
    e = b.op("exp", b.op("sub", score, b.reduce(MAX, (c,), score)))
    term: Expr = e
    if read == "masked and summed":
        term = b.select(b.op("gt", score, f32(0.0)), e, f32(0.0))
    b.put(buffer("l", F32, 4), r, b.reduce(SUM, (c,), term))
    if read == "stored":
        b.put(buffer("y", F32, 4, 8), place, b.op("mul", e, f32(2.0)))
    if read == "compared":
        b.put(buffer("y", F32, 4), r, b.reduce(MAX, (c,), e))
    cheap = dtype is BF16 and read.endswith("summed")
    assert (e in rounded_to_16_bits(b.program())) == cheap


def test_an_exponential_that_is_stored_exactly_is_exact_although_a_product_reads_it_too() -> None:
    r, c = Axis("r", index(4)), Axis("c", index(8))
    b = Builder("k", (), (r, c))
    score = b.load(buffer("s", F32, 4, 8), index(r) * 8 + c)
    e = b.op("exp", b.op("sub", score, b.reduce(MAX, (c,), score)))
    b.put(buffer("w", BF16, 4, 8), index(r) * 8 + c, b.cast(e, BF16))
    b.put(buffer("e", F32, 4, 8), index(r) * 8 + c, e)
    assert e not in rounded_to_16_bits(b.program())


def test_a_weight_of_a_product_is_exact_where_the_largest_is_kept() -> None:
    r, c = Axis("r", index(4)), Axis("c", index(8))
    for monoid in (MAX, SUM):
        b = Builder("k", (), (r, c))
        score = b.load(buffer("s", F32, 4, 8), index(r) * 8 + c)
        e = b.op("exp", b.op("sub", score, b.reduce(MAX, (c,), score)))
        b.put(buffer("w", BF16, 4, 8), index(r) * 8 + c, b.cast(e, BF16))
        kept = b.reduce(monoid, (c,), b.op("mul", e, f32(0.5)))
        b.put(buffer("l", F32, 4), r, kept)
        assert (e in rounded_to_16_bits(b.program())) == (monoid is SUM)


@pytest.mark.parametrize("beside_one", (True, False))
def test_an_erf_is_cheap_beside_one_and_exact_where_small_ones_count(beside_one: bool) -> None:
    """``bf16((erf(x) + 1) / x)`` and ``bf16(erf(x) / x)``."""
    c = Axis("c", index(8))
    b = Builder("k", (), (c,))
    x = b.load(buffer("x", F32, 8), c)
    erf = b.op("erf", x)
    above = b.op("add", erf, f32(1.0)) if beside_one else erf
    b.put(buffer("y", BF16, 8), c, b.cast(b.op("div", above, x), BF16))
    assert (erf in rounded_to_16_bits(b.program())) is beside_one


@pytest.mark.parametrize("base", ["running", "scaled", "another row's", "final"])
def test_terms_are_relative_to_a_maximum_only_while_it_runs(base: str) -> None:
    r, c, k = Axis("r", index(4)), Axis("c", index(8)), Axis("k", index(2))
    b = Builder("k", (), (r, c))
    top, total = b.carry(f32(float("-inf")), r), b.carry(f32(0.0), r)
    place = index(r) * 16 + index(k) * 8 + c
    with b.loop(k, 2):
        score = b.load(buffer("s", F32, 4, 16), place)
        b.update(top, Op("maximum", (top, b.reduce(MAX, (c,), score))))
        own = b.load(buffer("m", F32, 4), r) if base == "another row's" else top
        shown = b.op("mul", own, f32(0.5)) if base == "scaled" else own
        e = b.op("exp", b.op("sub", score, shown))
        b.update(total, Op("add", (total, b.reduce(SUM, (c,), e))))
    if base == "final":
        e = b.op("exp", b.op("sub", b.load(buffer("x", F32, 4), r), top))
    b.put(buffer("y", F32, 4), r, b.op("add", total, e) if base == "final" else total)
    assert (e in relative_to_maximum(b.program())) == (base in ("running", "scaled"))
