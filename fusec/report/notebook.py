"""What a notebook shows of an explanation, and of a list of kernels: HTML without scripts.

A cell has no room for a report (``fusec report``): tables, and texts that open at a click.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from fusec.report.seen import folded

if TYPE_CHECKING:
    from fusec.report import KernelText
    from fusec.report.explanation import Explanation, GraphReport, KernelReport

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
    from fusec.report.terminal import format_bytes

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
    kernels = [
        _kernel(kernel, count, format_bytes(kernel.bytes)) for kernel, count in _alike(graph)
    ]
    if kernels:
        parts.append(_table(("kernel", "times", "bytes", "module", "your lines"), kernels))
    externs = [(str(n), e.op, e.reason) for e, n in Counter(graph.externs).items()]
    if externs:
        parts.append(_table(("times", "eager kernel", "why"), externs))
    return "\n".join(parts)


def _alike(graph: GraphReport) -> Iterable[tuple[KernelReport, int]]:
    """Return kernels, those of alike layers once, with their number."""
    found: dict[object, list[KernelReport]] = {}
    for kernel in graph.kernels:
        key = (kernel.bytes, kernel.source, kernel.members, folded(kernel.module))
        found.setdefault(key, []).append(kernel)
    return [(group[0], len(group)) for group in found.values()]


def _kernel(kernel: KernelReport, count: int, size: str) -> tuple[str, ...]:
    module = folded(kernel.module) if count > 1 else kernel.module
    return kernel.name, str(count), size, module, "\n".join(kernel.source)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    titles = "".join(f"<th{_LEFT}>{escape(cell)}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"


def _cell(text: str) -> str:
    return f"<td{_LEFT}>{'<br>'.join(map(escape, text.splitlines()))}</td>"
