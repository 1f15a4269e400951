"""Loops of products as they are printed: which sums an iteration waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusec.codegen.targets import find_target
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import compile_to_source
from fusec.driver.trace import Trace
from fusec.options import Options
from fusec.tools.report.emulation import emulate
from fusec.tools.report.observe import observe
from tests.support import values

USED = ".to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)"
BF16 = torch.bfloat16


def times_used(fn: Callable[..., Any], *shapes: tuple[int, ...], target: str = "sm_90") -> int:
    """Return how many sums the loops of a function, and of its gradient, use to wait for them."""
    inputs = [torch.ones(shape, dtype=BF16, requires_grad=True) for shape in shapes]
    made = sources(fn, inputs, train=True, target=target)
    return sum(text.count(USED) for text in made)


def sources(
    fn: Callable[..., Any], inputs: list[Tensor], *, train: bool = False, target: str = "sm_90"
) -> list[str]:
    """Return the kernels of a function."""
    chosen = Options(strict=True, verify=True, race="fused", autotune=False, cache=False)
    found = find_target(target)
    made = [
        compile_to_source(one.graph, CompileContext(found, chosen, Trace(one.name)))
        for one in observe(fn, inputs, train=train, target=found)
    ]
    return [text for one in made for text in one.sources.values()]


def of_gelu(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.linear(F.gelu(x), w) + y


SHAPES = ((64, 128), (96, 128), (64, 96))


@pytest.mark.parametrize(
    ("target", "waits"), [("sm_90", True), ("sm_80", False), ("sm_100", False)]
)
def test_a_left_operand_computed_from_loads_is_waited_for(target: str, waits: bool) -> None:
    """Where products read it from registers while the loop goes on: wgmma alone does."""
    assert bool(times_used(of_gelu, *SHAPES, target=target)) is waits


def of_products_in_f32(x: Tensor, w: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply by what is made of a product in f32, which is no wgmma."""
    h = x @ w
    h = (h - h.sum(-1, keepdim=True)).to(BF16)
    return h, h.flatten(0, 1).t() @ z


def test_a_left_operand_computed_from_products_in_f32_is_waited_for() -> None:
    """These are done at once, so nothing has waited for the products before them."""
    shapes = ((2, 24, 192), (192, 64), (48, 64))
    inputs = [values(*shape, seed=n) for n, shape in enumerate(shapes)]
    inputs[-1] = inputs[-1].to(BF16)
    found = emulate(of_products_in_f32, inputs, options={"race": "fused"})
    assert found.faults == (), str(found)
    assert len(found.kernels) == 1
    assert sum(text.count(USED) for text in sources(of_products_in_f32, inputs)) == 1


def test_operands_that_are_loaded_or_computed_from_products_are_not() -> None:
    """An attention's weights, and those of its gradients, wait for the scores."""
    heads = ((1, 2, 64, 32),) * 3
    assert times_used(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), *heads) == 0
    assert times_used(lambda x, w, y: F.linear(x, w) + y, *SHAPES) == 0
