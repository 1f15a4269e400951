"""How threads share a grid, and the products of weights in panels that they take in turn."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusec
from tests.support import seeded


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return the sources of a frozen module's kernels."""
    monkeypatch.setenv("FUSEC_FREEZE", "1")

    def sources(module: nn.Module, *inputs: Tensor) -> list[str]:
        with torch.no_grad():
            return [k.source for k in fusec.kernels(module.eval(), *inputs, race="fused")]

    return sources


class Layer(nn.Module):
    """A norm, a layer, GELU, another layer and a residual."""

    def __init__(self, width: int = 64, hidden: int = 2048) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def schedules(source: str) -> list[str]:
    return re.findall(r"schedule\(([^)]*)\)", source)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="nothing is packed")
@pytest.mark.parametrize(
    ("rows", "hidden", "taken"),
    [(128, 2048, "dynamic, 5"), (128, 8192, "dynamic, 8"), (17, 96, "dynamic, 1")],
)
def test_a_thread_takes_adjacent_panels_together(
    rows: int, hidden: int, taken: str, kernels: Callable[..., list[str]]
) -> None:
    norm, up, down = kernels(Layer(hidden=hidden), torch.randn(rows, 64))
    assert schedules(norm) == ["static"] and "f_multiply" not in norm.split("extern")[-1]
    assert schedules(up) == [taken]
    assert schedules(down) == ["dynamic, 1"]
    assert all(source.count("f_multiply<DENSE>(") == 1 for source in (up, down))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="nothing is packed")
def test_what_stands_before_a_product_is_computed_once(
    kernels: Callable[..., list[str]],
) -> None:
    """Each panel reads all rows: GELU belongs to the kernel of the layer before, not after."""
    _, up, down = kernels(Layer(), torch.randn(100, 64))
    assert "f_ndtr" in up.split("extern")[-1] and "f_ndtr" not in down.split("extern")[-1]


def test_columns_of_a_batch_are_no_panels() -> None:
    """Of ``x[b, s, d]`` summed along s, d lies like the columns of a panel, if it is as long."""
    with seeded(0):
        w, x = torch.randn(128, 64), torch.randn(500, 64, 3)

    def mixed(w: Tensor, x: Tensor) -> Tensor:
        return F.gelu(torch.einsum("ts,bsd->btd", w, x))

    (kernel,) = fusec.kernels(mixed, w, x, race="fused")
    assert "a_bmm_acc[8192]" in kernel.source and "f_multiply<" not in kernel.source[-4000:]


def test_values_of_an_attention_are_no_panels() -> None:
    with seeded(0):
        q, k, v = torch.randn(3, 1, 4, 192, 64).unbind()
    (kernel,) = fusec.kernels(F.scaled_dot_product_attention, q, k, v, race="fused")
    assert kernel.source.count("f_multiply(") >= 2 and "f_multiply<" not in kernel.source[-4000:]
    assert schedules(kernel.source) == ["dynamic"]
