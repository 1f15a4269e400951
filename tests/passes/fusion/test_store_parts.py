"""Parts of a joined tensor are stored where they belong by the kernel that makes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fusec.codegen.targets import find_target
from fusec.driver.stages import FUSE
from fusec.ir.graph import Kernel
from fusec.ir.verify import verify_schedule
from fusec.passes.fusion.store_parts import store_parts
from fusec.passes.stage import fold
from fusec.tools.interpreter.graph import run_graph
from tests.frontend.tracing import Captured
from tests.fuzz.graphs import copy_extern
from tests.fuzz.pipeline import context

X, Y = (torch.randn(64, 32, dtype=torch.float64) for _ in range(2))


def written(fn, *inputs, target="cpu"):
    """Return the buffers that each kernel stores, checked: the pass changes no result."""
    captured = Captured(fn)
    captured(*inputs)
    (graph,) = captured.graphs
    others = [stage for stage in FUSE if stage.name != "store_parts"]
    before = fold(others, graph, context(find_target(target)))
    after = store_parts(before)
    verify_schedule(after)
    values = [i.numpy() for i in inputs]
    results = (run_graph(s, values, copy_extern) for s in (after, before))
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    kernels = [s for s in after.steps if isinstance(s, Kernel)]
    return [tuple(store.buffer.name for store in kernel.stores) for kernel in kernels]


def dear(x, y):
    """Return two tensors that are dear enough not to be computed again for each point of a cat."""
    return F.gelu(x) * y, x * torch.tanh(y) * torch.exp(y)


@pytest.mark.parametrize("dim", [0, 1])
def test_two_parts_of_one_kernel_are_stored_behind_each_other(dim):
    assert written(lambda x, y: torch.cat(dear(x, y), dim), X, Y) == [("cat", "cat")]


def test_parts_stand_in_the_order_of_the_whole():
    def three(x, y):
        a, b = dear(x, y)
        return torch.cat((b, a, torch.erf(x) * torch.exp(y)), 1)

    assert written(three, X, Y) == [("cat", "cat", "cat")]


def test_a_whole_of_wholes_is_joined_where_its_own_parts_are():
    def nested(x, y):
        whole = torch.cat(dear(x, y), 1)
        return torch.cat((torch.erf(whole), whole.exp() * whole.tanh()), 0)

    assert written(nested, X, Y)[-1] == ("cat_1", "cat_1")


def test_what_is_read_elsewhere_is_stored_by_itself():
    def both(x, y):
        a, b = dear(x, y)
        return torch.cat((a, b), 1), a

    assert written(both, X, Y)[-1] == ("cat",)


def test_parts_of_two_kernels_are_joined_by_a_third():
    def parts(x, y):
        rows = torch.softmax(x, 1) * torch.softmax(y, 1)
        columns = torch.softmax(x, 0) * torch.softmax(y, 0)
        return torch.cat((rows, columns), 1)

    assert written(parts, X, Y)[-1] == ("cat",)


def test_a_cat_of_inputs_stays_a_kernel():
    assert written(lambda x, y: torch.cat((x, y), 1), X, Y) == [("cat",)]
