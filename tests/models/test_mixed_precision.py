"""Autocast and loss scaling: no kernel only casts an activation, weights are cast once a step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn

import fusec
from tests.saved import DropoutBlock, cut, eager_bytes, inductor_bytes, saved_bytes

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Cast(nn.Module):
    """A module under autocast."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", self.dtype):
            return self.inner(x)


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x)))).float()


def casts(graph: fx.Graph) -> int:
    """Return the conversions of weights to 16 bits."""
    return sum(
        str(n.target) == "aten._to_copy.default"
        and n.args[0].name.startswith("primals")
        and n.meta["val"].dim() > 1
        and n.meta["val"].dtype in (BF16, F16)
        for n in graph.nodes
    )


@pytest.mark.slow
def test_weights_are_cast_once_and_saved_but_activations_are_not() -> None:
    module, x = Cast(DropoutBlock(256, 4), BF16), torch.randn(4, 128, 256)
    forward, backward = cut(module, x)
    assert (casts(forward), casts(backward)) == (4, 0)
    weights = 12 * 256 * 256 * BF16.itemsize
    found = saved_bytes(forward, backward) - weights
    assert found < inductor_bytes(module, x) - weights
    assert found <= 0.6 * (eager_bytes(module, x) - weights)


@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
def test_no_kernel_only_casts_an_activation(dtype: torch.dtype) -> None:
    module, x = Cast(Mlp(64), dtype), torch.randn(32, 64)
    torch._dynamo.reset()
    kernels = fusec.kernels(module, x, target="cpu:amx", options={"race": "library"})
    alone = [k for k in kernels if is_cast(k.notation)]
    # The library's products need both weights in 16 bits; a bias is cast where it is added.
    assert len(alone) == 2
    assert len(kernels) == 5


def is_cast(notation: str) -> bool:
    lines = [line for line in notation.splitlines() if " = " in line]
    (line,) = lines if len(lines) == 1 else ("",)
    return line.count("[") == 2 and ("= bf16(" in line or "= f16(" in line)


def test_a_scaler_finds_infinities_and_skips_the_step() -> None:
    torch.manual_seed(0)
    modules = [Cast(Mlp(32), F16)]
    modules.append(copy.deepcopy(modules[0]))
    x = torch.randn(16, 32)
    torch._dynamo.reset()
    calls = [modules[0], torch.compile(modules[1], backend="fusec", options={"strict": True})]
    scales = []
    for module, call in zip(modules, calls, strict=True):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
        seen = []
        for _ in range(12):
            optimizer.zero_grad()
            before = [p.detach().clone() for p in module.parameters()]
            scaler.scale(call(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            moved = any((a != b).any() for a, b in zip(module.parameters(), before, strict=True))
            seen.append((scaler.get_scale(), moved))
        scales.append(seen)
    assert scales[0] == scales[1]
    assert {moved for _, moved in scales[1]} == {True, False}
    for mine, expected in zip(modules[1].parameters(), modules[0].parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-2, atol=1e-3)
