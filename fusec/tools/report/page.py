"""Print the page at the end of ``fusec run``: advice first, then the facts that it follows from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusec.tools.report.breaks import paragraph
from fusec.tools.report.seen import Launch, Seen, SeenGraph
from fusec.tools.terminal import (
    columns,
    fitted_table,
    format_bytes,
    format_seconds,
    format_table,
    indented,
    tail,
    wrapped,
)

LINES = 56
"""The most lines of a page, which need little scrolling."""
_ROWS = range(12, 2, -1)
"""Rows of a table, from the most to the fewest that are tried; the JSON form has all."""
_LEAST_PLACE = 32
"""The least width of a table's column for a line of the user's program."""


def page(seen: Seen) -> str:
    """Return a record as text, with as many rows of each table as fit on a page."""
    pages = (_page(seen, rows) for rows in _ROWS)
    shown: list[str] = []
    for shown in pages:
        if len(shown) <= LINES:
            break
    return "\n".join(shown)


def _page(seen: Seen, rows: int) -> list[str]:
    """Return a page's lines, with some rows of each table at most."""
    sections = [
        _advice(f"do this first: {_counted(seen)}", seen.advice(), rows),
        _advice("without a remedy", seen.unmended(), rows // 2),
        _notes(seen.notes(), rows // 2),
        _graphs(seen.graphs, rows),
        _modules(seen, rows),
        _kernels(seen.slowest(eager=False), rows),
        _eager_kernels(seen.slowest(eager=True), rows),
        _compiles(seen),
    ]
    lines = [_head(seen)]
    for section in sections:
        lines += ["", *section] if section else []
    return lines


def _head(seen: Seen) -> str:
    compiling = sum(seen.compile_seconds.values())
    rest = max(seen.seconds - compiling - seen.run_seconds, 0.0)
    said = f": {format_seconds(seen.seconds)}"
    if not seen.graphs and not seen.breaks:
        said += "; nothing was compiled"
    else:
        said += (
            f": compile {format_seconds(compiling)}, graphs {format_seconds(seen.run_seconds)}, "
            f"else {format_seconds(rest)}; peak {format_bytes(seen.peak_bytes)}"
        )
    return f"{tail(seen.what, columns() - len(said))}{said}"


def _advice(title: str, advice: Sequence[str], rows: int) -> list[str]:
    """Return the texts of some advice as numbered paragraphs."""
    lines = [title] if advice else []
    for number, text in enumerate(advice[:rows], 1):
        first, *rest = text.splitlines()
        lines += paragraph(f"{number}.", first)
        for line in rest:
            lines += paragraph("", line)
    return [*lines, *_more(len(advice), rows)]


def _notes(notes: Sequence[str], rows: int) -> list[str]:
    """Return the recompiles that the program needs."""
    lines = ["compiled again, as it has to be"] if notes else []
    for text in notes[:rows]:
        lines += wrapped(text, "  ", "    ")
    return [*lines, *_more(len(notes), rows)]


def _counted(seen: Seen) -> str:
    again = sum(one.count for one in seen.recompiles if not one.remedy.meant)
    counts = {
        "graph break": len(seen.breaks),
        "recompile": again,
        "fallback": sum(bool(graph.summary.problem) for graph in seen.graphs),
    }
    said = [f"{n} {what}{'s' * (n != 1)}" for what, n in counts.items() if n]
    return ", ".join(said) or "what takes long"


def _graphs(graphs: Sequence[SeenGraph], most: int) -> list[str]:
    if not graphs:
        return []
    called = {g.summary.compile: g.summary.called for g in graphs if g.summary.called}
    rows: list[Sequence[str]] = [
        ("", "graph", "kernels", "eager", "calls", "time", "compile", "of")
    ]
    dear = sorted(graphs, key=lambda g: (not g.summary.problem, -g.run_seconds))[:most]
    rows += [_graph_row(graph, called) for graph in graphs if graph in dear]
    hits = sum(graph.summary.cached for graph in graphs)
    title = f"graphs: {len(graphs)}, {hits} from the cache"
    return [title, *_graph_table(rows), *_more(len(graphs), most)]


def _graph_row(graph: SeenGraph, called: Mapping[str, str]) -> tuple[str, ...]:
    """Return a graph's row; ``called`` maps a compile's number to the module that it compiled."""
    made, place = graph.summary, str(graph.place) if graph.place.path else ""
    counts = ("-", "all") if made.problem else (str(len(made.kernels)), str(len(made.externs)))
    times = (str(graph.calls), format_seconds(graph.run_seconds)) if graph.calls else ("-", "-")
    spent = "cached" if made.cached else format_seconds(made.total_seconds)
    of = ", ".join(filter(None, (called.get(made.compile, ""), place)))
    return (made.compile, made.name, *counts, *times, spent, of)


def _graph_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table whose last column is below each row if there is no room beside it."""
    table = indented(format_table([row[:-1] for row in rows], right=(2, 3, 4, 5, 6)))
    if columns() - max(map(len, table)) > _LEAST_PLACE:
        return fitted_table(rows, right=(2, 3, 4, 5, 6), indent=2)
    lines = [table[0]]
    for (*_, place), line in zip(rows[1:], table[1:], strict=True):
        lines += [line, *wrapped(place, " " * 7, " " * 9)]
    return lines


def _modules(seen: Seen, most: int) -> list[str]:
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
            for module, seconds, calls in rows[:most]
        ],
        right=(1, 2, 3),
    )
    return ["modules: time, share, launches", *indented(table), *_more(len(rows), most)]


def _kernels(launches: Sequence[Launch], most: int) -> list[str]:
    rows = [launch for launch in launches if launch.calls]
    if not rows:
        return []
    table = fitted_table(
        [
            (format_seconds(k.seconds), f"{k.calls} x", _numbered(k.graph), k.name, k.module, "")
            for k in rows[:most]
        ],
        right=(0, 1),
        names=(3, 4),
        indent=2,
    )
    return ["kernels, by time", *table, *_more(len(rows), most)]


def _numbered(graph: str) -> str:
    """Return a graph as its table has it: "0/0 forward" for "forward 0/0"."""
    name, _, number = graph.partition(" ")
    return f"{number} {name}".strip()


def _eager_kernels(launches: Sequence[Launch], most: int) -> list[str]:
    """Return eager kernels, those of one operation as one row, with the modules they are in."""
    alike: dict[tuple[str, str], list[Launch]] = {}
    for launch in launches:
        if launch.calls:
            alike.setdefault((launch.name, launch.reason), []).append(launch)
    if not alike:
        return []
    rows = [
        (sum(one.seconds for one in some), sum(one.calls for one in some), name, reason, some)
        for (name, reason), some in alike.items()
    ]
    rows.sort(key=lambda row: -row[0])
    table = fitted_table(
        [
            (format_seconds(seconds), f"{calls} x", name, _within(some), reason)
            for seconds, calls, name, reason, some in rows[:most]
        ],
        right=(0, 1),
        names=(2, 3),
        indent=2,
    )
    return ["eager kernels, by time", *table, *_more(len(rows), most)]


def _within(launches: Sequence[Launch]) -> str:
    """Return the module in which launches take most, and how many others there are."""
    modules = list(dict.fromkeys(launch.module for launch in launches if launch.module))
    if len(modules) < 2:
        return "".join(modules)
    return f"{modules[0]} and {len(modules) - 1} more"


def _compiles(seen: Seen) -> list[str]:
    """Return the phases of compiles, fusec's own after Dynamo's and AOTAutograd's."""
    spent = {n: format_seconds(seconds) for n, seconds in seen.compile_seconds.items() if seconds}
    theirs = [f"{name} {time}" for name, time in spent.items() if not name.startswith(_OWN)]
    own = [f"{n.removeprefix(_OWN)} {time}" for n, time in spent.items() if n.startswith(_OWN)]
    said = ", ".join(theirs) + (f"; fusec: {', '.join(own)}" if own else "")
    return wrapped(f"compile, by phase: {said}", following="  ") if spent else []


_OWN = "fusec: "
"""The prefix of the names of fusec's own phases."""


def _more(count: int, shown: int) -> list[str]:
    return [f"  and {count - shown} more, which --json lists"] if count > shown else []
