"""What is decided when values get their names: products that are added up share a tile."""

from __future__ import annotations

import torch

from fusec.codegen.targets import find_target
from fusec.options import Options
from fusec.tools.report.observe import observe
from fusec.tools.report.stages import take_through
from tests.codegen.test_contraction import fused, tensor


def source_of(fn, *inputs: torch.Tensor) -> str:
    (graph,) = observe(fn, inputs)
    options = Options.from_compile(None, {"race": "fused"})
    return take_through(graph, find_target("sm_90"), options).text("source")


def operands(count: int) -> list[torch.Tensor]:
    sides = [(tensor(32, 48, seed=2 * n), tensor(48, 64, seed=2 * n + 1)) for n in range(count)]
    return [t.bfloat16() for side in sides for t in side]


def test_a_sum_of_three_products_has_one_accumulator() -> None:
    def total(a, b, c, d, e, f):
        return torch.relu(a @ b + c @ d + e @ f)

    source = source_of(total, *operands(3))
    assert source.count("tl.dot(") == 3
    assert source.count("= tl.full((") == 1
    fused(total, *operands(3))


def test_a_product_that_is_also_read_alone_keeps_its_own() -> None:
    def several(a, b, c, d):
        first = a @ b
        return first + c @ d, torch.relu(first)

    assert source_of(several, *operands(2)).count("= tl.full((") == 2
    fused(several, *operands(2))


def test_a_difference_of_products_keeps_both() -> None:
    def difference(a, b, c, d):
        return a @ b - c @ d

    assert source_of(difference, *operands(2)).count("= tl.full((") == 2
    fused(difference, *operands(2))


def test_masked_products_of_two_loops_share_an_accumulator_and_its_end() -> None:
    def causal(a, b, c, d):
        below = torch.ones(256, 256, dtype=torch.bool).tril()
        return a.masked_fill(~below, 0) @ b + c.masked_fill(~below, 0) @ d

    square = [tensor(256, 256, seed=n).bfloat16() for n in range(4)]
    source = source_of(causal, *square)
    assert source.count("= tl.full((") == 1
    assert "tl.minimum(" in source, "the loop ends where both are masked"
