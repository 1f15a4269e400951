"""Activations and residuals behind frozen convolutions run in the library's call."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusec.frontend.fx_passes.packing import has_onednn
from fusec.tools.report import explain
from tests.support import seeded

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch is built without oneDNN")

PLAIN = "mkldnn._convolution_pointwise.default"
ADDED = "mkldnn._convolution_pointwise.binary"


class Net(nn.Module):
    """A convolution, and a function of its result and of its images."""

    def __init__(self, behind: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        with seeded(0):
            self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.conv(x), x)


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    with seeded(1):
        made = torch.randn(2, 8, 6, 6)
    made[0, 0, 0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    return made.to(dtype).contiguous(memory_format=torch.channels_last)


def squeezed(y: Tensor, x: Tensor) -> Tensor:
    y = F.silu(y)
    return y * y.mean((2, 3), keepdim=True)


def gated(y: Tensor, x: Tensor) -> Tensor:
    return x * y.sigmoid()


BEHIND: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str, int]] = {
    "silu": (lambda y, x: F.silu(y), PLAIN, 0),
    "hardswish": (lambda y, x: F.hardswish(y), PLAIN, 0),
    "sigmoid": (lambda y, x: y.sigmoid(), PLAIN, 0),
    "residual": (lambda y, x: x + y, ADDED, 0),
    "beside a sum": (squeezed, PLAIN, 1),
    "in a gate": (gated, PLAIN, 1),
    "silu of a residual": (lambda y, x: F.silu(x + y), PLAIN, 1),
    "relu, of which NaN is NaN": (lambda y, x: F.relu(y), PLAIN, 1),
    "read twice": (lambda y, x: F.silu(y) + y, PLAIN, 1),
    "itself added": (lambda y, x: y + y, PLAIN, 1),
    "as tokens": (lambda y, x: y.flatten(2).transpose(1, 2) + 1.5, PLAIN, 1),
    "channels shuffled": (lambda y, x: y.view(2, 2, 4, 6, 6).transpose(1, 2) * 2, PLAIN, 1),
    "in another format": (lambda y, x: F.silu(y).contiguous(), PLAIN, 1),
}
"""Function, the call of the convolution, and how many kernels are left."""


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize(
    "dtype", (torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow))
)
def test_the_call_computes_what_stands_behind_it(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bf16 on this processor")
    monkeypatch.setenv("FUSEC_FREEZE", "1")
    behind, call, kernels = BEHIND[name]
    module, x = Net(behind).eval().to(dtype), images(dtype)
    torch._dynamo.reset()
    with torch.no_grad():
        (graph,) = explain(module, x).graphs
        assert [extern.op for extern in graph.externs] == [call]
        assert len(graph.kernels) <= kernels
        made = torch.compile(module, backend="fusec", options={"strict": True})(x)
        eager, exact = module(x), copy.deepcopy(module).double()(x.double())
    assert made.stride() == eager.stride()
    torch.testing.assert_close(made.isnan(), eager.isnan())
    usual = eager.isfinite()
    worst = (eager - exact)[usual].abs().max()
    floor = 4 * torch.finfo(dtype).eps * exact[usual].abs().max()
    assert (made - exact)[usual].abs().max() <= 4 * worst + floor


def test_a_residual_of_another_type_stays_in_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_FREEZE", "1")
    x = images()[1:]
    module, places = Net(lambda y, x: y).eval(), x.mul(9).long()

    def added(x: Tensor, places: Tensor) -> Tensor:
        return module(x) + places

    torch._dynamo.reset()
    with torch.no_grad():
        made = torch.compile(added, backend="fusec", options={"strict": True})(x, places)
        torch.testing.assert_close(made, added(x, places), atol=1e-4, rtol=1e-4)
