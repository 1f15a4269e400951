"""The whole pipeline on a graph: each structure run by its interpreter, checked by its verifier.

Limits that keep small things as they are (a reduction too short to split, a buffer too small to
share) are lowered, so that graphs small enough to interpret go through all that large ones do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fusec.codegen.targets import Target, find_target
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import flat_kernels
from fusec.driver.stages import FUSE, LOWER
from fusec.driver.trace import Trace
from fusec.ir.cpu_tuning import LoopTuning
from fusec.ir.graph import Graph, Kernel, Schedule, all_launches
from fusec.ir.host import HostProgram, verify_host
from fusec.ir.machine import FusionTuning, RowTuning
from fusec.ir.program import Program
from fusec.options import Options
from fusec.passes.memory.buffers import plan_host
from fusec.passes.stage import Observe, Stage, fold, fold_each
from fusec.tools.interpreter.expression import Env
from fusec.tools.interpreter.graph import run_graph
from fusec.tools.interpreter.program import run_program

SMALL = {
    "fusion": FusionTuning(split_elements=16, least_part_rows=2, min_reused_input_bytes=1),
    "rows": RowTuning(resident_row=16, row_tile=16),
    "loops": LoopTuning(point_elements=64, least_points=4, kept_cost=1),
}
"""Sizes from which passes do something, for small graphs."""


def small_target(name: str, width: int = 16) -> Target:
    """Return a target of low limits whose launches are dear, so that fusion is eager."""
    target = find_target(name, width)
    machine = replace(target.machine, launch_us=1e3, units=16, parts=4, **SMALL)
    return replace(target, machine=machine)


class Mismatch(AssertionError):
    """A stage changed what a graph computes."""


def context(target: Target, **chosen: Any) -> CompileContext:
    """Return a context under which each stage is verified."""
    options = Options.from_compile(None, {"verify": True, "strict": True, **chosen})
    return CompileContext(target, options, Trace("fuzz"))


def comparing(expected: list[Any], run: Callable[[Any], list[Any]]) -> Observe:
    """Return an observer that compares the output of each stage with what a graph computes.

    Args:
        run: returns what a structure computes.
    """

    def observe(stage: Stage, structure: Any) -> Callable[[Any], None]:
        def done(made: Any) -> None:
            if made is not structure:
                _compare(stage.name, expected, run(made))

        return done

    return observe


def check_pipeline(
    graph: Graph, inputs: tuple[Any, ...], target: Target, extern: Any = None
) -> tuple[Schedule, dict[str, Program]]:
    """Take a graph through all stages; each must compute, exactly, what the graph does.

    Raises:
        Mismatch: naming the stage.
        InvalidIR: naming the stage.
    """
    expected = run_graph(graph, inputs, extern)

    run = partial(run_graph, inputs=inputs, extern=extern)
    compared = replace(context(target), observe=(comparing(expected, run),))
    schedule = fold(FUSE, graph, compared)
    programs = lower_all(schedule, target)
    host = plan_host(schedule, target.codegen.overwritable)
    verify_host(host)
    _compare("lower", expected, run_programs(host, programs, inputs, extern))
    return schedule, programs


def lower_all(schedule: Schedule, target: Target, **chosen: Any) -> dict[str, Program]:
    """Return the verified program of each kernel."""
    lowering = context(target, **chosen)
    flat = flat_kernels(all_launches(schedule), lowering)
    return dict(fold_each((*target.codegen.flat, *LOWER), flat, lowering))


def run_programs(
    host: HostProgram, programs: dict[str, Program], inputs: tuple[Any, ...], extern: Any
) -> list[Any]:
    """Return what a host program returns, computed by the programs of its kernels."""

    def run(kernel: Kernel, env: Env) -> None:
        run_program(programs[kernel.name], env.storage, env.sizes)

    return run_graph(host, inputs, extern, run)


def _compare(stage: str, expected: list[Any], found: list[Any]) -> None:
    for position, (a, b) in enumerate(zip(expected, found, strict=True)):
        if not np.array_equal(a, b, equal_nan=False):
            where = np.argwhere(np.asarray(a) != np.asarray(b))[0].tolist()
            raise Mismatch(
                f"{stage}: output {position} is {b[tuple(where)]} instead of {a[tuple(where)]} "
                f"at {where}"
            )
