"""Scatters and scans of any length beside eager: a step for each source, or each point."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fusec
from fusec.errors import IndexOutOfRange
from fusec.processors import PROCESSORS
from tests.support import BACKEND, check, compile_with, externs, on_processor, values

N, E, C = 60, 900, 22
"""Rows of a result, sources, columns: 900 * 60 * 22 comparisons would be too many."""

TYPES = (torch.bfloat16, torch.float64, torch.int32, torch.int64)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    places = values(E, dtype=torch.int64, low=0, high=N)
    return values(N, C, dtype=dtype), places, values(E, C, dtype=dtype, seed=2)


def by_rows(i: torch.Tensor) -> torch.Tensor:
    return i[:, None].expand(-1, C)


def of_each_row(i: torch.Tensor) -> torch.Tensor:
    """Places of 22 rows that differ."""
    return (i + torch.arange(C)[:, None]) % N


SCATTERS: dict[str, Callable[..., object]] = {
    "index_add": lambda x, i, s: x.index_add(0, i, s, alpha=0.5),
    "index_add of columns": lambda x, i, s: x.t().index_add(1, i, s.t()),
    "index_add, then more": lambda x, i, s: torch.relu(x.index_add(0, i, s.sigmoid() * 2)) * 3,
    "index_add to zero": lambda x, i, s: torch.zeros_like(x).index_add(0, i, x[i] * s),
    "index_put": lambda x, i, s: x.index_put((i - N,), s, accumulate=True),
    "index_put along two axes": lambda x, i, s: s.new_zeros(20, 15, C).index_put(
        (i % 20, i % 15), s, accumulate=True
    ),
    "scatter_add": lambda x, i, s: x.scatter_add(0, by_rows(i), s),
    "scatter_add of fewer columns": lambda x, i, s: x.scatter_add(0, by_rows(i)[:, :5], s),
    "scatter_add along rows": lambda x, i, s: x.t().scatter_add(1, of_each_row(i), s.t() * 2),
    "the mean along rows": lambda x, i, s: x.t().scatter_reduce(1, of_each_row(i), s.t(), "mean"),
    "gathered along rows": lambda x, i, s: x.t().gather(1, of_each_row(i)).sin() * s.t(),
    "gathered by each batch": lambda x, i, s: (
        torch.stack((x, x.sin(), x.cos())).gather(1, of_each_row(i)[:3, :, None].expand(-1, -1, C))
        * s
    ),
    "fewer along rows": lambda x, i, s: x.t().scatter_add(1, of_each_row(i)[:7], s.t()[:7]).sin(),
    "the greatest": lambda x, i, s: x.scatter_reduce(0, by_rows(i), s, "amax"),
    "the least of the sources": lambda x, i, s: x.scatter_reduce(
        0, by_rows(i), s, "amin", include_self=False
    ),
    "the product": lambda x, i, s: x.scatter_reduce(0, by_rows(i), 1 + s / 100, "prod"),
    "the mean": lambda x, i, s: x.scatter_reduce(0, by_rows(i), s, "mean"),
    "the mean of the sources": lambda x, i, s: x.index_reduce(0, i, s, "mean", include_self=False),
    "sums and counts": lambda x, i, s: (
        torch.zeros_like(x).index_add(0, i, s)
        / s.new_zeros(N).index_add(0, i, s.new_ones(E)).clamp(min=1)[:, None]
    ),
    "sources alike": lambda x, i, s: s.new_zeros(N, C, C).index_add(
        0, i, s[:, :, None].expand(-1, -1, C) * 2
    ),
    "read elsewhere": lambda x, i, s: torch.zeros_like(x).index_add(0, i, s)[i.flip(0)],
    "reshaped, then summed": lambda x, i, s: (x * 0 + 1).index_add(0, i, s).view(12, 5, C).sum(1),
    "between softmaxes": lambda x, i, s: x.index_add(0, i, s.softmax(1)).softmax(1),
    "in place": lambda x, i, s: x.clone().index_add_(0, i, s),
    "read by its gradient": lambda x, i, s: x.sin().index_add(0, i, s.sin()).sin() * 2,
    "read with and without the rest": lambda x, i, s: (
        (x + (y := torch.zeros_like(x).index_add(0, i, s))),
        (x + y).sin() + y,
    ),
    "of many columns": lambda x, i, s: torch.sigmoid(
        x.new_zeros(N, C, 80).index_add(0, i, s[:, :, None] * torch.linspace(-1, 1, 80)) + x[0, 0]
    ),
}
EMBEDDINGS: dict[str, Callable[..., object]] = {
    "embedding": lambda x, i, s: F.embedding(i, x).tanh() * s,
    "two dimensional": lambda x, i, s: F.embedding(i.view(30, 30), x).cos(),
    "with padding": lambda x, i, s: F.embedding(i, x, padding_idx=3).tanh(),
    "by frequency": lambda x, i, s: F.embedding(i, x, scale_grad_by_freq=True).tanh(),
    "gathered": lambda x, i, s: x[i].tanh() * s,
    "read twice": lambda x, i, s: F.embedding(i, x).tanh() * x[i.flip(0)],
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SCATTERS)
def test_many_sources_are_combined(name: str) -> None:
    fewer = name == "scatter_add of fewer columns"  # its places vary along the columns: eager
    check(
        SCATTERS[name], *inputs(), train=name not in ("the product", "the greatest") and not fewer
    )
    if BACKEND == "fusec" and not fewer:
        assert externs(SCATTERS[name], *inputs()) == []


OF_FLOATS = ("index_add", "the mean", "sums and counts")
OF_TYPES = [
    *itertools.product(("scatter_add", *OF_FLOATS), (torch.bfloat16, torch.float64)),
    *itertools.product(("scatter_add",), (torch.int32, torch.int64)),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "dtype"), OF_TYPES, ids=str)
def test_many_sources_of_a_type_are_combined(name: str, dtype: torch.dtype) -> None:
    check(SCATTERS[name], *inputs(dtype))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_the_gradient_of_a_table_is_the_sum_of_its_rows(name: str) -> None:
    check(EMBEDDINGS[name], *inputs(), train=True)
    if BACKEND == "fusec":
        assert externs(EMBEDDINGS[name], *inputs(), train=True) == []


@pytest.mark.skipif(BACKEND != "fusec", reason="asks fusec to verify")
def test_lanes_beyond_a_row_read_nothing() -> None:
    torch.compiler.reset()
    x, i, s = inputs()
    fn = torch.compile(
        lambda x, i, s: x.sin().index_add(0, i, s).sin(),
        backend="fusec",
        options={"strict": True, "verify": True, "cache": False},
    )
    fn(x.requires_grad_(), i, s).sum().backward()


def test_symbolic_numbers_of_sources() -> None:
    def step(x, i, s):
        return x.index_add(0, i, s), F.embedding(i, x).sin()

    for sources in (70, 900, 33):
        x, i, s = inputs()
        check(step, x, i[:sources], s[:sources], dynamic=True, train=True)


@pytest.mark.skipif(BACKEND != "fusec", reason="asks fusec alone")
def test_a_scatter_writes_its_result_alone() -> None:
    x, i, s = inputs()
    (kernel,) = fusec.kernels(lambda x, i, s: torch.zeros_like(x).index_add(0, i, s * 2), x, i, s)
    assert "scratch" not in kernel.source and "alloca" not in kernel.source


@pytest.mark.skipif(BACKEND != "fusec", reason="asks fusec alone")
def test_the_gradient_of_a_tied_table_is_added_to_the_other_one() -> None:
    def step(x, i, s):
        return ((F.embedding(i, x) * s) @ x.t()).square().mean()

    _, i, _ = inputs()
    wide, s = values(400, 300), values(E, 300)
    check(step, wide, i, s, train=True)
    merges = " ".join(str(fusec.explain(step, wide, i, s, train=True)).split())
    assert "embedding_dense_backward_sum with add" in merges


@pytest.mark.parametrize("wrong", [N, -1, 2**40, -(2**40)])
def test_a_place_out_of_range_is_an_error_and_nothing_is_written_there(wrong: int) -> None:
    x, i, s = inputs()
    fn = torch.compile(lambda x, i, s: x.index_add(0, i, s), backend=BACKEND)
    fn(x, i, s)
    i[E // 2] = wrong
    with pytest.raises(IndexOutOfRange if BACKEND == "fusec" else Exception):
        fn(x, i, s)


@pytest.mark.parametrize("count", [90, 5000])
def test_the_inverse_of_a_permutation_is_one_kernel(count: int) -> None:
    def inverse(p: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(p)
        found[p] = torch.arange(len(p))
        return found * 2

    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    check(inverse, order, left=("empty_permuted.default",))


@pytest.mark.parametrize("count", [7, 6000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("interval", [(8, 0, 7), (100, -1.0, 1.0), (7, -0.3, 1.7), (3, 0.1, 0.2)])
def test_elements_are_counted_in_the_interval_that_eager_finds(
    count: int, dtype: torch.dtype, interval: tuple[int, float, float]
) -> None:
    bins, low, high = interval

    def histogram(x: torch.Tensor) -> torch.Tensor:
        return torch.histc(x, bins, low, high)

    edges = torch.linspace(low, high, bins + 1, dtype=dtype)
    beside = (edges, edges.nextafter(edges + 1), edges.nextafter(edges - 1))
    special = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
    given = torch.cat([values(count, dtype=dtype), *beside, special])
    torch.compiler.reset()
    call = compile_with(histogram)
    assert torch.equal(call(given), histogram(given))
    if BACKEND == "fusec":
        assert externs(histogram, given) == []


# -- scans ----------------------------------------------------------------------------------------

ROWS, LENGTH = 35, 190
NAN, INFINITE = float("nan"), float("inf")
SCANS: dict[str, Callable[[torch.Tensor], object]] = {
    "along rows": lambda x: x.cumsum(1),
    "along columns": lambda x: x.cumsum(0),
    "the product": lambda x: (1 + x / 100).cumprod(1),
    "extremes and their places": lambda x: (torch.cummax(x, 1), torch.cummin(x, 0)),
    "between pointwise operations": lambda x: (x * 2).sigmoid().cumsum(1) * x + 1,
    "before a softmax of it": lambda x: x.cumsum(1).softmax(1),
    "before a softmax across it": lambda x: x.cumsum(0).softmax(1),
    "of a scan": lambda x: x.cumsum(1).cumsum(1),
    "from the end": lambda x: x.flip(1).cumsum(1).flip(1),
    "before a norm": lambda x: F.layer_norm(x.cumsum(1), (x.shape[1],)),
    "of ones": lambda x: torch.ones_like(x).cumsum(1),
    "of a mask": lambda x: (x > 0).cumsum(1) - 1,
    "both ways": lambda x: x.cumsum(0) + x.cumsum(1),
    "of a view": lambda x: x.view(5, -1, x.shape[1]).cumsum(1).view(x.shape).relu(),
    "before sums": lambda x: (x.cumsum(1).sum(1), x.cumsum(0).amax(0)),
    "of all": lambda x: x.flatten().cumsum(0),
    "in f16 for f32": lambda x: x.half().cumsum(1, dtype=torch.float32),
    "of products": lambda x: (x[:, :8] @ x[:8, :]).cumsum(1),
    "of exponentials along rows": lambda x: (x * 2).logcumsumexp(1).sigmoid(),
    "of exponentials along columns": lambda x: x.logcumsumexp(0) - x,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SCANS)
def test_long_scans(name: str) -> None:
    check(SCANS[name], values(ROWS, LENGTH), train=name not in ("of ones", "of a mask"))
    if BACKEND == "fusec":
        left = {op for op, _ in externs(SCANS[name], values(ROWS, LENGTH))}
        assert left <= {"mm.default"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_long_scans_of_exponentials_of_a_type(dtype: torch.dtype) -> None:
    check(lambda x: (x.logcumsumexp(1), x.logcumsumexp(0)), values(ROWS, LENGTH, dtype=dtype))


@pytest.mark.skipif(BACKEND != "fusec", reason="eager's own bits")
@pytest.mark.parametrize("shape", [(4, 64), (64, 12), (ROWS, LENGTH)])
def test_sums_so_far_have_eagers_bits_however_few_they_are(shape: tuple[int, int]) -> None:
    def decays(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)

    x = -1000 * values(*shape).abs()
    assert torch.equal(compile_with(decays)(x), decays(x))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(0, 200), (300, 0), (1, 3000), (3000, 1), (3000,)], ids=str)
def test_long_scans_of_exponentials_of_a_shape(shape: tuple[int, ...]) -> None:
    x = values(*shape)
    check(lambda x: (x.logcumsumexp(0), x.logcumsumexp(-1)), x, train=True)


def test_exponentials_beyond_the_range_of_floats_are_summed() -> None:
    x = values(ROWS, LENGTH)
    x[0], x[1, :5], x[2, 7] = -INFINITE, -INFINITE, INFINITE
    x[3, 9], x[4, 100], x[5, 100] = NAN, INFINITE, -INFINITE
    x[6], x[7], x[8, 2:4] = 1000, 10 * torch.arange(LENGTH), torch.tensor((1000, INFINITE))
    check(lambda x: (x.logcumsumexp(1), x.logcumsumexp(0), x[8].logcumsumexp(0)), x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["along rows", "along columns", "extremes and their places"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.int32, torch.int64], ids=str
)
def test_long_scans_of_a_type(name: str, dtype: torch.dtype) -> None:
    check(SCANS[name], values(ROWS, LENGTH, dtype=dtype))


@pytest.mark.parametrize("columns", [63, 64, 65, 1021, 2060])
def test_scans_along_an_outer_axis_take_many_columns_a_step(columns: int) -> None:
    def scan(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums = (x * 2).cumsum(1)
        return (
            sums.relu(),
            sums.cumsum(1),
            x.cummax(1).values,
            x.logcumsumexp(1),
            x.cummin(1).indices,
        )

    check(scan, values(2, 130, columns), train=columns == 65)


def test_long_scans_of_symbolic_length() -> None:
    for length in (190, 77, 33):
        x = values(ROWS, length)
        check(
            lambda x: ((x * 2).cumsum(1), x.cumsum(0), x.logcumsumexp(1)),
            x,
            dynamic=True,
            train=True,
        )


@pytest.mark.skipif(BACKEND != "fusec", reason="asks for fusec's vectors")
@pytest.mark.parametrize("name", ["sse4", "avx2"])
def test_vectors_of_other_widths_are_scanned(name: str) -> None:
    def step(x, n):
        every = (x.cumsum(1), x.cumprod(1), x.cummax(1).values, x.cummin(1).values)
        every = (*every, x.logcumsumexp(1))
        return every, n.cumsum(1), n.cummax(1).values, n.int().cummin(1).values

    with on_processor(PROCESSORS[f"cpu:{name}"].features):
        x = values(ROWS, LENGTH, low=0.9, high=1.1)
        check(step, x, values(ROWS, LENGTH, dtype=torch.int64))


@pytest.mark.skipif(BACKEND != "fusec", reason="counts fusec's launches")
@pytest.mark.parametrize("name", ["extremes", "places", "stored"])
def test_scans_of_scans_are_one_kernel(name: str) -> None:
    def scan(x: torch.Tensor) -> object:
        if name == "stored":
            sums = (x * 2).cumsum(1)
            return sums, (sums * x).cumsum(1)
        extremes = torch.cummax(x, 1)
        return extremes if name == "extremes" else extremes.indices

    x = values(ROWS, 4 * LENGTH)
    x[2, 30:90], x[3, 40], x[4, 7:] = 5, NAN, -INFINITE
    x[3, 50:60:2] = NAN
    check(scan, x)
    (graph,) = fusec.explain(scan, x).graphs
    assert graph.launches == 1


@pytest.mark.skipif(BACKEND != "fusec", reason="reads fusec's kernel")
def test_expensive_terms_are_computed_before_a_scan_in_lanes() -> None:
    def fused(x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid().cumsum(1) * x

    for length in (1030, 4099):
        check(fused, values(3, length), train=length == 1030)
    (kernel,) = fusec.kernels(fused, values(3, 4096))
    loops = kernel.source.split("for (")
    assert any("f_sigmoid" in loop for loop in loops)
    assert not any("f_sigmoid" in loop and "f_scansum" in loop for loop in loops)


def test_nan_and_infinity_stay_from_where_they_are() -> None:
    x = values(ROWS, LENGTH)
    x[3, 50], x[4, 60], x[5, 70] = float("nan"), float("inf"), -float("inf")
    check(lambda x: (x.cumsum(1), x.cumsum(0), x.cummax(1), x.cummin(0)), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_extremes_may_grow_in_each_step_or_in_none(dtype: torch.dtype) -> None:
    x = values(ROWS, LENGTH, dtype=dtype)
    x[0], x[1], x[2] = torch.arange(LENGTH), -torch.arange(LENGTH), 3
    x[3, 8:], x[4, 7:9], x[5, 17:] = x[3, 7], 900, x[5].amax()
    if dtype.is_floating_point:
        x[6, ::5], x[7, 8], x[8] = INFINITE, NAN, -INFINITE
        x[9, ::2], x[9, 1::2] = 0.0, -0.0
    check(lambda x: (torch.cummax(x, 1), torch.cummin(x, 1), torch.cummax(x.flatten(), 0)), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_products_of_factors_that_are_zero_have_a_gradient(dtype: torch.dtype) -> None:
    x = values(5, LENGTH, low=0.9, high=1.1, dtype=dtype)
    x[0, 0], x[1, 9], x[2, LENGTH - 1] = 0, 0, 0
    x[3, 8], x[3, 70], x[4] = 0, 0, 0

    def products(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.cumprod(1), torch.cumprod(x, dim=-2), x.flatten().cumprod(0, dtype=torch.float64)

    check(products, x, train=True)
    if BACKEND == "fusec":
        assert externs(products, x, train=True) == []


@pytest.mark.skipif(BACKEND != "fusec", reason="counts fusec's launches")
def test_the_gradient_of_a_product_so_far_is_one_kernel() -> None:
    _, backward = fusec.explain(lambda x: x.cumprod(1), values(ROWS, LENGTH), train=True).graphs
    assert backward.launches == 1


def test_no_product_so_far_of_nothing_or_one() -> None:
    for shape in ((0, 4), (4, 0), (1, 1), (1,), ()):
        check(lambda x: (x.cumprod(-1), x.cumprod(0) * 2), values(*shape), train=True)


def extremes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    greatest, places = x.cummax(-1)
    return greatest.sin(), places, torch.cummin(x, 0).values * 2, torch.cummin(x, dim=-1)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_extremes_so_far_have_a_gradient(dtype: torch.dtype) -> None:
    x = values(ROWS, LENGTH, dtype=dtype)
    x[0], x[1], x[2] = torch.arange(LENGTH), -torch.arange(LENGTH), 3
    x[3, 8:], x[4, 7:9] = x[3, 7], 900
    check(extremes, x, train=True)
    check(lambda x: x.cummax(1).values, x, train=True)
    for shape in ((0, 4), (4, 0), (1, 1), (1,), (3, 4, 300)):
        check(extremes, values(*shape, dtype=dtype), train=True)
    check(lambda x: (x.cummax(0), x.cummax(0).values * 2), values(dtype=dtype), train=True)


@pytest.mark.skipif(BACKEND != "fusec", reason="asks fusec alone")
def test_gradients_of_extremes_are_infinite_only_where_eager_s_are() -> None:
    x = values(4, LENGTH)
    x[1, 9], x[2, 50:60], x[3, 3] = NAN, INFINITE, -INFINITE
    weights = values(4, LENGTH, seed=1)
    weights[:, 100], weights[1, 4], weights[0, LENGTH - 1] = INFINITE, NAN, -INFINITE
    found = []
    for call in (compile_with(lambda x: x.cummax(1).values), lambda x: x.cummax(1).values):
        own = x.clone().requires_grad_()
        call(own).backward(weights)
        found.append(own.grad)
    torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.skipif(BACKEND != "fusec", reason="counts fusec's launches")
@pytest.mark.parametrize("name", ["cumsum", "cummax", "cummin"])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_gradient_of_a_scan_is_one_kernel(name: str, dim: int) -> None:
    def scan(x: torch.Tensor) -> torch.Tensor:
        made = getattr(x, name)(dim)
        return made if isinstance(made, torch.Tensor) else made.values

    explained = fusec.explain(scan, values(ROWS, 4 * LENGTH), train=True)
    assert [graph.launches for graph in explained.graphs] == [1, 1]
    assert externs(scan, values(ROWS, 4 * LENGTH), train=True) == []


@pytest.mark.skipif(BACKEND != "fusec", reason="counts fusec's launches")
def test_a_scan_that_is_read_from_its_end_is_one_kernel() -> None:
    def turned(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).cumsum(1).flip(1).sin() + x

    check(turned, values(ROWS, 4 * LENGTH), train=True)
    (graph,) = fusec.explain(turned, values(ROWS, 4 * LENGTH)).graphs
    assert graph.launches == 1
    check(lambda x: ((y := x.cumsum(1)).flip(1), y * 2), values(ROWS, LENGTH), train=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float64],
    ids=str,
)
def test_elements_in_reverse_order_are_adjacent(dtype: torch.dtype) -> None:
    for length in (3, 64, 77):
        x = values(5, length, low=0, high=9, dtype=torch.int64).to(dtype)
        check(lambda x: (x.flip(1) == x, x.flip(0, 1).float() * 2, x.flip(1).clone()), x)


def test_a_long_sum_keeps_its_digits() -> None:
    x = torch.full((300_000,), 0.1)
    check(lambda x: x.cumsum(0), x, tol=1e-7)


def test_a_sum_beside_steps_keeps_its_digits() -> None:
    """Two results take a step for each element: the sum's terms were added one by one."""

    def summed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest, places = x.cummax(1)
        return largest.sum(1), places.sum(1)

    x = values(3, 2000)
    torch._dynamo.reset()
    (ours, places), (exact, wanted) = compile_with(summed)(x), summed(x.double())
    assert torch.equal(places, wanted)
    torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("name", ["cumsum", "cummax", "cummin", "logcumsumexp"])
def test_a_long_scan_is_summed_in_parts(name: str) -> None:
    """A long sum has a loop around its loop, both along the axis that is scanned."""

    def summed(x: torch.Tensor) -> torch.Tensor:
        scanned = getattr(torch, name)(x, 1)
        return (scanned if isinstance(scanned, torch.Tensor) else scanned.values).sum(1)

    for length in (2000, 4097):
        check(summed, values(3, length))
    check(lambda x: (x.cumsum(0).sum(), x.cumsum(0).flip(0).mean()), values(5000))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
@pytest.mark.parametrize(("sources", "include_self"), [(20, True), (20, False), (300, True)])
def test_means_of_small_integers_wrap_as_eager_s(
    dtype: torch.dtype, sources: int, include_self: bool
) -> None:
    rows = torch.zeros(sources, dtype=torch.int64)
    source = torch.full((sources,), 100 if dtype.itemsize == 1 else 10000, dtype=dtype)

    def means(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        some = x.scatter_reduce(0, i, s, "mean", include_self=include_self)
        return some, x.index_reduce(0, i, s, "mean", include_self=include_self)

    check(means, torch.ones(2, dtype=dtype), rows, source)


def test_slices_of_a_tensor_without_axes_are_eager_s() -> None:
    """Eager refuses them, whatever was compiled before."""

    def added(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x.index_add(0, i, s)

    index = torch.zeros(200, dtype=torch.int64)
    check(added, torch.zeros(10, 4), index, torch.ones(200, 4))
    with pytest.raises(RuntimeError, match="source tensor shape must match"):
        compile_with(added)(torch.zeros(()), index, torch.ones(200))
