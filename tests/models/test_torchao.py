"""torchao's quantised linear layers, as its tensor subclasses arrive in the graph.

What is left to eager kernels are products with weights of float8, and of two int8 where a processor
has instructions for these (AVX-512 VNNI): quantisation, dequantisation, scales, biases and
activations are in kernels of fusec, and so are other products with integer weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusec
from fusec.runtime.kernels.cpp_kernel import vector_width
from tests.support import compile_with, seeded

BYTES = {"_int_mm.default"} if vector_width() == 16 else set()

CONFIGURATIONS: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "int8": (lambda ao: ao.Int8WeightOnlyConfig(), set()),
    "int8, one scale": (lambda ao: ao.Int8WeightOnlyConfig(granularity=ao.PerTensor()), set()),
    "int4 in int8": (
        lambda ao: ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32)),
        set(),
    ),
    "int4 with zeros in int8": (
        lambda ao: ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(64), ao.MappingType.ASYMMETRIC),
        set(),
    ),
    "int4 packed": (lambda ao: packed_configuration(), set()),
    "int8 dynamic": (lambda ao: ao.Int8DynamicActivationInt8WeightConfig(), BYTES),
    "int8 dynamic, one scale": (
        lambda ao: ao.Int8DynamicActivationInt8WeightConfig(granularity=ao.PerTensor()),
        BYTES,
    ),
    "int8 dynamic, asymmetric": (
        lambda ao: ao.Int8DynamicActivationInt8WeightConfig(
            act_mapping_type=ao.MappingType.ASYMMETRIC
        ),
        BYTES,
    ),
    "int8 static": (
        lambda ao: ao.Int8StaticActivationInt8WeightConfig(
            torch.full((1, 1), 0.03), granularity=ao.PerTensor()
        ),
        BYTES,
    ),
    "int8 dynamic, int4": (
        lambda ao: ao.Int8DynamicActivationIntxWeightConfig(torch.int4, ao.PerGroup(32)),
        set(),
    ),
    "fp8": (lambda ao: ao.Float8WeightOnlyConfig(), {"mm.default", "addmm.default"}),
}
"""Those that run on CPUs, each with the library's products that it may be left with.

torchao refuses to quantise activations to float8 there.
"""


def packed_configuration() -> Any:
    workflow = pytest.importorskip("torchao.prototype.quantization.int4.inference_workflow")
    return workflow.PrototypeInt4WeightOnlyConfig(group_size=64)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_quantised_network_leaves_its_products_alone(name: str) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="make test-torchao has it")

    configuration, left = CONFIGURATIONS[name]
    with seeded(0):
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
        model, x = model.bfloat16().eval(), torch.randn(16, 256, dtype=torch.bfloat16)
    exact = copy.deepcopy(model).double()
    quantization.quantize_(model, configuration(quantization))
    with torch.no_grad():
        torch._dynamo.reset()
        (graph,) = fusec.explain(model, x).graphs
        assert {call.op for call in graph.externs} <= left
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


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_network_quantised_by_pt2e_is_kernels_of_fusec(dynamic: bool) -> None:
    pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    quantizers = pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    with seeded(0):
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).eval()
        x = torch.randn(16, 256)
    quantizer = quantizers.X86InductorQuantizer()
    quantizer.set_global(
        quantizers.get_default_x86_inductor_quantization_config(is_dynamic=dynamic)
    )
    prepared = pt2e.prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    converted = pt2e.convert_pt2e(prepared)
    with torch.no_grad():
        torch._dynamo.reset()
        (graph,) = fusec.explain(converted, x).graphs
        assert not graph.externs
        torch._dynamo.reset()
        torch.testing.assert_close(compile_with(converted)(x), converted(x), rtol=1e-4, atol=1e-4)
