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
