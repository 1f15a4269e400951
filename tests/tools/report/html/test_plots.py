"""The roofline and the memory plot: points under their roof, areas that follow the bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusec.codegen.targets import find_target
from fusec.tools.report.html.document import Document
from fusec.tools.report.html.drawn import drawn_steps
from fusec.tools.report.html.plots import (
    BOTTOM,
    HEIGHT,
    LEFT,
    cost_of,
    memory_plot,
    roof_of,
    roofline_plot,
)
from fusec.tools.report.traffic import Moment, Usage
from tests.tools.report.html.conftest import stage


def test_points_are_under_the_roof_and_within_the_plot(document: Document) -> None:
    for graph in document.graphs:
        plot = roofline_plot(graph)
        assert plot is not None
        assert len(plot.points) + len(plot.left_out) == len(graph.boxes)
        ceiling = min(line.y for line in plot.roof[1:])
        for point in plot.points:
            assert point.x >= LEFT and ceiling - 1 <= point.y <= HEIGHT - BOTTOM
        for point in plot.points:
            box = graph.boxes[point.box]
            rate = box.operations / box.timing.us
            allowed = graph.roof.bytes_us * box.operations / box.bytes
            assert rate <= 1.001 * min(allowed, graph.roof.ceilings[0].rate)


def test_operations_are_counted_with_two_for_a_multiply_add() -> None:
    staged = stage(lambda a, b: torch.relu(a @ b), [torch.randn(64, 32), torch.randn(32, 16)])
    machine = staged[0].target.machine
    costs = [cost_of(step.step, machine) for step in drawn_steps(staged[0])]
    assert sum(cost.operations for cost in costs) >= 2 * 64 * 32 * 16
    assert all(cost.us > 0 for cost in costs)


def test_kernels_of_fusec_alone_have_their_names_beside_them(document: Document) -> None:
    for graph in document.graphs:
        eager = replace(graph.boxes[0], kind="library", operations=1.0, share=1.0)
        plot = roofline_plot(replace(graph, boxes=(eager, *graph.boxes[1:])))
        assert plot is not None and plot.points[0].kind == "library"
        assert plot.points[0].label == "" and any(point.label for point in plot.points)


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_a_roof_has_lanes_below_products(target: str) -> None:
    roof = roof_of(find_target(target).machine)
    assert [c.rate for c in roof.ceilings] == sorted((c.rate for c in roof.ceilings), reverse=True)
    assert roof.ceilings[-1].name == "lanes"


def test_memory_is_stairs_over_the_steps() -> None:
    moments = (Moment("k0", 100, 0), Moment("k1", 100, 50), Moment("k2", 100, 100))
    plot = memory_plot(Usage(moments, (("x", 100),)))
    assert plot.label == "200 B at k2"
    assert [tick.label for tick in plot.rows] == ["0 B", "50 B", "100 B", "150 B", "200 B"]
    assert plot.given.count("V") == 2  # one stair, and down at the end
    assert plot.made.count("V") == 4
    assert plot.peak_y < HEIGHT - BOTTOM
