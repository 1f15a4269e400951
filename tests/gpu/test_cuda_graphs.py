"""Models recorded as CUDA graphs on a device: steps equal eager's, and memory does not grow."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from bench.workload import backend_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()  # and with it all recordings, and their memory


class Mlp(torch.nn.Module):
    def __init__(self, width: int = 256, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(self.norm(x)))
        return x + self.down(F.dropout(h, self.dropout, self.training))


def recorded(fn, **more):
    options = {"strict": True, "cudagraphs": True, "autotune": False}
    return torch.compile(fn, backend=backend_of("fusec"), options=options, **more)


def recordings() -> int:
    """How many graphs torch's trees hold on this device."""
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    waiting = [] if manager is None else [n for nodes in manager.roots.values() for n in nodes]
    count = 0
    while waiting:
        count += 1
        waiting.extend(n for nodes in waiting.pop().children.values() for n in nodes)
    return count


def train(model, step, batches) -> list[torch.Tensor]:
    """Losses and parameters of steps of SGD; a new tensor with other values for each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = step(x.clone()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def test_five_steps_of_training_equal_eager():
    torch.manual_seed(0)
    eager = Mlp().cuda()
    model = copy.deepcopy(eager)
    batches = [torch.randn(64, 256, device="cuda") for _ in range(5)]
    expected = train(eager, eager, batches)
    found = train(model, recorded(model), batches)
    assert recordings() >= 2  # a forward and a backward
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_replays_do_not_record_again_and_memory_does_not_grow():
    model = Mlp().cuda()
    step = recorded(model)
    batches = [torch.randn(64, 256, device="cuda") for _ in range(4)]
    train(model, step, batches)
    before, count = torch.cuda.memory_reserved(), recordings()
    train(model, step, batches * 10)
    assert recordings() <= count + 2  # gradients of a new optimizer may move once
    assert torch.cuda.memory_reserved() <= before + 2**21


def test_batches_of_several_sizes_are_recorded_each():
    model = Mlp().cuda().eval()
    fn = recorded(model, dynamic=True)
    with torch.no_grad():
        for _ in range(4):
            for rows in (16, 33, 64):
                x = torch.randn(rows, 256, device="cuda")
                torch.testing.assert_close(fn(x), model(x), rtol=1e-3, atol=1e-4)
    assert recordings() >= 3


def test_training_on_batches_of_several_sizes():
    torch.manual_seed(0)
    eager = Mlp().cuda()
    model = copy.deepcopy(eager)
    batches = [torch.randn(rows, 256, device="cuda") for rows in (32, 48, 17) * 3]
    expected = train(eager, eager, batches)
    found = train(model, recorded(model, dynamic=True), batches)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_dropout_draws_anew_in_each_replay():
    model = Mlp(dropout=0.5).cuda().train()
    fn = recorded(model)
    x = torch.randn(64, 256, device="cuda")
    with torch.no_grad():
        outputs = [fn(x).clone() for _ in range(5)]
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(outputs))


def test_buffers_are_updated_by_replays():
    eager = torch.nn.BatchNorm1d(64).cuda()
    model = copy.deepcopy(eager)
    fn = recorded(model)
    for seed in range(5):
        x = torch.randn(32, 64, device="cuda") + seed
        fn(x)
        eager(x)
    torch.testing.assert_close(model.running_mean, eager.running_mean)
    assert model.num_batches_tracked.item() == 5


def test_a_written_input_is_not_recorded_and_is_right():
    def update(cache, x):
        cache.mul_(0.5).add_(x)
        return cache.sum(-1)

    fn, cache = recorded(update), torch.zeros(64, 64, device="cuda")
    ours = cache.clone()
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(64, 64, device="cuda")
            torch.testing.assert_close(fn(ours, x), update(cache, x), rtol=1e-4, atol=1e-4)
    assert recordings() == 0
