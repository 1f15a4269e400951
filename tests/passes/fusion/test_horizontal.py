"""Kernels that are alike and independent become one launch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusec.codegen.targets import find_target
from fusec.driver.pipeline import generate
from fusec.driver.stages import FUSE
from fusec.ir.graph import ForeachKernel, Kernel
from fusec.ir.text import print_step
from fusec.ir.verify import verify_schedule
from fusec.passes.fusion.horizontal import fuse_horizontally
from fusec.passes.memory.in_place import in_place
from fusec.passes.stage import fold
from fusec.tools.interpreter.graph import run_graph
from fusec.tools.interpreter.program import run_program
from tests.frontend.tracing import Captured
from tests.fuzz.pipeline import context
from tests.passes.memory.test_in_place import arguments, copied

TARGETS = ("cpu", "sm_90")


def run_pass(fn, *inputs, target="cpu", extern=copied):
    """Return (schedule, decisions) after the pass; it returns what it did before."""
    captured = Captured(fn)
    captured(*inputs)
    (graph,) = captured.graphs
    row = find_target(target)
    before = in_place(fold(FUSE, graph, context(row)))
    after = fuse_horizontally(before, row.machine)
    decisions = after.decisions[len(before.decisions) :]
    verify_schedule(after)
    values = arguments(graph, 0)
    for mine, theirs in zip(
        run_graph(after, values, extern), run_graph(before, values, extern), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    return after, decisions


def foreach_kernels(schedule):
    return [s for s in schedule.steps if isinstance(s, ForeachKernel)]


def steps(*pairs):
    """An optimizer's step: p -= 0.5 * g, for each pair."""
    half = len(pairs) // 2
    for p, g in zip(pairs[:half], pairs[half:], strict=True):
        p.sub_(g, alpha=0.5)
    return pairs[:half]


def tensors(*shapes):
    return [torch.randn(s) for s in shapes]


def test_any_shapes_are_rows_of_one_template():
    shapes = [(16, 3), (32,), (2, 4, 8), (64, 64)]
    after, decisions = run_pass(steps, *tensors(*shapes), *tensors(*shapes))
    (found,) = foreach_kernels(after)
    assert after.steps == (found,)
    assert [sizes for _, sizes in found.rows] == [(48,), (32,), (64,), (4096,)]
    assert [d.reason for d in decisions] == ["4 kernels alike in one launch"]


def test_the_printed_form():
    shapes = [(16,), (2, 16), (4, 16)]
    after, _ = run_pass(steps, *tensors(*shapes), *tensors(*shapes))
    assert print_step(foreach_kernels(after)[0]).splitlines() == [
        "foreach b0 of 3 kernels    grid i:n    inside -",
        "  arg0_1[i] = arg0_1[i] - (arg1_1[i] * 0.5)",
        "  k0(arg1_1, arg0_1, n=16)",
        "  k1(arg3_1, arg2_1, n=32)",
        "  k2(arg5_1, arg4_1, n=64)",
    ]


def test_sizes_that_are_multiples_of_16_are_apart_from_others():
    shapes = [(16,), (32,), (48,), (17,), (3,), (5,)]
    after, _ = run_pass(steps, *tensors(*shapes), *tensors(*shapes))
    assert [len(b.kernels) for b in foreach_kernels(after)] == [3, 3]


def test_other_arithmetic_types_or_steps_through_memory_are_not_alike():
    def several(a, b, c, d, e, f):
        return a * 2, b * 2, c * 2, d * 3, e * 2, f.t() * 2

    given = [*tensors((16,), (32,), (48,), (64,)), torch.randn(16).double(), torch.randn(16, 32)]
    after, _ = run_pass(several, *given)
    (found,) = foreach_kernels(after)
    assert [kernel.name for kernel in found.kernels] == ["k0", "k1", "k2"]


def test_few_kernels_stay_apart():
    shapes = [(16 * k,) for k in range(1, 3)]
    after, decisions = run_pass(steps, *tensors(*shapes), *tensors(*shapes))
    assert not foreach_kernels(after) and not decisions


def test_kernels_that_depend_on_each_other_stay_apart():
    def chain(x, *others):
        return [x := (x.sum() + y) for y in others]

    after, _ = run_pass(chain, *tensors((8,), (16,), (32,), (48,), (64,)))
    for found in foreach_kernels(after):
        made = {s.buffer for s in found.stores}
        read = {b for buffers, _ in found.rows for b in buffers} - made
        assert not made & read
    assert any(isinstance(s, Kernel) for s in after.steps)


@pytest.mark.parametrize("target", TARGETS)
def test_the_program_of_a_template_computes_each_member(target):
    shapes = [(16, 3), (32,), (80, 64)]
    given = [*tensors(*shapes), *tensors(*shapes)]
    after, _ = run_pass(steps, *given, target=target)
    (found,) = foreach_kernels(after)
    program = generate(after, context(find_target(target))).programs[found.name]
    assert program.table
    random = np.random.default_rng(0)
    for buffers, sizes in found.rows:
        values = {b: random.normal(size=sizes[0]).astype(np.float32) for b in buffers}
        p, g = (next(b for b in buffers if b.name.startswith(f"arg{k}")) for k in _names(buffers))
        expected = values[p] - values[g] * np.float32(0.5)
        storage = {t: values[b] for t, b in zip(found.buffers, buffers, strict=True)}
        run_program(program, storage, dict(zip(found.extents, sizes, strict=True)))
        np.testing.assert_allclose(values[p], expected, rtol=1e-6)


def _names(buffers):
    return sorted(int(b.name.removeprefix("arg").partition("_")[0]) for b in buffers)


@pytest.mark.parametrize(("columns", "together"), [(8, True), (4096, False)])
def test_large_results_that_wait_for_their_readers_are_made_just_before(
    columns: int, together: bool
) -> None:
    """What one launch makes is in memory at once; sorts, which read it, run one after another."""

    def sort(node, args, kwargs):
        return [np.sort(args[0], axis=1), np.argsort(args[0], axis=1)]

    def sorted_doubles(x, y, z):
        return [torch.sort(2 * t)[0] for t in (x, y, z)]

    after, _ = run_pass(sorted_doubles, *tensors(*[(16, columns)] * 3), extern=sort)
    assert bool(foreach_kernels(after)) is together
