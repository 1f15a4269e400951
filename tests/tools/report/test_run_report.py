"""The page behind a script: short, one row for what is alike, and notes for what is meant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusec.tools.report.breaks import Break, Place, Recompile, Remedy, read_recompile
from fusec.tools.report.run_report import LINES, Launch, Seen, SeenGraph
from fusec.tools.summary import ExternSummary, GraphSummary, KernelSummary

KERNEL = KernelSummary("k0", "k0", ("add",), "", ())
EXTERN = ExternSummary("mm", "mm.default", "runs in the library", "", ())
NONE = Remedy("none is known")


def graph(name: str, number: int = 0) -> SeenGraph:
    made = GraphSummary(f"{number}/0", name, "cpu", False, "", (KERNEL,), (EXTERN,), {"build": 1.0})
    return SeenGraph(made, Place("train.py", 3, "forward", "def forward(self, x):"), 10, 0.5)


def launch(graph: str, name: str, module: str, seconds: float = 1.0, reason: str = "") -> Launch:
    return Launch(graph, name, module, bool(reason), reason, 10, seconds)


STEP = Seen(
    "train.py",
    12.0,
    (graph("forward"), graph("backward")),
    compile_seconds={"Dynamo": 1.0, "fusec: build": 2.0},
    peak_bytes=10**9,
)


def test_kernels_of_one_code_in_two_graphs_are_told_apart() -> None:
    launches = (launch("forward 0/0", "k0: add", "h.*"), launch("backward 0/0", "k0: add", "h.*"))
    lines = str(replace(STEP, launches=launches)).splitlines()
    rows = [line.split() for line in lines if "k0: add" in line]
    assert [row[4:6] for row in rows] == [["0/0", "forward"], ["0/0", "backward"]]


def test_eager_kernels_of_one_operation_are_one_row() -> None:
    launches = tuple(
        launch(
            "forward 0/0", "convolution.default", f"up.{n}.conv1", 1.0 + n, "runs in the library"
        )
        for n in range(10)
    )
    page = str(replace(STEP, launches=launches))
    (row,) = [line for line in page.splitlines() if "convolution" in line]
    assert row.split()[:4] == ["55", "s", "100", "x"]
    assert "up.9.conv1 and 9 more" in row and "runs in the library" in row


@pytest.mark.parametrize("columns", [80, 100])
def test_the_headline_is_one_line(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in ("train.py", "a_script_with_a_name_that_says_very_much.py"):
        first, second, *_ = str(replace(STEP, what=name)).splitlines()
        assert first.endswith(": 12 s: compile 3 s, graphs 1 s, else 8 s; peak 1 GB")
        assert len(first) <= columns and second == ""


def test_the_phases_of_compiles_are_one_paragraph() -> None:
    assert str(STEP).splitlines()[-1] == "compile, by phase: Dynamo 1 s; fusec: build 2 s"


def test_what_was_seen_at_many_lines_is_one_entry() -> None:
    places = [Place("gnn.py", line, "forward", "x = y") for line in range(1, 31)]
    breaks = tuple(Break(place, "no tracing of that", NONE) for place in places)
    guard = "tensor 'x' size mismatch at index 0. expected 3, actual "
    again = tuple(
        Recompile(place, f"{guard}{place.line}", Remedy("mark_dynamic"), 1.0) for place in places
    )
    seen = replace(STEP, breaks=breaks, recompiles=again)
    (text,) = seen.unmended()
    assert text.splitlines()[0] == (
        "gnn.py:1 in forward: x = y; also gnn.py:2, gnn.py:3, gnn.py:4, gnn.py:5 and 25 more"
    )
    (text,) = seen.advice()
    assert "compiled 30 more times, 30.0 s: " in text


def test_graphs_that_fall_back_for_one_reason_are_one_entry() -> None:
    failed = [graph("forward", number) for number in range(3)]
    failed = [replace(g, summary=replace(g.summary, problem="ValueError: x")) for g in failed]
    (text,) = replace(STEP, graphs=tuple(failed)).advice()
    assert "graph forward 0/0 and 2 more run as eager kernels: ValueError: x" in text


@pytest.mark.parametrize("guard", ["GLOBAL_STATE changed: grad_mode", "L['self'].training == True"])
def test_a_recompile_that_is_meant_is_a_note(guard: str) -> None:
    metrics = {"recompile_reason": f"0/0: {guard}", "entire_frame_compile_time_s": 2.5}
    again = read_recompile(metrics, Place("train.py", 3, "forward"))
    assert again is not None and again.remedy.meant
    seen = replace(STEP, recompiles=(again,))
    assert not seen.advice() and not seen.unmended()
    (note,) = seen.notes()
    assert note.startswith("train.py:3 in forward: 2.5 s more: ") and note.endswith("two graphs")
    assert "do this first" not in str(seen) and "without a remedy" not in str(seen)
    assert "compiled again, as it has to be\n  train.py:3 in forward" in str(seen)


def test_collections_of_garbage_are_named() -> None:
    seen = replace(STEP, collections=3, collection_seconds=4.5)
    (text,) = seen.advice()
    assert "50% of the time: Python collects garbage 3 times" in text and "gc.freeze()" in text
    assert not replace(STEP, collections=3, collection_seconds=0.1).advice()


def test_a_page_is_short_whatever_was_seen() -> None:
    places = [Place("a.py", line, f"f{line}", "y = g(x)" * 9) for line in range(1, 40)]
    launches = tuple(
        launch(f"forward {n}/0", f"k{n}: add + mul + layer_norm", f"part{n}", n + 1.0, reason)
        for n in range(40)
        for reason in ("", f"no lowering for operation number {n} of the program" * 2)
    )
    seen = Seen(
        "a.py",
        100.0,
        tuple(graph("forward", n) for n in range(40)),
        tuple(Break(p, f"reason {p.line} " * 9, NONE) for p in places),
        tuple(Recompile(p, f"guard f{p.line} " * 9, Remedy(f"keep f{p.line}")) for p in places),
        launches,
        {"Dynamo": 1.0},
    )
    assert len(str(seen).splitlines()) <= LINES < 60
