"""A linear layer and its loss in chunks of rows: against eager, and the memory that it takes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fusec
from tests.support import check, compile_with, tune, values

C, V = 16, 200
ROWS = 16
"""Rows of a chunk in these tests."""
REDUCTIONS = ("mean", "sum", "none")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_CHUNK_BYTES", "2000")
    monkeypatch.setenv("FUSEC_VERIFY", "1")
    monkeypatch.setenv("FUSEC_CACHE", "0")
    tune(monkeypatch, "fusion", chunk_bytes=ROWS * V * 4, chunk_rows=1)


def loops(fn, *inputs: torch.Tensor, train: bool = True, dynamic: bool = False) -> dict[str, int]:
    """Return how many loops over rows each graph of a function has."""
    told = fusec.explain(fn, *inputs, train=train, dynamic=dynamic)
    return {graph.name: len(graph.loops) for graph in told.graphs}


def targets(*shape: int, ignored: bool = False) -> torch.Tensor:
    t = values(*shape, dtype=torch.int64, low=0, high=V, seed=5)
    if ignored:
        t.view(-1)[::3] = -100
    return t


def loss_of(reduction: str, smoothing: float = 0.0):
    def loss(x, w, t, *b):
        logits = F.linear(x, w, *b)
        return F.cross_entropy(
            logits.view(-1, V), t.view(-1), reduction=reduction, label_smoothing=smoothing
        )

    return loss


@pytest.mark.sampled(17)
@pytest.mark.parametrize("bias", (False, True), ids=("no bias", "bias"))
@pytest.mark.parametrize("smoothing", (0.0, 0.1))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_linear_and_cross_entropy_match_eager(reduction, smoothing, bias):
    b = (values(V, seed=3),) if bias else ()
    inputs = values(48, C), values(V, C, seed=2), targets(48, ignored=True), *b
    check(loss_of(reduction, smoothing), *inputs, train=True)


def test_what_a_loop_fills_is_new_to_autograd():
    x, w, t = values(5 * ROWS, C), values(V, C), torch.arange(5 * ROWS) % V

    def losses(x, w):
        logits = x @ w.T
        return F.cross_entropy(logits, t, reduction="none"), logits.amax(-1), logits.T @ x

    compiled = compile_with(losses)
    assert [out._version for out in compiled(x, w)] == [0, 0, 0]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rows", (37, 7, 1), ids="{} rows".format)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_last_chunk_may_be_short(reduction, rows):
    check(loss_of(reduction), values(rows, C), values(V, C, seed=2), targets(rows), train=True)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64), ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_other_types_match_eager(reduction, dtype):
    x, w, b = values(40, C), values(V, C, seed=2), values(V, seed=3)
    inputs = x.to(dtype), w.to(dtype), targets(40, ignored=True), b.to(dtype)
    smoothing = 0.0 if dtype is torch.float16 else 0.1  # where eager's sum over classes overflows
    check(loss_of(reduction, smoothing), *inputs, train=True)


@pytest.mark.parametrize("bias", (False, True), ids=("no bias", "bias"))
@pytest.mark.parametrize("rows", (40, 160), ids=("whole rows", "a sum in f32"))
def test_gradients_in_16_bits_match_eager(rows, bias):
    """The gradient of the logits is whole where a sum of the weight's in f32 would be as large."""
    inputs = values(rows, C), values(V, C, seed=2), targets(rows, ignored=True)
    b = (values(V, seed=3),) if bias else ()
    inputs = tuple(t.bfloat16() if t.is_floating_point() else t for t in (*inputs, *b))
    check(loss_of("mean"), *inputs, train=True)
    (forward, _) = fusec.explain(loss_of("mean"), *inputs, train=True).graphs
    assert ("addmm_" in str(forward.loops)) is (rows == 160)


@pytest.mark.first
@pytest.mark.parametrize("bias", (False, True), ids=("no bias", "bias"))
def test_rows_of_batch_and_time_match_eager(bias):
    b = (values(V, seed=3),) if bias else ()
    inputs = values(3, 16, C), values(V, C, seed=2), targets(3, 16), *b
    check(loss_of("mean", 0.1), *inputs, train=True)


def test_weights_of_classes_match_eager():
    weight = values(V, seed=4, low=0.1, high=2.0)

    def loss(x, w, t):
        return F.cross_entropy(F.linear(x, w), t, weight=weight.to(x.dtype))

    check(loss, values(48, C), values(V, C, seed=2), targets(48, ignored=True), train=True)


def test_a_loss_written_out_matches_eager():
    def loss(x, w, t):
        logits = x @ w.t()
        lse = torch.logsumexp(logits.float(), -1)
        picked = logits.gather(-1, t[..., None])[..., 0]
        return (lse - picked).mean() + 1e-2 * lse.square().mean()

    check(loss, values(3, 16, C), values(V, C, seed=2), targets(3, 16), train=True)


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.parametrize("dynamic", (True, False), ids=("dynamic", "static"))
def test_two_batches_of_other_sizes_match_eager(dynamic):
    loss = loss_of("mean")
    for rows in (48, 80):
        inputs = values(rows, C), values(V, C, seed=2), targets(rows)
        check(loss, *inputs, train=True, dynamic=dynamic)
        assert loops(loss, *inputs, dynamic=dynamic) == {"forward": 1, "backward": 0}


class Tied(nn.Module):
    """An embedding whose weights are the head's as well, and a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, C)
        self.norm = nn.LayerNorm(C)

    def forward(self, ids, t):
        hidden = self.norm(self.embed(ids))
        logits = F.linear(hidden, self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), t.flatten())


def test_tied_weights_match_eager():
    torch.manual_seed(0)
    check(Tied(), targets(3, 16), targets(3, 16), train=True)


def test_a_forward_alone_runs_in_chunks():
    inputs = values(48, C), values(V, C, seed=2), targets(48)
    check(loss_of("mean"), *inputs)
    assert loops(loss_of("mean"), *inputs, train=False) == {"inference": 1}


def test_gradients_linear_in_a_scalar_are_made_in_the_forward():
    inputs = values(48, C), values(V, C, seed=2), targets(48)
    assert loops(loss_of("mean"), *inputs) == {"forward": 1, "backward": 0}


def test_a_loss_of_each_row_computes_its_logits_again():
    inputs = values(48, C), values(V, C, seed=2), targets(48)
    assert loops(loss_of("none"), *inputs) == {"forward": 1, "backward": 1}


def test_logits_that_are_returned_are_whole():
    def loss(x, w, t):
        logits = F.linear(x, w)
        return F.cross_entropy(logits, t), logits

    inputs = values(48, C), values(V, C, seed=2), targets(48)
    check(loss, *inputs, train=True)
    assert loops(loss, *inputs) == {"forward": 0, "backward": 0}


# -- memory ----------------------------------------------------------------------------------------


def peak_bytes(call) -> int:
    """Return the most bytes that a call holds at a time, by the allocator's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    events = seen.profiler.kineto_results.events()
    moves = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = most = 0
    for _, size in moves:
        held += size
        most = max(most, held)
    return most


def peaks(rows: int, width: int, wide: int, dtype: torch.dtype, reduction: str) -> list[int]:
    """Return the bytes above the gradients that eager and fusec hold at most in a step."""
    x, w = values(rows, width).to(dtype), values(wide, width, seed=2).to(dtype)
    x, w = x.requires_grad_(), w.requires_grad_()
    t = values(rows, dtype=torch.int64, low=0, high=wide)

    def loss(x, w, t):
        return F.cross_entropy(F.linear(x, w), t, reduction=reduction)

    compiled = compile_with(loss)

    def step(call):
        def run() -> None:
            call(x, w, t).sum().backward()

        return run

    step(compiled)()
    found = []
    for call in (loss, compiled):
        x.grad = w.grad = None
        found.append(peak_bytes(step(call)) - x.nbytes - w.nbytes)
    return found


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_no_more_than_a_chunk_is_in_memory(reduction, monkeypatch):
    rows, wide = 512, 2048
    monkeypatch.setenv("FUSEC_VERIFY", "0")  # it would keep what is compared
    tune(monkeypatch, "fusion", chunk_bytes=32 * wide * 4)
    monkeypatch.setenv("FUSEC_CHUNK_BYTES", str(rows * wide * 2))  # half: also where it costs time
    eager, found = peaks(rows, C, wide, torch.float32, reduction)
    assert eager > 2 * rows * wide * 4
    assert found < eager / 8


@pytest.mark.parametrize(
    ("rows", "share"), ((128, 0.7), (512, 0.25)), ids=("whole rows", "a sum in f32")
)
def test_a_loop_in_16_bits_takes_less_memory(rows, share, monkeypatch):
    """Of 128 rows the gradient of the logits is whole, and the library takes half of it again."""
    wide = 2048
    monkeypatch.setenv("FUSEC_VERIFY", "0")
    tune(monkeypatch, "fusion", chunk_bytes=32 * wide * 2)
    monkeypatch.setenv("FUSEC_CHUNK_BYTES", str(rows * wide * 2))
    eager, found = peaks(rows, 64, wide, torch.bfloat16, "mean")
    assert found < share * eager


def test_rows_in_reverse_are_no_rows_of_a_loop():
    x, w, u = values(48, C), values(V, C, seed=2), values(48, 1, seed=3)

    def reverse(x, w, u, t):
        scores = x @ w.t()
        return F.cross_entropy(scores, t.flip(0)), (scores * u.flip(0)).sum(1), (scores * u).sum(1)

    check(reverse, x, w, u, targets(48), train=True)
