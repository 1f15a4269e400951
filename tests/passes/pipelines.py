"""Graphs through the pipeline or through one pass of it: what tests of passes share."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fusec.codegen.targets import find_target
from fusec.errors import InvalidIR
from fusec.ir.expr import Buffer
from fusec.ir.graph import Def, Graph, Kernel, Schedule
from fusec.ir.program import Program
from fusec.ir.verify import verify_graph, verify_schedule
from fusec.passes.dag import find_uses
from fusec.passes.fusion.unify import unify
from fusec.passes.kernel.coalesce import coalesce
from fusec.tools.interpreter.graph import ExternCall, run_graph
from tests.fuzz.graphs import Example, copy_extern, example
from tests.fuzz.pipeline import check_pipeline, small_target


def check_small(graph: Graph, inputs: tuple[Any, ...], target: str = "cpu") -> Schedule:
    """Check every stage on a graph, with low limits of size; return its schedule."""
    return check_pipeline(graph, inputs, small_target(target), copy_extern)[0]


def check_full(
    graph: Graph, inputs: tuple[Any, ...], target: str = "cpu"
) -> tuple[Schedule, dict[str, Program]]:
    """Check every stage on a graph, as a user's compile would take it."""
    return check_pipeline(graph, inputs, find_target(target), copy_extern)


def kernels(schedule: Schedule) -> list[Kernel]:
    return [step for step in schedule.steps if isinstance(step, Kernel)]


# -- one pass --------------------------------------------------------------------------------------


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Return small integers, whose sums and products are exact in every type."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float64)


def check_same(
    before: Graph,
    after: Graph | Schedule,
    inputs: tuple[Any, ...],
    extern: ExternCall = copy_extern,
) -> None:
    """Assert that a pass's result is well formed and computes, exactly, what was there before."""
    with np.errstate(all="ignore"):
        expected = run_graph(before, inputs, extern)
        if isinstance(after, Schedule):
            verify_schedule(after)
            found = run_graph(after, inputs, extern)
        else:
            verify_graph(after)
            found = run_graph(after, inputs, extern)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(b, a)


BOUNDED = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
"""For tests over ``random_graphs``: a few seconds at most, and the same graphs in each run."""


def random_graphs(*, symbols: bool = False) -> st.SearchStrategy[Example]:
    """Return a strategy for random graphs with inputs: small ones, which the verifier accepts."""
    seeds = st.tuples(st.integers(1, 6), st.integers(0, 1 << 20))
    drawn = seeds.map(lambda s: example(s[1], symbols=symbols, count=s[0]))
    return drawn.filter(_is_provable)


def _is_provable(drawn: Example) -> bool:
    try:
        verify_graph(drawn.graph)
    except InvalidIR:  # the prover's limits, on some gathers below divisions
        return False
    return True


def names(graph: Graph) -> list[str]:
    """Return the buffers that a graph's definitions make, in order."""
    return [n.buffer.name for n in graph.nodes if isinstance(n, Def)]


def unified(graph: Graph, *stored: Buffer) -> Kernel:
    """Return one kernel that computes a graph, storing what it returns (and ``stored``)."""
    defs = tuple(n for n in graph.nodes if isinstance(n, Def))
    return unify(defs, find_uses(graph).live_out | set(stored))


def kernel_of(graph: Graph, *stored: Buffer) -> Kernel:
    """Return such a kernel with flat accesses."""
    return coalesce(unified(graph, *stored))
