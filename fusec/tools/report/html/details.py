"""What a report says of its boxes: the launches to look at first, and facts of each.

Leads are the slowest launches, with a hint for each. ``panel.html`` prints what a click shows.

Worked example::

    >>> [(name, box.heading, hint(box)) for name, box in leads_of(document.graphs)][0]
    ('g0-b3', 'layer_norm + mm in h.*.attn', '0.48 of its memory floor')
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.ir.decision import Decision
from fusec.tools.report.html.document import Box, Drawing
from fusec.tools.terminal import format_bytes, format_us, in_units

# -- leads -----------------------------------------------------------------------------------------


SHOWN_LEADS = 5
LEAST_SHARE = 0.03
"""The share of the time of all launches below which one is left out."""
AT_THE_FLOOR = 0.8


def leads_of(graphs: Sequence[Drawing]) -> list[tuple[str, Box]]:
    """Return the launches that take most of the time, the slowest first, with their ids."""
    found = [
        (f"g{g}-b{k}", box) for g, graph in enumerate(graphs) for k, box in enumerate(graph.boxes)
    ]
    found.sort(key=lambda row: -row[1].spent_us)
    total = sum(box.spent_us for _, box in found)
    return [row for row in found[:SHOWN_LEADS] if row[1].spent_us >= LEAST_SHARE * total]


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


# -- details ---------------------------------------------------------------------------------------


SHOWN_NAMES = 12
KINDS = {
    "kernel": "kernel of fusec",
    "foreach": "one launch of many alike kernels",
    "library": "eager kernel",
}


def names_of(box: Box) -> str:
    """Return the names of a box's launches, the first of many."""
    shown = ", ".join(box.names[:SHOWN_NAMES])
    return shown + (f" and {box.count - SHOWN_NAMES} more" if box.count > SHOWN_NAMES else "")


def facts_of(box: Box) -> list[tuple[str, str]]:
    """Return the facts of a box, as (name, value): of the model, then of the machine code."""
    each, together = (" each", "all ") if box.count > 1 else ("", "")
    rows = [
        ("kind", KINDS[box.kind]),
        ("launches", f"{box.count}"),
        (f"bytes{each}", f"{format_bytes(box.bytes)}, {together}{box.share:.1%} of the graph's"),
        ("time", f"{format_us(box.timing.us)}, {box.timing.word}"),
        ("memory's floor", format_us(box.floor_us)),
    ]
    if box.operations:
        rate = f", {_count(box.operations / box.bytes)} a byte" if box.bytes else ""
        rows.append(("operations", f"{_count(box.operations)}{rate}"))
    return [*rows, *box.facts]


def _count(value: float) -> str:
    return in_units(value, ("", "k", "M", "G", "T"))


def saving_of(decision: Decision) -> str:
    """Return the microseconds that a decision saves, with their sign; "" where it is not legal."""
    saved = decision.saved_us
    return "" if saved is None else f"{'+' if saved >= 0 else '-'}{format_us(abs(saved))}"
