"""Training on two ranks, through torch.distributed as it is: DDP, FSDP2, tensor parallelism.

Each rank trains three models from the same weights: the distributed one eagerly, the distributed
one compiled, and one alone in f64 on the batches of both ranks, which is the reference.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.ranks import compiled_graphs, run_ranks
from tests.support import assert_agree, compile_with, seeded, values

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

STEPS = 2
WIDTH, HEADS, LENGTH, BATCH = 32, 4, 6, 4


class Attention(nn.Module):
    """Causal attention; the heads of a rank are those that its projections make."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], -1, WIDTH // HEADS)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(blocks: int = 1) -> nn.Module:
    with seeded():
        return Model(blocks)


def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = values(BATCH, LENGTH, WIDTH, seed=10 * step + rank).to(dtype)
    return x, (torch.arange(BATCH * LENGTH) + step + rank) % 5


def train(
    model: nn.Module, call: Callable, batch_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
) -> list[torch.Tensor]:
    """Return the losses of a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, labels = batch_of(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(call(x).flatten(0, 1), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def train_alone(ranks: tuple[int, ...], blocks: int = 1) -> tuple[list[torch.Tensor], nn.Module]:
    """Train in f64 on the batches of some ranks together; return losses and the model."""
    model = make_model(blocks).double()

    def together(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [batch(step, rank, torch.float64) for rank in ranks]
        return torch.cat([x for x, _ in parts]), torch.cat([labels for _, labels in parts])

    return train(model, model, together), model


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return whole parameters by the names they have alone."""
    return {
        name.removeprefix("module.").replace("_orig_mod.", ""): (
            p.full_tensor() if isinstance(p, DTensor) else p
        ).detach()
        for name, p in model.named_parameters()
    }


def check_states(eager: nn.Module, compiled: nn.Module, reference: nn.Module) -> None:
    states = state(eager), state(compiled), state(reference)
    for name in states[2]:
        assert_agree(*(s[name] for s in states), name, tol=1e-4)


def check_losses(eager: list, compiled: list, reference: list | None = None) -> None:
    """Assert equal losses; the loss of one rank's batch has no reference of its own."""
    for step, (a, b) in enumerate(zip(eager, compiled, strict=True)):
        r = a.double() if reference is None else reference[step]
        assert_agree(a, b, r, f"loss {step}", tol=1e-5)


# -- DDP -------------------------------------------------------------------------------------------


def ddp(rank: int, bucket_mb: float, graphs: int) -> None:
    dist._DEFAULT_FIRST_BUCKET_BYTES = int(bucket_mb * 2**20)  # it is a megabyte otherwise

    def own(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch(step, rank, torch.float32)

    plain, wrapped = (
        DistributedDataParallel(make_model(), bucket_cap_mb=bucket_mb) for _ in range(2)
    )
    expected = train(plain, plain, own)
    found = train(wrapped, compile_with(wrapped, fullgraph=False), own)
    check_losses(expected, found)
    check_states(plain, wrapped, train_alone((0, 1))[1])
    for name in ("forward", "backward"):
        made = len(compiled_graphs(name=name))
        assert made == graphs, f"{made} graphs {name}"


@pytest.mark.parametrize(
    "bucket_mb, graphs",
    (pytest.param(25.0, 1, marks=pytest.mark.slow, id="one"), pytest.param(0.02, 2, id="many")),
)
def test_ddp_trains_as_eager_with_one_graph_or_one_for_each_bucket(bucket_mb, graphs):
    run_ranks(ddp, bucket_mb, graphs)


# -- FSDP2 -----------------------------------------------------------------------------------------


def fsdp(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def sharded(*, compiled: bool) -> nn.Module:
        model = make_model(blocks=2)
        for block in model.blocks:
            if compiled:
                block.compile(backend="fusec", options={"strict": True}, dynamic=False)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def own(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch(step, rank, torch.float32)

    plain, split = sharded(compiled=False), sharded(compiled=True)
    expected, found = train(plain, plain, own), train(split, split, own)
    check_losses(expected, found)
    check_states(plain, split, train_alone((0, 1), blocks=2)[1])
    assert compiled_graphs(name="forward") and compiled_graphs(name="backward")


@pytest.mark.slow
def test_fsdp2_of_compiled_blocks_trains_as_eager():
    run_ranks(fsdp)


# -- tensor parallelism ----------------------------------------------------------------------------


def tensor_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def spread() -> nn.Module:
        model = make_model()
        for block in model.blocks:
            parallelize_module(
                block,
                mesh,
                {
                    "attention.q": ColwiseParallel(),
                    "attention.k": ColwiseParallel(),
                    "attention.v": ColwiseParallel(),
                    "attention.out": RowwiseParallel(),
                    "mlp.up": ColwiseParallel(),
                    "mlp.down": RowwiseParallel(),
                },
            )
        return model

    def same(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch(step, 0, torch.float32)

    plain, split = spread(), spread()
    expected, found = train(plain, plain, same), train(split, compile_with(split), same)
    losses, alone = train_alone((0,))
    check_losses(expected, found, losses)
    check_states(plain, split, alone)
    assert len(compiled_graphs(name="forward")) == len(compiled_graphs(name="backward")) == 1


@pytest.mark.slow
def test_tensor_parallel_attention_and_mlp_train_as_eager():
    run_ranks(tensor_parallel)
