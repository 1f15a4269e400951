"""Pointwise operations against eager: arithmetic, activations, special values, layouts, sizes.

Operations of one family share a compiled function that returns a dictionary, so that a failure
names the operation and a family costs one compile. Type promotion and casts: test_promotion.py.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from tests.support import (
    FLOATS,
    LAYOUTS,
    TRAINED,
    Cases,
    as_captured,
    check,
    in_both,
    values,
    with_layout,
)

in_inference, in_training = Cases(), Cases()

ANY = {
    "abs": torch.abs,
    "neg": torch.neg,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "atan": torch.atan,
    "asinh": torch.asinh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "square": torch.square,
    "pow2": lambda x: x**2,
    "pow3": lambda x: x**3,
    "add_scalar": lambda x: x + 1.5,
    "rsub": lambda x: 2 - x,
    "scaled": lambda x: (x * 0.5 + 1.0) / 3,
    "over_scalar": lambda x: x / 7,
    "scalar_over": lambda x: 1.0 / (x.abs() + 1.0),
}
POSITIVE = {
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "pow_half": lambda x: x**0.5,
    "pow_minus_half": lambda x: x**-0.5,
    "pow_minus_two": lambda x: x**-2,
    "pow_float": lambda x: x**2.7,
    "two_to_the": lambda x: 2**x,
}
UNIT = {
    "asin": torch.asin,
    "acos": torch.acos,
    "atanh": torch.atanh,
    "tan": torch.tan,
    "logit": torch.logit,
}
ROUNDING = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "frac": torch.frac,
    "sign": torch.sign,
    "sgn": torch.sgn,
    "signbit": torch.signbit,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "isfinite": torch.isfinite,
    "logical_not": torch.logical_not,
    "nan_to_num": lambda x: torch.nan_to_num(x, nan=2.0, posinf=3.0, neginf=-4.0),
    "positive": torch.positive,
}
ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "softplus_threshold": lambda x: F.softplus(x, beta=2.0, threshold=1.0),
    "elu": lambda x: F.elu(x, 1.3),
    "celu": lambda x: F.celu(x, 0.7),
    "selu": F.selu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 0.2, -1.0),
    "glu": lambda x: F.glu(x, dim=-1),
    "new_gelu": lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x.pow(3)))),
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "add_alpha": lambda x, y: torch.add(x, y, alpha=0.25),
    "sub_alpha": lambda x, y: torch.sub(x, y, alpha=3),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "copysign": torch.copysign,
    "logaddexp": torch.logaddexp,
    "pow": lambda x, y: torch.pow(x.abs() + 0.5, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y.abs() + 1, value=0.5),
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, -1.0),
    "clamp_tensors": lambda x, y: torch.clamp(x, y - 1, y + 1),
    "dist": lambda x, y: (x - y) ** 2,
}
REMAINDERS = {
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "floor_divide": torch.floor_divide,
    "div_floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "remainder_scalar": lambda x, y: x % 0.75,
    "fmod_scalar": lambda x, y: torch.fmod(x, -0.75),
}
COMPARISONS = {
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "gt_scalar": lambda x, y: x > 0.5,
    "ne_scalar": lambda x, y: x != 0,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "heaviside": torch.heaviside,
    "isclose": torch.isclose,
}
CLAMPS = {
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_min": lambda x: x.clamp(min=0.1),
    "clamp_max": lambda x: x.clamp(max=0.1),
    "clip": lambda x: torch.clip(x, 0.0, 1.0),
    "clamp_empty": lambda x: x.clamp(1.0, -1.0),
}
# Rare operations: lowered or left to eager, they have to be right.
RARE = {
    "lgamma": torch.lgamma,
    "digamma": torch.digamma,
    "erfinv": lambda x: torch.erfinv(torch.tanh(x) * 0.9),
    "i0": torch.i0,
    "sinc": torch.sinc,
    "acosh": lambda x: torch.acosh(x.abs() + 1.5),
    "xlogy": lambda x: torch.xlogy(x, x.abs() + 0.5),
    "rad2deg": torch.rad2deg,
    "bitwise": lambda x: (x > 0) & ~(x > 1) | (x < -1),
}

DOMAINS = {
    "any": (ANY, None, None),
    "positive": (POSITIVE, 0.05, 4.0),
    "unit": (UNIT, 0.02, 0.95),
    "rounding": (ROUNDING, -5.0, 5.0),
    "activations": (ACTIVATIONS, -6.0, 6.0),
    "clamps": (CLAMPS, -2.0, 2.0),
}


def apply_all(table):
    """One function that applies every operation of a table to the same arguments."""

    def apply(*args):
        return {name: op(*args) for name, op in table.items()}

    return apply


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("family", DOMAINS)
@as_captured
def test_unary_family_matches_eager(family, dtype, check):
    table, low, high = DOMAINS[family]
    check(apply_all(table), values(7, 34, dtype=dtype, low=low, high=high), left=())


@pytest.mark.sampled(17)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("family", ("any", "positive", "unit", "activations", "clamps"))
@in_both
def test_unary_family_has_eager_gradients(family, dtype, check):
    table, low, high = DOMAINS[family]
    x = values(5, 34, dtype=dtype, low=low, high=high)
    check(apply_all(table), x, train=True, left=())


@as_captured
def test_rare_unary_operations_match_eager_wherever_they_run(check):
    check(apply_all(RARE), values(5, 33))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@as_captured
def test_binary_family_matches_eager(dtype, check):
    check(apply_all(BINARY), values(9, 33, dtype=dtype), values(9, 33, dtype=dtype, seed=1))


@pytest.mark.sampled(13)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.float16), ids=str)
@in_both
def test_binary_family_has_eager_gradients(dtype, check):
    x, y = values(4, 17, dtype=dtype), values(4, 17, dtype=dtype, seed=1)
    check(apply_all(BINARY), x, y, train=True, left=())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@as_captured
def test_comparisons_match_eager_where_values_tie(dtype, check):
    x = values(8, 33, dtype=torch.int64, low=-2, high=3).to(dtype)
    y = values(8, 33, dtype=torch.int64, low=-2, high=3, seed=1).to(dtype)
    check(apply_all(COMPARISONS), x, y, left=())


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
@in_both
def test_float_remainders_have_eager_signs(dtype, check):
    # Quarters divide exactly, so that no rounding moves a quotient across an integer.
    x = values(6, 33, dtype=torch.int64, low=-40, high=40).to(dtype) / 4
    y = values(6, 33, dtype=torch.int64, low=1, high=9, seed=1).to(dtype) / 4
    signs = torch.where(values(6, 33, dtype=torch.bool, seed=2), 1, -1).to(dtype)
    check(apply_all(REMAINDERS), x, y * signs, left=())


SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 60.0, -60.0]
# Left out: where eager's own kernels disagree with each other or with mathematics (fp32
# `(-inf) ** 0.5` is NaN, fp16 infinity; `gelu(inf)` is NaN on CPUs).
UNSETTLED = ("pow_half", "pow_minus_half", "gelu", "glu")
SPECIAL_TABLE = {**ANY, **POSITIVE, **UNIT, **ROUNDING, **CLAMPS, **ACTIVATIONS}
SPECIAL_TABLE = {name: op for name, op in SPECIAL_TABLE.items() if name not in UNSETTLED}


# Compiled, they are those of test_special_values.py.
@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@as_captured
def test_special_values_pass_through_unary_operations_as_in_eager(dtype, check):
    check(apply_all(SPECIAL_TABLE), torch.tensor(SPECIAL * 3, dtype=dtype))


@as_captured
def test_special_values_pass_through_binary_operations_as_in_eager(check):
    table = {**BINARY, **COMPARISONS}
    row = torch.tensor(SPECIAL)
    check(apply_all(table), row[:, None].expand(11, 11).clone(), row.expand(11, 11).clone())


@as_captured
def test_denormal_and_largest_values_survive(check):
    info = torch.finfo(torch.float32)
    x = torch.tensor([info.max, -info.max, info.tiny, info.smallest_normal / 4, info.eps] * 4)
    check(lambda x: (x * 0.5, x + x, -x, x * x, x.abs().sqrt(), x / 3), x)


@pytest.mark.parametrize("layout", LAYOUTS)
@as_captured
def test_strided_operand_gives_eager_values_and_strides(layout, check):
    x = with_layout(values(6, 10, 14), layout)
    y = values(6, 10, 14, seed=1)
    check(lambda x, y: (x * 2 + y, torch.exp(x), F.relu(x) - 1, y / (x.abs() + 1)), x, y)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@in_both
def test_two_operands_of_one_layout_keep_it_as_eager_does(layout, check):
    x, y = (with_layout(values(4, 6, 8, seed=s), layout) for s in (0, 1))
    check(lambda x, y: (x + y, torch.where(x > 0, x, y), torch.tanh(x)), x, y, train=True)


@pytest.mark.slow
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int64), ids=str)
def test_every_pair_of_layouts_matches_eager(left, right, dtype):
    x = with_layout(values(4, 6, 8, dtype=dtype), left)
    y = with_layout(values(4, 6, 8, dtype=dtype, seed=1), right)
    with FakeTensorMode() as mode:
        traced = mode.from_tensor(x) + mode.from_tensor(y)
    as_eager = traced.stride() == (x + y).stride()  # not for some pairs of 16-bit floats

    def fn(x, y):
        made = x + y, x * 2 - y, torch.maximum(x, y)
        return made if as_eager else [value.contiguous() for value in made]

    check(fn, x, y)


@in_training
def channels_last_images_stay_channels_last():
    x, y = (with_layout(values(2, 5, 4, 6, seed=s), "channels_last") for s in (0, 1))
    bias = values(1, 5, 1, 1, seed=2)
    return (lambda x, y, b: (F.relu(x + b) * y, x.sigmoid(), x * 2), x, y, bias)


BROADCASTS = [
    ((3, 1, 5), (1, 4, 5)),
    ((4, 5), (5,)),
    ((5,), (4, 5)),
    ((3, 4, 1), (3, 1, 6)),
    ((2, 1), (1, 1)),
    ((), (3, 4)),
    ((1,), (7,)),
    ((2, 3, 4, 5), (3, 1, 5)),
    ((1, 1, 8), (6, 1, 1)),
]


@as_captured
def test_broadcasting_shapes_match_eager(check):
    tensors = [values(*shape, seed=i) for i, pair in enumerate(BROADCASTS) for shape in pair]

    def pairs(*args):
        return [torch.relu(a * 2 + b) - b for a, b in zip(args[::2], args[1::2], strict=True)]

    check(pairs, *tensors)


@in_training
def broadcast_gradients_are_summed_over_the_broadcast_axes():
    tensors = [values(*shape, seed=i) for i, pair in enumerate(BROADCASTS) for shape in pair]
    return (
        lambda *args: [torch.tanh(a) * b for a, b in zip(args[::2], args[1::2], strict=True)],
        *tensors,
    )


SIZES = ((), (1,), (1, 1), (7,), (17,), (31,), (33,), (100,), (1000,), (4097,), (3, 1, 5), (1, 129))


@in_inference
def odd_sizes_are_computed_to_the_last_element():
    tensors = [values(*shape, seed=i) for i, shape in enumerate(SIZES)]
    return (lambda *xs: [F.gelu(x) * 2 + x for x in xs], *tensors)


@in_inference.each((torch.float16, torch.bfloat16, torch.float64))
def odd_sizes_of_other_dtypes_are_computed_to_the_last_element(dtype):
    tensors = [values(n, dtype=dtype, seed=n) for n in (1, 7, 33, 1000, 4097)]
    return (lambda *xs: [F.silu(x) + 1 for x in xs], *tensors)


@in_training
def tensors_without_elements_pass_through():
    tensors = [values(*shape) for shape in ((0,), (0, 5), (3, 0, 4))] + [values(3)]
    return (lambda a, b, c, d: (a.exp(), b * 2 + 1, c + c, d * 2), *tensors)


@in_inference
def a_large_tensor_is_computed_by_several_threads_alike():
    return (lambda x, y: F.relu(x) * 0.5 + y.sigmoid(), values(513, 1025), values(1025, seed=1))


def test_a_chain_of_eighty_operations_compiles_and_matches():
    def chain(x):
        for i in range(40):
            x = torch.sin(x) * (1 + i / 40) + 0.1
        return x

    check(chain, values(5, 33), tol=1e-4)


@in_inference
def one_input_feeds_many_outputs_of_other_shapes_and_dtypes():
    def many(x, row):
        y = x * 2
        return y, y + row, y.to(torch.float64), (y > 0), y.to(torch.int32), row * 3, y[0] * row

    return many, values(6, 9), values(9, seed=1)


@in_training
def the_same_expression_twice_and_unused_results_do_no_harm():
    def twice(x):
        unused = torch.exp(x * 1000)
        _ = unused + 1
        a, b = torch.tanh(x * 2), torch.tanh(x * 2)
        return a + b, a * b

    return twice, values(4, 8)


@in_inference
def constants_of_the_closure_are_used():
    table = values(8, seed=5)
    return (lambda x: (x + table) * torch.tensor(2.5) + torch.tensor([1.0] * 8), values(4, 8))


@TRAINED
def test_pointwise_chain_takes_dynamic_shapes(train):
    check(
        lambda x, y: F.gelu(x + y) * x.shape[0] + y.shape[-1],
        values(5, 12),
        values(12, seed=1),
        dynamic=True,
        train=train,
    )


def test_autocast_region_computes_in_half_precision_as_eager():
    def block(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = x @ w
            return F.gelu(h), h + x.bfloat16()

    check(block, values(6, 16), values(16, 16, seed=1))


@in_inference.each((4, 64))
def relu_keeps_the_sign_of_zero(size):
    return (lambda x: 1 / x.relu(), torch.full((size,), -0.0))


def test_cases_match_eager():
    in_inference.check()


@TRAINED
def test_cases_match_eager_with_their_gradients(train):
    in_training.check(train=train)
