"""The whole pipeline on a graph: each structure run by its interpreter, checked by its verifier.

Limits that keep small things as they are (a reduction too short to split, a buffer too small to
share) are lowered, so that graphs small enough to interpret go through all that large ones do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from fusec.codegen import lower as lowering
from fusec.codegen.lower import lower
from fusec.codegen.targets import Target, find_target
from fusec.ir.graph import Extern, Graph, Schedule
from fusec.ir.interp import (
    _bind_inputs,
    _collect_outputs,
    _run_extern,
    run_graph,
    run_program,
    run_schedule,
)
from fusec.ir.program import Program
from fusec.ir.verify import verify_graph, verify_schedule
from fusec.ir.verify_program import verify_program
from fusec.passes import fuse as fusion
from fusec.passes import split_reduction as splitting
from fusec.passes.coalesce import coalesce
from fusec.passes.dead_code import dead_code
from fusec.passes.fuse import fuse
from fusec.passes.inline import inline
from fusec.passes.library_bias import library_bias
from fusec.passes.schedule import rowwise, vector_loops
from fusec.passes.share import share
from fusec.passes.simplify import simplify
from fusec.passes.split_reduction import split_reduction

SMALL = (
    (splitting, "MIN_ELEMENTS", 16),
    (splitting, "MIN_ROWS_PER_PART", 2),
    (fusion, "SHARED_BYTES", 1),
    (rowwise, "RESIDENT", 16),
    (rowwise, "LOOP_TILE", 16),
    (vector_loops, "CHUNK_ELEMENTS", 64),
    (vector_loops, "MIN_GRID", 4),
    (lowering, "KEEP_COST", 1),
)


@contextmanager
def small_limits() -> Iterator[None]:
    """Lower every limit of size while the block runs."""
    with ExitStack() as stack:
        for module, name, value in SMALL:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def small_target(name: str, width: int = 16) -> Target:
    """Return a target whose launches are dear, so that fusion is eager."""
    target = find_target(name, width)
    machine = replace(target.machine, launch_us=1e3, units=16, parts=4)
    return replace(target, machine=machine)


STAGES: tuple[tuple[str, Callable[[Graph, Target], Graph]], ...] = (
    ("simplify", lambda g, t: simplify(g)),
    ("dead_code", lambda g, t: dead_code(g)),
    ("share", lambda g, t: share(g)),
    ("split_reduction", lambda g, t: split_reduction(g, t.machine)),
    ("inline", lambda g, t: inline(g)),
    ("dead_code again", lambda g, t: dead_code(g)),
)
"""What ``pipeline.optimise`` does before fusion."""


class Mismatch(AssertionError):
    """A stage changed what a graph computes."""


def check_pipeline(
    graph: Graph, inputs: tuple[Any, ...], target: Target, extern: Any = None
) -> tuple[Schedule, dict[str, Program]]:
    """Take a graph through all stages; each must compute, exactly, what the graph does.

    Raises:
        Mismatch: naming the stage.
    """
    expected = run_graph(graph, inputs, extern)
    staged = graph
    for _, stage in STAGES:
        staged = stage(staged, target)
        verify_graph(staged)
    _compare("passes before fusion", expected, run_graph(staged, inputs, extern))
    schedule, _ = fuse(staged, target.machine, target.accepts)
    schedule = library_bias(schedule)
    verify_schedule(schedule)
    _compare("fuse", expected, run_schedule(schedule, inputs, extern))
    programs = lower_all(schedule, target)
    _compare("lower", expected, run_programs(schedule, programs, inputs, extern))
    return schedule, programs


def lower_all(schedule: Schedule, target: Target) -> dict[str, Program]:
    """Return the verified program of each kernel."""
    programs: dict[str, Program] = {}
    for step in schedule.steps:
        if isinstance(step, Extern):
            continue
        flat = coalesce(target.algebra(step))
        programs[step.name] = lower(flat, target.plans(flat)[0])
        verify_program(programs[step.name])
    return programs


def run_programs(
    schedule: Schedule, programs: dict[str, Program], inputs: tuple[Any, ...], extern: Any
) -> list[Any]:
    """Return what the schedule's graph returns, computed by the programs of its kernels."""
    env = _bind_inputs(schedule.graph, inputs)
    for step in schedule.steps:
        if isinstance(step, Extern):
            _run_extern(step, env, extern)
        else:
            run_program(programs[step.name], env.storage, env.sizes)
    return _collect_outputs(schedule.graph, env)


def _compare(stage: str, expected: list[Any], found: list[Any]) -> None:
    for position, (a, b) in enumerate(zip(expected, found, strict=True)):
        if not np.array_equal(a, b, equal_nan=False):
            where = np.argwhere(np.asarray(a) != np.asarray(b))[0].tolist()
            raise Mismatch(
                f"{stage}: output {position} is {b[tuple(where)]} instead of {a[tuple(where)]} "
                f"at {where}"
            )
