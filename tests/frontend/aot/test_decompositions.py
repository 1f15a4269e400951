"""What AOTAutograd takes apart, and what it must not."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusec.frontend.aot.decompositions import decompositions

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("biased", "shape", "product"),
    [(torch.addmm, (4, 4), aten.mm.default), (torch.baddbmm, (2, 4, 4), aten.bmm.default)],
)
def test_biased_products_multiply_in_the_type_of_their_operands(
    biased: object, shape: tuple[int, ...], product: object
) -> None:
    a = torch.ones(shape, dtype=torch.bfloat16)
    gm = make_fx(lambda c, x, y: biased(c, x, y, beta=0.5, alpha=2), decompositions())(a, a, a)  # type: ignore[operator]
    (call,) = [n for n in gm.graph.nodes if n.target is product]
    assert [n.op for n in call.args] == ["placeholder", "placeholder"]
    assert call.meta["val"].dtype is torch.bfloat16
    assert torch.equal(gm(a, a, a), biased(a, a, a, beta=0.5, alpha=2))  # type: ignore[operator]


def test_a_bias_times_zero_is_ignored() -> None:
    a, bias = torch.ones(4, 4), torch.full((4,), float("nan"))
    gm = make_fx(lambda c, x, y: torch.addmm(c, x, y, beta=0), decompositions())(bias, a, a)
    assert torch.equal(gm(bias, a, a), a @ a)
