"""Random numbers that kernels draw: their bits, their statistics, and that a backward sees them.

The bits are those of ``tests/philox.py``, whoever computes them: the eager kernels of the library's
operations, NumPy's interpreter, C++ and Triton (in its interpreter), over any tiling and view.
"""

from __future__ import annotations

import math
import operator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import tests.triton_backend  # noqa: F401 (registers the backends)
from fusec.frontend.ops import random as random_numbers
from tests.frontend.tracing import CapturedAhead
from tests.philox import uniforms
from tests.support import backend_of, compile_with, seeded

SEEDS = torch.tensor([7, -(2**62) + 12345, 2**63 - 1])
RUNNERS = pytest.mark.parametrize("runner", ("numpy", "fusec", "triton_interpreter"))


def drawn(size, which=1, kind="uniform", dtype=torch.float32, bounds=(), seeds=SEEDS, order=None):
    order = order if order is not None else list(range(len(size)))
    return torch.ops.fusec.random(size, order, seeds, which, kind, dtype, *bounds)


def runs(fn, runner):
    """Return ``fn`` run by one of the ways to run a kernel."""
    torch._dynamo.reset()
    if runner == "numpy":
        return CapturedAhead(fn)
    return compile_with(fn, runner)


def compiled(fn, dynamic=False, **options):
    torch._dynamo.reset()
    options = {"strict": True, "verify": True, **options}
    return torch.compile(
        fn, backend=backend_of("fusec"), options=options, fullgraph=True, dynamic=dynamic
    )


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", (0, 1, 2))
def test_eager_numbers_are_philox_by_position(which):
    expected = torch.from_numpy(uniforms(int(SEEDS[which]), range(3 * 37))).view(3, 37)
    assert torch.equal(drawn([3, 37], which), expected)
    turned = drawn([3, 37], which, order=[1, 0])
    assert torch.equal(turned, expected) and turned.stride() == (1, 3)


VIEWS = {
    "transposed": lambda r: r.t() * 2,
    "a slice": lambda r: r[1:, 3::2] * 2,
    "flipped": lambda r: r.flip(0, 1) + 1,
    "a row": lambda r: r[2] * 3,
    "reshaped": lambda r: r.reshape(10, 28).t() + 1,
    "rolled": lambda r: r.roll((1, 5), (0, 1)),
    "expanded": lambda r: r[:, None, :].expand(8, 3, 35) * 2,
    "a largest number": lambda r: r.amax(1),
    "other rows": lambda r: r[torch.tensor([3, 0, 3])],
}


def rows(width, seeds):
    r = drawn([4, width], seeds=seeds)
    return torch.where(r == r.amax(1, keepdim=True), 2, r)  # a row stays together


def integers(dtype, low, high, seeds):
    return drawn([5, 33], 1, "integer", dtype, (low, high), seeds)


LARGEST = torch.int64, -5, random_numbers.LARGEST_RANGE - 5
INTEGERS = [
    (torch.int64, 0, 7), (torch.int64, -5, 120), (torch.int64, 0, 1), (torch.int32, 0, 7),
    (torch.int32, -5, 120), (torch.uint8, 0, 7), (torch.uint8, 0, 120), (torch.float32, 0, 7),
    (torch.float32, -5, 120), LARGEST,
]  # fmt: skip
BITS = {
    **{f"of size {n}": lambda s, n=n: (drawn(n, 0, seeds=s) + 0, drawn(n, 2, seeds=s))
       for n in ([], [1], [5], [64], [3, 37], [2, 3, 40], [7, 4, 4])},
    **{name: lambda s, view=view: view(drawn([8, 35], seeds=s)) for name, view in VIEWS.items()},
    **{f"rows of {n}": partial(rows, n) for n in (1, 3, 16, 33, 64, 100, 128, 1000)},
    **{str(dtype): lambda s, dtype=dtype: drawn([5, 33], dtype=dtype, seeds=s)
       for dtype in (torch.float64, torch.bfloat16, torch.float16)},
    **{f"{dtype} from {low} to {high}": partial(integers, dtype, low, high)
       for dtype, low, high in INTEGERS},
}  # fmt: skip
"""Functions of the seeds whose results are the same bits whoever runs them."""
NORMAL = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize(
    ("runner", "step"),
    (
        ("numpy", 1),
        ("fusec", 2),
        ("triton_interpreter", 5),
        pytest.param("fusec", 1, marks=pytest.mark.slow),
        pytest.param("triton_interpreter", 1, marks=pytest.mark.slow),
    ),
)
def test_every_runner_draws_the_eager_bits(runner, step):
    names = list(BITS)[::step]

    def every(seeds):
        normal = [drawn([5, 33], 1, "normal", dtype, seeds=seeds) for dtype in NORMAL[::step]]
        return {name: BITS[name](seeds) for name in names}, normal

    expected, normal = every(SEEDS)
    found, found_normal = runs(every, runner)(SEEDS)
    for name, values in expected.items():
        for a, b in zip(pytree.tree_leaves(found[name]), pytree.tree_leaves(values), strict=True):
            assert torch.equal(a, b), name
    torch.testing.assert_close(found_normal, normal)


def test_integers_lie_between_their_bounds():
    for dtype, low, high in INTEGERS:
        values = integers(dtype, low, high, SEEDS)
        assert values.min() >= low and values.max() < high
    values = integers(*LARGEST, SEEDS)
    assert values.min() < 2**28 and values.max() > 2**32 - 2**28


@pytest.mark.parametrize(("seed", "uniform"), ((12121362, 0.0), (16390493, 1 - 2**-24)))
def test_normal_numbers_are_finite_where_the_uniform_one_is_least_and_greatest(seed, uniform):
    radius, angle = random_numbers._numbers(torch.tensor(seed), 1, 2)
    assert radius == uniform
    (normal,) = random_numbers.normal_numbers(torch.tensor(seed), 1, torch.float32)
    expected = math.sqrt(-2 * math.log(1 - uniform)) * math.cos(2 * math.pi * angle)
    assert math.isclose(normal, expected, rel_tol=1e-5)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_uniform_numbers_of_16_bits_are_never_one(dtype):
    values = random_numbers.uniform_numbers(SEEDS[0], 100_000, dtype)
    (exact,) = random_numbers._numbers(SEEDS[0], 100_000, 1)
    assert exact.to(dtype).max() == 1, "rounded they would be"
    assert values.min() == 0 and values.max() == 1 - 2.0 ** -random_numbers.BITS[dtype]
    assert torch.equal(values.to(dtype).double(), values.double())


# -- statistics ------------------------------------------------------------------------------------

MANY = 1 << 18


@pytest.fixture(scope="module")
def many():
    return compiled(lambda seeds: drawn([MANY], seeds=seeds))(SEEDS).double()


def test_uniform_numbers_have_their_mean_and_variance(many):
    assert abs(many.mean() - 0.5) < 4 / math.sqrt(12 * MANY)
    assert abs(many.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / MANY)
    assert many.min() >= 0 and many.max() < 1


@pytest.mark.parametrize("byte", (0, 1, 2))
def test_bytes_are_evenly_distributed(many, byte):
    counts = ((many * 2**24).long() >> 8 * byte & 255).bincount(minlength=256).double()
    chi_squared = ((counts - MANY / 256) ** 2 / (MANY / 256)).sum()
    assert abs(chi_squared - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("lag", (1, 2, 3, 4, 5, 8, 16, 512, 1024))
def test_numbers_do_not_depend_on_earlier_ones(many, lag):
    early, late = many[:-lag] - 0.5, many[lag:] - 0.5
    assert abs((early * late).mean() * 12) < 5 / math.sqrt(MANY)
    assert (early == late).double().mean() < 1e-4, "numbers repeat"


def test_no_group_of_four_repeats(many):
    """A peer's dropout mask had each word four times over (pytorch#198333)."""
    groups = many.view(-1, 4)
    assert len(torch.unique(groups, dim=0)) == len(groups)
    for k in range(4):
        assert len(torch.unique(groups[:, k])) > 0.98 * len(groups)


def test_normal_numbers_have_their_moments():
    z = compiled(lambda seeds: drawn([MANY], 1, "normal", seeds=seeds))(SEEDS).double()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - moment) < 5 * math.sqrt(variance / MANY)
    assert abs((z[:-1] * z[1:]).mean()) < 5 / math.sqrt(MANY)
    for bound, share in ((1, 0.31731), (2, 0.0455), (3, 0.0027)):
        seen = (z.abs() > bound).double().mean()
        assert abs(seen - share) < 5 * math.sqrt(share / MANY)


def test_integers_are_evenly_distributed():
    draw = compiled(lambda s: drawn([MANY], 1, "integer", torch.int64, (-3, 97), s))
    counts = (draw(SEEDS) + 3).bincount(minlength=100).double()
    chi_squared = ((counts - MANY / 100) ** 2 / (MANY / 100)).sum()
    assert len(counts) == 100 and abs(chi_squared - 99) < 5 * math.sqrt(2 * 99)


# -- torch's own functions -------------------------------------------------------------------------


def test_what_torch_draws_has_its_distribution():
    def draw(x):
        return (
            torch.rand(300, 100), torch.rand_like(x), torch.randn(300, 100), torch.randn_like(x),
            x.clone().uniform_(2, 5), x.clone().normal_(1, 2), x.clone().exponential_(2.0),
            torch.bernoulli(x * 0 + 0.3), x.clone().bernoulli_(0.3), torch.randint_like(x, 5),
            torch.randint(3, 9, (300, 100)).float(), torch.randint(5, (300, 100)).float(),
            torch.rand(300, 100, dtype=torch.float64), torch.randn(300, 100, dtype=torch.bfloat16),
        )  # fmt: skip

    moments = (
        (0.5, 1 / 12), (0.5, 1 / 12), (0, 1), (0, 1),
        (3.5, 9 / 12), (1, 4), (0.5, 0.25),
        (0.3, 0.21), (0.3, 0.21), (2, 2),
        (5.5, 35 / 12), (2, 2),
        (0.5, 1 / 12), (0, 1),
    )  # fmt: skip
    with seeded(1):
        found = compiled(draw)(torch.zeros(300, 100))
    flat = [t.double().flatten() for t in found]
    for values, (mean, variance) in zip(flat, moments, strict=True):
        assert abs(values.mean() - mean) < 5 * math.sqrt(variance / 30000)
        assert abs(values.var() - variance) < 0.05 * variance
    for i, a in enumerate(flat):
        for b in flat[:i]:
            assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1]) < 5 / math.sqrt(30000)


def test_draws_have_eagers_types_and_strides():
    x = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)

    def draw(x):
        return (torch.rand_like(x), torch.randn_like(x.transpose(1, 2)), torch.rand(0, 3),
                torch.randint(7, (3,), dtype=torch.int32), torch.randint_like(x, 3, 9).to(x.dtype),
                torch.bernoulli(x.half()), torch.rand(()), F.dropout(x.bfloat16(), 0.5, True),
                torch.rand_like(x[:, :, 1:2, :]), torch.randn(3, 1).expand(3, 4) + 1)  # fmt: skip

    for ours, eagers in zip(compiled(draw)(x), draw(x), strict=True):
        assert ours.dtype is eagers.dtype and ours.shape == eagers.shape
        assert ours.stride() == eagers.stride()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("bounds", ((0.0, 1.0), (-3.0, -1.0), (1e6, 1e6 + 1)), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_uniform_in_place_stays_below_its_upper_bound(bounds, dtype):
    low, high = (torch.tensor(b, dtype=dtype).item() for b in bounds)
    values = compiled(lambda x: x.clone().uniform_(low, high))(torch.zeros(20000, dtype=dtype))
    assert values.min() >= low and (values.max() < high or low == high)


def test_an_exponential_number_is_never_zero(monkeypatch):
    values = compiled(lambda x: x.clone().exponential_(3.0))(torch.zeros(1 << 20))
    assert values.min() > 0 and torch.isfinite(values.log()).all()


def test_probabilities_of_zero_and_one_are_certain():
    ends = torch.tensor([0.0, 1.0]).repeat(5000)
    coins = compiled(lambda p: (torch.bernoulli(p), torch.bernoulli(p.double())))(ends)
    assert torch.equal(coins[0], ends) and torch.equal(coins[1], ends.double())


def test_small_probabilities_keep_24_bits_in_bf16():
    """8 bits would keep 230 of 256: 0.8984."""
    kept = compiled(lambda x: F.dropout(x, 0.1, True))(torch.ones(1 << 20, dtype=torch.bfloat16))
    share = (kept != 0).double().mean()
    assert abs(share - 0.9) < 5 * math.sqrt(0.09 / (1 << 20))


# -- seeds -----------------------------------------------------------------------------------------


def test_the_seed_of_torch_decides_and_each_call_draws_anew():
    draw = compiled(lambda x: (F.dropout(x, 0.5, True), torch.rand_like(x), torch.rand_like(x)))
    x = torch.ones(3000)
    with seeded(1):
        first, second = draw(x), draw(x)
    with seeded(1):
        again = draw(x)
    with seeded(2):
        other = draw(x)
    for a, b, c, d in zip(first, second, again, other, strict=True):
        assert torch.equal(a, c)
        assert not torch.equal(a, b) and not torch.equal(a, d)
    assert not torch.equal(first[1], first[2])


def test_a_generator_of_the_users_own_is_followed():
    def draw(x, generator):
        return torch.rand(100, generator=generator) + x

    torch._dynamo.reset()
    found, expected = (
        run(torch.zeros(100), torch.Generator().manual_seed(3))
        for run in (torch.compile(draw, backend="fusec"), draw)
    )
    assert torch.equal(found, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_fallback_random_follows_eagers_stream(dtype):
    def draw(x):
        nothing = F.dropout(x, 0.0, True) + F.dropout(x, 1.0, True)
        attention = F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3)
        return (torch.rand(5, 7) + nothing, torch.randn_like(x), torch.randint(3, 9, (11,)),
                torch.bernoulli(x.sigmoid()), x.clone().uniform_(2, 3), F.dropout(x, 0.3, True),
                attention, torch.empty_like(x).bernoulli_(0.4))  # fmt: skip

    x = torch.linspace(-1, 1, 35, dtype=dtype).reshape(5, 7)
    with seeded(4):
        expected = draw(x)
    with seeded(4):
        found = compiled(draw, fallback_random=True)(x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("checkpointed", (False, True))
def test_fallback_random_has_eagers_masks_in_training(checkpointed):
    def layer(x):
        return F.dropout(F.gelu(x), 0.4, True)

    def model(x):
        return checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)

    gradients = []
    for run in (model, compiled(model, fallback_random=True)):
        x = torch.linspace(-2, 2, 300).requires_grad_()
        with seeded(4):
            run(x).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


# -- training --------------------------------------------------------------------------------------


def saved_by(fn, *args):
    """Return what a call returns, and the tensors that its backward keeps besides ``args``."""
    kept = []
    given = {a.untyped_storage().data_ptr() for a in args}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in given:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return fn(*args), kept


@pytest.mark.sampled(5)
@pytest.mark.parametrize("p", (0.1, 0.5))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
def test_the_gradient_has_the_mask_of_the_forward_and_none_is_saved(p, dtype):
    x = torch.randn(64, 100).to(dtype).requires_grad_()  # drawn in f32: none is zero
    out, kept = saved_by(compiled(lambda x: F.dropout(x, p, True)), x)
    out.backward(torch.ones_like(out))
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.int64, 1)]
    scale = torch.tensor(1 / (1 - p), dtype=dtype)
    torch.testing.assert_close(x.grad, torch.where(out != 0, scale, 0))
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    factor = torch.where(out != 0, torch.tensor(1 / (1 - p), dtype=wide), 0)
    assert torch.equal(out, (x.detach().to(wide) * factor).to(dtype))


def test_two_dropouts_of_a_graph_save_two_seeds():
    def block(x, w):
        return x + F.dropout(F.dropout(torch.sin(x), 0.3, True) @ w, 0.4, True)

    x, w = torch.randn(64, 96).requires_grad_(), torch.randn(96, 96).requires_grad_()
    out, kept = saved_by(compiled(block), x, w)
    assert sum(t.numel() for t in kept if t.dtype in (torch.int64, torch.bool, torch.uint8)) == 2
    dropped = out == x
    out.sum().backward()
    upstream = torch.where(dropped, 0.0, 1 / 0.6) @ w.detach().t()
    inner = x.grad - 1
    kept_inside = inner != 0
    expected = upstream * torch.cos(x.detach()) / 0.7
    torch.testing.assert_close(inner[kept_inside], expected[kept_inside], atol=1e-4, rtol=1e-4)
    assert abs(kept_inside.float().mean() - 0.7) < 0.03


def test_noise_of_the_forward_is_that_of_the_gradient():
    def reparametrised(mean, log):
        return mean + torch.randn_like(mean) * torch.exp(log)

    mean, log = (torch.randn(40, 50).requires_grad_() for _ in range(2))
    out, kept = saved_by(compiled(reparametrised), mean, log)
    out.sum().backward()
    assert all(t.numel() == 1 for t in kept)
    torch.testing.assert_close(log.grad, (out - mean).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("selective", (False, True), ids=("all", "selective"))
def test_checkpointing_draws_the_same_numbers_again(selective):
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    def policy(_, operation, *args, **kwargs):
        saved = operation in (torch.ops.aten.mm.default, torch.ops.aten.native_dropout.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    extra = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}

    def block(x, w):
        return F.dropout(torch.sin(x @ w), 0.4, True)

    def model(x, w):
        x = checkpoint(block, x, w, use_reentrant=False, **(extra if selective else {}))
        return x * 2

    x, w = torch.randn(64, 80).requires_grad_(), torch.randn(80, 80).requires_grad_()
    out, kept = saved_by(compiled(model), x, w)
    out.sum().backward()
    assert not [t for t in kept if t.dtype is torch.bool]
    product = (x @ w).detach()
    expected = (out != 0) * torch.cos(product) * 2 / 0.6
    torch.testing.assert_close(x.grad, expected @ w.detach().t(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(w.grad, x.detach().t() @ expected, atol=1e-4, rtol=1e-4)


def test_gradients_are_those_of_the_function_with_its_draws_held():
    def block(x, w):
        h = F.dropout(torch.sin(x @ w), 0.3, True) * torch.rand_like(x)
        weights = F.dropout(torch.softmax(h @ h.t(), -1), 0.2, True)
        return (weights @ h + torch.randn_like(h)).square().sum()

    x, w = (torch.randn(24, 24, dtype=torch.float64).requires_grad_() for _ in range(2))
    step, direction = compiled(block), torch.randn(24, 24, dtype=torch.float64)

    def value(x):
        with seeded(8):
            return step(x.requires_grad_(), w)

    value(x).backward()
    up, down = (value(x.detach() + e * direction).item() for e in (1e-5, -1e-5))
    assert math.isclose((x.grad * direction).sum().item(), (up - down) / 2e-5, rel_tol=1e-6)


def test_dynamic_shapes_draw_by_position():
    step = compiled(lambda x: F.dropout(x, 0.25, True) * torch.rand_like(x), dynamic=True)
    for rows in (5, 8, 13):
        x = torch.ones(rows, 2 * rows + 1).requires_grad_()
        with seeded(3):
            out = step(x)
        with seeded(3):
            seeds = torch.ops.fusec.random_seeds(2, torch.device("cpu"))
        mask, numbers = (drawn(list(x.shape), k, seeds=seeds) for k in (0, 1))
        expected = torch.where(mask >= 0.25, numbers / 0.75, 0)
        torch.testing.assert_close(out.detach(), expected)
        out.sum().backward()
        torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("p", (0.0, 1.0))
def test_dropout_of_nothing_and_of_everything_draws_no_number(p):
    x = torch.randn(6, 33).requires_grad_()
    with seeded(5):
        state = torch.get_rng_state()
        out = compiled(lambda x: F.dropout(x, p, True) + 1)(x)
        assert torch.equal(torch.get_rng_state(), state)
    out.sum().backward()
    assert torch.equal(out, x + 1 if p == 0 else torch.ones_like(x))
    assert torch.equal(x.grad, torch.full_like(x, 1 - p))


@pytest.mark.parametrize("value", (math.inf, -math.inf, math.nan))
def test_what_is_not_finite_stays_so_where_it_is_dropped(value):
    """0 * inf is NaN, as eager's product with the mask is."""
    out = compiled(lambda x: F.dropout(x, 0.5, True))(torch.full((1000,), value))
    assert not torch.isfinite(out).any()


@pytest.mark.first
@pytest.mark.parametrize("backend", ("triton_interpreter", "triton_fused"))
def test_gpu_kernels_draw_what_cpu_kernels_draw(backend):
    def attention(q, k, v):
        weights = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1)
        return F.dropout(weights, 0.4, True) @ v

    shapes = [torch.randn(2, 33, 16) for _ in range(3)]
    results = []
    for name in ("fusec", backend):
        inputs = [t.clone().requires_grad_() for t in shapes]
        torch._dynamo.reset()
        with seeded(9):
            out = compile_with(attention, name)(*inputs)
            out.square().sum().backward()
        results.append((out.detach(), *map(operator.attrgetter("grad"), inputs)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
