"""Equal parts of a concatenation are stored one by one."""

from __future__ import annotations

import numpy as np
import pytest

from fusec.codegen.targets import find_target
from fusec.ir.expr import Expr, IndexValue, Load, Op, Select, in_range
from fusec.ir.graph import Def, FlatKernel, kernel_nodes
from fusec.ir.index import index
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.kernel.unroll_parts import unroll_parts
from tests.ir.graphs import axes, buffer, graph
from tests.passes.kernel.test_unroll_windows import run
from tests.passes.pipelines import kernel_of

MACHINE = find_target("cpu:avx512").machine


def joined(lengths: tuple[int, ...], *, last: bool = False) -> FlatKernel:
    """y = tanh(cat(parts)), along the first axis or the last."""
    total = sum(lengths)
    shape = (24, total) if last else (total, 24)
    y = buffer("y", *shape)
    parts = [buffer(f"x{k}", *((24, n) if last else (n, 24))) for k, n in enumerate(lengths)]
    i, j = axes("i j", *shape)
    along, start = (j if last else i), total
    value: Expr | None = None
    for part, length in zip(parts[::-1], lengths[::-1], strict=True):
        start -= length
        here = index(along) - start
        inside = in_range(here, index(0), index(length))
        element = Load(part, (index(i), here) if last else (here, index(j)), inside)
        below = Op("lt", (IndexValue(index(along)), IndexValue(index(start + length))))
        value = element if value is None else Select(below, element, value)
    assert value is not None
    line = Def(y, (i, j), Op("tanh", (value,)))
    return coalesce(kernel_of(graph(tuple(parts), (line,), y)))


@pytest.mark.parametrize("length", [1, 3])
def test_each_part_has_a_store_without_comparisons(length: int) -> None:
    kernel = joined((length,) * 9)
    found = unroll_parts(kernel, MACHINE)
    assert len(found.stores) == 9
    assert not [n for n in kernel_nodes(found) if isinstance(n, Select)]
    assert np.array_equal(run(found)["y"], run(kernel)["y"])


def test_parts_of_whole_vectors_are_stored_along_the_lanes() -> None:
    kernel = joined((16,) * 8, last=True)
    found = unroll_parts(kernel, MACHINE)
    assert len(found.stores) == 8
    assert np.array_equal(run(found)["y"], run(kernel)["y"])
    narrow = joined((4,) * 8, last=True)
    assert unroll_parts(narrow, MACHINE) is narrow


@pytest.mark.parametrize(
    "lengths", [(1,) * 7, (5, 1, 1, 1, 1, 1, 1, 1, 1), (8, 8)], ids=["few", "unequal", "two"]
)
def test_few_or_unequal_parts_stay(lengths: tuple[int, ...]) -> None:
    kernel = joined(lengths)
    assert unroll_parts(kernel, MACHINE) is kernel
