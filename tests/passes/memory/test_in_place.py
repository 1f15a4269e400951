"""Copies into inputs become stores of the kernels that make what is copied."""

from __future__ import annotations

import numpy as np
import torch

from fusec.codegen.targets import find_target
from fusec.driver.stages import FUSE
from fusec.ir.extern import CopyInto
from fusec.ir.graph import Extern, Kernel
from fusec.ir.verify import verify_schedule
from fusec.passes.memory.in_place import in_place
from fusec.passes.stage import fold
from fusec.tools.interpreter.graph import run_graph
from tests.frontend.tracing import Captured
from tests.fuzz.pipeline import context


def copied(node, args, kwargs):
    """Run the only extern of these graphs."""
    assert node.effect == CopyInto()
    args[0][...] = args[1]
    return []


def run_pass(fn, *inputs):
    """Return the schedule after the pass, checked: it returns what it did before."""
    captured = Captured(fn)
    captured(*(i.clone() for i in inputs))
    (graph,) = captured.graphs
    before = fold(FUSE, graph, context(find_target("cpu")))
    after = in_place(before)
    verify_schedule(after)
    given = [arguments(graph, i) for i in (0, 1)]
    for values in given:
        for mine, theirs in zip(
            run_graph(after, values, copied), run_graph(before, values, copied), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
    return after


def arguments(graph, seed):
    random = np.random.default_rng(seed)
    return [random.normal(size=tuple(e.const for e in b.shape)) for b in graph.inputs]


def copies(schedule):
    return sum(isinstance(s, Extern) for s in schedule.steps)


def written(schedule):
    kernels = [s for s in schedule.steps if isinstance(s, Kernel)]
    return [tuple(store.buffer.name for store in kernel.stores) for kernel in kernels]


X, Y, Z = (torch.randn(64, 32) for _ in range(3))


def test_a_kernel_writes_the_input_itself():
    def step(x, y):
        x.add_(y)
        return x

    after = run_pass(step, X, Y)
    assert copies(after) == 0
    assert written(after) == [("arg0_1",)]


def test_a_store_comes_after_the_stores_that_read_its_old_contents():
    def momentum(p, m, g):
        m.mul_(0.9).add_(g)
        p.sub_(m)
        return p, m

    after = run_pass(momentum, X, Y, Z)
    assert copies(after) == 0
    ((first, second),) = written(after)
    kernel = next(s for s in after.steps if isinstance(s, Kernel))
    assert f"{second}[" in repr(kernel.stores[0].expr)
    assert f"{first}[" not in repr(kernel.stores[1].expr)


def test_readers_of_the_old_contents_run_first():
    def counted(s, x):
        s.add_(1)
        x.mul_(s)
        return x, s

    after = run_pass(counted, torch.ones(()), X)
    assert copies(after) == 0
    assert [len(names) for names in written(after)] == [1, 1]
    assert after.steps[0].grid and not after.steps[1].grid  # x reads s + 1, computed again


def test_swapped_tensors_keep_a_copy():
    def swap(x, y):
        old = x * 2
        x.copy_(y + 1)
        y.copy_(old)
        return x, y

    assert copies(run_pass(swap, X, Y)) >= 1


def test_a_tensor_read_at_another_index_keeps_its_copy():
    def shift(x):
        x.copy_(torch.flip(x, (0,)) + 1)
        return x

    assert copies(run_pass(shift, X)) == 1


def test_a_row_that_is_summed_keeps_its_copy():
    def centre(x):
        x.sub_(x.mean(1, keepdim=True))
        return x

    assert copies(run_pass(centre, X)) == 1


def test_a_kernel_with_loops_writes_what_no_other_store_of_it_reads():
    def track(mean, x):
        found = x.sum(0)
        mean.mul_(0.9).add_(found)
        return found * 2

    after = run_pass(track, X[0], X)
    assert copies(after) == 0
    (kernel,) = after.steps
    assert kernel.inside and written(after) == [("arg1_1", "mul_1")]

    def also_read(mean, x):
        found = x.sum(0)
        scaled = found * mean
        mean.mul_(0.9).add_(found)
        return scaled

    after = run_pass(also_read, X[0], X)
    assert copies(after) == 1 and len(after.steps) == 2


def test_a_loop_may_write_what_its_kernel_does_not_read():
    def normalise(x, y):
        x.copy_(torch.softmax(y, 1))
        return y + 1

    after = run_pass(normalise, X, Y)
    assert copies(after) == 0
    assert written(after) == [("arg0_1", "add")]


def test_a_whole_that_is_stored_in_pieces_is_stored_in_the_input():
    def join(x, y):
        x.copy_(torch.cat((y[:32].exp(), y[:32].tanh())))
        return y + 1

    after = run_pass(join, X, Y)
    assert copies(after) == 0
    assert ("arg0_1", "arg0_1") in written(after)


def test_a_result_that_is_also_returned_is_stored_twice():
    def both(x):
        y = x * 2
        x.copy_(y)
        return y, x

    after = run_pass(both, X)
    assert copies(after) == 0
    assert written(after) == [("mul", "arg0_1")]
