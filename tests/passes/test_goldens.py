"""Before and after: what each pass makes of a small graph, as text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fusec.codegen.targets import find_target
from fusec.ir.graph import Graph
from fusec.ir.text import print_graph, print_schedule
from fusec.passes.fusion.fuse import fuse
from fusec.passes.graph.dead_code import dead_code
from fusec.passes.graph.inline import inline
from fusec.passes.graph.simplify import simplify
from fusec.passes.graph.split_reduction import split_reduction
from tests.fuzz.pipeline import small_target
from tests.ir.graphs import cat, layer_norm, softmax
from tests.passes.fusion.test_fuse import row_and_column_sums

Check = Callable[[str, str], None]
PASSES: dict[str, tuple[Callable[[Graph], Graph], Graph]] = {
    "simplify": (simplify, cat(3, 4)),
    "dead_code": (dead_code, softmax(4, 8)),
    "inline": (lambda g: inline(g, small_target("cpu").machine), layer_norm(4, 8)),
    "split_reduction": (
        lambda g: split_reduction(g, small_target("cpu").machine),
        row_and_column_sums(197),
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_pass_makes_of_a_graph(name: str, golden: Check) -> None:
    run, before = PASSES[name]
    after = run(before)
    golden(name, f"{print_graph(before)}\n\n-- {name}\n\n{print_graph(after)}")


@pytest.mark.parametrize("example", ["layer_norm", "softmax"])
def test_fusion_makes_one_kernel(example: str, golden: Check) -> None:
    before = {"layer_norm": layer_norm, "softmax": softmax}[example](64, 128)
    target = find_target("cpu")
    schedule = fuse(before, target.machine, target.accepts)
    golden(f"fuse_{example}", f"{print_graph(before)}\n\n-- fuse\n\n{print_schedule(schedule)}")
