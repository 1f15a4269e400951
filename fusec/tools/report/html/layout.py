"""Lay out the boxes and edges of a drawing, in pixels.

From top to bottom: the segments of ``drawn.py``, each with eager launches on the left and fusec's
launches on the right. There, boxes are in rows, one for each generation of the graph
(``networkx.topological_generations``). An edge goes down to the next row directly; any other leaves
through the gap below its box, runs in a lane beside all boxes, and comes back through the gap above
its target, so that no edge crosses a box. A box has one lane, and boxes whose lanes would overlap
have different ones: a colouring of the graph of their overlaps.

A back edge leads from a layer to the next one, which is drawn as the same boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import networkx

from fusec.tools.report.html.drawn import Segment

CALL_WIDTH, CALL_HEIGHT, CALL_GAP = 236, 22, 4
BOX_WIDTHS, BOX_HEIGHT, BOX_GAP = (360, 273, 178), 62, 12
"""Widths of a box in a row of one, two and three."""
COLUMNS = len(BOX_WIDTHS)
ROW_GAP = 34
HEAD, PADDING = 34, 14
LEFT = PADDING + CALL_WIDTH + 34
LANE, LANES = 7, 14
"""Pixels between two lanes, and the number that fits: further ones overlap."""
FIELD = COLUMNS * BOX_WIDTHS[-1] + (COLUMNS - 1) * BOX_GAP
"""The width of a row of boxes."""
WIDTH = LEFT + FIELD + LANE * LANES + 3 * PADDING


@dataclass(frozen=True, slots=True)
class Place:
    """The position of an item: its upper left corner, and its width."""

    x: int
    y: int
    width: int = 0

    @property
    def middle(self) -> int:
        return self.x + self.width // 2


@dataclass(frozen=True, slots=True)
class Path:
    """An edge from box to box, as the commands of an SVG path; ``around`` others, or ``back``."""

    start: int
    end: int
    back: bool
    around: bool
    line: str


@dataclass(frozen=True, slots=True)
class Layout:
    """A drawing.

    Attributes:
        boxes, calls: by their position in the graph.
        frames: (top, height) of each segment.
    """

    width: int
    height: int
    boxes: Mapping[int, Place]
    calls: Mapping[int, Place]
    frames: tuple[tuple[int, int], ...]
    paths: tuple[Path, ...]


def lay_out(segments: Sequence[Segment], edges: Iterable[tuple[int, int]]) -> Layout:
    """Return the layout of a drawing.

    Args:
        edges: (position of a producer's box, position of its consumer's).
    """
    edges = sorted(set(edges))
    boxes: dict[int, Place] = {}
    calls: dict[int, Place] = {}
    rows: dict[int, int] = {}
    frames = []
    top = row = 0
    for segment in segments:
        y = top + HEAD
        for position, call in enumerate(segment.calls):
            calls[call] = Place(PADDING, y + position * (CALL_HEIGHT + CALL_GAP), CALL_WIDTH)
        generations = _rows(segment.steps, edges)
        listed = HEAD + len(segment.calls) * (CALL_HEIGHT + CALL_GAP) + PADDING
        drawn = HEAD + len(generations) * (BOX_HEIGHT + ROW_GAP) - ROW_GAP + 2 * PADDING
        height = max(listed, drawn) if generations else listed
        spread = (height - drawn) // (len(generations) + 1)
        for line in generations:
            y += spread
            width = BOX_WIDTHS[len(line) - 1]
            left = LEFT + (FIELD - len(line) * (width + BOX_GAP) + BOX_GAP) // 2
            for column, box in enumerate(line):
                boxes[box] = Place(left + column * (width + BOX_GAP), y, width)
                rows[box] = row
            y, row = y + BOX_HEIGHT + ROW_GAP, row + 1
        frames.append((top, height))
        top += height + PADDING
    order = {box: k for k, box in enumerate(b for s in segments for b in s.steps)}
    paths = _paths([(a, b) for a, b in edges if a != b], boxes, rows, order)
    return Layout(WIDTH, top, boxes, calls, tuple(frames), paths)


def _rows(steps: Sequence[int], edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return boxes by generation, at most ``COLUMNS`` in a row."""
    graph: networkx.DiGraph[int] = networkx.DiGraph()
    graph.add_nodes_from(steps)
    # Edges that lead up are from one layer to the next.
    graph.add_edges_from((a, b) for a, b in edges if a < b and a in graph and b in graph)
    found = []
    for generation in networkx.topological_generations(graph):
        line = sorted(generation)
        found += [line[k : k + COLUMNS] for k in range(0, len(line), COLUMNS)]
    return found


# -- edges -----------------------------------------------------------------------------------------


def _paths(
    edges: Sequence[tuple[int, int]],
    boxes: Mapping[int, Place],
    rows: Mapping[int, int],
    order: Mapping[int, int],
) -> tuple[Path, ...]:
    far = [(a, b) for a, b in edges if rows[b] != rows[a] + 1]
    lanes = _lanes(far, rows)
    found = []
    for a, b in edges:
        start = Place(boxes[a].middle, boxes[a].y + BOX_HEIGHT)
        end = Place(boxes[b].middle, boxes[b].y)
        lane = lanes.get(a, 0) % LANES
        around = rows[b] != rows[a] + 1
        line = _around(start, end, lane) if around else _down(start, end)
        found.append(Path(a, b, order[b] < order[a], around, line))
    return tuple(found)


def _lanes(edges: Sequence[tuple[int, int]], rows: Mapping[int, int]) -> dict[int, int]:
    """Return a lane for each box with edges that go around others."""
    spans: dict[int, tuple[int, int]] = {}
    for a, b in edges:
        low, high = spans.get(a, (rows[a], rows[a]))
        spans[a] = min(low, rows[b] - 1), max(high, rows[b])
    overlaps: networkx.Graph[int] = networkx.Graph()
    overlaps.add_nodes_from(spans)
    overlaps.add_edges_from(
        (a, b)
        for (a, (top, foot)), (b, (other, end)) in combinations(spans.items(), 2)
        if top <= end and other <= foot
    )
    # Short edges take the lanes next to the boxes.
    short = sorted(spans, key=lambda box: (spans[box][1] - spans[box][0], box))
    colours: dict[int, int] = networkx.greedy_color(overlaps, strategy=lambda *_: short)
    return colours


def _down(start: Place, end: Place) -> str:
    middle = (start.y + end.y) // 2
    return f"M{start.x} {start.y}C{start.x} {middle} {end.x} {middle} {end.x} {end.y - 5}"


def _around(start: Place, end: Place, lane: int) -> str:
    """Return a path through a lane, with round corners."""
    x = LEFT + FIELD + BOX_GAP + lane * LANE
    below, above = start.y + 7 + lane % 3 * 4, end.y - 11 - lane % 3 * 4
    corners = [
        start,
        Place(start.x, below),
        Place(x, below),
        Place(x, above),
        Place(end.x, above),
        Place(end.x, end.y - 5),
    ]
    parts = [f"M{start.x} {start.y}"]
    for (before, corner), after in zip(pairwise(corners), corners[2:], strict=False):
        near, far = _towards(corner, before), _towards(corner, after)
        parts.append(f"L{near.x} {near.y}Q{corner.x} {corner.y} {far.x} {far.y}")
    return "".join([*parts, f"L{end.x} {end.y - 5}"])


def _towards(corner: Place, other: Place) -> Place:
    """Return the point five pixels from a corner, towards another one."""

    def step(here: int, there: int) -> int:
        distance = there - here
        return here + max(-5, min(5, distance // 2 if abs(distance) < 10 else distance))

    return Place(step(corner.x, other.x), step(corner.y, other.y))
