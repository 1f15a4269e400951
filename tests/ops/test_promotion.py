"""Type promotion, casts, and integer and boolean arithmetic against eager."""

from __future__ import annotations

import pytest
import torch

from tests.support import TRAINED, Cases, as_captured, in_both, values

in_inference, in_training = Cases(), Cases()

ALL_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
SIGNED_INTS = (torch.int64, torch.int32, torch.int16, torch.int8)
ALL_INTS = (*SIGNED_INTS, torch.uint8)

ARITHMETIC = {
    "add": torch.add,
    "mul": torch.mul,
    "true_div": lambda x, y: x / (y * y + 1),
    "maximum": torch.maximum,
    "eq": torch.eq,
    "lt": torch.lt,
    "where": lambda x, y: torch.where(x > y, x, y),
}


def one_of(dtype, *shape, seed=0):
    return values(*shape, dtype=dtype, seed=seed)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("left", ALL_DTYPES, ids=str)
@as_captured
def test_every_pair_of_dtypes_promotes_as_in_eager(left, check):
    x = one_of(left, 4, 9)
    others = [one_of(right, 4, 9, seed=1 + i) for i, right in enumerate(ALL_DTYPES)]

    def promote(x, *others):
        return [[op(x, y) for op in ARITHMETIC.values()] for y in others]

    check(promote, x, *others)


@as_captured
def test_zero_dimensional_tensors_do_not_widen_the_other_operand(check):
    rows = [one_of(dtype, 3, 7) for dtype in ALL_DTYPES]
    scalars = [one_of(d, seed=3) for d in (torch.float64, torch.float32, torch.int64, torch.bool)]

    def promote(rows, scalars):
        return [[r + s, s * r, torch.maximum(r, s)] for r in rows for s in scalars]

    check(promote, rows, scalars)


@in_inference
def python_scalars_promote_by_category_alone():
    rows = [one_of(dtype, 3, 7) for dtype in ALL_DTYPES]

    def promote(*rows):
        return [[r + 1, r * 1.5, r / 2, 2 - r.to(torch.float32), r == 1, r + True] for r in rows]

    return promote, *rows


@pytest.mark.parametrize("train", (False, True), ids=("forward", "training"))
@in_both
def test_mixed_floating_dtypes_match_eager(train, check):
    inputs = [one_of(d, 5, 9, seed=i) for i, d in enumerate(ALL_DTYPES[:4])]
    check(
        lambda a, b, c, d: (a * b, b * c, c + d, a * d + b, a + 2 * c.sigmoid()),
        *inputs,
        train=train,
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("source", ALL_DTYPES, ids=str)
@in_both
def test_casts_to_every_dtype_match_eager(source, check):
    if source.is_floating_point:
        # Halves and thirds on both sides of zero: casts truncate, toward zero.
        x = torch.tensor([-14.7, -3.5, -2.4, -1.0, -0.6, -0.0, 0.2, 0.5, 1.5, 2.5, 14.9] * 3)
        x = x.to(source)
    else:
        x = one_of(source, 33)
    # A negative value has no meaning as uint8 that C++ and CUDA agree on.
    targets = [d for d in ALL_DTYPES if d != torch.uint8]
    magnitude = x if source == torch.bool else x.abs()
    check(lambda x, m: ([x.to(d) for d in targets], m.to(torch.uint8)), x, magnitude)


@in_inference
def integers_wrap_as_in_eager_when_cast_to_narrower_ones():
    x = torch.tensor([300, -300, 70000, -70000, 2**31, 2**40 + 5, -1, 127, 128, 255, 256])
    return (lambda x: [x.to(d) for d in (*ALL_INTS, torch.bool)], x)


@in_inference
def large_integers_keep_all_their_bits():
    x = torch.tensor([2**53 + 1, -(2**53) - 1, 2**62, -(2**62), 2**31, 2**31 - 1])
    return (lambda x: (x + 1, x * 3, x - 2**40, x // 7, x > 2**53, x.to(torch.float64)), x)


@in_inference
def explicit_casts_round_and_are_not_elided():
    x = values(8, 65) * 3

    def rounds(x):
        low = x.to(torch.bfloat16)
        narrow = x.to(torch.float16).to(torch.float32)
        return low.to(torch.float32), narrow - x, low.float() == x, x.double().float(), x.int() * x

    return rounds, x


@in_training.each((torch.float16, torch.bfloat16))
def rounding_feeds_an_equality_as_in_eager(dtype):
    # Found in Inductor: the cast was elided, the equality failed, the gradient was NaN.
    return (lambda x: x.to(dtype).amin(0), values(9, 17))


@as_captured
def test_type_predicates_and_views_of_casts_match_eager(check):
    def convert(x, i):
        return x.type_as(i), i.type_as(x), x.half().t(), i.bool() | (x > 0), x.long().sum()

    check(convert, values(4, 9) * 4, values(4, 9, dtype=torch.int64))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", ALL_INTS, ids=str)
@in_both
def test_integer_arithmetic_matches_eager_on_negative_operands(dtype, check):
    low = 0 if dtype == torch.uint8 else -50
    x = values(9, 33, dtype=dtype, low=low, high=50)
    y = values(9, 33, dtype=dtype, low=1, high=9, seed=1)
    y = y if dtype == torch.uint8 else y * torch.where(values(9, 33, seed=2) > 0, 1, -1).to(dtype)

    def arithmetic(x, y):
        return {
            "add": x + y,
            "sub": x - y,
            "mul": x * y,
            "floor_divide": x // y,
            "trunc_divide": torch.div(x, y, rounding_mode="trunc"),
            "floor_by_scalar": x // 4,
            "true_divide": x / y,
            "remainder": x % y,
            "remainder_scalar": x % 5,
            "fmod": torch.fmod(x, y),
            "neg": -x,
            "abs": abs(x),
            "sign": torch.sign(x),
            "square": x**2,
            "cube": x**3,
            "maximum": torch.maximum(x, y),
            "clamp": x.clamp(2, 7),
            "comparison": (x < y, x >= 3, x == y),
            "truth": torch.logical_and(x, y),
            "sqrt": torch.sqrt(x.abs()),
            "exp": torch.exp(y),
            "relu": torch.relu(x),
        }

    check(arithmetic, x, y)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ALL_INTS, ids=str)
@in_both
def test_bits_and_shifts_match_eager(dtype, check):
    x = values(9, 17, dtype=dtype, low=0 if dtype == torch.uint8 else -50, high=60)
    y = values(9, 17, dtype=dtype, low=0, high=6, seed=1)

    def bits(x, y):
        return x & y, x | y, x ^ y, ~x, x << y, x >> y, x << 2, x >> 1, x & 3, (x & 1) == 0

    check(bits, x, y)


@in_inference
def bytes_shifted_by_their_width_and_more_are_zero():
    def shift(x, y):
        return x >> 8, x >> 9, x << 8, x >> 64, x >> y, x << y

    return (
        shift,
        torch.tensor([0, 255, 200, 3], dtype=torch.uint8),
        torch.tensor([7, 8, 9, 64]).byte(),
    )


@in_inference.each([1, 30])
def numbers_beyond_the_type_beside_them_compare_as_in_eager(times):
    def compare(x, y):
        return x > 2**40, x == 2**31, x < -(2**35), y > 2**63, y >= 2**63 - 1

    x = torch.tensor([1, -1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    y = torch.tensor([1, -1, 2**63 - 1, -(2**63)])
    return compare, x.repeat(times), y.repeat(times)


@in_inference
def integer_overflow_wraps_around_as_in_eager():
    x = torch.tensor([250, 255, 3, 128], dtype=torch.uint8)
    i = torch.tensor([2**31 - 1, -(2**31), 5, -7], dtype=torch.int32)
    return (lambda x, i: (x + 10, x * 2, x - 200, i + 1, i - 1, i * 2, -x), x, i)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("exponent", range(8))
@in_both
def test_integer_powers_match_eager(exponent, check):
    x = values(5, 9, dtype=torch.int64, low=-4, high=5)
    check(
        lambda x, f, t: (x**exponent, f**exponent, f**-exponent, torch.pow(exponent, t), x**t),
        x,
        values(5, 9),
        values(5, 9, dtype=torch.int64, low=0, high=6, seed=1),
    )


@in_training
def integer_powers_have_eager_gradients_at_zero():
    x = torch.tensor([0.0, -0.0, 1.0, -2.0, 0.5])
    return (lambda x: (x**0, x**1, x**2, x**3, x**4), x)


@as_captured
def test_boolean_algebra_matches_eager(check):
    a, b = (values(7, 33, dtype=torch.bool, seed=s) for s in (0, 1))

    def algebra(a, b):
        return (
            a & b,
            a | b,
            a ^ b,
            ~a,
            a == b,
            a != b,
            a + b,
            a * b,
            a > b,
            a <= b,
            torch.logical_xor(a, b),
            torch.where(a, 1.0, 0.0),
            torch.where(b, 2, 3),
            a.int() + b,
        )

    check(algebra, a, b)


@as_captured
def test_where_promotes_and_broadcasts_its_branches(check):
    c = values(4, 1, dtype=torch.bool)
    x, i = values(4, 9), values(9, dtype=torch.int64)

    def choose(c, x, i):
        return (
            torch.where(c, x, i),
            torch.where(c, x, 0.0),
            torch.where(c, 1, i),
            torch.where(c, x.half(), x),
            torch.where(c, -torch.inf, x),
        )

    check(choose, c, x, i)


@in_training
def gradients_flow_through_where_with_a_nan_in_the_branch_not_taken():
    x = torch.tensor([-1.0, 0.0, 1.0, 4.0])
    return (lambda x: torch.where(x > 0, torch.sqrt(x), x * 2), x)


@in_training.each((torch.float16, torch.bfloat16))
def half_precision_chain_is_no_worse_than_eager(dtype):
    def chain(x, y):
        h = (x + y) * 0.125
        return h.sigmoid() * h + y, torch.tanh(h) - h * 0.5

    return chain, values(33, 65, dtype=dtype), values(33, 65, dtype=dtype, seed=1)


def test_cases_match_eager():
    in_inference.check()


@TRAINED
def test_cases_match_eager_with_their_gradients(train):
    in_training.check(train=train)
