"""Render an explanation, or a list of kernels, for a notebook: HTML without scripts.

A cell has no room for a report (``fusec report``): it has tables, and texts that open at a click.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from fusec.tools.report.layers import Layers

if TYPE_CHECKING:
    from fusec.tools.report import KernelText
    from fusec.tools.report.explanation import Explanation, GraphReport, KernelReport

_LEFT = ' style="text-align:left"'


def explanation_html(explanation: Explanation) -> str:
    """Return an explanation as HTML."""
    parts = [f"<p><b>fusec</b>, target {escape(explanation.target)}</p>"]
    for one in explanation.breaks:
        what = f"✕ graph break: {one.place}"
        parts.append(
            f'<p style="color:#b42318"><b>{escape(what)}</b><br>{escape(one.reason)}<br>'
            f"→ {escape(str(one.remedy))}</p>"
        )
    if explanation.unseen:
        parts.append(f"<p>✕ from here on not seen: {escape(explanation.unseen)}</p>")
    return "\n".join([*parts, *map(_graph, explanation.graphs)])


def kernels_html(kernels: Sequence[KernelText]) -> str:
    """Return generated kernels as HTML: a line each, which opens to notation and source."""
    if not kernels:
        return "<p>no kernels</p>"
    return "\n".join(
        f"<details><summary><code>{escape(kernel.name)}</code> {escape(kernel.graph)}: "
        f"<code>{escape(kernel.notation.splitlines()[0])}</code></summary>"
        f"<pre>{escape(kernel.notation)}</pre><pre>{escape(kernel.source)}</pre></details>"
        for kernel in kernels
    )


def _graph(graph: GraphReport) -> str:
    # Local: it imports this module.
    from fusec.tools.terminal import format_bytes

    sizes = map(format_bytes, (graph.bytes_eager, graph.bytes_moved, graph.bytes_floor))
    parts = [
        f"<h4>{escape(graph.name)}</h4>",
        _table(
            ("", "eager", "fusec", "floor"),
            [
                ("launches", str(graph.launches_eager), str(graph.launches), ""),
                ("bytes", *sizes),
            ],
        ),
    ]
    kernels = [_kernel(alike, place, format_bytes) for place, alike in _alike(graph)]
    if kernels:
        parts.append(_table(("kernel", "times", "bytes", "module", "your lines"), kernels))
    counted = Counter((extern.op, extern.reason) for extern in graph.externs)
    externs = [(str(n), op, reason) for (op, reason), n in counted.items()]
    if externs:
        parts.append(_table(("times", "eager kernel", "why"), externs))
    return "\n".join(parts)


def _alike(graph: GraphReport) -> list[tuple[str, list[KernelReport]]]:
    """Group kernels by their module, layers folded: those of repeated layers are together."""
    layers = Layers.of(graph.modules)
    found: dict[tuple[str, object], list[KernelReport]] = {}
    for kernel in graph.kernels:
        kind = (kernel.bytes, kernel.source, kernel.members)
        found.setdefault((layers.folded(kernel.module), kind), []).append(kernel)
    return [(place, alike) for (place, _), alike in found.items()]


def _kernel(
    alike: Sequence[KernelReport], place: str, size: Callable[[int], str]
) -> tuple[str, ...]:
    kernel, *more = alike
    module, lines = place if more else kernel.module, "\n".join(kernel.source)
    return kernel.name, str(len(alike)), size(kernel.bytes), module, lines


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    titles = "".join(f"<th{_LEFT}>{escape(cell)}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"


def _cell(text: str) -> str:
    return f"<td{_LEFT}>{'<br>'.join(map(escape, text.splitlines()))}</td>"
