"""Weights that are packed once: the calls that read them, what these compute, and what changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusec
from fusec.frontend.packing import has_onednn, has_packing
from fusec.passes.libraries import Answer
from fusec.race import LibraryJudge
from fusec.report import explain
from fusec.runtime.frozen import _frozen as frozen_graphs
from tests.support import seeded, tune

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch is built without oneDNN")

CONVOLUTION = "mkldnn._convolution_pointwise.default"
CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Conv2d(8, 6, 3, bias=False),
    "strided": lambda: nn.Conv2d(8, 6, (3, 1), stride=2, padding=(1, 0), dilation=(2, 1)),
    "depthwise": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "folded": lambda: nn.Sequential(nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6)),
}


def frozen(module: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(module, backend="fusec", options={"strict": True, "freeze": True})


def images(dtype: torch.dtype = torch.float32, side: int = 12) -> Tensor:
    with seeded(2):
        made = torch.randn(2, 8, side, side).to(dtype)
    return made.contiguous(memory_format=torch.channels_last)


def operations(module: nn.Module, x: Tensor) -> list[str]:
    with torch.no_grad():
        (graph,) = explain(module, x).graphs
    return [call.op for call in graph.externs]


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize(
    "dtype", (torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow))
)
def test_a_convolution_of_channels_last_images_reads_a_packed_weight(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_packing(torch.empty(0, dtype=dtype)):
        pytest.skip("oneDNN has no kernels of this type here")
    monkeypatch.setenv("FUSEC_FREEZE", "1")
    with seeded(0):
        module, x = CONVOLUTIONS[name]().eval().to(dtype), images(dtype)
    assert operations(module, x) == [CONVOLUTION]
    with torch.no_grad():
        exact = copy.deepcopy(module).double()(x.double())
        eager, made = module(x), frozen(module)(x)
    assert made.stride() == eager.stride()
    worst, floor = (eager - exact).abs().max(), torch.finfo(dtype).eps * exact.abs().max()
    assert (made - exact).abs().max() <= 4 * worst + floor


def test_changes_of_packed_weights_are_seen() -> None:
    with seeded(0):
        module, x = nn.Sequential(nn.Conv2d(8, 6, 3), nn.ReLU()).eval(), images()
    compiled = frozen(module)

    def agree() -> bool:
        with torch.no_grad():
            return torch.allclose(compiled(x), module(x), atol=1e-4)

    assert agree()
    with torch.no_grad():
        module[0].weight.mul_(2.0)
    assert agree(), "written in place"
    module[0].weight = nn.Parameter(torch.randn_like(module[0].weight))
    assert agree(), "another object"
    module[0].weight.data.mul_(2.0)
    assert not agree(), "past torch"
    assert fusec.refreeze(module) == 1
    assert agree()


def test_images_of_other_sizes_read_the_same_packed_weight() -> None:
    torch._dynamo.reset()
    with seeded(0):
        module = nn.Conv2d(8, 6, 3).eval()
    options = {"strict": True, "freeze": True}
    compiled = torch.compile(module, backend="fusec", dynamic=True, options=options)
    with torch.no_grad():
        for side in (12, 9, 31):
            x = images(side=side)
            torch.testing.assert_close(compiled(x), module(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("library", ("packed", "oneDNN", None))
def test_a_product_may_read_a_packed_weight_which_no_other_way_computes(
    bias: bool, library: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LibraryJudge, "__call__", lambda *_: Answer(library, "said", 1.0))
    monkeypatch.setenv("FUSEC_CACHE", "0")
    tune(monkeypatch, raced_product=1)
    with seeded(0):
        layer, x = nn.Linear(24, 40, bias=bias), torch.randn(16, 24)
    compiled = frozen(lambda x: layer(layer(x)[:, :24]))

    def agree() -> None:
        with torch.no_grad():
            wanted = layer(layer(x)[:, :24])
            torch.testing.assert_close(compiled(x), wanted, atol=1e-4, rtol=1e-4)

    agree()
    with torch.no_grad():
        layer.weight.add_(0.5)
    agree()
    readers = [graph for graph in frozen_graphs if graph.reads([layer.weight])]
    assert bool(readers) is (library == "packed")
