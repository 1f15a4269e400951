"""Where boxes and edges are: nothing overlaps, edges end at their boxes and cross none."""

from __future__ import annotations

import re
from itertools import combinations

import pytest

from fusec.tools.report.html.document import Document
from fusec.tools.report.html.drawn import Segment
from fusec.tools.report.html.layout import BOX_HEIGHT, COLUMNS, LEFT, Layout, Place, lay_out

CHAIN = [(0, 1), (1, 2), (2, 3)]


def segment(*steps: int, calls: int = 0, frame: str = "") -> Segment:
    return Segment(frame, 1, steps, tuple(range(calls)))


def overlap(a: Place, b: Place, height: int = BOX_HEIGHT) -> bool:
    beside = a.x + a.width <= b.x or b.x + b.width <= a.x
    return not beside and abs(a.y - b.y) < height


def test_a_chain_goes_down_one_box_a_row() -> None:
    layout = lay_out([segment(0, 1, 2, 3)], CHAIN)
    assert [layout.boxes[k].y for k in range(4)] == sorted({p.y for p in layout.boxes.values()})
    assert {path.back for path in layout.paths} == {False}


def test_what_does_not_depend_on_each_other_stands_in_one_row() -> None:
    layout = lay_out([segment(0, 1, 2, 3)], [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert layout.boxes[1].y == layout.boxes[2].y
    wide = lay_out([segment(*range(8))], [(0, k) for k in range(1, 8)])
    ys = [place.y for place in wide.boxes.values()]
    assert max(map(ys.count, ys)) == COLUMNS


def test_an_edge_to_the_next_layer_leads_back() -> None:
    layout = lay_out([segment(0, 1, frame="h.*")], [(0, 1), (1, 0)])
    assert {(p.start, p.end): p.back for p in layout.paths} == {(0, 1): False, (1, 0): True}


def test_edges_that_go_around_have_lanes_of_their_own() -> None:
    layout = lay_out([segment(*range(6))], [*((k, k + 1) for k in range(5)), (0, 3), (1, 5)])
    lanes = {path.start: max_x(path.line) for path in layout.paths if "Q" in path.line}
    assert len(lanes) == 2 and lanes[0] != lanes[1]


def max_x(line: str) -> int:
    """Return how far right a path goes."""
    numbers = [int(n) for n in re.findall(r"-?\d+", line)]
    return max(numbers[::2])


def test_edges_end_at_their_boxes() -> None:
    layout = lay_out([segment(0, 1, 2, 3)], [*CHAIN, (0, 3)])
    for path in layout.paths:
        numbers = [int(n) for n in re.findall(r"-?\d+", path.line)]
        start, end = layout.boxes[path.start], layout.boxes[path.end]
        assert numbers[:2] == [start.middle, start.y + BOX_HEIGHT]
        assert numbers[-2] == end.middle and end.y - 10 < numbers[-1] < end.y


@pytest.mark.parametrize("graph", [0, 1])
def test_nothing_overlaps_in_a_drawing(document: Document, graph: int) -> None:
    layout: Layout = document.graphs[graph].layout
    for a, b in combinations(layout.boxes.values(), 2):
        assert not overlap(a, b)
    for a, b in combinations(layout.calls.values(), 2):
        assert not overlap(a, b, 22)
    assert all(call.x + call.width < LEFT for call in layout.calls.values())
    for (top, height), part in zip(layout.frames, document.graphs[graph].segments, strict=True):
        for k in part.steps:
            assert top < layout.boxes[k].y < layout.boxes[k].y + BOX_HEIGHT < top + height
        for k in part.calls:
            assert top < layout.calls[k].y < layout.calls[k].y + 22 < top + height
    assert layout.height >= max(top + height for top, height in layout.frames)
