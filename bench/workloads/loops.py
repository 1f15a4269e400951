"""Loops of Python over a sequence, whose states are a recurrence; scans; recurrent models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.workload import Case, Workload
from bench.workloads.blocks import default_dtype

GROUP = "loops of Python on CPUs"
SCANS: Mapping[str, Callable[[Tensor, int], Tensor | tuple[Tensor, ...]]] = {
    "cumsum": lambda x, dim: x.cumsum(dim),
    "cumprod": lambda x, dim: x.cumprod(dim),
    "cummax": lambda x, dim: torch.cummax(x, dim),
    "logcumsumexp": lambda x, dim: x.logcumsumexp(dim),
    "sigmoid+cumsum+product": lambda x, dim: x.sigmoid().cumsum(dim) * x,
}


def recurrence(a: Tensor, b: Tensor) -> Tensor:
    h, states = torch.zeros_like(b[:, 0]), []
    for t in range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        states.append(h)
    return torch.stack(states, 1)


def selective_scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mamba's, as its reference writes it."""
    factors = torch.exp(torch.einsum("bdl,dn->bdln", delta, a))
    terms = torch.einsum("bdl,bnl,bdl->bdln", delta, b, u)
    h, ys = a.new_zeros((u.shape[0], *a.shape)), []
    for t in range(u.shape[2]):
        h = factors[:, :, t] * h + terms[:, :, t]
        ys.append(torch.einsum("bdn,bn->bd", h, c[:, :, t]))
    return torch.stack(ys, dim=2)


def of_length(dtype: torch.dtype, device: str, shrink: int, *, length: int) -> Case:
    shape = (8, max(8, length // shrink), 64)
    return Case(recurrence, (torch.rand(shape).to(dtype), torch.randn(shape).to(dtype)))


def mamba(dtype: torch.dtype, device: str, shrink: int, *, length: int) -> Case:
    """Channels of a model of 768, and 16 states of each."""
    steps, channels, states = max(8, length // shrink), 1536 // shrink, 16
    shapes = ((1, channels, steps), (1, channels, steps), (channels, states))
    u, delta, a = (torch.rand(shape).to(dtype) for shape in shapes)
    b, c = (torch.randn(1, states, steps).to(dtype) for _ in range(2))
    return Case(selective_scan, (u, delta, -a, b, c))


def scan(
    dtype: torch.dtype, device: str, shrink: int, *, name: str, shape: tuple[int, ...], dim: int
) -> Case:
    x = 0.99 + 0.02 * torch.rand([max(8, n // shrink) for n in shape])
    return Case(lambda x: SCANS[name](x, dim), (x.to(dtype),))


class Logits(nn.Module):
    """A model of transformers, from tokens to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def model(dtype: torch.dtype, device: str, shrink: int, *, name: str, length: int) -> Case:
    """Two layers, 256 wide: of Mamba, Mamba-2, or one of Qwen3-Next's and one of attention."""
    import transformers  # local: it takes a second

    common = {"vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 2, "use_cache": False}
    own: Mapping[str, Mapping[str, Any]] = {
        "Mamba": {"state_size": 16},
        "Mamba2": {"num_heads": 8, "state_size": 64, "n_groups": 1, "chunk_size": 64},
        "Qwen3Next": {
            "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1],
            "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64,
            "linear_key_head_dim": 64, "linear_value_head_dim": 64,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        },
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**common, **own[name])
    with default_dtype(dtype):
        made = getattr(transformers, f"{name}ForCausalLM")(config)
    return Case(Logits(made), (torch.randint(3, 256, (1, max(8, length // shrink))),))


def cpu() -> list[Workload]:
    lines = (((100_000,), 0), ((256, 4096), 1), ((256, 4096), 0), ((16, 512, 128), 1))
    scans = [
        Workload(
            "scans on CPUs",
            f"{name} {'x'.join(map(str, shape))} dim {dim}",
            partial(scan, name=name, shape=shape, dim=dim),
            train,
        )
        for name in SCANS
        for shape, dim in lines
        for train in (False, True)
    ]
    recurrent = [
        Workload(
            "recurrent models on CPUs", f"{kind} {n}", partial(model, name=kind, length=n), train
        )
        for kind in ("Mamba", "Mamba2", "Qwen3Next")
        for n in (256, 2048)
        for train in (False, True)
    ]
    return [*_loops(), *scans, *recurrent]


def _loops() -> list[Workload]:
    forms = (("recurrence 8x{}x64", of_length, (64, 512)), ("mamba 1x{}x1536", mamba, (64, 256)))
    return [
        Workload(GROUP, name.format(length), partial(make, length=length), train)
        for name, make, lengths in forms
        for length in lengths
        for train in (False, True)
    ]
