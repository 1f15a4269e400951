"""Ways that a compile takes: noted as the judges said them, and taken again without asking them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fusec.codegen.targets import find_target
from fusec.driver.stages import CompileContext
from fusec.driver.trace import Trace
from fusec.ir.graph import Extern, Graph
from fusec.options import Options
from fusec.passes.fusion.contract import Choice, FuseGraph, Group, Judge
from fusec.passes.fusion.libraries import Answer
from fusec.tools.report.candidates import Pinned, Record, is_way
from fusec.tools.report.observe import observe
from tests.passes.fusion.test_libraries import product

GROUP = Group(Graph("group", (), (product("c", 4, 6, 8),), ()), frozenset(), ())


def asked_for(context: CompileContext) -> list[Any]:
    """Ask the judges of a context about a product and a group; return what they say."""
    assert context.choose_library is not None and context.make_judge is not None
    return [context.choose_library(product("c", 4, 6, 8)), context.make_judge(no_cut)(GROUP)]


def no_cut(graph: Graph) -> Any:
    raise AssertionError("the model was asked")


def judged(answer: Callable[[], None]) -> CompileContext:
    """Return a context whose judges call a function before they answer."""

    def library(call: Extern) -> Answer:
        answer()
        return Answer("oneDNN", "measured", 3.0)

    def make(cut: FuseGraph) -> Judge:
        def judge(group: Group) -> Choice:
            answer()
            return Choice(True, 2, "measured", 5.0)

        return judge

    plain = CompileContext(find_target("cpu"), Options(), Trace("test"))
    return replace(plain, make_judge=make, choose_library=library)


def test_a_record_notes_what_the_judges_say() -> None:
    record = Record()
    assert [a.reason for a in asked_for(record.around(judged(lambda: None)))] == ["measured"] * 2
    (group, fused), (call, library) = record.ways.items()
    assert re.match(r"group [0-9a-f]{16} ", group) and fused == "fused #2"
    assert call.startswith("product mm") and library == "oneDNN"
    assert all(is_way(*row) for row in record.ways.items())


def test_a_way_that_is_pinned_is_taken_and_nothing_measured_is_asked_for() -> None:
    record = Record()
    asked_for(record.around(judged(lambda: None)))
    pinned = Pinned(record.ways)
    library, choice = asked_for(pinned.around(judged(lambda: pytest.fail("a judge was asked"))))
    assert library == Answer("oneDNN", "the lock says so")
    assert choice.fused and choice.configuration == 2
    assert pinned.ways == record.ways


def test_a_library_that_is_not_here_gives_way_to_the_rule() -> None:
    record = Record()
    asked_for(record.around(judged(lambda: None)))
    (group, _), (call, _) = record.ways.items()
    pinned = Pinned({group: "library", call: "BLIS"})
    library, choice = asked_for(pinned.around(judged(lambda: pytest.fail("a judge was asked"))))
    assert library == Answer(None, "by rule: nothing is timed") and not choice.fused
    assert pinned.ways[call] == "ATen"


@pytest.mark.parametrize("way", ["contiguous", "channels-last"])
def test_the_format_of_images_is_pinned_too(way: str) -> None:
    def trace(record: Record) -> None:
        observe(nn.Conv2d(8, 8, 3), [torch.randn(2, 8, 9, 9)], adapt=record.around)

    record = Record()
    trace(record)
    ((asked, _),) = record.ways.items()
    assert asked.startswith("convolution convolution") and "float32[2,8,9,9]" in asked
    pinned = Pinned({asked: way})
    trace(pinned)
    assert pinned.ways == {asked: way}


@pytest.mark.parametrize(
    ("asked", "way"),
    [("group 12", "fused"), ("group 12", "fused #x"), ("convolution", "any"), ("call", "ATen")],
)
def test_what_is_no_way_is_told(asked: str, way: str) -> None:
    assert not is_way(asked, way)
