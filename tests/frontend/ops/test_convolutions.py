"""Convolutions without a library: what index notation says of them, next to eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fusec
from fusec.frontend.call import GraphBuilder
from fusec.frontend.capture import capture
from fusec.ir.graph import Extern
from fusec.ir.text import print_graph
from tests.frontend.tracing import traced
from tests.support import BACKEND, TRAINED, check, values

pytestmark = pytest.mark.skipif(BACKEND != "fusec", reason="is about fusec's own kernels")

CONVOLUTIONS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], Any]] = {
    "padding": (F.conv2d, (2, 16, 14, 15), (24, 16, 3, 3), {"padding": 1}),
    "stride": (F.conv2d, (1, 3, 23, 25), (20, 3, 7, 5), {"padding": (3, 1), "stride": (2, 3)}),
    "dilation": (F.conv2d, (1, 8, 14, 14), (8, 8, 3, 2), {"padding": 2, "dilation": (2, 1)}),
    "one place": (F.conv2d, (2, 16, 7, 9), (8, 16, 1, 1), {"stride": 2}),
    "one channel": (F.conv2d, (2, 1, 7, 9), (8, 1, 3, 3), {}),
    "depthwise": (F.conv2d, (2, 12, 9, 9), (12, 1, 3, 3), {"padding": 1, "groups": 12}),
    "two for each": (F.conv2d, (2, 6, 9, 9), (12, 1, 3, 3), {"stride": 2, "groups": 6}),
    "groups": (F.conv2d, (2, 12, 9, 9), (8, 3, 3, 3), {"padding": 1, "groups": 4}),
    "a line": (F.conv1d, (3, 5, 33), (7, 5, 4), {"padding": 2, "stride": 3}),
    "a volume": (F.conv3d, (1, 4, 5, 6, 7), (6, 4, 3, 2, 3), {"padding": (1, 0, 2)}),
    "transposed": (F.conv_transpose2d, (2, 6, 7, 5), (6, 4, 3, 3), {"stride": 2, "padding": 1}),
    "transposed, more": (
        F.conv_transpose2d, (1, 8, 5, 6), (8, 3, 3, 2),
        {"stride": (3, 2), "output_padding": 1, "dilation": 2, "groups": 2},
    ),
    "transposed line": (F.conv_transpose1d, (2, 3, 9), (3, 5, 4), {"padding": 1}),
}  # fmt: skip
"""The function, sizes of what is read and of the weights, settings."""


def given(name: str) -> tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    conv, image, weight, settings = CONVOLUTIONS[name]
    transposed = conv in (F.conv_transpose1d, F.conv_transpose2d)
    made = weight[1] * settings.get("groups", 1) if transposed else weight[0]

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(conv(x, w, b, **settings)) + 0.5

    return fn, (values(*image), values(*weight, seed=2), values(made, seed=3))


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    options = {"native": True, "strict": True}
    return torch.compile(fn, backend="fusec", fullgraph=True, options=options)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONS)
@torch.no_grad()
def test_a_convolution_is_eager_s(name: str, dtype: torch.dtype) -> None:
    fn, inputs = given(name)
    own = tuple(one.to(dtype) for one in inputs)
    found, wanted = compiled(fn)(*own), fn(*(one.double() for one in own))
    bounds = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2}[dtype]
    assert found.dtype is dtype
    scale = float(wanted.abs().max())
    torch.testing.assert_close(found.double(), wanted, rtol=bounds, atol=bounds * scale)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ("padding", "depthwise", "transposed"))
@torch.no_grad()
def test_a_batch_of_any_size_and_images_too(name: str) -> None:
    fn, (x, w, b) = given(name)
    call = compiled(fn)
    for images, more in ((2, 0), (5, 3), (3, 8)):
        own = values(images, x.shape[1], x.shape[2] + more, x.shape[3] + 1, seed=7)
        for axis in (0, 2, 3):
            torch._dynamo.mark_dynamic(own, axis)
        torch.testing.assert_close(call(own, w, b), fn(own, w, b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_only_where_no_library_may_be_called(name: str) -> None:
    fn, inputs = given(name)
    gm = traced(fn, *inputs)
    for alone in (False, True):
        graph, _ = capture(gm, "g", GraphBuilder(alone=alone))
        calls = [node.target for node in graph.nodes if isinstance(node, Extern)]
        assert calls == [] if alone else ["aten.convolution.default"]


LINES: dict[str, dict[str, Any]] = {
    "both sides": {"padding": 3},
    "causal": {"padding": 6},
    "no padding": {},
    "apart": {"padding": 6, "dilation": 2},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize("settings", LINES)
@TRAINED
def test_a_depthwise_convolution_along_one_axis_is_a_kernel_and_its_gradients_too(
    settings: str, dtype: torch.dtype, train: bool
) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.silu(F.conv1d(F.glu(x, 1), w, b, groups=6, **LINES[settings]))

    inputs = values(2, 12, 37), values(6, 1, 7, seed=2), values(6, seed=3)
    check(fn, *(one.to(dtype) for one in inputs), train=train, left=())


@pytest.mark.parametrize("whole", (False, True), ids=("a sequence", "with its padding"))
def test_a_causal_convolution_of_channels_side_by_side_is_one_kernel(whole: bool) -> None:
    """As of a state space model; what lies behind the sequence is not computed."""

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        padded = F.conv1d(x.transpose(1, 2), w, b, padding=3, groups=24)
        return F.silu(padded if whole else padded[:, :, : x.shape[1]])

    inputs = values(2, 37, 24), values(24, 1, 4, seed=2), values(24, seed=3)
    check(fn, *inputs, left=())
    (graph,) = fusec.explain(fn, *inputs).graphs
    assert graph.launches == 1


@TRAINED
def test_as_many_groups_as_a_size_says(train: bool) -> None:
    """Where x has as many channels as places along a line, one symbol is both, and the groups."""
    convolve = lambda x, w: F.conv1d(x, w, groups=w.shape[0])  # noqa: E731
    more = [(values(2, 24, 24), values(24, 1, 1, seed=1))]
    inputs = values(2, 33, 33), values(33, 1, 1, seed=1)
    check(convolve, *inputs, train=train, dynamic=True, more=more)


def test_gradients_that_nobody_wants_are_not_computed() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x, w, None, padding=3, groups=6)

    for frozen in (0, 1):
        inputs = values(2, 6, 37), values(6, 1, 7, seed=2)
        own = [one.requires_grad_(k != frozen) for k, one in enumerate(inputs)]
        torch._dynamo.reset()
        strict = {"strict": True}
        result = torch.compile(fn, backend="fusec", fullgraph=True, options=strict)(*own)
        wanted = fn(*own)
        (found,) = torch.autograd.grad(result, own[1 - frozen], torch.ones_like(result))
        (expected,) = torch.autograd.grad(wanted, own[1 - frozen], torch.ones_like(wanted))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ("stride", "two for each", "groups of two"))
def test_the_library_convolves_where_elements_lie_apart(kind: str) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x, w, stride=2 if kind == "stride" else 1, groups=6 // w.shape[1])

    x = values(2, 6, 37)
    w = values(12 if kind == "two for each" else 6, 2 if kind == "groups of two" else 1, 7, seed=2)
    graph, _ = capture(traced(fn, x, w), "g", GraphBuilder())
    assert [call.target for call in graph.externs] == ["aten.convolution.default"]


def test_the_notation_is_a_sum_over_channels_and_places(golden: Callable[[str, str], None]) -> None:
    texts = []
    for name in ("stride", "groups", "transposed"):
        fn, inputs = given(name)
        graph, _ = capture(traced(fn, *inputs), "g", GraphBuilder(alone=True))
        texts.append(f"{name}:\n{print_graph(graph)}")
    golden("convolutions", "\n\n".join(texts))
