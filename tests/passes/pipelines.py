"""Graphs written by hand through the pipeline: what tests of passes share."""

from __future__ import annotations

from typing import Any

from fusec.codegen.targets import find_target
from fusec.ir.graph import Graph, Kernel, Schedule
from fusec.ir.program import Program
from tests.fuzz.graphs import copy_extern
from tests.fuzz.pipeline import check_pipeline, small_limits, small_target


def check_small(graph: Graph, inputs: tuple[Any, ...], target: str = "cpu") -> Schedule:
    """Check every stage on a graph, with low limits of size; return its schedule."""
    with small_limits():
        return check_pipeline(graph, inputs, small_target(target), copy_extern)[0]


def check_full(
    graph: Graph, inputs: tuple[Any, ...], target: str = "cpu"
) -> tuple[Schedule, dict[str, Program]]:
    """Check every stage on a graph, as a user's compile would take it."""
    return check_pipeline(graph, inputs, find_target(target), copy_extern)


def kernels(schedule: Schedule) -> list[Kernel]:
    return [step for step in schedule.steps if isinstance(step, Kernel)]
