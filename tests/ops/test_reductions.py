"""Reductions against eager: every kind over sizes, axes, dtypes, layouts, ties and NaN."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.support import (
    BACKEND,
    FLOATS,
    LAYOUTS,
    TORCH,
    TRAINED,
    Cases,
    as_captured,
    check,
    check_all,
    compile_with,
    externs,
    in_both,
    values,
    with_layout,
)

in_inference, in_training = Cases(), Cases()

# Variances of one value are meant.
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom")

# name -> f(x, dim, keepdim), for one axis or several
OVER_AXES = {
    "sum": lambda x, d, k: x.sum(d, keepdim=k),
    "mean": lambda x, d, k: x.mean(d, keepdim=k),
    "amax": lambda x, d, k: x.amax(d, keepdim=k),
    "amin": lambda x, d, k: x.amin(d, keepdim=k),
    "var": lambda x, d, k: x.var(d, keepdim=k),
    "std": lambda x, d, k: x.std(d, correction=0, keepdim=k),
    "var_mean": lambda x, d, k: torch.var_mean(x, d, correction=2, keepdim=k),
    "std_mean": lambda x, d, k: torch.std_mean(x, d, keepdim=k),
    "logsumexp": lambda x, d, k: torch.logsumexp(x, d, keepdim=k),
    "norm2": lambda x, d, k: torch.linalg.vector_norm(x, 2, d, keepdim=k),
    "norm1": lambda x, d, k: torch.linalg.vector_norm(x, 1, d, keepdim=k),
    "norm3": lambda x, d, k: torch.linalg.vector_norm(x, 3, d, keepdim=k),
    "norm_inf": lambda x, d, k: torch.linalg.vector_norm(x, math.inf, d, keepdim=k),
    "norm_minus_inf": lambda x, d, k: torch.linalg.vector_norm(x, -math.inf, d, keepdim=k),
    "nansum": lambda x, d, k: x.nansum(d, keepdim=k),
    "scaled": lambda x, d, k: (x * 2 + 1).relu().sum(d, keepdim=k) * 0.5,
}
COUNTS = {
    "any": lambda x, d, k: (x > 1).any(d, keepdim=k),
    "all": lambda x, d, k: (x > -2).all(d, keepdim=k),
    "any_value": lambda x, d, k: x.any(d, keepdim=k),
    "count_nonzero": lambda x, d, k: torch.count_nonzero(x > 0, d),
    "norm0": lambda x, d, k: torch.linalg.vector_norm(x.relu(), 0, d, keepdim=k),
}
OVER_ONE_AXIS = {
    "prod": lambda x, d, k: (x * 0.3 + 1).prod(d, keepdim=k),
    "argmax": lambda x, d, k: x.argmax(d, keepdim=k),
    "argmin": lambda x, d, k: x.argmin(d, keepdim=k),
    "max": lambda x, d, k: x.max(d, keepdim=k),
    "min": lambda x, d, k: x.min(d, keepdim=k),
    "aminmax": lambda x, d, k: torch.aminmax(x, dim=d, keepdim=k),
    "softmax": lambda x, d, k: x.softmax(d),
    "log_softmax": lambda x, d, k: x.log_softmax(d),
    "softmin": lambda x, d, k: F.softmin(x, d),
    "cumsum": lambda x, d, k: x.cumsum(d),
    "cumprod": lambda x, d, k: (x * 0.1 + 1).cumprod(d),
    "normalize": lambda x, d, k: F.normalize(x, dim=d),
}
SCANS = {"cumsum.default", "cumprod.default"}
EVERYTHING = {
    "sum": torch.sum,
    "mean": torch.mean,
    "var": torch.var,
    "std": torch.std,
    "max": torch.max,
    "min": torch.min,
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "norm": torch.linalg.vector_norm,
    "any": torch.any,
    "all": torch.all,
    "prod": lambda x: (x * 0.02 + 1).prod(),
    "count": lambda x: torch.count_nonzero(x > 0),
}

# shape and axes
AXES = [
    ((5, 33), 1),
    ((5, 33), 0),
    ((3, 7, 17), (0, 2)),
    ((3, 7, 17), (-1, -2)),
    ((3, 7, 17), -2),
    ((2, 3, 5, 31), (0, 2, 3)),
    ((2, 3, 5, 31), (1,)),
    ((4, 1, 6), 1),
    ((1, 9), 0),
    ((4, 1000), -1),
    ((100, 7), 0),
    ((2, 4097), 1),
]


def over_axes(tables, dim, keepdim):
    """One function with every reduction of the tables that can take these axes."""
    several = isinstance(dim, tuple) and len(dim) > 1
    axis = dim[0] if isinstance(dim, tuple) and not several else dim
    tables = [t for t in tables if not (several and t is OVER_ONE_AXIS)]

    def reduce(x):
        return {name: op(x, axis, keepdim) for table in tables for name, op in table.items()}

    return reduce


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("shape", "dim"), AXES, ids=str)
@as_captured
def test_reductions_over_axes_match_eager(shape, dim, check):
    keepdim = len(shape) % 2 == 1
    reduce = over_axes((OVER_AXES, COUNTS, OVER_ONE_AXIS), dim, keepdim)
    check(reduce, values(*shape), left=SCANS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("shape", "dim"), AXES[::3], ids=str)
@as_captured
def test_reductions_have_eager_gradients(shape, dim, check):
    check(over_axes((OVER_AXES,), dim, False), values(*shape), train=True, left=())


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dim", (0, -1))
@in_both
def test_reductions_along_one_axis_have_eager_gradients(dim, check):
    without = () if TORCH >= (2, 13) else ("aminmax",)  # no gradient in torch 2.11
    table = {name: op for name, op in OVER_ONE_AXIS.items() if name not in without}
    check(over_axes((table,), dim, True), values(6, 17), train=True)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@in_both
def test_reductions_of_each_floating_dtype_match_eager(dtype, check):
    check(over_axes((OVER_AXES, COUNTS, OVER_ONE_AXIS), -1, True), values(6, 129, dtype=dtype))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64), ids=str)
@as_captured
def test_reductions_of_other_dtypes_have_eager_gradients(dtype, check):
    check(over_axes((OVER_AXES,), (0, 2), True), values(3, 5, 33, dtype=dtype), train=True)


@pytest.mark.slow
@pytest.mark.parametrize("keepdim", (False, True))
@pytest.mark.parametrize(("shape", "dim"), AXES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("train", (False, True), ids=("forward", "training"))
def test_every_reduction_over_dtypes_axes_and_keepdim_matches_eager(
    shape, dim, dtype, keepdim, train
):
    tables = (OVER_AXES,) if train else (OVER_AXES, COUNTS, OVER_ONE_AXIS)
    check(over_axes(tables, dim, keepdim), values(*shape, dtype=dtype), train=train)


SIZES = (1, 7, 17, 31, 33, 100, 1000, 4097)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", SIZES)
@in_both
def test_full_reductions_of_odd_sizes_match_eager(n, check):
    check(lambda x: {name: op(x) for name, op in EVERYTHING.items()}, values(n, seed=n))


@pytest.mark.parametrize("shape", ((3, 5, 7), (64, 65), (1, 1), ()), ids=str)
@as_captured
def test_full_reductions_of_several_axes_match_eager(shape, check):
    check(lambda x: {name: op(x) for name, op in EVERYTHING.items()}, values(*shape))


@pytest.mark.parametrize("shape", ((33,), (6, 65)), ids=str)
@as_captured
def test_full_reductions_have_eager_gradients(shape, check):
    table = {k: op for k, op in EVERYTHING.items() if k in ("sum", "mean", "var", "norm", "prod")}
    check(lambda x: {name: op(x * 2) for name, op in table.items()}, values(*shape), train=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("n", SIZES[1:])
def test_row_softmax_and_statistics_of_odd_sizes_match_eager(n):
    def rows(x):
        return x.softmax(-1), torch.var_mean(x, -1), x.amax(-1), x.argmax(-1), (x * x).sum(-1)

    check(rows, values(5, n, seed=n))
    check(rows, values(n, 3, seed=n).t())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", LAYOUTS)
@as_captured
def test_reductions_of_strided_tensors_match_eager(layout, check):
    def reduce(x):
        return x.sum(-1), x.mean(0), x.amax(1), x.softmax(-1), x.argmax(-1), x.sum(), x.var((0, 2))

    check(reduce, with_layout(values(5, 6, 17), layout), train=True)


@in_training
def reductions_of_channels_last_images_match_eager():
    x = with_layout(values(2, 5, 4, 6), "channels_last")
    return (lambda x: (x.mean((2, 3)), x.sum(1), x.softmax(1), torch.var_mean(x, (0, 2, 3))), x)


INTEGER_REDUCTIONS = {
    "sum": lambda x, d: x.sum(d),
    "prod": lambda x, d: x.prod(d),
    "amax": lambda x, d: x.amax(d),
    "amin": lambda x, d: x.amin(d),
    "argmax": lambda x, d: x.argmax(d),
    "argmin": lambda x, d: x.argmin(d),
    "max": lambda x, d: x.max(d),
    "min": lambda x, d: x.min(d),
    "any": lambda x, d: x.any(d),
    "all": lambda x, d: x.all(d),
    "cumsum": lambda x, d: x.cumsum(d),
    "count_nonzero": lambda x, d: torch.count_nonzero(x, d),
    "mean": lambda x, d: x.mean(d, dtype=torch.float32),
    "sum_as_float": lambda x, d: x.sum(d, dtype=torch.float64),
    "sum_as_int32": lambda x, d: x.sum(d, dtype=torch.int32),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dim", (0, 1))
@pytest.mark.parametrize("dtype", (torch.int64, torch.int32, torch.uint8, torch.int8), ids=str)
@in_both
def test_integer_reductions_match_eager(dtype, dim, check):
    x = values(6, 17, dtype=dtype, low=0 if dtype == torch.uint8 else -3, high=4)
    check(lambda x: {name: op(x, dim) for name, op in INTEGER_REDUCTIONS.items()}, x)


@as_captured
def test_boolean_reductions_match_eager(check):
    def reduce(x):
        return (
            x.any(),
            x.all(),
            x.any(dim=()),
            x.all(dim=[]),
            x.any(1),
            x.all(0),
            x.sum(),
            x.sum(1),
            x.cumsum(1),
            x.amax(1),
            x.amin(0),
            x.max(1),
            x.min(0),
            x.int().argmax(1),
            x.float().mean(0),
            x.prod(1),
            torch.count_nonzero(x),
        )

    check(reduce, values(6, 17, dtype=torch.bool))


@as_captured
def test_reductions_may_change_the_dtype(check):
    def reduce(x, h):
        return (
            x.sum(1, dtype=torch.float64),
            h.sum(0, dtype=torch.float32),
            h.mean(dtype=x.dtype),
            h.softmax(-1, dtype=torch.float32),
            h.cumsum(0, dtype=torch.float32),
            x.log_softmax(0, dtype=torch.float64),
            torch.linalg.vector_norm(h, dtype=x.dtype),
        )

    check(reduce, values(6, 17), values(6, 17, dtype=torch.float16))


@in_inference
def positions_of_ties_are_the_first_as_in_eager():
    x = values(9, 33, dtype=torch.int64, low=-1, high=2).float()

    def positions(x):
        return (
            x.argmax(1),
            x.argmin(1),
            x.argmax(0),
            x.argmin(0),
            x.argmax(),
            x.argmin(),
            x.max(1),
            x.min(0),
            x.long().argmax(1),
            x.long().min(1),
        )

    return positions, x


@in_training
def gradient_of_amax_is_shared_between_ties_and_that_of_max_is_not():
    x = values(5, 17, dtype=torch.int64, low=-1, high=2).float()
    return (lambda x: (x.amax(1), x.amin(0), x.max(1).values, x.min(0).values, x.amax()), x)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("special", (math.nan, math.inf, -math.inf), ids=str)
@in_both
def test_special_values_pass_through_reductions_as_in_eager(special, check):
    x = values(6, 33)
    x[0, 4] = x[1, 0] = x[1, 32] = x[2, 17] = special
    x[3] = special
    positions = over_axes((OVER_ONE_AXIS,), 1, False)
    # Eager's mean beside a variance is Welford's, which is NaN where the mean is infinite.
    table = {name: op for name, op in OVER_AXES.items() if name not in ("var_mean", "std_mean")}
    check(
        lambda x: (
            over_axes((table,), 1, False)(x),
            positions(x),
            x.argmax(0),
            x.amax(),
            x.amin(0),
            x.sum(0),
            x.argmin(),
            x.max(0),
            x.isnan().any(1),
        ),
        x,
    )


@in_inference
def rows_masked_altogether_become_nan_and_others_do_not():
    x = values(6, 33)
    mask = values(6, 33, dtype=torch.bool)
    mask[2] = True
    mask[3] = False

    def masked(x, mask):
        scores = x.masked_fill(mask, -math.inf)
        return scores.softmax(-1), scores.log_softmax(-1), scores.logsumexp(-1), scores.amax(-1)

    return masked, x, mask


@in_inference.each((torch.float32, torch.float16))
def softmax_of_large_values_does_not_overflow(dtype):
    x = values(5, 65, dtype=dtype) * 1e4
    return (lambda x: (x.softmax(-1), x.log_softmax(-1), x.logsumexp(-1)), x)


@in_inference
def variance_survives_a_large_mean():
    x = values(5, 1000) + 1000
    return (lambda x: (torch.var_mean(x, 1), x.std(0), F.layer_norm(x, (1000,))), x)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", ((3, 7), (3, 4097)))
def test_spread_of_equal_values_is_zero_and_so_is_the_slope_of_a_deviation(shape, dtype):
    def spread(x):
        one = x[:, :1]
        deviations = x.std(-1, correction=0), *torch.std_mean(x, -1), one.std(1, correction=0)
        return *deviations, x.var(-1), *torch.var_mean(x, -1), one.var(1, correction=0)

    x = torch.tensor([0.1, -3.3, 1e6 + 0.1]).to(dtype)[:, None].expand(shape).contiguous()
    mean = x[:, 0].clone()
    products = torch.compile(lambda x: ((x * 1.7).std(-1), F.gelu(x).std(-1)), backend=BACKEND)(x)
    assert not torch.count_nonzero(torch.stack(products))  # a product less another, rounded once
    found = torch.compile(spread, backend=BACKEND)(x.requires_grad_())
    for k, value in enumerate(found):
        assert torch.equal(value, mean if k in (2, 6) else torch.zeros_like(mean)), k
    (slope,) = torch.autograd.grad((found[0] + found[1] + found[3]).sum(), x)
    assert torch.count_nonzero(slope) == 0


@in_inference.each((1e30, 1e19, 1e-30))
def spread_whose_squares_leave_the_range_is_as_exact_as_eager_s(scale):
    x = torch.tensor([[1.0, 1.0, -1.0, 1e-30], [0.5, 0.25, 1.0, 2.0]]).repeat(1, 9) * scale

    def fn(x):
        return x.std(1), x.std(0), x.std(), torch.std_mean(x, 1, correction=0), x[:, :3].var(1)

    return (lambda x, y: (fn(x), fn(y)), x, x.bfloat16())


@in_inference
def spread_of_infinities_is_nan():
    x = torch.tensor([[math.inf] * 3, [-math.inf, 1.0, 2.0], [1.0, math.inf, 2.0]])
    return (lambda x: (x.std(-1), x[:1, :1].var(1, correction=0), torch.std_mean(x, 1)[0]), x)


@in_training
def spread_of_a_large_offset_keeps_the_digits_of_the_differences():
    x = values(6, 1000) + 1e6
    return (lambda x: (x.std(-1), x.var(0), *torch.var_mean(x), torch.std_mean(x, 1)[0]), x)


@in_inference
def variance_of_one_value_is_nan_or_zero_as_in_eager():
    return (
        lambda x: (x.var(1), x.var(1, correction=0), x.std(1), torch.var_mean(x, 1)),
        values(5, 1),
    )


@as_captured
def test_reductions_of_tensors_without_elements_match_eager(check):
    def reduce(a, b):
        return (
            a.sum(),
            a.sum(1),
            a.prod(1),
            b.sum(0),
            b.sum(1),
            a.any(1),
            a.all(1),
            b.amax(1),
            a.mean(1),
            a.softmax(1),
            a.cumsum(1),
            torch.count_nonzero(a),
            b.argmax(1),
        )

    check(reduce, values(3, 0), values(0, 4))


@in_training
def reduced_values_are_broadcast_back_over_their_rows():
    def rows(x):
        centered = x - x.mean(-1, keepdim=True)
        scaled = centered / (x.std(-1, keepdim=True) + 1e-5)
        return scaled, x / x.amax(0, keepdim=True), x - x.logsumexp(-1, keepdim=True), x * x.sum()

    return rows, values(9, 65)


@in_training
def a_reduction_of_a_reduction_matches_eager():
    def nested(x):
        return (
            x.sum(-1).amax(0),
            x.softmax(-1).sum(0),
            x.mean(1).mean(),
            (x.amax(2) * 2).sum((0, 1)),
        )

    return nested, values(4, 7, 33)


@in_training
def row_and_column_reductions_of_one_tensor_match_eager():
    return (lambda x: ((x * 2).sum(0), (x * 2).sum(1), (x * 2).sum(), x * 2), values(65, 129))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("rows", "columns"), ((1025, 33), (3, 20001), (2049, 5)), ids=str)
def test_long_reductions_are_split_without_loss(rows, columns):
    x = values(rows, columns)
    check(lambda x: (x.sum(0), x.sum(1), x.sum(), x.var(0), x.amax(0), x.mean(1)), x, tol=1e-4)


@in_training
def cumulative_operations_match_eager():
    def cumulative(x):
        return (
            x.cumsum(0),
            x.cumsum(-1),
            x.cummax(1),
            x.cummin(0),
            torch.logcumsumexp(x, 1),
            x.flip(1).cumsum(1).flip(1),
            x.diff(dim=1),
        )

    return cumulative, values(6, 17)


@as_captured
def test_order_statistics_match_eager_wherever_they_run(check):
    check(lambda x: (x.sort(-1), x.topk(3, -1), x.median(-1), x.kthvalue(4, -1)), values(6, 17))


@in_training
def a_sum_over_an_expanded_axis_counts_every_copy():
    return (
        lambda x: (
            x.expand(7, 5, 9).sum(0),
            x.expand(7, 5, 9).mean(),
            x[None].expand(3, -1, -1).amax(0),
        ),
        values(5, 9),
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("train", (False, True), ids=("forward", "training"))
@in_both
def test_reductions_take_dynamic_shapes(train, check):
    def reduce(x):
        return x.sum(-1), x.mean(0), x.softmax(-1), x.var(-1), x.amax(0), x.sum() / x.shape[0]

    check(reduce, values(6, 35), dynamic=True, train=train)


def test_long_columns_lose_no_more_digits_than_three_times_eager():
    x = values(16384, 48)
    reference = x.double().sum(0)
    compiled = torch.compile(lambda x: x.sum(0), backend=BACKEND)

    def error(result):
        return (result.double() - reference).pow(2).mean().sqrt()

    assert error(compiled(x)) <= 3 * error(x.sum(0))


def test_scans_and_searches_of_special_values_match_eager():
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[1.0, 3.0, 3.0, nan, 2.0, nan], [-inf, -inf, -0.0, inf, -inf, 7.0]])

    def scan(x):
        sorted_line = torch.tensor([-1.0, 0.0, 0.0, 2.0])
        behind_all = torch.tensor([-1.0, 0.0, 0.0, 2.0, 8.0, 9.0, nan])
        return (x.cummax(1), x.cummin(1), x.cummax(0), x.logcumsumexp(1), x.cumprod(1),
                torch.searchsorted(sorted_line, x), torch.bucketize(x, sorted_line, right=True),
                torch.isin(x, sorted_line),
                torch.searchsorted(behind_all, x.nan_to_num(posinf=7.0, neginf=-7.0)),
                torch.bucketize(x.nan_to_num(posinf=7.0, neginf=-7.0), behind_all, right=True),
                F.max_pool2d(x[None], 2, 1, return_indices=True))  # fmt: skip

    check(scan, x)
    if BACKEND == "fusec":
        assert externs(scan, x) == []


BESIDE = {
    "amax": lambda v: v.amax(),
    "prod": lambda v: v.prod(),
    "rows": lambda v: v.amin(1),
    "columns": lambda v: v.sum(0),
    "places": lambda v: v.argmax(),
    "scan": lambda v: v.cumsum(0),
    "terms": lambda v: v + 1,
    "compared": lambda v: v == v.amax(0),
}


@pytest.mark.parametrize("columns", (2, 4))
def test_a_sum_of_short_rows_matches_eager_beside_what_else_is_made_of_its_terms(columns):
    def case(other):
        def both(x):
            terms = x * torch.where(torch.arange(columns) < 1, 1.0, 2.0)
            return terms.sum(), other(terms)

        return both, values(50, columns)

    check_all({name: case(other) for name, other in BESIDE.items()})


@in_training
def gradients_of_extremes_of_pairs_match_eager_beside_a_sum():
    return (lambda x: (x.sin().amin(1), x.sin().sum((1, 2)), x.sin().amax((1, 2)))), values(
        1, 10, 2
    )


def test_cases_match_eager():
    in_inference.check()


@TRAINED
def test_cases_match_eager_with_their_gradients(train):
    in_training.check(train=train)


ROWS = [(2100, 3), (3000, 2), (1000, 5), (600, 16), (20000, 3), (300, 300), (3, 5000), (1, 4000)]


@pytest.mark.parametrize("offset", [0.5, 1000.0])
def test_no_sum_adds_a_long_chain_of_rows(offset: float) -> None:
    """Few columns fill no vector: their sums are in arrays, each row is added to them."""

    def sums(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [y for x in tensors for y in (x.sum(0), (x * x).sum(0), x.sin().sum(0) + x.sum(0))]

    given = [values(*shape, seed=seed).sigmoid() + offset for seed, shape in enumerate(ROWS)]
    exact = sums(*(x.double() for x in given))
    for found, right in zip(compile_with(sums)(*given), exact, strict=True):
        assert (found - right).abs().max() < 3e-7 * right.abs().max(), found.shape
