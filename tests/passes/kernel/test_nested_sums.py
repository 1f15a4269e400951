"""Sums of sums in one loop: of rows that are loaded element by element, on a GPU."""

from __future__ import annotations

import pytest

from fusec.codegen.targets import find_target
from fusec.ir.expr import Expr, Op, Reduce
from fusec.ir.graph import Kernel, kernel_nodes
from fusec.ir.monoid import MAX, SUM, Monoid
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.kernel.nested_sums import flatten_nested_sums
from tests.ir.graphs import axes, buffer, load
from tests.passes.kernel.test_coalesce import one
from tests.passes.pipelines import kernel_of

GPU, CPU = find_target("sm_90").machine, find_target("cpu").machine


def sums(width: int, *, read_again: bool = False, outer: Monoid = SUM) -> Kernel:
    """Return ``y[c] = sum(b: sum(i: x[b, c, i]))`` , or read the parts twice."""
    x = buffer("x", 4, 3, width)
    b, c, i = axes("b c i", 4, 3, width)
    part = Reduce(SUM, (i,), load(x, b, c, i))
    total: Expr = Reduce(outer, (b,), part)
    if read_again:
        total = Op("add", (total, Reduce(SUM, (b,), Op("mul", (part, part)))))
    return kernel_of(one(total, (c,), x))


def loops(kernel: Kernel) -> list[int]:
    """Return how many axes each reduction has."""
    return [len(n.over) for n in kernel_nodes(kernel) if isinstance(n, Reduce)]


def test_a_sum_of_sums_of_odd_rows_is_one_sum() -> None:
    kernel = sums(49)
    assert loops(flatten_nested_sums(kernel, GPU)) == [2]
    assert loops(coalesce(flatten_nested_sums(kernel, GPU))) == [2]
    assert flatten_nested_sums(kernel, CPU) is kernel


@pytest.mark.parametrize(
    "kernel", [sums(48), sums(49, read_again=True), sums(49, outer=MAX)],
    ids=["vectors", "parts that are read again", "the largest of sums"],
)  # fmt: skip
def test_other_sums_stay(kernel: Kernel) -> None:
    assert flatten_nested_sums(kernel, GPU) is kernel
