"""Which convolutions are computed by minimal filtering, and from which weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fusec.codegen.targets import find_target
from fusec.driver.context import CompileContext
from fusec.driver.trace import Trace
from fusec.frontend.fx_passes.fx_nodes import DECISIONS
from fusec.options import Options
from tests.frontend.tracing import captured_graphs
from tests.support import values

aten, ops = torch.ops.aten, torch.ops.fusec
SHAPE = (4, 16, 18, 18)


def graphs_of(
    fn: Any, *inputs: Tensor, train: bool = False, **options: Any
) -> list[fx.GraphModule]:
    context = CompileContext(find_target("cpu:avx512"), Options(**options), Trace("joint"))
    return captured_graphs(fn, *inputs, context=context, train=train)


def count(graphs: list[fx.GraphModule], target: Any) -> int:
    return sum(len(g.graph.find_nodes(op="call_function", target=target)) for g in graphs)


def last(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return values(*shape).to(dtype).contiguous(memory_format=torch.channels_last)


def filters(x: Tensor, shape: tuple[int, ...] = (32, 16, 3, 3), **settings: Any) -> int:
    w = last(*shape, dtype=x.dtype)
    graphs = graphs_of(lambda x, w: F.conv2d(x, w, **settings), x, w)
    return count(graphs, ops.winograd.default)


def test_it_is_one_of_many_places() -> None:
    assert filters(last(*SHAPE), padding=1) == 1
    assert filters(last(*SHAPE), padding=(0, 2)) == 1


@pytest.mark.parametrize(
    "settings",
    [{"stride": 2}, {"dilation": 2}, {"padding": 3}, {"padding": 1, "stride": (1, 2)}],
    ids=str,
)
def test_none_has_other_settings(settings: dict[str, Any]) -> None:
    assert filters(last(*SHAPE), **settings) == 0


def test_none_has_groups_or_another_kernel_or_ragged_channels() -> None:
    assert filters(last(*SHAPE), (32, 8, 3, 3), padding=1, groups=2) == 0
    assert filters(last(*SHAPE), (32, 16, 5, 5), padding=2) == 0
    assert filters(last(*SHAPE), (32, 16, 1, 3)) == 0
    assert filters(last(*SHAPE), (24, 16, 3, 3), padding=1) == 0
    assert filters(last(4, 24, 18, 18), (32, 24, 3, 3), padding=1) == 0


def test_none_has_other_types_or_formats_or_few_places() -> None:
    assert filters(last(*SHAPE, dtype=torch.float64), padding=1) == 0
    assert filters(last(*SHAPE, dtype=torch.bfloat16), padding=1) == 0
    assert filters(last(4, 16, 15, 15), padding=1) == 0
    assert filters(last(1, 16, 500, 3), padding=1) == 0
    options = {"channels_last": False}
    plain = graphs_of(lambda x, w: F.conv2d(x, w), values(*SHAPE), values(32, 16, 3, 3), **options)
    assert count(plain, ops.winograd.default) == 0


def test_none_is_of_eager_s_precision() -> None:
    x, w = last(*SHAPE), values(32, 16, 3, 3)
    assert count(graphs_of(F.conv2d, x, w, precision="eager"), ops.winograd.default) == 0
    assert count(graphs_of(F.conv2d, x, w), ops.winograd.default) == 1


def test_a_frozen_weight_is_transformed_once_and_few_places_gain_too() -> None:
    fn, x = nn.Conv2d(16, 32, 3, padding=1).eval(), last(1, 16, 8, 8)
    with torch.no_grad():
        assert count(graphs_of(fn, x), ops.winograd.default) == 0
        frozen = graphs_of(fn, x, freeze=True)
    assert count(frozen, ops.winograd.default) == 1
    assert count(frozen, ops.winograd_weight.default) == 0


def test_the_gradient_of_images_is_filtered_too_and_that_of_weights_is_not() -> None:
    fn, x = nn.Conv2d(16, 32, 3, padding=(0, 1)), last(*SHAPE).requires_grad_()
    graphs = graphs_of(fn, x, train=True)
    assert [count([g], ops.winograd.default) for g in graphs] == [1, 1]
    (rest,) = graphs[1].graph.find_nodes(
        op="call_function", target=aten.convolution_backward.default
    )
    assert rest.args[10] == [False, True, True]


def test_it_is_still_called_a_convolution_and_knows_why_its_format_was_chosen() -> None:
    fn = nn.Sequential(*(nn.Conv2d(32, 32, 3, padding=1) for _ in range(6))).eval()
    with torch.no_grad():
        (graph,) = graphs_of(fn, values(4, 32, 32, 32))
    node, *others = graph.graph.find_nodes(op="call_function", target=ops.winograd.default)
    assert len(others) == 5
    assert node.meta["original_aten"] is aten.convolution.default
    form, filtered = node.meta[DECISIONS]
    assert form.b == "channels-last" and form.taken
    assert (filtered.a, filtered.b) == (node.name, "winograd")


def test_a_gradient_of_weights_alone_stays() -> None:
    fn, x = nn.Conv2d(16, 32, 3, padding=1), last(*SHAPE)
    graphs = graphs_of(fn, x, train=True)
    assert [count([g], ops.winograd.default) for g in graphs] == [1, 0]
