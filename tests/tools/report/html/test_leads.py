"""What a report shows first: what takes the time, and what is known about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusec.tools.report.html.details import hint, leads_of
from fusec.tools.report.html.document import Box, Document, Timing
from fusec.tools.report.static_rules import Finding


@pytest.fixture
def kernel(document: Document) -> Box:
    box = next(box for box in document.graphs[0].boxes if box.kind == "kernel")
    return replace(box, faults=(), warnings=(), floor_us=5.0, timing=Timing(10.0, "measured"))


def test_launches_are_ranked_by_the_time_of_all_of_them(document: Document, kernel: Box) -> None:
    boxes = (
        replace(kernel, names=("k0",), timing=Timing(20.0, "measured")),
        replace(kernel, names=("k1", "k2", "k3"), module="h.*"),
        replace(kernel, names=("k4",), timing=Timing(0.5, "measured")),  # under 3 % of the time
    )
    graphs = replace(document.graphs[0], boxes=()), replace(document.graphs[1], boxes=boxes)
    (first, of_three), (second, _) = leads_of(graphs)
    assert (first, of_three.count, of_three.spent_us) == ("g1-b1", 3, 30.0)
    assert of_three.heading == f"{kernel.title} in h.*"
    assert second == "g1-b0"
    assert graphs[1].dearest == 1 and graphs[0].dearest is None


def test_there_are_none_without_launches(document: Document) -> None:
    assert leads_of(()) == leads_of([replace(document.graphs[0], boxes=())]) == []


def test_a_hint_says_the_fault_before_the_floor(kernel: Box) -> None:
    spill = Finding("graph", "k0", "spills", "40 B", "use a smaller tile")
    assert hint(kernel) == "0.50 of its memory floor"
    assert hint(replace(kernel, floor_us=9.0)).startswith("as fast as memory is")
    assert hint(replace(kernel, warnings=(spill,))) == "spills: use a smaller tile"
    library = replace(kernel, kind="library", reason="no lowering")
    assert hint(library) == "eager kernel: no lowering"
