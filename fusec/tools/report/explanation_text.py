"""Print an explanation as text, for ``fusec explain``.

Kernels, eager kernels and merges of equal layers share one line with their number; a table by
module comes first where there are many launches. Lines are at most as wide as the terminal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from fusec.frontend.modules import BETWEEN
from fusec.ir.decision import Decision
from fusec.tools.report.breaks import break_lines, recompile_lines, unseen_lines
from fusec.tools.report.explanation import (
    Explanation,
    ExternReport,
    GraphReport,
    KernelReport,
    LoopReport,
    OutsideReport,
    PassReport,
    SumReport,
)
from fusec.tools.report.layers import Layers
from fusec.tools.terminal import (
    alike,
    columns,
    fitted_table,
    format_bytes,
    format_table,
    indented,
    shorten,
    tail,
    wrapped,
)

SHOWN = 12
"""Modules in the printed form; the JSON form has all."""
_DECISIONS = 5
"""The most merges of each kind, and choices of candidates, in the printed form."""
_LINES = 3
"""The most lines of the user's program for one kernel."""
_MERGED = 48
"""The most characters of a name that joins the parts of a kernel."""
_MANY = 16
"""The number of launches from which there is a table by module."""
_NARROW = 80
"""Columns below which continuation lines are indented less."""
_NUMBER = re.compile(r"_v?\d+")


def explanation_text(explained: Explanation) -> str:
    """Return what ``fusec explain`` prints."""
    if not (explained.graphs or explained.breaks or explained.unseen or explained.outside):
        return "nothing was compiled: the call has no tensor operations"
    parts = [
        f"target {explained.target}",
        "\n".join(break_lines(explained.breaks)),
        "\n".join(recompile_lines(explained.recompiles)),
        *map(graph_text, explained.graphs),
        "\n".join(_outside_lines(explained.outside)),
    ]
    if explained.unseen:
        parts.append("\n".join(unseen_lines(explained.unseen)))
    elif not explained.graphs:
        parts.append("nothing is compiled: all of the call runs eagerly")
    return "\n\n".join(filter(None, parts))


def graph_text(graph: GraphReport) -> str:
    """Return the text of one graph."""
    rows = [
        ("", "eager", "fusec", "floor"),
        ("launches", str(graph.launches_eager), str(graph.launches), ""),
        ("bytes", *map(format_bytes, (graph.bytes_eager, graph.bytes_moved, graph.bytes_floor))),
    ]
    if graph.held:
        rows.append(("held", "", format_bytes(graph.held), ""))
    of = f" of {graph.called}" if graph.called else ""
    lines = [f"graph {graph.name}{of}", *indented(format_table(rows, right=(1, 2, 3)))]
    for remark in graph.remarks:
        lines += wrapped(remark, "  note: ", "    ")
    lines += _section("passes of yours", _pass_lines(graph.passes))
    layers = Layers.of(graph.modules)
    lines += _section("modules, by bytes", _module_lines(graph, layers))
    lines += _section("kernels", _kernel_lines(graph.kernels, layers))
    for loop in graph.loops:
        lines += ["", *indented(_loop_lines(loop))]
    lines += _section("eager kernels", _extern_lines(graph.externs))
    lines += _section("order of sums", _sum_lines(graph.sums))
    taken = [d for d in graph.decisions if d.is_merge and d.taken]
    rejected = [d for d in graph.decisions if d.is_merge and not d.taken]
    saved = sum(d.saved_us or 0 for d in taken)
    title = f"merges taken: {len(taken)}, modelled to save {saved:.3g} us"
    lines += _section(title, _taken_lines(taken))
    lines += _section(f"merges rejected: {len(rejected)}", _rejected_lines(rejected))
    lines += _section("choices", _choice_lines([d for d in graph.decisions if not d.is_merge]))
    return "\n".join(lines)


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"  {title}", *lines] if lines else []


def _pass_lines(passes: Sequence[PassReport]) -> list[str]:
    """Return each pass of the user, with the number of lines that it rewrote."""
    rows = [
        (one.name, f"rewrote {one.rewritten} of {one.lines} lines" if one.rewritten else "nothing")
        for one in passes
    ]
    return indented(format_table(rows), 4) if rows else []


def _module_lines(graph: GraphReport, layers: Layers) -> list[str]:
    """Return bytes and launches by module, layers folded; nothing for a small graph."""
    launches: list[KernelReport | ExternReport] = [*graph.kernels, *graph.externs]
    groups = alike(launches, lambda one: layers.folded(_layer(one.module)))
    if len(launches) < _MANY or len(groups) < 2:
        return []
    total = sum(one.bytes for one in launches) or 1
    ranked = sorted(groups, key=lambda some: -sum(one.bytes for one in some))
    rows = [("", "", "kernels", "eager", "bytes", "")]
    for some in ranked[:SHOWN]:
        places = {_layer(one.module) for one in some}
        kernels = sum(isinstance(one, KernelReport) for one in some)
        moved = sum(one.bytes for one in some)
        rows.append(
            (
                f"{len(places)} x" if len(places) > 1 else "",
                layers.folded(_layer(some[0].module)) or "(the model itself)",
                str(kernels),
                str(len(some) - kernels),
                format_bytes(moved),
                f"{moved / total:.0%}",
            )
        )
    lines = indented(format_table(rows, right=(0, 2, 3, 4, 5)), 4)
    if (over := max(map(len, lines)) - columns()) > 0:  # of a path, the end tells most
        room = max(len(row[1]) for row in rows) - over
        rows = [(row[0], tail(row[1], room), *row[2:]) for row in rows]
        lines = indented(format_table(rows, right=(0, 2, 3, 4, 5)), 4)
    more = len(ranked) - SHOWN
    return [*lines, f"    and {more} more"] if more > 0 else lines


def _layer(module: str) -> str:
    """Return a module's path up to the part of a layer: "h.3.attn" of "h.3.attn.c_proj"."""
    parts = module.partition(BETWEEN)[0].split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 2 if numbers else 2])


def _loop_lines(loop: LoopReport) -> list[str]:
    count = f"{loop.chunk} of {loop.rows} rows at a time, {loop.rounds} times"
    if not loop.rows:
        count = "as long as a condition holds"
    inside = ", ".join((*loop.externs, *loop.kernels))
    return [
        f"loop {loop.name}: {count}{', in one native call' * loop.native}; "
        f"{format_bytes(loop.bytes)} {'in all' if loop.rows else 'each time'}",
        *wrapped(f"each time: {inside}", "  ", "    "),
        f"  its largest buffer: {format_bytes(loop.largest)}; what it reads whole, such as weights,"
        " it reads each time",
    ]


def _sum_lines(sums: Sequence[SumReport]) -> list[str]:
    """Return the axes that kernels sum over, and which sizes change the order."""
    rows = [
        (
            f"{len(more) + 1} kernels" if more else one.kernel,
            f"over {', '.join(one.over)}",
            _order(one),
        )
        for one, *more in alike(sums, lambda one: (one.over, one.sizes, one.added))
    ]
    return fitted_table(rows, names=(1,), indent=4) if rows else []


def _order(one: SumReport) -> str:
    if one.added:
        return "changes from call to call: programs add to memory (unless deterministic)"
    return f"changes with {', '.join(one.sizes)}" if one.sizes else "no symbolic size changes it"


def _kernel_lines(kernels: Sequence[KernelReport], layers: Layers) -> list[str]:
    """Return each kernel with its lines; kernels of equal layers are one, with their number."""

    def kind(kernel: KernelReport) -> object:
        outputs = tuple(map(_without_number, kernel.outputs))
        place = layers.folded(kernel.module)
        return kernel.bytes, kernel.source, kernel.members, place, outputs

    groups = alike(kernels, kind)
    if not groups:
        return []
    rows = [(k.name, format_bytes(k.bytes), _written(k, len(more), layers)) for k, *more in groups]
    lines: list[str] = []
    width = max(len(name) for name, _, _ in rows), max(len(size) for _, size, _ in rows)
    for (kernel, *_), (name, size, text) in zip(groups, rows, strict=True):
        start = f"    {name:<{width[0]}}  {size:>{width[1]}}  "
        lines += wrapped(text, start, " " * min(len(start), 8 if columns() < _NARROW else 99))
        if kernel.expected is not None:
            lines += wrapped(str(kernel.expected), " " * 10, " " * 12)
        if kernel.function:
            lines += wrapped(kernel.function, " " * 10, " " * 12)
        lines += [shorten(f"{'':10}{line}", columns()) for line in kernel.source[:_LINES]]
        if (more := len(kernel.source) - _LINES) > 0:
            lines.append(f"{'':10}and {more} more line{'s' * (more > 1)}")
    return lines


def _written(kernel: KernelReport, more: int, layers: Layers) -> str:
    alike = f"{kernel.members} alike: " if kernel.members > 1 else ""
    times = [f"{more + 1} times"] if more else []
    if kernel.module and (more or not kernel.source):  # the user's lines show where it is
        times.append(f"in {layers.folded(kernel.module)}")
    counted = f"{' '.join(times)}: " if times else ""
    return counted + alike + ", ".join(kernel.outputs)


def _without_number(name: str) -> str:
    """Return a name without its numbers: "var_mean" for "var_mean_12"."""
    return _NUMBER.sub("", name)


def _extern_lines(externs: Sequence[ExternReport]) -> list[str]:
    counted = Counter((extern.op, extern.reason) for extern in externs)
    rows = [(f"{n} x", op, reason) for (op, reason), n in counted.items()]
    return fitted_table(rows, right=(0,), names=(1,), indent=4) if rows else []


def _outside_lines(outside: Sequence[OutsideReport]) -> list[str]:
    rows = [(one.op, f"{one.place}: {one.reason}") for one in outside]
    title = "outside of graphs, as PyTorch runs it"
    return [title, *fitted_table(rows, names=(0,), indent=2)] if rows else []


def _taken_lines(decisions: Sequence[Decision]) -> list[str]:
    """Return merges, the largest gain first; those of equal layers are one, with their number."""
    groups = _alike(decisions)
    rows = [
        (d.a, "with", d.b, _price(d.saved_us), f"{d.reason}{_times(more)}")
        for d, *more in groups[:_DECISIONS]
    ]
    return _with_rest(fitted_table(rows, (3,), names=(0, 2), indent=4) if rows else [], groups)


def _rejected_lines(decisions: Sequence[Decision]) -> list[str]:
    """Return each reason, and below it the merges that it rejects."""
    groups = _alike(decisions)
    pairs: dict[str, list[str]] = {}
    for d, *more in groups[:_DECISIONS]:
        said = [f"{shorten(d.a, _MERGED)} with {shorten(d.b, _MERGED)}", _price(d.saved_us)]
        pairs.setdefault(d.reason, []).append(", ".join(filter(None, said)) + _times(more))
    lines: list[str] = []
    for reason, kept in pairs.items():
        lines += wrapped(reason, "    ", "    ") + wrapped("; ".join(kept), "      ", "      ")
    return _with_rest(lines, groups)


def _choice_lines(choices: Sequence[Decision]) -> list[str]:
    """Return each choice between two candidates: the chosen one, the other one, and the gain."""
    groups, rows = _alike(choices), []
    for choice, *more in groups[:_DECISIONS]:
        chosen, other = (choice.b, choice.against) if choice.taken else (choice.against, choice.b)
        gain = choice.saved_us if choice.taken or choice.saved_us is None else 0.0 - choice.saved_us
        judged, *rest = choice.reason.split("; ")
        judge, _, times = judged.partition(": ")
        told = judge if " us" in times else judged  # the column before it has the times' difference
        said = f"{'; '.join([told, *rest])}{_times(more)}"
        rows.append((choice.a, "in", chosen, "not", other, _price(gain), said))
    return _with_rest(fitted_table(rows, (5,), names=(0, 2, 4), indent=4) if rows else [], groups)


def _alike(decisions: Sequence[Decision]) -> list[list[Decision]]:
    return alike(sorted(decisions, key=lambda d: -abs(d.saved_us or 0)), _decision_kind)


def _times(more: Sequence[Decision]) -> str:
    return f", {len(more) + 1} times" if more else ""


def _with_rest(lines: list[str], groups: Sequence[Sequence[Decision]]) -> list[str]:
    if rest := sum(map(len, groups[_DECISIONS:])):
        lines.append(f"    and {rest} more, which --json lists")
    return lines


def _decision_kind(decision: Decision) -> object:
    """Return a key that is equal for merges of equal layers."""
    names = [_without_number(part) for part in f"{decision.a}+{decision.b}".split("+")]
    return tuple(names), _price(decision.saved_us), decision.reason, decision.against


def _price(saved_us: float | None) -> str:
    return "" if saved_us is None else f"{saved_us:+.3g} us"
