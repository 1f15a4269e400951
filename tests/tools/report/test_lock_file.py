"""Candidates that a compile takes: recorded as the judge decides, and taken again from a lock."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fusec.codegen.targets import find_target
from fusec.driver.context import CompileContext
from fusec.driver.trace import Trace
from fusec.ir.choice import Choice, Decided
from fusec.ir.graph import Graph
from fusec.options import Options
from fusec.passes.fusion.contract import FUSED, LIBRARY, Group
from fusec.passes.fusion.libraries import library_choice
from fusec.tools.report.lock_file import Pinned, Record, is_candidate
from fusec.tools.report.observe import observe
from tests.passes.fusion.test_libraries import product


def no_cut(graph: Graph) -> Any:
    raise AssertionError("a group was cut")


PRODUCT = product("c", 4, 6, 8)
GROUP = Group(Graph("group", (), (PRODUCT,), ()), frozenset(), (), no_cut)
MODELLED = Decided(LIBRARY, "modelled", 1.0)
CHOICES = (
    library_choice(PRODUCT),
    Choice("group", GROUP.describe, GROUP, (LIBRARY,), lambda: MODELLED, FUSED),
)


def decisions(context: CompileContext) -> list[Decided]:
    """Return what a context's judge decides about a product and a group."""
    return [context.judge(choice) for choice in CHOICES]


def judged(note: Callable[[], None]) -> CompileContext:
    """Return a context whose judge calls a function before it decides."""

    def judge(choice: Choice) -> Decided:
        note()
        candidate = "oneDNN" if choice.kind == "product" else "fused #2"
        return Decided(candidate, "measured", 3.0)

    return replace(CompileContext(find_target("cpu"), Options(), Trace("test")), judge=judge)


def test_a_record_notes_what_the_judges_say() -> None:
    record = Record()
    assert [d.reason for d in decisions(record.around(judged(lambda: None)))] == ["measured"] * 2
    (group, fused), (call, library) = record.candidates.items()
    assert re.match(r"group [0-9a-f]{16} ", group) and fused == "fused #2"
    assert call.startswith("product mm") and library == "oneDNN"
    assert all(is_candidate(*row) for row in record.candidates.items())


def test_a_pinned_candidate_is_taken_without_the_judge() -> None:
    record = Record()
    decisions(record.around(judged(lambda: None)))
    pinned = Pinned(record.candidates)
    library, group = decisions(pinned.around(judged(lambda: pytest.fail("the judge was called"))))
    assert library == Decided("oneDNN", "the lock says so", pinned=True)
    assert group.candidate == "fused #2"
    assert pinned.candidates == record.candidates


def test_a_pinned_library_that_does_not_exist_here_is_decided_by_rule() -> None:
    record = Record()
    decisions(record.around(judged(lambda: None)))
    (group, _), (call, _) = record.candidates.items()
    pinned = Pinned({group: "library", call: "BLIS"})
    library, chosen = decisions(pinned.around(judged(lambda: pytest.fail("the judge was called"))))
    assert (
        library == Decided("ATen", "by rule: the library that it names")
        and chosen.candidate == LIBRARY
    )
    assert pinned.candidates[call] == "ATen"


@pytest.mark.parametrize("format_", ["contiguous", "channels-last"])
def test_the_format_of_images_is_pinned_too(format_: str) -> None:
    def trace(record: Record) -> None:
        observe(nn.Conv2d(8, 8, 3), [torch.randn(2, 8, 9, 9)], adapt=record.around)

    record = Record()
    trace(record)
    ((asked, _),) = record.candidates.items()
    assert asked.startswith("convolution convolution") and "float32[2,8,9,9]" in asked
    pinned = Pinned({asked: format_})
    trace(pinned)
    assert pinned.candidates == {asked: format_}


class Two(nn.Module):
    """Equal convolutions: four in a chain, which share images, and one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)))
        self.alone = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.chain(x), self.alone(y)


def test_equal_convolutions_that_are_decided_otherwise_are_taken_again_as_they_were() -> None:
    images = [torch.randn(4, 8, 16, 16), torch.randn(4, 8, 16, 16)]
    record = Record()
    calls = iter([900.0, 900.0, 900.0, -900.0])  # three of the chain matter, and the other

    def judge(choice: Choice) -> Decided:
        return Decided("channels-last", "told", next(calls), 1000.0)

    def around(context: CompileContext) -> CompileContext:
        return record.around(replace(context, judge=judge))

    observe(Two(), images, adapt=around)
    assert set(record.candidates.values()) == {"contiguous", "channels-last"}
    pinned = Pinned(record.candidates)
    observe(Two(), images, adapt=pinned.around)
    assert pinned.candidates == record.candidates
    assert all(is_candidate(*row) for row in record.candidates.items())


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ("group 12", "fused"),
        ("group 12", "fused #x"),
        ("group 12", "7"),
        ("group 12", "fused #²"),
        ("convolution", "any"),
        ("call", "ATen"),
        ("product", ""),
    ],
)
def test_an_entry_without_a_candidate_is_invalid(choice: str, name: str) -> None:
    assert not is_candidate(choice, name)
