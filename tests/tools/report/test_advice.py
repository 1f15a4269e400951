"""What to do first: all in one unit, each with what helps, and what has no remedy apart."""

from __future__ import annotations

from dataclasses import replace

from fusec.tools.report.breaks import Break, Place, Recompile, Remedy
from fusec.tools.report.run_report import Launch, Seen, SeenGraph, advice_on
from fusec.tools.summary import GraphSummary, KernelSummary

KERNEL = KernelSummary("k0", "k0", ("add",), "", ())
MADE = GraphSummary("0/0", "inference", "cpu", False, "", (KERNEL, KERNEL), (), {})
LINES = [Place("m.py", line, "f") for line in range(8)]
REMEDY = Remedy("change it")


def program(*graphs: SeenGraph, **more: object) -> Seen:
    """Return ten seconds of a program, of which two compile."""
    return replace(Seen("m.py", 10.0, graphs, compile_seconds={"Dynamo": 2.0}), **more)


def graph(seconds: float, *, calls: int = 10, problem: str = "", reason: str = "") -> SeenGraph:
    return SeenGraph(replace(MADE, problem=problem, reason=reason), LINES[7], calls, seconds)


def test_shares_of_the_time_come_before_what_costs_once() -> None:
    again = Recompile(LINES[1], "a size", REMEDY, seconds=1.0)
    longer = Recompile(LINES[2], "a rank", REMEDY, seconds=1.5)
    seen = program(
        graph(6.0, problem="ValueError: planted"),
        breaks=(Break(LINES[3], "a print", REMEDY),),
        recompiles=(again, longer),
    )
    costs = [text.splitlines()[1].partition(": ")[0] for text in seen.advice()]
    assert costs == ["75% of the time", "at most 25% of the time", "once", "once"]
    assert [text.splitlines()[0] for text in seen.advice()[2:]] == ["m.py:2 in f", "m.py:1 in f"]


def test_a_function_that_is_skipped_comes_before_a_line_and_the_frequent_line_first() -> None:
    rare, often = Break(LINES[1], "rare", REMEDY), Break(LINES[2], "often", REMEDY, count=9)
    skipped = Break(LINES[3], "skipped", REMEDY, skipped=True)
    found = program(graph(2.0), breaks=(rare, often, skipped)).advice()
    assert [text.splitlines()[0] for text in found] == [f"m.py:{n} in f" for n in (3, 2, 1)]
    assert found[0].splitlines()[1] == "at most 75% of the time: all of f runs eagerly: skipped"


def test_a_compile_that_failed_is_bisected() -> None:
    (text,) = program(graph(6.0, problem="ValueError: planted")).advice()
    assert text.splitlines() == [
        "m.py:7 in f",
        "75% of the time: graph inference 0/0 runs as eager kernels: ValueError: planted",
        "-> fusec bisect --crash m.py, which ends with a file for a bug report",
    ]


def test_a_graph_that_nobody_times_takes_at_most_what_is_elsewhere() -> None:
    failed = graph(0.0, problem="ValueError: planted")
    (text,) = program(graph(2.0), failed).advice()
    assert text.splitlines()[1].startswith("at most 75% of the time: graph inference 0/0 runs as")


def test_what_has_no_remedy_is_no_advice_but_is_said() -> None:
    nothing = Remedy("none: another object runs the same code")
    seen = program(
        graph(6.0, problem="Unsupported: a complex number", reason="a complex number"),
        recompiles=(Recompile(LINES[1], "an id", nothing),),
        breaks=(Break(LINES[2], "unknown", Remedy("none is known")),),
    )
    assert seen.advice() == []
    assert [text.splitlines()[0] for text in seen.unmended()] == [
        "m.py:7 in f", "m.py:2 in f", "m.py:1 in f",
    ]  # fmt: skip
    assert "-> none: another object" in seen.unmended()[-1]
    assert "without a remedy\n" in str(seen) and "do this first" not in str(seen)


def test_an_eager_kernel_is_advice_where_something_helps() -> None:
    def slow(reason: str, seconds: float) -> Seen:
        launch = Launch("", "uniform.default", "h.*.drop", True, reason, 10, seconds)
        return program(graph(4.0), launches=(launch,))

    (one,) = advice_on(slow("random numbers: eager's stream", 2.0))
    assert (one.place, one.cost) == ("uniform.default of h.*.drop", "25% of the time")
    assert "fallback_random" in one.remedy.change
    assert advice_on(slow("random numbers: eager's stream", 0.3)) == []
    assert advice_on(slow("random numbers: a seed for each draw", 2.0)) == []
    assert advice_on(slow("contraction: runs in the library", 2.0)) == []
    assert (
        "torch.where"
        in advice_on(slow("a mask as an index: its size depends on data", 2.0))[0].remedy.change
    )


def test_many_short_calls_are_bound_by_launches() -> None:
    (text,) = program(graph(2.0, calls=200_000)).advice()
    assert text.splitlines()[1] == (
        "25% of the time: graph inference 0/0 is launch-bound: 2 launches in 10 us a call"
    )
    assert program(graph(2.0, calls=50_000)).advice() == []  # 20 us a launch
    assert program(graph(0.0004, calls=40)).advice() == []  # a few calls
    assert program(graph(0.9, calls=90_000)).advice() == []  # a small share
