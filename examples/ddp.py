"""Train on two processes by DDP, with fusec in each: gloo on CPUs, NCCL where there are GPUs.

    python examples/ddp.py                   # starts two processes itself
    torchrun --nproc-per-node 4 examples/ddp.py

Each rank compiles the wrapped model; gradients are averaged while the backward runs. At the end the
ranks compare their weights.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 20
FEATURES, CLASSES = 64, 10


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(FEATURES),
        nn.Linear(FEATURES, 4 * FEATURES),
        nn.GELU(),
        nn.Linear(4 * FEATURES, CLASSES),
    )


def make_batch(generator: torch.Generator, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return f32[32, FEATURES] and the index of each row's largest of the first CLASSES."""
    x = torch.randn(32, FEATURES, generator=generator)
    return x.to(device), x[:, :CLASSES].argmax(-1).to(device)


def train(rank: int) -> list[float]:
    """Train on this rank's batches; return the losses, averaged over ranks."""
    gpu = torch.cuda.is_available()
    device = f"cuda:{int(os.environ.get('LOCAL_RANK', rank))}" if gpu else "cpu"
    model = DistributedDataParallel(make_model().to(device))
    compiled = torch.compile(model, backend="fusec")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1 + rank)
    losses = []
    for step in range(STEPS):
        x, labels = make_batch(generator, device)
        optimizer.zero_grad()
        loss = F.cross_entropy(compiled(x), labels)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
        if rank == 0 and step % 5 == 0:
            print(f"step {step:3d}   loss {losses[-1]:.4f}", flush=True)
    check_weights(model)
    return losses


def check_weights(model: nn.Module) -> None:
    """Raise if the ranks' weights differ in a single bit."""
    for name, parameter in model.named_parameters():
        others = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(others, parameter.detach())
        if not all(torch.equal(parameter, other) for other in others):
            raise RuntimeError(f"{name} differs between ranks")


def run(rank: int, world: int, meeting: str) -> None:
    """Be one rank; ``meeting`` is the URL under which ranks find each other."""
    torch.set_num_threads(max(1, torch.get_num_threads() // world))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world)
    try:
        losses = train(rank)
        if rank == 0:
            print(f"{world} ranks, {STEPS} steps: loss {losses[0]:.4f} to {losses[-1]:.4f}")
    finally:
        dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:  # torchrun's
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
        return
    world = max(2, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.spawn(run, (world, f"file://{directory}/meeting"), world)


if __name__ == "__main__":
    main()
