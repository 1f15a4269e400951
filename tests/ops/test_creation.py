"""Tensors made inside the graph against eager: ranges, fills, triangles, dropout that is off."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from fusec.frontend.call import GraphBuilder
from fusec.frontend.capture import capture
from fusec.ir.text import print_graph
from tests.frontend.tracing import lowered, traced
from tests.support import TRAINED, Cases, check, compile_with, in_both, seeded, values

in_inference, in_training = Cases(), Cases()

ARANGES = [(7,), (0,), (2, 9), (9, 2, -2), (-3, 4, 3), (0.0, 1.0, 0.25), (5, 5)]
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool)


@in_inference
def aranges_match_eager():
    def make(x):
        made = [torch.arange(*bounds) for bounds in ARANGES]
        typed = [torch.arange(2, 12, 3, dtype=d) for d in DTYPES[:5]]
        return made, typed, [m * 2 + 1 for m in made], torch.arange(x.shape[0]) + x

    return make, values(7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@in_both
def test_fills_match_eager(dtype, check):
    def make(x):
        return {
            "full": torch.full((3, 5), 1, dtype=dtype),
            "zeros": torch.zeros(2, 3, dtype=dtype),
            "ones": torch.ones(4, dtype=dtype),
            "empty_extent": torch.ones(0, 3, dtype=dtype),
            "zeros_like": torch.zeros_like(x),
            "ones_like": torch.ones_like(x, dtype=dtype),
            "full_like": torch.full_like(x, 1, dtype=dtype),
            "new_full": x.new_full((2, 2), 1),
            "new_zeros": x.t().new_zeros(3),
            "scalar": torch.tensor(1, dtype=dtype) + x,
            "eye": torch.eye(4, 6, dtype=dtype),
            "added": torch.full_like(x, 1) + x,
        }

    check(make, values(4, 6, dtype=dtype).t())


@in_inference
def special_fills_match_eager():
    def make(x):
        low = torch.finfo(x.dtype).min
        return (
            torch.full((3,), -torch.inf) + x,
            torch.full_like(x, torch.nan),
            x * low,
            torch.full((2,), 2**40),
            torch.full((3,), True),
            torch.full((), 3.5) * x,
        )

    return make, values(3)


@in_inference
def linspaces_and_grids_match_eager():
    def make(x):
        rows, columns = torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")
        return (
            torch.linspace(0, 1, 7),
            torch.linspace(-2.5, 3, 33) * x,
            torch.logspace(0, 2, 3),
            rows * 10 + columns,
            torch.cartesian_prod(torch.arange(2), torch.arange(3)),
            torch.linspace(3, 3, 1),
        )

    return make, values(33)


@in_inference
def triangles_match_eager():
    def make(x):
        ones = torch.ones(5, 7)
        return (
            [torch.tril(ones, k) for k in (-2, 0, 3)],
            [torch.triu(ones, k) for k in (-2, 0, 3)],
            torch.ones(4, 4, dtype=torch.bool).tril(),
            torch.tril(x),
            torch.triu(x, 1) * 2,
            torch.tril_indices(4, 4),
            torch.full((4, 4), -torch.inf).triu(1),
        )

    return make, values(3, 5, 7)


def test_a_function_without_inputs_compiles():
    check(lambda: (torch.arange(10) * 2, torch.ones(3).sum(), torch.zeros(2, 2)))


def test_what_is_computed_of_positions_wraps_as_in_eager():
    def hashed():
        i, j = torch.arange(8), torch.arange(8, dtype=torch.int32)
        h = i * 6364136223846793005 + 1442695040888963407
        narrow = (i * 2**30).int(), (i * 2**40).int(), j * 2**30
        return h, h < 0, h >> 33, h % 97, i * 2**62 >= 0, narrow, [n < 0 for n in narrow]

    check(hashed)


@pytest.mark.parametrize("dynamic", (False, True))
def test_positions_of_a_dynamic_size_wrap_in_32_bits(dynamic):
    def wrapped(x):
        i = torch.arange(x.shape[0])
        near = i[:, None] * 2**20 + i[:3]
        found = (i * 2**28, i * 2**30, i * 1000003, i * 1103515245, near, (i * 2**40) // 3)
        return [n.int() < 0 for n in found]

    check(wrapped, torch.zeros(3000), dynamic=dynamic)


def test_a_constant_output_is_private_to_each_call():
    def make(x):
        return torch.zeros(4), x + 1

    torch._dynamo.reset()
    compiled = compile_with(make)
    first, _ = compiled(torch.ones(2))
    first.add_(5)
    second, _ = compiled(torch.ones(2))
    assert torch.equal(second, torch.zeros(4))


@in_training
def dropout_that_drops_nothing_matches_eager():
    def drop(x):
        return (
            F.dropout(x, 0.0, True) * 2,
            F.dropout(x, 0.5, False) + 1,
            F.dropout(x.relu(), 0.0, True).sum(-1),
            F.dropout1d(x, 0.3, False),
        )

    return drop, values(6, 33)


@in_training
def dropout_that_drops_everything_matches_eager():
    return (lambda x: F.dropout(x, 1.0, True) + 1, values(6, 33))


def test_dropout_modules_in_eval_mode_match_eager():
    layers = torch.nn.Sequential(torch.nn.Dropout(0.9), torch.nn.GELU(), torch.nn.Dropout(0.1))
    check(layers.eval(), values(6, 33), train=True)


def test_dropout_keeps_the_expected_share_and_scales_it():
    torch._dynamo.reset()
    compiled = compile_with(lambda x: F.dropout(x * 1.0, 0.25, True))
    with seeded(3):
        out = compiled(torch.ones(400, 500))
    kept = out != 0
    assert torch.allclose(out[kept], torch.tensor(4 / 3))
    assert abs(kept.float().mean().item() - 0.75) < 0.01
    assert (kept.float().mean(0) - 0.75).abs().max() < 0.15, "columns drop together"
    assert (kept.float().mean(1) - 0.75).abs().max() < 0.15, "rows drop together"


def test_dropout_gradients_use_the_mask_of_the_forward():
    torch._dynamo.reset()
    compiled = compile_with(lambda x: F.dropout(torch.sin(x), 0.4, True) * 2)
    x = values(50, 33).requires_grad_()
    with seeded(5):
        out = compiled(x)
        out.sum().backward()
    expected = torch.where(out != 0, 2 * torch.cos(x) / 0.6, 0.0)
    assert torch.allclose(x.grad, expected, atol=1e-5)


def test_dropout_follows_the_seed_and_differs_from_call_to_call():
    torch._dynamo.reset()
    compiled = compile_with(lambda x: (F.dropout(x, 0.5, True), F.dropout(x, 0.5, True)))
    x = torch.ones(2000)
    with seeded(1):
        a, b = compiled(x)
        c, _ = compiled(x)
    with seeded(1):
        again, _ = compiled(x)
    assert torch.equal(a, again)
    assert not torch.equal(a, b), "two dropouts of one call drew the same mask"
    assert not torch.equal(a, c), "two calls drew the same mask"


def test_random_tensors_have_their_distributions():
    torch._dynamo.reset()

    def draw(x):
        return (
            torch.rand(40, 500),
            torch.randn(40, 500),
            torch.randint(0, 7, (20000,)),
            torch.rand_like(x),
            torch.bernoulli(torch.full((20000,), 0.3)),
        )

    with seeded(2):
        uniform, normal, integers, like, coins = compile_with(draw)(torch.zeros(100, 33))
    assert uniform.min() >= 0 and uniform.max() < 1
    assert abs(uniform.mean().item() - 0.5) < 0.01
    assert abs(normal.mean().item()) < 0.03 and abs(normal.std().item() - 1) < 0.03
    assert set(integers.tolist()) == set(range(7))
    assert like.shape == (100, 33) and like.unique().numel() > 3000
    assert abs(coins.mean().item() - 0.3) < 0.02


@pytest.mark.parametrize("n", (5, 9))
def test_created_tensors_follow_dynamic_shapes(n):
    def make(x):
        n = x.shape[0]
        return (
            torch.arange(n) + x[:, 0],
            torch.zeros(n, 2),
            x.new_ones(n, n).tril() @ x,
            torch.full((n,), n),
            x.new_ones(n + 1),
            torch.eye(n),
        )

    check(make, values(n, 4), dynamic=True)


@pytest.mark.parametrize("step", (-1, -1.0, -3))
def test_a_range_counts_down_by_a_step_that_is_a_symbol(step: float) -> None:
    def fn(step):
        return torch.arange(512, -512, step)

    compiled = compile_with(fn, dynamic=True)
    assert torch.equal(compiled(step), fn(step))


FLOAT_RANGES = [
    (-1000, 0.05, 0.1),
    (-1, 1, 0.1),
    (3.3, -3.0, -0.007),
    (-(2.0**24), 0, 4096.5),
    (1e9, 1e9 + 40, 0.75),
    (0.5, 70.0),
    (-0.0, -9.0, -1.0),
    (0.0, 2.0**-1000, 2.0**-1005),
    (0.0, 1e20, 1e18),
    (2**24 - 3, 2**24 + 40),
    (-(2**53) - 40, -(2**53), 3),
]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16, torch.float16))
def test_ranges_of_floats_are_as_exact_as_eagers(dtype: torch.dtype) -> None:
    """Eager computes f32 in f64 on CPUs, and rounds once; 16 bits it computes in f32."""

    ranges = [b for b in FLOAT_RANGES if max(map(abs, b)) <= torch.finfo(dtype).max]

    def make():
        return [torch.arange(*bounds, dtype=dtype) for bounds in ranges]

    unit = 2.0**-52 if dtype.itemsize > 2 else 2.0**-23
    share = 0 if dtype is torch.float32 else torch.finfo(dtype).eps
    for bounds, eager, found in zip(ranges, make(), compile_with(make)(), strict=True):
        first, end, step = bounds if len(bounds) == 3 else (*bounds, 1)
        exact = [float(Fraction(first) + Fraction(step) * i) for i in range(len(eager))]
        wanted = torch.tensor(exact, dtype=torch.float64).to(dtype)
        slack = max(abs(first), abs(end)) * unit
        torch.testing.assert_close(found, wanted, rtol=share, atol=slack)
        assert torch.signbit(found[0]) == torch.signbit(eager[0])


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32, torch.uint8))
def test_ranges_of_integers_are_eagers(dtype: torch.dtype) -> None:
    def make():
        wide = [(2**24 - 2, 2**24 + 9), (2**53 - 2, 2**53 + 9, 3), (2**62, 2**62 - 9, -2)]
        return [torch.arange(*bounds, dtype=dtype) for bounds in (*ARANGES[:5], *wide)]

    for eager, found in zip(make(), compile_with(make)(), strict=True):
        assert torch.equal(eager, found)


@pytest.mark.parametrize("n", (40, 70))
def test_ranges_of_floats_have_dynamic_lengths(n: int) -> None:
    def make(x):
        n = x.shape[0]
        ends = (0, n), (0.0, n), (0.5, n), (0, n * 0.1, 0.1), (n, 0.3, -1.7), (0.25 * n, n)
        return [torch.arange(*bounds, dtype=torch.float32) for bounds in ends]

    check(make, values(n), dynamic=True)


def test_ranges_by_fractions_begin_at_any_size() -> None:
    """A start is no integer times a power of two then: their product may not fit in 64 bits."""

    def fn(n: int) -> torch.Tensor:
        return torch.arange(n, n + 1, 2.0**-12, dtype=torch.float64)

    compiled = compile_with(fn, dynamic=True)
    for n in (5, 2**40, -(2**40), 2**50):
        assert torch.equal(compiled(n)[:2], fn(n)[:2])


def test_ranges_that_f32_holds_are_computed_in_it() -> None:
    """And all are on GPUs, as in eager."""

    def exact():
        ends = (9,), (0.0, 4.0, 0.25), (5, 0, -1.5)
        return [torch.arange(*bounds, dtype=torch.float32) for bounds in ends]

    def rounded():
        return torch.arange(0.0, 4.0, 0.1)

    assert "f64" not in print_graph(lowered(exact))
    assert "f64" in print_graph(lowered(rounded))
    on_gpu, _ = capture(traced(rounded), "g", GraphBuilder(device="cuda"))
    assert "f64" not in print_graph(on_gpu)


def test_cases_match_eager():
    in_inference.check()


@TRAINED
def test_cases_match_eager_with_their_gradients(train):
    in_training.check(train=train)
