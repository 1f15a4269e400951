"""Sizes that nobody knows before the call: what makes them runs eagerly, the rest stays fused.

Sizes may be 0 or 1 here without another compile (``mark_unbacked``), or come of a tensor's contents
in the middle of a graph.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._higher_order_ops.while_loop import while_loop

from bench.workload import backend_of
from fusec.driver.compiler import RECENT
from tests import triton_backend  # noqa: F401  (registers its backends)
from tests.support import TRAINED, assert_agree, check, since_2_13, values


def compiled(fn, backend="fusec", fullgraph=True, **settings):
    torch._dynamo.reset()
    counters.clear()
    RECENT.clear()
    options = {"strict": True, "verify": True} if backend == "fusec" else None
    return torch.compile(
        fn, backend=backend_of(backend), fullgraph=fullgraph, options=options, **settings
    )


def agree(wanted, found):
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (wanted, found)), strict=True)
    for a, b in pairs:
        exact = a.double() if a.is_floating_point() else a
        assert_agree(a, b, exact, "result", tol=1e-5, strides=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 16)

    def forward(self, x):
        joined = torch.cat([x, x * 2]).flip(0)
        scores = (x @ x.mT).softmax(-1)
        return (
            F.silu(self.up(self.norm(x))), joined, scores @ x, x.sum(0), x.mean(0), x.view(-1) + 1
        )  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ("fusec", "triton_interpreter"))
def test_a_size_that_was_never_seen_may_be_none_one_or_many(backend):
    block = Block()
    call = compiled(block, backend)
    for rows in (5, 1, 0, 17):
        x = values(rows, 8, seed=rows)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        with torch.no_grad():
            agree(block(x), call(x))
    assert counters["stats"]["unique_graphs"] == 1
    assert all(trace.problem is None for trace in RECENT)


def test_a_variance_in_parts_of_nothing_is_eagers():
    def normed(x):
        variance, mean = torch.var_mean(x, (0, 1), correction=0)
        return mean, (x - mean) * torch.rsqrt(variance + 1e-5)

    call = compiled(normed)
    for rows in (5, 0, 33):
        x = values(64, rows, 32, seed=rows)
        torch._dynamo.decorators.mark_unbacked(x, 1)
        agree(normed(x), call(x))


def test_what_does_not_vary_along_no_row_has_no_sum_and_no_true_element():
    def reduced(x, y):
        rows = x.shape[0]
        return torch.full((rows,), True).any(), y.expand(rows, 3).sum(0)

    call, y = compiled(reduced), torch.tensor([1.0, math.inf, math.nan])
    for rows in (5, 0):
        x = values(rows, 2)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        agree(reduced(x, y), call(x, y))


def pointwise_forms(x):
    n = x.shape[0]
    place = torch.arange(n)[:, None]
    return (
        F.gelu(x) * 2, x.clamp(-1, 1), torch.where(x > 0, x, -x), x + place, x * (place % 3 == 1),
        x.flip(0), x.mT.contiguous() * 2, x.view(-1).exp(), torch.stack([x, x], 1).flatten(0, 1),
        x.repeat(2, 1) * 2, x[None].expand(3, -1, -1) + 1, torch.cat([x, x.sin()], 1),
        x.unsqueeze(1) * x, x[torch.arange(n).flip(0)] * 2, x.view(n, 2, 2).transpose(1, 2) + 1,
        x.masked_fill(place > 2, 0.5), torch.tril(x[:, None] * x, 1), F.pad(x, (1, 1)) * 3,
    )  # fmt: skip


def reduced_forms(x):
    return (
        x.sum(), x.sum(0), x.sum(1), x.mean(0), x.mean(1), x.detach().prod(0), x.amax(1),
        x.softmax(0), x.log_softmax(1), x.var(1), x.square().sum(0).sqrt().exp(),
        x.norm(dim=1).relu(),
        F.layer_norm(x, (4,)), (x > 0).any(0), (x > 0).all(1), x.argmax(1), (x > 0).sum(0),
        x.mT @ x, F.cross_entropy(x, x.argmin(1), reduction="sum"),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("backend", ("fusec", "triton_interpreter"))
@pytest.mark.parametrize("fn", (pointwise_forms, reduced_forms))
def test_one_compile_serves_no_row_one_and_many_in_training(fn, backend):
    def marked(x):
        torch._dynamo.decorators.mark_unbacked(x, 0)
        return call(x)

    call = compiled(fn, backend)
    for rows in (5, 0, 1, 2, 17):
        agree_in_training(fn, marked, values(rows, 4, seed=rows))
    assert counters["stats"]["unique_graphs"] == 1
    assert all(trace.problem is None for trace in RECENT)


def windows(x):
    """Windows whose sizes are the greatest or least of others, as x may have no row."""
    n = x.shape[0]
    shifted = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
    return (
        x[1:] * 2, x[:-1].exp(), x[::2] * 2, x[-2:] * 2, x[1:-1].tanh(), x[:3] * 2, x[: n // 2] + 1,
        x[1:] - x[:-1], shifted * x, torch.cat([x * 2, x[1:], x]), F.pad(x * 2, (0, 0, 1, 2)),
        x[1:].sum(0), x[:-1].softmax(0),
    )  # fmt: skip


def gradients(call, fn_inputs, seed=3):
    """Return outputs and the gradients of a random sum of them."""
    inputs = [t.clone().requires_grad_(t.is_floating_point()) for t in fn_inputs]
    outputs = call(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    roots = [t for t in outputs if t.requires_grad]
    wanted = [t for t in inputs if t.requires_grad]
    cotangents = [values(*root.shape, seed=seed) for root in roots]
    return (*outputs, *torch.autograd.grad(roots, wanted, cotangents, allow_unused=True))


def agree_in_training(fn, call, *inputs):
    wanted, found = gradients(fn, inputs), gradients(call, inputs)
    assert [t is None for t in wanted] == [t is None for t in found]
    agree(*(tuple(t.detach() for t in run if t is not None) for run in (wanted, found)))


@TRAINED
@pytest.mark.parametrize(
    "backend", ("fusec", pytest.param("triton_interpreter", marks=pytest.mark.slow))
)
def test_windows_of_a_size_that_was_never_seen_are_fused(backend, train):
    def marked(x):
        torch._dynamo.decorators.mark_unbacked(x, 0)
        return call(x)

    call = compiled(windows, backend)
    for rows in (6, 3, 2, 1, 0, 17):
        x = values(rows, 4, seed=rows)
        if train:
            agree_in_training(windows, marked, x)
        else:
            agree(windows(x), marked(x))
    assert counters["stats"]["unique_graphs"] == 1
    assert all(trace.problem is None for trace in RECENT)


@pytest.mark.sampled(3)  # a diagonal
@pytest.mark.parametrize("backend", ("fusec", "triton_interpreter"))
@pytest.mark.parametrize("shape", ((0, 4), (3, 0), (1, 1)), ids=str)
def test_static_sizes_of_none_and_one_are_eagers(shape, backend):
    def everything(x):
        return (
            (x * 2 + 1).relu(), x.sum(0), x.sum(), x.mean(0), x.prod(1), (x > 0).any(0),
            (x > 0).all(1), x.softmax(0), x.logsumexp(1), x @ x.mT, (x.mT @ x) * 2,
            torch.cat([x, x * 2, x[:0]]), torch.stack([x, x]), x.flip(0), x.reshape(-1),
            x.cumsum(0),
        )  # fmt: skip

    x = values(*shape)
    call = compiled(everything, backend)
    agree(everything(x), call(x))


@pytest.mark.parametrize("reduce", (lambda x: x.amax(0), lambda x: x.max(), lambda x: x.argmax(0)))
def test_the_largest_of_nothing_is_an_error_as_in_eager(reduce):
    x = values(0, 4)
    with pytest.raises((RuntimeError, IndexError)):
        reduce(x)
    with pytest.raises(Exception, match=r"(?i)dim|zero|empty|operation"):
        compiled(reduce)(x)


@pytest.fixture
def captured():
    """Let Dynamo capture what depends on data instead of breaking the graph there."""
    settings = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(**settings):
        yield


@pytest.mark.parametrize("reduce", ("max", "min", "amax", "argmin"))
@pytest.mark.parametrize("along", ((), (0,), (-1,)), ids=str)
def test_the_largest_of_nothing_is_an_error_where_data_say_how_many_there_are(
    captured, reduce, along
):
    def largest(x):
        chosen = x[(x > 0).any(1)]
        return getattr(chosen * 2, reduce)(*along)

    call, x = compiled(largest), values(5, 4)
    for rows in (x, -x, x[:2], torch.full((3, 4), -1.0)):
        kept = (rows > 0).any()
        if kept or along == (-1,):
            agree(largest(rows), call(rows))
            continue
        for run in (largest, call):
            with pytest.raises((RuntimeError, IndexError)):
                run(rows)


def positions(x, n):
    found = (x > 0).nonzero()
    return (found * 2 + 1).sum(0), x.exp() * 2


def chosen(x, n):
    y = x[x > 0]
    return y.sigmoid() * 2, y.sum(), x + 1


def number(x, n):
    k = n[0].item()
    torch._check(k >= 0)
    return x * k + 1, torch.zeros(k, 3) + x.sum(), torch.arange(k) * 2.5


def beginning(x, n):
    k = n[0].item()
    torch._check(k >= 1)
    torch._check(k <= x.shape[0])
    return (x[:k] * 2).softmax(0)


def repeated(x, n):
    return torch.repeat_interleave(x, n, 0) * 2 + 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fn", (positions, chosen, number, beginning, repeated))
def test_what_depends_on_data_runs_eagerly_and_the_rest_is_fused(captured, fn):
    call = compiled(fn)
    for seed, count in ((0, 3), (1, 1), (2, 4)):
        x, n = values(5, 4, seed=seed), torch.tensor([count, 0, 2, 1, 1])
        agree(fn(x, n), call(x, n))
    nothing = -values(5, 4).abs()
    agree(fn(nothing, n), call(nothing, n))
    assert counters["stats"]["unique_graphs"] == 1
    (trace,) = RECENT
    assert trace.problem is None


def masked_loss(x, n):
    """A language model's loss at the places that count: the two masks give one size."""
    kept = (x * 2)[n > 0]
    return F.cross_entropy(kept @ WEIGHT, n[n > 0] % 3, reduction="sum"), F.layer_norm(kept, (4,))


def experts(x, n):
    y = torch.zeros_like(x)
    for expert in range(2):
        rows = (n % 2 == expert).nonzero().squeeze(1)
        y = y.index_add(0, rows, F.silu(x[rows] * (expert + 1)))
    return y * 2


def counted(x, n):
    _, place, count = torch.unique(n, return_inverse=True, return_counts=True)
    return x[place] * count[place][:, None] + torch.bincount(n).sum() * x.exp()


def scattered(x, n):
    i, j = torch.where(x > 0)
    return torch.zeros(5, 4).index_put((i, j), x[i, j].exp(), accumulate=True), x[x > 0].mean()


def sized(x, n):
    a, b = n[:2].tolist()
    for part in (a, b):
        torch._check(part >= 0)
    torch._check(a + b <= x.shape[0])
    first, second = x.narrow(0, 0, a), x.narrow(0, a, b)
    return torch.cat([first * 2, second.exp()]).sum(0), first.tanh(), torch.zeros(a, 4) + x.sum()


WEIGHT = values(4, 7, seed=9)


def test_a_size_that_a_number_divides_may_be_none(captured):
    """A quarter of no element is none: the first column is then the other tensor's."""

    def joined(x, w):
        y = x[x > 0]
        torch._check(y.shape[0] % 4 == 0)
        return torch.cat([y.view(4, -1), w.view(4, -1)], 1)[:, 0] * 2

    call = compiled(joined)
    for x in (torch.ones(8), -torch.ones(8)):
        agree(joined(x, values(8)), call(x, values(8)))


@pytest.mark.sampled(17)
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize(
    "fn",
    (pytest.param(masked_loss, marks=since_2_13), experts, counted, repeated, scattered, sized),
)
def test_gradients_through_sizes_that_depend_on_data_are_eagers(captured, fn, dynamic):
    call = compiled(fn, dynamic=dynamic)
    for seed, count in ((0, 3), (1, 1), (2, 4)):
        agree_in_training(fn, call, values(5, 4, seed=seed), torch.tensor([count, 0, 2, 1, 1]))
    agree_in_training(fn, call, -values(5, 4).abs() - 1, torch.tensor([1, 0, 0, 0, 0]))
    assert counters["stats"]["unique_graphs"] == 1
    assert all(trace.problem is None for trace in RECENT)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fn", (masked_loss, scattered, sized))
def test_where_data_breaks_the_graph_training_is_right(fn):
    call = compiled(fn, fullgraph=False)
    for seed, count in ((0, 3), (1, 1), (2, 4)):
        agree_in_training(fn, call, values(5, 4, seed=seed), torch.tensor([count, 0, 2, 1, 1]))


def within(x, n):
    k = n[0].item()
    torch._check(k >= 1)
    torch._check(k <= x.shape[0])
    return x[:k] * 2


def even(x, n):
    k = n[0].item()
    torch._check((k >= 0) & (k % 2 == 0))
    torch._check((k < 1) | (k <= x.shape[0]))
    return x.repeat(2, 1)[:k] * 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("train", (False, True), ids=("inference", "training"))
@pytest.mark.parametrize(
    ("fn", "right", "wrong"), ((within, (5, 1), (6, 0, -1)), (even, (4, 2, 0), (3, 6, -2)))
)
def test_what_a_program_asserts_of_its_sizes_is_asserted(captured, fn, right, wrong, train):
    call = compiled(fn)
    x = values(5, 4).requires_grad_(train)
    for count in right:
        agree(fn(x, torch.tensor([count])), call(x, torch.tensor([count])))
    for count in wrong:
        with pytest.raises(RuntimeError, match="assertion failed"):
            call(x, torch.tensor([count]))
    assert counters["stats"]["unique_graphs"] == 1


def test_explain_names_what_depends_on_data(captured):
    import fusec  # the report is all that is needed of it

    (graph,) = fusec.explain(chosen, values(5, 4), torch.tensor([1])).graphs
    reasons = {(extern.op, extern.reason) for extern in graph.externs}
    assert ("index.Tensor", "a result that depends on data") in reasons
    assert len(graph.kernels) >= 2


def beside_a_mask(x, i):
    y = x * 2
    kept = y[y > 0]
    y[1, i[0]] = 0
    return y.sin(), kept.sum()


def behind_a_masked_write(x, i):
    y = x * 2
    y[y > 0] = 1
    y[1, i[0]] = 0
    return y.sin()


def written(x, i):
    y = x * 2
    y[i] = y[1, i] + 1
    return y.sin(), y[:, i]


def read_and_written(x, i):
    y = x * 2
    row = y[i] * y.argmax().item()
    y[1] = row
    return y.sin()


def looped(x, n):
    def step(i, y):
        return i + 1, y.sin() * 1.1

    start = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, y: i < n, step, (start, x * 2))[1].cos()


HELD = {
    "element": lambda x, i: (x * 2)[1, i].sin(),
    "row": lambda x, i: (x * 2)[i].sin(),
    "row of a stack": lambda x, i: torch.stack([x, x * 2, x + 1, x])[i].sin(),
    "row of an input": lambda x, i: x[i],
    "from": lambda x, i: (x * 2)[i:].sin(),
    "to": lambda x, i: (x * 2)[:i].sin(),
    "between": lambda x, i: (x * 2)[i - 1 : i].sin(),
    "select": lambda x, i: (x * 2).select(0, i.item()).sin(),
    "narrow": lambda x, i: (x * 2).narrow(0, i.item(), 1).sin(),
    "narrow by a tensor": lambda x, i: (x * 2).narrow(0, i, 1).sin(),
    "tensor_split": lambda x, i: torch.tensor_split(x.sin(), i.item()),
    "arithmetic": lambda x, i: x.sin() * i.item() + i,
    "a size": lambda x, i: torch.zeros(i.item()) + x.sum(),
    "a loop": looped,
    "a write": written,
    "a write behind a read": read_and_written,
    "a write beside a mask": lambda x, i: beside_a_mask(x, (i,)),
    "a write behind a masked one": lambda x, i: behind_a_masked_write(x, (i,)),
}
"""What Dynamo traces because it knows the number that an input holds, under guards."""


@pytest.mark.sampled(5)  # a diagonal
@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("train", (False, True), ids=("inference", "training"))
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
def test_a_number_that_an_input_holds_is_known_in_each_trace(captured, name, train, dynamic):
    other = values(4, 5, seed=3), torch.tensor(3)
    check(HELD[name], values(4, 5), torch.tensor(2), train=train, dynamic=dynamic, more=(other,))


@pytest.mark.parametrize("name", ("element", "a size", "a write"))
def test_another_number_that_an_input_holds_is_no_start_from_the_cache(captured, name):
    x = values(4, 5)
    for number in (2, 3, 1):
        call = compiled(HELD[name])
        agree(HELD[name](x, torch.tensor(number)), call(x, torch.tensor(number)))


def test_a_mask_of_several_axes_may_choose_elements_twice():
    """The second choice has the size of the first one, which is no symbol of its own."""

    def fn(x, mask):
        rows, columns = x[mask], x[:, mask[0]]
        return rows * 2, x[mask].sum(0), rows + x[mask], columns.sum(), x[:, mask[0]].exp()

    mask = values(4, 7, seed=1) > 0
    check(fn, values(4, 7), mask)
    check(fn, values(4, 7, 3), mask)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_one_row_of_few_is_chosen_as_eagerly(rows: int) -> None:
    """A sum of ``where(r == 0, 1, 0) * y`` has terms ``0 * y`` only where there are other rows."""
    y, x = torch.tensor([1.0, math.inf, math.nan]), torch.randn(rows, 3)

    def chosen(x: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(x.shape[0])[:, None] == 0, 1.0, 0.0).mul(y).sum(0)

    torch._dynamo.decorators.mark_unbacked(x, 0)
    found = torch.compile(chosen, backend="fusec", options={"strict": True})(x)
    torch.testing.assert_close(found, chosen(x), equal_nan=True)
