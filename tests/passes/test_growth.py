"""The work of the passes grows with a graph, not with its square; equal layers are judged once.

Work is counted, not timed: calls of fusec's own functions.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import networkx as nx
import pytest

import fusec
from fusec.codegen.targets import find_target
from fusec.ir.decision import Decision
from fusec.ir.expr import Buffer, Op
from fusec.ir.graph import Def, Graph
from fusec.ir.index import index
from fusec.ir.machine import FusionTuning
from fusec.ir.memory import overwritable
from fusec.ir.monoid import SUM
from fusec.passes.dag import TopologicalOrder
from fusec.passes.fusion import fuse as fusion
from fusec.passes.fusion.fuse import TOO_LARGE, EstimateMemo, fuse
from fusec.passes.graph.inline import inline
from fusec.passes.graph.simplify import simplify
from tests.calls import calls_of
from tests.ir.graphs import axes, buffer, f32, graph, load, total
from tests.passes.pipelines import kernels

HOME = str(Path(fusec.__file__).parent)
ROWS, COLUMNS = 64, 256


def count_calls(action: Callable[[], object]) -> int:
    """Return how many functions of fusec an action calls."""
    count = 0

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(HOME)

    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def cut(example: Graph) -> None:
    machine = find_target("cpu")
    fuse(inline(simplify(example), machine.machine), machine.machine, machine.accepts)


def line(name: str, op: str, *sources: Buffer | float) -> Def:
    """name[i, j] = op(sources[i, j], ...)"""
    own = axes("i j", ROWS, COLUMNS)
    args = tuple(load(s, *own) if isinstance(s, Buffer) else f32(s) for s in sources)
    return Def(buffer(name, ROWS, COLUMNS), own, Op(op, args))


def chain(steps: int) -> Graph:
    """x = sin(x) * 1.01 + y, again and again."""
    x = start = buffer("x", ROWS, COLUMNS)
    y = buffer("y", ROWS, COLUMNS)
    lines = []
    for k in range(steps):
        lines.append(line(f"sin{k}", "sin", x))
        lines.append(line(f"mul{k}", "mul", lines[-1].buffer, 1.01))
        lines.append(line(f"add{k}", "add", lines[-1].buffer, y))
        x = lines[-1].buffer
    return graph((start, y), tuple(lines), x)


def residual(steps: int) -> Graph:
    """x = x + tanh(x) * y: each value has two readers, and all are read again at the end."""
    x = start = buffer("x", ROWS, COLUMNS)
    y = buffer("y", ROWS, COLUMNS)
    lines = []
    for k in range(steps):
        lines.append(line(f"tanh{k}", "tanh", x))
        lines.append(line(f"mul{k}", "mul", lines[-1].buffer, y))
        lines.append(line(f"add{k}", "add", x, lines[-1].buffer))
        x = lines[-1].buffer
    return graph((start, y), tuple(lines), *(n.buffer for n in lines if n.expr.name == "tanh"), x)


def sums(count: int) -> Graph:
    """Sums of one shape over buffers that have nothing else in common."""
    inputs = tuple(buffer(f"x{k}", ROWS, COLUMNS) for k in range(count))
    lines = []
    for k, x in enumerate(inputs):
        (i,) = axes("i", ROWS)
        (c,) = axes("c", COLUMNS)
        lines.append(Def(buffer(f"s{k}", ROWS), (i,), total(SUM, c, load(x, i, c))))
    return graph(inputs, tuple(lines), *(n.buffer for n in lines))


def outputs(count: int) -> Graph:
    """Many outputs that read the same two inputs."""
    x, y = buffer("x", ROWS, COLUMNS), buffer("y", ROWS, COLUMNS)
    lines = []
    for k in range(count):
        lines.append(line(f"mul{k}", "mul", x, float(k)))
        lines.append(line(f"out{k}", "add", lines[-1].buffer, y))
    return graph((x, y), tuple(lines), *(n.buffer for n in lines[1::2]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("make", "size", "calls"),
    [(chain, 100, 2000), (residual, 80, 4500), (sums, 60, 1500), (outputs, 40, 17000)],
)
def test_twice_the_graph_is_twice_the_work(
    make: Callable[[int], Graph], size: int, calls: int
) -> None:
    """``calls``: for each definition, half as many again as were counted in 2026-11."""
    small, large = make(size), make(2 * size)
    few, many = (count_calls(functools.partial(cut, example)) for example in (small, large))
    assert many < 2.7 * few
    assert many < calls * len(large.nodes)


def states(count: int) -> Graph:
    """x = tanh(x) * y for a y of each step; all x are results."""
    x, inputs, lines = buffer("x", ROWS, COLUMNS), [], []
    inputs.append(x)
    for k in range(count):
        inputs.append(buffer(f"y{k}", ROWS, COLUMNS))
        lines.append(line(f"tanh{k}", "tanh", x))
        lines.append(line(f"x{k}", "mul", lines[-1].buffer, inputs[-1]))
        x = lines[-1].buffer
    return graph(tuple(inputs), tuple(lines), *(n.buffer for n in lines[1::2]))


def test_a_kernel_is_walked_once_for_each_result_that_may_lie_over_an_operand() -> None:
    """Walked for each pair of both, it took 120 of RWKV's 152 CPU-seconds (64 steps)."""
    machine = find_target("cpu")
    counts = []
    for count in (12, 24):
        (kernel,) = kernels(fuse(states(count), machine.machine, machine.accepts))
        counts.append(count_calls(functools.partial(overwritable, kernel)))
    assert counts[1] < 4 * counts[0] < 20_000


def layers(count: int) -> Graph:
    """Layers of y = x / sum(x) + w, each with a weight and an output of its own."""
    x = start = buffer("x", ROWS, COLUMNS)
    lines: list[Def] = []
    weights = []
    for k in range(count):
        (i,) = axes("i", ROWS)
        (c,) = axes("c", COLUMNS)
        lines.append(Def(buffer(f"s{k}", ROWS), (i,), total(SUM, c, load(x, i, c))))
        i, j = axes("i j", ROWS, COLUMNS)
        weights.append(buffer(f"w{k}", COLUMNS))
        share = Op("div", (load(x, i, j), load(lines[-1].buffer, i)))
        weighted = Op("add", (share, load(weights[-1], j)))
        lines.append(Def(buffer(f"y{k}", ROWS, COLUMNS), (i, j), weighted))
        x = lines[-1].buffer
    return graph((start, *weights), tuple(lines), *(n.buffer for n in lines[1::2]))


def judged(count: int) -> tuple[int, int]:
    """Return how many groups are unified to judge them, and how many kernels are left."""
    target = find_target("cpu")
    machine = replace(target.machine, fusion=FusionTuning(kernel_definitions=4))
    with calls_of(fusion.unify) as unified:
        schedule = fuse(layers(count), machine, target.accepts)
    left = len(kernels(schedule))
    return len(unified) - left, left


def test_layers_that_are_alike_are_judged_once() -> None:
    few, many = judged(8), judged(16)
    assert many[1] == 2 * few[1]
    assert many[0] <= few[0] + 2


def test_a_graph_that_is_cut_again_is_judged_once() -> None:
    """``contract`` opens calls and closes them: most groups of the next graph are known."""
    target, known, example = find_target("cpu"), EstimateMemo(), layers(4)
    cuts = []
    for unifications in (False, True):
        with calls_of(fusion.unify) as unified:
            cuts.append(fuse(example, target.machine, target.accepts, judged=known))
        left = len(kernels(cuts[-1]))
        assert (len(unified) == left) is unifications  # those of the kernels themselves
    assert cuts[0].decisions == cuts[1].decisions


def test_a_reason_names_the_buffers_of_its_own_layer() -> None:
    inputs, lines = [], []
    for k in range(2):  # y[n] = s[n] + s[511 - n], of a sum
        inputs.append(buffer(f"x{k}", 512, 16))
        i, c = axes("i c", 512, 16)
        lines.append(Def(buffer(f"s{k}", 512), (i,), total(SUM, c, load(inputs[-1], i, c))))
        (n,) = axes("n", 512)
        s = lines[-1].buffer
        both_ends = Op("add", (load(s, n), load(s, 511 - index(n))))
        lines.append(Def(buffer(f"y{k}", 512), (n,), both_ends))
    machine = find_target("cpu")
    example = graph(tuple(inputs), tuple(lines), lines[1].buffer, lines[3].buffer)
    decisions = fuse(example, machine.machine, lambda _: True).decisions
    reasons = {(d.a, d.b): d.reason for d in decisions if "another place" in d.reason}
    assert reasons["s0", "y0"].startswith("y0 reads s0 at another place: ")
    assert reasons["s1", "y1"] == reasons["s0", "y0"].replace("0 ", "1 ")


def test_a_kernel_that_would_be_too_large_says_so() -> None:
    target = find_target("cpu")
    machine = replace(target.machine, fusion=FusionTuning(kernel_nodes=8))
    schedule = fuse(chain(3), machine, target.accepts)
    decisions = schedule.decisions
    assert len(kernels(schedule)) > 1
    assert all(isinstance(d, Decision) for d in decisions)
    assert TOO_LARGE in {d.reason for d in decisions if not d.taken}


@pytest.mark.parametrize("seed", range(20))
def test_order_finds_the_detours_that_a_search_finds(seed: int) -> None:
    draw = random.Random(seed)
    dag: nx.DiGraph[int] = nx.gnp_random_graph(14, 0.2, seed=seed, directed=True)
    dag = nx.DiGraph((a, b) for a, b in dag.edges if a < b)
    order = TopologicalOrder(dag)
    for merged in range(100, 110):
        if len(dag) < 2:
            break
        a, b = draw.sample(sorted(dag), 2)
        paths = [*nx.all_simple_paths(dag, a, b), *nx.all_simple_paths(dag, b, a)]
        detour = any(len(path) > 2 for path in paths)
        assert order.has_detour(a, b) == detour
        between = {node for path in paths for node in path[1:-1]}
        assert set(order.on_detours(a, b)) == between
        if not detour:
            order.merge(a, b, merged)
            assert nx.is_directed_acyclic_graph(dag)
            assert all(order.position[s] < order.position[t] for s, t in dag.edges)
