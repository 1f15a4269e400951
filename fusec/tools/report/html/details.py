"""What a report says of its boxes: the launches to look at first, and the details of each.

Leads are the slowest launches, with a hint for each. The details of a box, shown by a click, are
JSON: only strings, as the page prints them::

    {"texts": [text],
     "boxes": {"g0-b3": {"title", "kind", "names", "where",
                         "facts": [[name, value]], "expected", "reason", "lines": [line],
                         "reads": [[name, type, size]], "writes": [...],
                         "feeds": [id], "fed": [id], "calls": [id],
                         "findings": [[kind, rule, seen, advice]],
                         "decisions": [[taken, a, b, saving, reason, against]],
                         "listings": [[label, text]]}}}

Worked example::

    >>> [(name, box.heading, hint(box)) for name, box in leads_of(document.graphs)][0]
    ('g0-b3', 'layer_norm + mm in h.*.attn', '0.48 of its memory floor')
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusec.ir.decision import Decision
from fusec.tools.report.html.document import Box, Document, Drawing, Tensor
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


def details_of(document: Document) -> dict[str, Any]:
    """Return the details of each box, for the page's script."""
    return {
        "texts": list(document.texts),
        "boxes": {
            f"g{g}-b{k}": _details(box, g)
            for g, graph in enumerate(document.graphs)
            for k, box in enumerate(graph.boxes)
        },
    }


def _details(box: Box, graph: int) -> dict[str, Any]:
    return {
        "title": box.title,
        "kind": box.kind,
        "names": _names(box),
        "where": box.module,
        "facts": [*_facts(box), *map(list, box.facts)],
        "expected": box.expected,
        "reason": box.reason,
        "lines": list(box.lines),
        "reads": list(map(_tensor, box.reads)),
        "writes": list(map(_tensor, box.writes)),
        "feeds": [f"g{graph}-b{k}" for k in box.feeds],
        "fed": [f"g{graph}-b{k}" for k in box.fed_by],
        "calls": [f"g{graph}-c{k}" for k in box.calls],
        "findings": [
            *(["fault", f.rule, f.seen, f.advice] for f in box.faults),
            *(["warning", f.rule, f.seen, f.advice] for f in box.warnings),
        ],
        "decisions": list(map(_decision, box.decisions)),
        "listings": [[listing.label, listing.text] for listing in box.listings],
    }


def _names(box: Box) -> str:
    shown = ", ".join(box.names[:SHOWN_NAMES])
    return shown + (f" and {box.count - SHOWN_NAMES} more" if box.count > SHOWN_NAMES else "")


def _facts(box: Box) -> list[list[str]]:
    each, together = (" each", "all ") if box.count > 1 else ("", "")
    rows = [
        ["kind", KINDS[box.kind]],
        ["launches", f"{box.count}"],
        [f"bytes{each}", f"{format_bytes(box.bytes)}, {together}{box.share:.1%} of the graph's"],
        ["time", f"{format_us(box.timing.us)}, {box.timing.word}"],
        ["memory's floor", format_us(box.floor_us)],
    ]
    if box.operations:
        rate = f", {_count(box.operations / box.bytes)} a byte" if box.bytes else ""
        rows.append(["operations", f"{_count(box.operations)}{rate}"])
    return rows


def _count(value: float) -> str:
    return in_units(value, ("", "k", "M", "G", "T"))


def _tensor(tensor: Tensor) -> list[str]:
    return [tensor.name, tensor.type, format_bytes(tensor.bytes)]


def _decision(decision: Decision) -> list[Any]:
    saved = decision.saved_us
    saving = "" if saved is None else f"{'+' if saved >= 0 else '-'}{format_us(abs(saved))}"
    return [decision.taken, decision.a, decision.b, saving, decision.reason, decision.against]
