"""torchao's quantised linear layers, as its tensor subclasses arrive in the graph.

What is left to eager kernels are products with weights of float8: quantisation, dequantisation,
scales, biases and activations are in kernels of fusec, and so are products with integer weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusec
from tests.support import compile_with, seeded

CONFIGURATIONS = {
    "Int8WeightOnlyConfig": set(),
    "Float8WeightOnlyConfig": {"mm.default", "addmm.default"},
    "Int8DynamicActivationInt8WeightConfig": set(),
}
"""Those that run on CPUs -> the library's products that they may be left with."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_quantised_network_leaves_its_products_alone(name: str) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="make test-torchao has it")

    configuration: Callable[[], Any] = getattr(quantization, name)
    with seeded(0):
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
        model, x = model.bfloat16().eval(), torch.randn(16, 256, dtype=torch.bfloat16)
    exact = copy.deepcopy(model).double()
    quantization.quantize_(model, configuration())
    with torch.no_grad():
        torch._dynamo.reset()
        (graph,) = fusec.explain(model, x).graphs
        assert {call.op for call in graph.externs} <= CONFIGURATIONS[name]
        torch._dynamo.reset()
        ours, theirs, wanted = compile_with(model)(x), model(x), exact(x.double())
    error, least = ((made - wanted).abs().max() for made in (ours, theirs))
    assert error <= 2 * least + 2 * torch.finfo(torch.bfloat16).eps * wanted.abs().max()


@pytest.mark.slow
def test_a_network_trains_in_8_bits() -> None:
    float8 = pytest.importorskip("torchao.float8", reason="make test-torchao has it")

    with seeded(0):
        model = nn.Sequential(
            nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 64, bias=False)
        ).bfloat16()
        x = torch.randn(32, 64).bfloat16()
    exact = copy.deepcopy(model).double()
    model = float8.convert_to_float8_training(model)
    torch._dynamo.reset()
    forward, backward = fusec.explain(model, x, train=True, target="sm_90").graphs
    assert len(forward.kernels) <= 2 and len(backward.kernels) <= 2
    assert {call.op for call in (*forward.externs, *backward.externs)} <= {"_scaled_mm.default"}
    torch._dynamo.reset()
    ours = copy.deepcopy(model)
    made, theirs = trained(ours, compile_with(ours), x), trained(model, model, x)
    for a, b, c in zip(made, theirs, trained(exact, exact, x.double()), strict=True):
        assert (a - c).norm() <= 1.25 * (b - c).norm() + 1e-2 * c.norm()


def trained(model: nn.Module, call: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    """Return a result, and the gradients of the input and of all weights."""
    x = x.clone().requires_grad_()
    y = call(x)
    y.float().square().sum().backward()
    grads = (x.grad, *(p.grad for p in model.parameters()))
    return [t.detach().double() for t in (y, *grads) if t is not None]
