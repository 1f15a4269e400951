"""What Dynamo says of breaks and recompiles, as records: merged, and in order."""

from __future__ import annotations

import pytest

from fusec.tools.report.breaks import (
    Break,
    Place,
    Recompile,
    Remedy,
    break_lines,
    merge_breaks,
    merge_recompiles,
    place_of_compile,
    read_break,
    recompile_lines,
)
from fusec.tools.report.run_report import Launch, Seen

REMEDY = Remedy("change it")
HERE, THERE = Place("m.py", 3, "forward"), Place("m.py", 9, "other")
TEXT = """Graph break in user code at /site/torch/nn/functional.py:12
Graph Break Reason: Unsupported thing
  Explanation: It is not done.
  Hint: Please report an issue to PyTorch.
  Hint: Use another.

  Developer debug context: x

User code traceback:
  File "/home/me/model.py", line 7, in forward
    y = F.thing(x)
  File "/site/torch/nn/functional.py", line 12, in thing
    return broken(x)
"""


def test_breaks_of_one_line_are_one_that_is_skipped_if_either_is() -> None:
    once = Break(HERE, "a print", REMEDY)
    skipped = Break(HERE, "a print", REMEDY, skipped=True)
    for pair in ((once, skipped), (skipped, once)):
        (found,) = merge_breaks(pair)
        assert (found.skipped, found.count) == (True, 2)
    assert len(merge_breaks((once, Break(HERE, "an item", REMEDY)))) == 2
    first, _ = merge_breaks((once, Break(THERE, "a print", REMEDY, skipped=True)))
    assert first.place is THERE


def test_a_break_is_at_the_last_line_of_the_user_s_with_a_hint_that_helps() -> None:
    found = read_break(TEXT)
    assert (found.place.path, found.place.line) == ("/home/me/model.py", 7)
    assert (found.reason, found.remedy.change) == ("It is not done", "Use another")
    useless = read_break(TEXT.replace("  Hint: Use another.\n", ""))
    assert useless.remedy.change == "none is known"


def test_recompiles_of_one_function_are_one_for_each_kind_and_the_longest_is_first() -> None:
    sizes = [
        Recompile(HERE, f"tensor 'x' size mismatch at index 0. expected {n}", REMEDY, seconds=0.5)
        for n in (8, 12)
    ]
    rank = Recompile(HERE, "tensor 'x' rank mismatch", REMEDY, seconds=3.0)
    first, second = merge_recompiles([*sizes, rank])
    assert (first.reason, first.count) == (rank.reason, 1)
    assert (second.reason, second.count, second.seconds) == (sizes[0].reason, 2, 1.0)
    assert second.said.startswith("compiled 2 more times, 1.0 s: tensor")
    assert "\n".join(recompile_lines((first, second))).startswith("recompiles: 3\n")


def test_how_often_a_line_breaks_is_said_where_it_is_more_than_once() -> None:
    assert "(3 times)" in "\n".join(break_lines([Break(HERE, "a print", REMEDY, count=3)]))
    assert "times)" not in "\n".join(break_lines([Break(HERE, "a print", REMEDY)]))
    assert break_lines([]) == recompile_lines([]) == []


@pytest.mark.parametrize(
    ("name", "line"), [("forward", 4), ("torch_dynamo_resume_in_forward_at_7", 7)]
)
def test_what_goes_on_behind_a_break_is_at_its_line(name: str, line: int) -> None:
    metrics = {"co_name": name, "co_filename": "m.py", "co_firstlineno": 4}
    assert place_of_compile(metrics) == Place("m.py", line, "forward")


def test_launches_of_one_name_and_module_are_added_up_and_the_slowest_is_first() -> None:
    rows = [
        ("forward 0/0", "mm", "h.*", True, 1.0),
        ("forward 0/1", "sort", "head", True, 4.0),
        ("forward 0/1", "mm", "h.*", True, 2.0),
        ("forward 0/0", "k0: add", "h.*", False, 9.0),
    ]
    launches = tuple(Launch(g, n, m, eager, "why", 2, s) for g, n, m, eager, s in rows)
    seen = Seen("m.py", launches=launches)
    assert [(r.name, r.calls, r.seconds) for r in seen.slowest(eager=True)] == [
        ("sort", 2, 4.0), ("mm", 4, 3.0),
    ]  # fmt: skip
    assert [r.name for r in seen.slowest(eager=False)] == ["k0: add"]
    assert seen.by_module() == [("h.*", 12.0, 6), ("head", 4.0, 2)]
    reverse = Seen("m.py", launches=(launches[1], launches[3]))
    assert [module for module, _, _ in reverse.by_module()] == ["h.*", "head"]
