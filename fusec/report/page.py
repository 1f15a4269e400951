"""The page that ``fusec run`` ends with: what to do first, and then what it follows from."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.report.breaks import paragraph
from fusec.report.seen import Launch, Seen, SeenGraph
from fusec.report.terminal import (
    columns,
    fitted_table,
    format_bytes,
    format_seconds,
    format_table,
    indented,
    wrapped,
)

_ROWS = 12
"""Rows of a table; the JSON form has all."""
_LEAST_PLACE = 32
"""Columns of a line of the user's that are worth a column of a table."""


def page(seen: Seen) -> str:
    """Return what was seen, as text."""
    sections = [
        _advice(f"do this first: {_counted(seen)}", seen.advice()),
        _advice("without a remedy", seen.unmended()),
        _graphs(seen.graphs),
        _modules(seen),
        _launches("kernels, by time", seen.slowest(eager=False)),
        _launches("eager kernels, by time", seen.slowest(eager=True)),
        _compiles(seen),
    ]
    lines = wrapped(_head(seen), following="  ")
    for section in sections:
        lines += ["", *section] if section else []
    return "\n".join(lines)


def _head(seen: Seen) -> str:
    compiling = sum(seen.compile_seconds.values())
    rest = max(seen.seconds - compiling - seen.run_seconds, 0.0)
    if not seen.graphs and not seen.breaks:
        return f"{seen.what}: {format_seconds(seen.seconds)}; nothing was compiled"
    return (
        f"{seen.what}: {format_seconds(seen.seconds)}: {format_seconds(compiling)} compiling, "
        f"{format_seconds(seen.run_seconds)} in compiled graphs, {format_seconds(rest)} elsewhere; "
        f"peak memory {format_bytes(seen.peak_bytes)}"
    )


def _advice(title: str, advice: Sequence[str]) -> list[str]:
    """Return what costs time, the dearest first."""
    lines = [title] if advice else []
    for number, text in enumerate(advice[: 2 * _ROWS], 1):
        first, *rest = text.splitlines()
        lines += paragraph(f"{number}.", first)
        for line in rest:
            lines += paragraph("", line)
    return [*lines, *_more(len(advice), 2 * _ROWS)]


def _counted(seen: Seen) -> str:
    counts = {
        "graph break": len(seen.breaks),
        "recompile": sum(one.count for one in seen.recompiles),
        "fallback": sum(bool(graph.summary.problem) for graph in seen.graphs),
    }
    said = [f"{n} {what}{'s' * (n != 1)}" for what, n in counts.items() if n]
    return ", ".join(said) or "what takes long"


def _graphs(graphs: Sequence[SeenGraph]) -> list[str]:
    if not graphs:
        return []
    called = {g.summary.compile: g.summary.called for g in graphs if g.summary.called}
    rows = [("", "graph", "kernels", "eager", "calls", "time", "compile", "of")]
    for graph in graphs[: 2 * _ROWS]:
        made, place = graph.summary, str(graph.place) if graph.place.path else ""
        counts = ("-", "all") if made.problem else (str(len(made.kernels)), str(len(made.externs)))
        rows.append(
            (
                made.compile,
                made.name,
                *counts,
                *(
                    (str(graph.calls), format_seconds(graph.run_seconds))
                    if graph.calls
                    else ("-", "-")
                ),
                "cached" if made.cached else format_seconds(made.total_seconds),
                ", ".join(filter(None, (called.get(made.compile, ""), place))),
            )
        )
    hits = sum(graph.summary.cached for graph in graphs)
    title = f"graphs: {len(graphs)}, {hits} from the cache"
    return [title, *_graph_table(rows), *_more(len(graphs), 2 * _ROWS)]


def _graph_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table whose last column stands below each row where there is no room beside it."""
    table = indented(format_table([row[:-1] for row in rows], right=(2, 3, 4, 5, 6)))
    if columns() - max(map(len, table)) > _LEAST_PLACE:
        return fitted_table(rows, right=(2, 3, 4, 5, 6), indent=2)
    lines = [table[0]]
    for (*_, place), line in zip(rows[1:], table[1:], strict=True):
        lines += [line, *wrapped(place, " " * 7, " " * 9)]
    return lines


def _modules(seen: Seen) -> list[str]:
    rows = [row for row in seen.by_module() if row[1] > 0]
    if not any(module for module, _, _ in rows):
        return []
    total = sum(seconds for _, seconds, _ in rows)
    table = format_table(
        [
            (
                module or "(the model itself)",
                format_seconds(seconds),
                f"{seconds / total:.0%}",
                str(calls),
            )
            for module, seconds, calls in rows[:_ROWS]
        ],
        right=(1, 2, 3),
    )
    return ["modules: time, share, launches", *indented(table), *_more(len(rows), _ROWS)]


def _launches(title: str, launches: Sequence[Launch]) -> list[str]:
    rows = [launch for launch in launches if launch.calls]
    if not rows:
        return []
    table = fitted_table(
        [
            (format_seconds(row.seconds), f"{row.calls} x", row.name, row.module, row.reason)
            for row in rows[:_ROWS]
        ],
        right=(0, 1),
        names=(2, 3),
        indent=2,
    )
    return [title, *table, *_more(len(rows), _ROWS)]


def _compiles(seen: Seen) -> list[str]:
    spent = [
        (name, format_seconds(seconds)) for name, seconds in seen.compile_seconds.items() if seconds
    ]
    return ["compile, by phase", *indented(format_table(spent, right=(1,)))] if spent else []


def _more(count: int, shown: int) -> list[str]:
    return [f"  and {count - shown} more, which --json lists"] if count > shown else []
