"""What a call of 30 to 300 us costs beside its kernels: `python -m bench.small_calls`.

Custom operators, sparse and normed embeddings, a number read from a tensor, samplers, a small graph
network. Peers take turns: eager; ``dynamo``, which is torch.compile with no compiler behind it, the
least that any backend costs; ``aot_eager``; fusec. A row has medians in us, the difference and the
ratio of fusec to eager, and what fusec adds to ``dynamo``. Bar: eager + 10 % or + 5 us.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import record, timing
from bench.workload import backend_of

PEERS = {"eager": "", "dynamo": "eager", "aot_eager": "aot_eager", "fusec": "fusec"}
SHARE, MORE_US = 1.1, 5.0
Row: TypeAlias = tuple[str, bool, Callable[..., Tensor], tuple[Any, ...]]
"""A name, whether it trains, a function and its arguments."""


@torch.library.custom_op("fusec_bench::scaled", mutates_args=())
def scaled(x: Tensor, by: float) -> Tensor:
    return x * by


@torch.library.custom_op("fusec_bench::add_to", mutates_args=("x",))
def add_to(x: Tensor, y: Tensor) -> None:
    x.add_(y)


scaled.register_fake(lambda x, by: torch.empty_like(x))
scaled.register_autograd(lambda ctx, gradient: (gradient * 2.0, None))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.small_calls", description=__doc__)
    parser.add_argument("--only", default="", help="measure rows with this text in their name")
    parser.add_argument("--quick", action="store_true", help="few rounds: a check")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="default %(default)s")
    options = parser.parse_args(arguments)
    run = record.Record("small_calls", options.out, quick=options.quick, peers=list(PEERS))
    missed = 0
    for name, train, call, given in rows():
        if options.only not in name:
            continue
        row = measure(call, given, train=train, quick=options.quick)
        peers = {peer: timing.summary(values, "us") for peer, values in row.items()}
        ratio = timing.paired_ratio(row["fusec"], row["eager"])
        us = {peer: float(found["median_us"]) for peer, found in peers.items()}
        more = us["fusec"] - us["eager"]
        missed += ratio > SHARE and more > MORE_US
        run.add({"group": "small calls", "name": name, "mode": "training" if train else "forward",
                 "peers": peers, "ratios": {"eager/fusec": round(1 / ratio, 4)}})  # fmt: skip
        times = "  ".join(f"{peer} {value:7.1f}" for peer, value in us.items())
        print(f"{name:20}{'training ' if train else 'forward  '}{times}   {more:+7.1f} us, "
              f"{ratio:.2f} times eager; {us['fusec'] - us['dynamo']:+.1f} us to dynamo",
              flush=True)  # fmt: skip
    print(f"{missed} rows beyond eager + 10 % and + 5 us; numbers: {run.path}")
    return 0


def measure(
    call: Callable[..., Tensor], given: tuple[Any, ...], *, train: bool, quick: bool
) -> dict[str, list[float]]:
    """Return seconds of a call, by peer."""
    torch._dynamo.reset()
    steps = {
        peer: step(compiled(call, backend), call, given, train=train)
        for peer, backend in PEERS.items()
    }
    for one in steps.values():
        for _ in range(3):  # compiles, and the backward when it first runs
            one()
    rounds = {"rounds": 5, "budget": 0.3} if quick else {"rounds": 101, "budget": 4.0}
    return timing.interleaved(steps, at_least=0.002, **rounds)


def compiled(call: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    """Return a function of its own for each backend: Dynamo keeps results with code objects."""
    if not backend:
        return call

    def entry(*args: Any) -> Tensor:
        return call(*args)

    entry.__code__ = entry.__code__.replace(co_name=f"{backend}_entry")
    return torch.compile(entry, backend=backend_of(backend))


def step(
    call: Callable[..., Tensor], model: Any, given: tuple[Any, ...], *, train: bool
) -> Callable[[], Any]:
    """Return a call without arguments; in training with the gradients of weights, or inputs."""

    def forward() -> Tensor:
        return call(*given)

    if not train:
        return torch.no_grad()(forward)
    leaves = list(model.parameters()) if isinstance(model, nn.Module) else [*given]
    return lambda: torch.autograd.grad(forward().sum(), leaves)


def rows() -> Iterator[Row]:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    leaf = x.clone().requires_grad_()
    yield "custom operator", False, lambda x: scaled(x, 2.0) + 1, (x,)
    yield "custom operator", True, lambda x: scaled(x, 2.0) + 1, (leaf,)
    yield "custom operators", False, lambda x: scaled(scaled(x, 2.0).sin(), 2.0), (x,)
    yield "custom mutation", False, added, (x,)
    rotations = torch.polar(torch.ones(16, 32), torch.randn(16, 32))
    yield "rope, complex", False, rotated, (torch.randn(1, 8, 16, 64), rotations)
    places, offsets = torch.randint(0, 1000, (64,)), torch.arange(0, 64, 8)
    yield "sparse embedding", True, nn.Embedding(1000, 32, sparse=True), (places,)
    bag = nn.EmbeddingBag(1000, 32, sparse=True, mode="sum")
    yield "sparse bag", True, bag, (places, offsets)
    yield "normed embedding", False, nn.Embedding(1000, 32, max_norm=1.0), (places,)
    yield "item, a scalar", False, lambda x, s: x * s.item() + 1, (x, torch.tensor(3.0))
    yield "item, a size", False, lambda x, n: x[: n.item()] * 2, (x, torch.tensor(5))
    logits = torch.randn(1, 5000)
    yield "sampler, top k", False, top_k, (logits,)
    yield "sampler, top p", False, top_p, (logits,)
    network, ends = Network(), (torch.randint(0, 200, (800,)), torch.randint(0, 200, (800,)))
    for train in (False, True):
        yield "graph network", train, network, (torch.randn(200, 32), *ends)
    for train in (False, True):
        layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
        yield "two layers", train, layers, (torch.randn(16, 32),)


def added(x: Tensor) -> Tensor:
    y = x + 1
    add_to(y, x)
    return y * 2


def rotated(q: Tensor, rotations: Tensor) -> Tensor:
    pairs = torch.view_as_complex(q.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations).flatten(3)


def top_k(logits: Tensor) -> Tensor:
    kept, _ = torch.topk(logits, 50)
    masked = torch.where(logits < kept[:, -1:], float("-inf"), logits)
    return torch.multinomial(F.softmax(masked / 0.8, -1), 1)


def top_p(logits: Tensor) -> Tensor:
    ordered, places = torch.sort(logits, descending=True, dim=-1)
    shares = F.softmax(ordered, -1)
    masked = torch.where(shares.cumsum(-1) - shares > 0.9, float("-inf"), ordered)
    return places.gather(-1, torch.multinomial(F.softmax(masked, -1), 1))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 16)])

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            sent = layer(x)[source]
            x = F.relu(sent.new_zeros(len(x), sent.shape[1]).index_add(0, target, sent))
        return x


if __name__ == "__main__":
    sys.exit(main())
