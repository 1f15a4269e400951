"""Wide products are substituted into their readers, but not into scatters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support import check


def looked_up(weight: torch.Tensor, rows: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
    return F.embedding(rows, weight) @ narrow


def added(weight: torch.Tensor, rows: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
    return weight.index_add(0, rows, (weight[: len(rows)] @ narrow) @ narrow.mT)


@pytest.mark.parametrize("model", [looked_up, added])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_scatter_reads_a_wide_product_from_memory(model, dtype: torch.dtype) -> None:
    """A gradient of 64 x 512 that sums 8 terms, in 16 bits, was refused where rows are chosen."""
    weight, narrow = torch.randn(1000, 512), torch.randn(512, 8) / 512**0.5
    leaves = [x.to(dtype).requires_grad_() for x in (weight, narrow)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    rows = torch.randint(0, 1000, (64,))
    compiled = torch.compile(model, backend="fusec", options={"strict": True})

    def gradients(call, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        loss = call(inputs[0], rows, inputs[1]).double().square().mean()
        return torch.autograd.grad(loss, inputs)

    expected = gradients(model, exact)
    for got, eager, right in zip(
        gradients(compiled, leaves), gradients(model, leaves), expected, strict=True
    ):
        scale = right.abs().max()
        error, allowed = ((x.double() - right).abs().max() / scale for x in (got, eager))
        assert error <= 2 * allowed + 1e-6


def test_the_parts_of_a_sum_are_no_product_to_recompute() -> None:
    """The last of them is shorter: where it ends is said of an axis that their sum has not."""

    def outer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = F.conv1d(x, w, groups=9)
        return (h.unsqueeze(-1) * h.unsqueeze(-2)).sum(1)

    check(outer, torch.randn(9, 9, 15), torch.randn(9, 1, 1), train=True)
