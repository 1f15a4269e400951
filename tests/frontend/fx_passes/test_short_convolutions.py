"""Convolutions that sum few channels are kernels of fusec's own: which, and what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusec.codegen.targets import find_target
from fusec.driver.context import CompileContext
from fusec.driver.trace import Trace
from fusec.frontend.fx_passes.short_convolutions import is_laid_out
from fusec.options import Options
from fusec.processors import PROCESSORS
from fusec.runtime.kernels.cpp_kernel import vector_width
from fusec.tools.report import explain
from tests.frontend.tracing import captured_graphs
from tests.support import BACKEND, check, on_processor, values, without_compiler

aten = torch.ops.aten
SHAPE = (2, 32, 20, 20)


def last(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    made = values(*shape, seed=seed).to(dtype)
    return made.contiguous(memory_format=torch.channels_last)


def own(x: Tensor, w: Tensor, **settings: Any) -> bool:
    """Return True if a convolution's weight is laid out for a kernel of fusec's own."""
    options = {k: settings.pop(k) for k in ("precision", "channels_last") if k in settings}
    context = CompileContext(find_target("cpu:avx512"), Options(**options), Trace("joint"))
    graphs = captured_graphs(lambda x, w: F.conv2d(x, w, **settings), x, w, context=context)
    (node,) = graphs[0].graph.find_nodes(op="call_function", target=aten.convolution.default)
    return is_laid_out(node.args[1].meta["val"])


# -- which -----------------------------------------------------------------------------------------


def test_depthwise_ones_of_small_windows_and_pictures_first_ones_are() -> None:
    for side, stride in ((3, 1), (3, 2), (5, 1), (7, 2)):
        x, w = last(*SHAPE), values(32, 1, side, side)
        assert own(x, w, padding=side // 2, stride=stride, groups=32)
    assert own(last(2, 3, 20, 20), values(16, 3, 3, 3), padding=1, stride=2)


@pytest.mark.parametrize(
    ("outputs", "read", "side", "settings"),
    [
        (32, 1, 9, {"padding": 4, "groups": 32}),  # a large window
        (32, 1, 3, {"padding": 2, "dilation": 2, "groups": 32}),  # neighbours share few places
        (64, 1, 3, {"padding": 1, "groups": 32}),  # two results a channel
        (32, 2, 3, {"padding": 1, "groups": 16}),
        (32, 1, 2, {"groups": 32}),  # 19 neighbours
        (32, 1, 3, {"padding": 1, "groups": 32, "precision": "eager"}),
        (32, 1, 3, {"padding": 1, "groups": 32, "channels_last": False}),
    ],
    ids=str,
)
def test_others_are_the_library_s(
    outputs: int, read: int, side: int, settings: dict[str, Any]
) -> None:
    x = last(*SHAPE)
    if "channels_last" in settings:
        x = x.contiguous()
    assert not own(x, values(outputs, read, side, side), **settings)


def test_those_of_pictures_are_the_library_s_where_it_is_as_fast() -> None:
    x = last(2, 3, 20, 20)
    assert not own(x, values(64, 3, 3, 3), padding=1)  # many results
    assert not own(x, values(32, 3, 7, 7), padding=3)  # a large window
    assert not own(x, values(8, 3, 3, 3), padding=1)  # they fill no vector
    assert not own(last(2, 4, 20, 20), values(32, 4, 3, 3), padding=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_the_library_s(dtype: torch.dtype) -> None:
    x, w = last(*SHAPE, dtype=dtype), values(32, 1, 3, 3).to(dtype)
    assert not own(x, w, padding=1, groups=32)


# -- what they compute -----------------------------------------------------------------------------

needs_fusec = pytest.mark.skipif(BACKEND != "fusec", reason="is about fusec's own kernels")


class Inverted(nn.Module):
    """A picture's first convolution, and a depthwise one with what stands around it."""

    def __init__(
        self, channels: int, side: int, stride: int | tuple[int, int], **more: Any
    ) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.deep = nn.Conv2d(channels, channels, side, stride, groups=channels, **more)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.hardswish(self.deep(F.relu(self.norm(self.first(x)))))
        return y, y.mean((2, 3))


CASES = {
    "three by three": (Inverted(16, 3, 1, padding=1), (2, 3, 8, 12)),
    "stride": (Inverted(24, 5, 2, padding=2), (2, 3, 15, 20)),
    "ragged channels": (Inverted(21, 3, 2, padding=1), (1, 3, 9, 14)),
    "no padding": (Inverted(16, 5, 1), (2, 3, 9, 11)),
    "wide padding": (Inverted(16, 3, (1, 2), padding=(2, 3)), (1, 3, 4, 7)),
    "window of seven": (Inverted(40, 7, 1, padding=3), (1, 3, 6, 5)),
    "window of two sides": (Inverted(16, (3, 5), 1, padding=(1, 2)), (1, 3, 6, 10)),
    "no neighbours": (Inverted(16, 3, 1, padding=1), (1, 3, 6, 11)),
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_compiled_is_eager_s(name: str, train: bool) -> None:
    fn, shape = CASES[name]
    check(fn.train(train), last(*shape), train=train)


@pytest.mark.parametrize("name", ["three by three", "stride", "window of seven"])
@torch.no_grad()
def test_frozen_ones_are_eager_s(name: str) -> None:
    fn, shape = CASES[name]
    x = last(*shape)
    torch._dynamo.reset()
    compiled = torch.compile(fn.eval(), backend="fusec", options={"freeze": True, "strict": True})
    torch.testing.assert_close(compiled(x), fn(x))


@needs_fusec
@torch.no_grad()
def test_they_have_what_stands_behind_them_and_a_picture_is_read_as_it_lies() -> None:
    fn = Inverted(16, 3, 1, padding=1).eval()
    (graph,) = explain(fn, last(1, 3, 20, 20)).graphs
    assert not graph.externs
    found = [d.a for d in graph.decisions if d.b == "kernel"]
    assert found == ["convolution", "convolution_1"]
    (plain,) = explain(nn.Sequential(*(fn.first, fn.deep)).eval(), values(4, 3, 64, 64)).graphs
    assert not plain.externs
    assert not [k for k in plain.kernels if "clone" in k.name and "convolution" not in k.name]


@torch.no_grad()
def test_without_a_compiler_the_graph_behind_a_picture_runs_as_eager_does() -> None:
    fn = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU())
    fn = nn.Sequential(*fn, nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU()).eval()
    picture = values(4, 3, 224, 224)
    with on_processor(PROCESSORS["cpu:avx2"].features):
        (graph,) = explain(fn, picture).graphs
        assert [d.a for d in graph.decisions if d.b == "kernel"] == ["convolution", "convolution_2"]
    torch._dynamo.reset()
    with without_compiler(), pytest.warns(UserWarning, match="compiler"):
        ran = torch.compile(fn, backend="fusec", options={"cache": False})(picture)
    torch.testing.assert_close(ran, fn(picture))


@needs_fusec
@torch.no_grad()
def test_a_weight_that_lies_so_by_chance_is_the_library_s_where_the_sums_are_long() -> None:
    def calls(x: Tensor, w: Tensor) -> list[str]:
        (graph,) = explain(lambda x, w: F.conv2d(x, w, padding=4, groups=x.shape[1]), x, w).graphs
        return [extern.op for extern in graph.externs]

    laid_out = values(9, 9, 1, 16).permute(3, 2, 0, 1)
    assert calls(last(1, 16, 12, 12), laid_out) == ["convolution.default"]
    assert calls(last(1, 1, 12, 12), values(1, 1, 9, 9)) == ["convolution.default"]


@needs_fusec
@pytest.mark.parametrize("name", ["cpu:avx2", "cpu:sse4"])
def test_on_narrower_vectors(name: str) -> None:
    processor = PROCESSORS[name]
    with on_processor(processor.features):
        assert vector_width() == processor.lanes
        check(Inverted(16, 5, 2, padding=2).eval(), last(2, 3, 8, 16))


def test_a_batch_of_any_size() -> None:
    more = tuple((last(n, 3, 8, 10, seed=n),) for n in (1, 3, 7))
    fn = Inverted(16, 3, 1, padding=1).eval()
    check(fn, last(4, 3, 8, 10), dynamic=True, more=more)
