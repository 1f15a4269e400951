"""What AOTAutograd takes apart, and what it must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusec.frontend.aot.decompositions import decompositions
from tests.support import check

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


@pytest.mark.parametrize(
    ("sizes", "options"),
    [((256,), {}), ((70_000, 1), {}), ((3, 300), {"dtype": torch.bool}), ((0,), {}), ((4, 2), {})],
)
def test_a_diagonal_of_any_length_is_that_of_eager(sizes: tuple[int, ...], options: Any) -> None:
    check(lambda x: torch.eye(*sizes, **options) * x, torch.tensor(2.5))


def test_a_diagonal_has_the_sizes_of_the_call() -> None:
    compiled = torch.compile(lambda x: torch.eye(*x.shape) * x, backend="fusec", dynamic=True)
    for shape in ((3, 4), (300, 2), (1, 1), (2, 500)):
        x = torch.randn(shape)
        assert torch.equal(compiled(x), torch.eye(*shape) * x)
