"""Choose the launches that a report shows first: the slowest, with a hint for each.

Worked example::

    >>> [(lead.box, lead.heading, lead.hint) for lead in leads_of(document.graphs)][0]
    ('g0-b3', 'layer_norm + mm in h.*.attn', '0.48 of its memory floor')
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusec.tools.report.html.document import Box, Drawing

SHOWN_LEADS = 5
LEAST_SHARE = 0.03
"""The share of the time of all launches below which one is left out."""
AT_THE_FLOOR = 0.8


@dataclass(frozen=True, slots=True)
class Lead:
    """A kind of launch that is worth a look.

    Attributes:
        box: its id in the page.
        share: of the time of all graphs' launches, in 0..1.
        us, word: microseconds of all of its launches in one call, and their origin.
    """

    box: str
    heading: str
    share: float
    count: int
    us: float
    word: str
    hint: str


def leads_of(graphs: Sequence[Drawing]) -> tuple[Lead, ...]:
    """Return the launches that take most of the time, the slowest first."""
    found = [
        (box, f"g{g}-b{k}") for g, graph in enumerate(graphs) for k, box in enumerate(graph.boxes)
    ]
    found.sort(key=lambda row: -row[0].spent_us)
    total = sum(box.spent_us for box, _ in found)
    return tuple(
        Lead(
            name,
            f"{box.title} in {box.module}" if box.module else box.title,
            box.spent_us / total,
            box.count,
            box.spent_us,
            box.timing.word,
            hint(box),
        )
        for box, name in found[:SHOWN_LEADS]
        if box.spent_us >= LEAST_SHARE * total
    )


def hint(box: Box) -> str:
    """Return a hint for a launch: advice on its code, why it is eager, or its floor."""
    for finding in (*box.faults, *box.warnings):
        return f"{finding.rule}: {finding.advice}"
    if box.kind == "library":
        return f"eager kernel: {box.reason}" if box.reason else "eager kernel"
    reached = box.floor_us / box.timing.us if box.timing.us else 1.0
    if reached >= AT_THE_FLOOR:
        return "as fast as memory is: only fewer bytes would make it faster"
    return f"{reached:.2f} of its memory floor"
