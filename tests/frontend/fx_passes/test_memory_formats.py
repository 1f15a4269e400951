"""Which convolutions run channels-last, and that nothing but strides inside a graph shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo import register_backend

import fusec
from fusec.codegen.targets import find_target
from fusec.driver.context import CompileContext
from fusec.driver.trace import Trace
from fusec.frontend.fx_passes.channels_last import images_of, is_last
from fusec.frontend.fx_passes.fx_nodes import DECISIONS
from fusec.ir.choice import Choice, Decided, Judge, judge_by_rule
from fusec.options import Options
from tests.frontend.tracing import captured_graphs
from tests.planted import under
from tests.support import TRAINED, check

aten = torch.ops.aten
LAYOUTS = pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last))
TRAIN = pytest.mark.parametrize("train", (False, True))


class Net(nn.Module):
    """A stem, a depthwise convolution with a residual, a 1x1, a squeeze; norms and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.narrow = nn.Conv2d(8, 12, 1)
        self.gate = nn.Conv2d(12, 12, 1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.hardswish(self.norm(self.stem(x)))
        x = F.max_pool2d(x + F.relu(self.depthwise(x)), 2)
        x = self.narrow(x)
        x = x * self.gate(F.adaptive_avg_pool2d(x, 1)).sigmoid()
        return self.head(x.mean((2, 3))), x


def gain(us: float, of_us: float = 0.0) -> Decided:
    """Return the decision that channels-last images save so many microseconds."""
    return Decided("channels-last", "as told", us, of_us)


def images(*shape: int, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=layout)


def weights(*shape: int) -> Tensor:
    return torch.randn(shape) * 0.1


def rewritten(
    fn: Callable[..., Any],
    *inputs: Tensor,
    train: bool = False,
    target: str = "cpu",
    judge: Judge = judge_by_rule,
) -> list[fx.GraphModule]:
    """Return the graphs that go to capture."""
    context = CompileContext(find_target(target), Options(), Trace("joint"), judge=judge)
    return captured_graphs(fn, *inputs, context=context, train=train)


def of(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


# -- what is computed ------------------------------------------------------------------------------

ALWAYS = "channels-last"
"""A backend for which each convolution gains by channels-last images, however small they are."""

register_backend(
    under(lambda context: replace(context, judge=lambda choice: gain(1e6))), name=ALWAYS
)


@pytest.mark.sampled(7)  # a diagonal
@LAYOUTS
@TRAIN
def test_a_network_does_what_eager_does(layout: torch.memory_format, train: bool) -> None:
    net = Net().train(train).to(memory_format=layout)
    check(net, images(2, 3, 16, 16, layout=layout), train=train, backend=ALWAYS)


@pytest.mark.slow
@pytest.mark.sampled(2)
@TRAIN
def test_sizes_may_be_dynamic(train: bool) -> None:
    more = [(images(3, 3, 16, 16),), (images(5, 3, 24, 20),)]
    check(
        Net().train(train),
        images(2, 3, 16, 16),
        train=train,
        dynamic=True,
        more=more,
        backend=ALWAYS,
    )


CONVOLVED = {
    "dense": lambda x, w: F.conv2d(x, w, padding=1),
    "strided": lambda x, w: F.conv2d(x, w, stride=2),
    "grouped": lambda x, w: F.conv2d(x, w[:, :4], groups=2),
    "depthwise": lambda x, w: F.conv2d(x, w[:, :1], groups=8),
    "dilated": lambda x, w: F.conv2d(x, w, dilation=2, padding="same"),
    "1x1": lambda x, w: F.conv2d(F.conv2d(x, w), w[:, :, :1, :1]),
    "transposed": lambda x, w: F.conv_transpose2d(x, w, stride=2, output_padding=1),
    "one image": lambda x, w: F.conv2d(x[0], w),
    "1d": lambda x, w: F.conv1d(x[:, :, 0], w[:, :, 0]),
    "3d": lambda x, w: F.conv3d(x[:, :, None], w[:, :, None]),
}


@pytest.mark.sampled(7)
@TRAINED
@pytest.mark.parametrize("kind", CONVOLVED)
def test_convolutions_of_each_kind_match_eager(kind: str, train: bool) -> None:
    convolve = CONVOLVED[kind]
    check(
        lambda x, w: torch.tanh(convolve(x.sin(), w)),
        images(2, 8, 9, 10), weights(8, 8, 3, 3), train=train, backend=ALWAYS,
    )  # fmt: skip


WEIGHTS = ((8, 8, 3, 3), (8, 8, 1, 1), (8, 1, 3, 3), (1, 8, 3, 3), (1, 8, 1, 1), (8, 1, 1, 1))


@pytest.mark.parametrize("last", (False, True))
@pytest.mark.parametrize("shape", WEIGHTS)
@pytest.mark.sampled(5)
def test_gradients_lie_as_eagers_do(shape: tuple[int, ...], last: bool) -> None:
    """Strides of axes with one element, too: an optimizer compares them with the weight's."""
    form = torch.channels_last if last else torch.contiguous_format
    convolved = nn.Conv2d(8, shape[0], shape[2], groups=8 // shape[1], bias=True)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), convolved, nn.SiLU()).to(memory_format=form)
    found = []
    for call in (net, torch.compile(net, backend=ALWAYS, dynamic=False)):
        net.zero_grad()
        x = images(2, 3, 9, 10).requires_grad_()
        call(x).square().sum().backward()
        found.append([leaf.grad.stride() for leaf in (x, *net.parameters())])
    assert found[0] == found[1]


def test_a_bias_alone_may_train() -> None:
    image, weight = images(2, 8, 5, 6), weights(6, 8, 3, 3)
    check(
        lambda b: torch.tanh(F.conv2d(image.to(b), weight.to(b), b)), torch.randn(6), train=True,
        backend=ALWAYS,
    )  # fmt: skip


def flat(y: Tensor) -> Tensor:
    return y.view(2, -1) * 2


def rows(y: Tensor) -> Tensor:
    return y.flatten(2).transpose(1, 2).softmax(-1)


def in_place(y: Tensor) -> Tensor:
    y.mul_(2)
    y[:, 1:3] += 1
    return y.relu_()


def views(y: Tensor) -> tuple[Tensor, ...]:
    return y, y[:, :, ::2], y.permute(0, 2, 3, 1), y.view(2, -1)


def parts(y: Tensor) -> tuple[Tensor, ...]:
    a, b = y.chunk(2, 1)
    return torch.cat((a.sin(), b, y.flip(2)), 1), a, b + 1


def windows(y: Tensor) -> Tensor:
    return y.as_strided((2, 4, 6), (256, 64, 1)) * 2


def attended(y: Tensor) -> Tensor:
    q = y.flatten(2).unsqueeze(1)
    return F.scaled_dot_product_attention(q, q, q).sum(1)


BEHIND = (flat, rows, in_place, views, parts, windows, attended)
SCORED = 3e-4
"""The tolerance of scores up to 25, where a fused gradient behind the library's forward has 3 times
eager's error, 3e-6 of the greatest element: see docs/numerics.md."""


@pytest.mark.sampled(7)
@TRAINED
@pytest.mark.parametrize("behind", BEHIND)
def test_what_follows_a_convolution_matches_eager(
    behind: Callable[[Tensor], Any], train: bool
) -> None:
    check(
        lambda x, w: behind(F.conv2d(x * 2, w, padding=1)),
        images(2, 8, 8, 8), weights(8, 8, 3, 3), train=train, backend=ALWAYS,
        tol=SCORED if behind is attended else None,
    )  # fmt: skip


def test_results_that_share_memory_still_do() -> None:
    def convolve(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.conv2d(x, w, padding=1)
        return y, y[:, 1:]

    x, w = images(2, 8, 8, 8), weights(8, 8, 3, 3)
    y, part = torch.compile(convolve, backend=ALWAYS, dynamic=False)(x, w)
    expected, _ = convolve(x, w)
    y.zero_()
    assert part.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    assert part.stride() == expected[:, 1:].stride()
    assert not part.any()


def test_images_under_autocast_match_eager() -> None:
    def cast(x: Tensor, w: Tensor, d: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.conv2d(F.relu(F.conv2d(x, w, padding=1)), d, groups=8).float()

    given = images(2, 8, 8, 8), weights(8, 8, 3, 3), weights(8, 1, 3, 3)
    check(cast, *given, train=True, tol=2e-2, backend=ALWAYS)


def test_draws_in_eagers_order_are_those_of_eager() -> None:
    def drop(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(F.conv2d(x, w, padding=1), 0.5)

    x, w = images(2, 8, 8, 8), weights(8, 8, 3, 3)
    torch.manual_seed(3)
    expected = drop(x, w)
    torch._dynamo.reset()
    options = {"fallback_random": True}
    compiled = torch.compile(drop, backend=ALWAYS, options=options, dynamic=False)
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(x, w), expected)


def test_a_custom_operation_gets_the_strides_that_it_would_get() -> None:
    seen = []

    @torch.library.custom_op("fusec_test::strides_of", mutates_args=())
    def strides_of(x: Tensor) -> Tensor:
        seen.append(x.stride())
        return x + 1

    strides_of.register_fake(torch.empty_like)
    x, w = images(2, 8, 8, 8), weights(8, 8, 3, 3)
    torch.compile(
        lambda x, w: strides_of(F.conv2d(x, w, padding=1)) * 2, backend=ALWAYS, dynamic=False
    )(x, w)
    assert seen == [(512, 64, 8, 1)]


# -- what is decided -------------------------------------------------------------------------------


def depthwise(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(F.conv2d(x, w, padding=1, groups=32).relu(), w, padding=1, groups=32).relu()


GIVEN = images(4, 32, 64, 64), weights(32, 1, 3, 3)


def copies(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the copies of images: those of weights are ``short_convolutions``'."""
    return [n for n in of(gm, aten.clone.default) if n.meta["val"].shape == GIVEN[0].shape]


def test_an_image_is_converted_once_on_its_way_in_and_once_on_its_way_out() -> None:
    (gm,) = rewritten(depthwise, *GIVEN)
    assert [n.kwargs["memory_format"] for n in copies(gm)] == [
        torch.channels_last, torch.contiguous_format,
    ]  # fmt: skip
    assert all(is_last(n.meta["val"]) for n in of(gm, aten.relu.default))


def test_the_backward_has_the_forwards_format() -> None:
    x, w = GIVEN
    forward, backward = rewritten(depthwise, x, w.clone().requires_grad_(), train=True)
    for gm, target in (
        (forward, aten.convolution.default),
        (backward, aten.convolution_backward.default),
    ):
        calls = of(gm, target)
        assert len(calls) == 2
        for call in calls:
            assert all(is_last(image.meta["val"]) for image in images_of(call))
    assert len(of(backward, aten.clone.default)) == 1  # what comes from outside


def test_what_converts_is_fused_with_what_makes_or_reads_the_image() -> None:
    def between(x: Tensor, w: Tensor) -> Tensor:
        return depthwise(x.exp(), w) * 3

    (graph,) = fusec.explain(between, *GIVEN).graphs
    assert len(graph.kernels) == 4 and not graph.externs  # one lays out the weight


def test_graphs_stay_as_they_are_where_nothing_is_gained() -> None:
    x, w = GIVEN
    last = x.contiguous(memory_format=torch.channels_last)
    narrow = weights(32, 32, 1, 1)
    for fn, given in (
        (depthwise, (last, w)),  # is channels-last
        (lambda x, w: F.conv2d(x, w).relu(), (x, narrow)),  # a product is as fast
        (lambda x, w: (x * w[:, 0, 0, 0, None, None]).relu(), (x, w)),
    ):
        (gm,) = rewritten(fn, *given)
        assert not copies(gm)
    (gm,) = rewritten(depthwise, x, w, target="sm_90")
    assert not of(gm, aten.clone.default)


@pytest.mark.parametrize("us", (-1.0, 1e6))
def test_a_judge_decides_what_a_convolution_gains(us: float) -> None:
    (gm,) = rewritten(depthwise, *GIVEN, judge=lambda choice: gain(us))
    assert bool(of(gm, aten.clone.default)) == (us > 0)
    decisions = [n.meta[DECISIONS][0] for n in of(gm, aten.convolution.default)]
    assert [d.taken for d in decisions] == [us > 0] * 2
    assert all("as told" in d.reason for d in decisions)


def test_conversions_at_the_border_are_paid_by_what_they_serve() -> None:
    """Two parts of a graph that share no image are decided apart."""

    def apart(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return depthwise(x, w).mean((2, 3)), F.conv2d(v, w[:, :, :1, :1])

    (gm,) = rewritten(apart, *GIVEN, images(2, 1, 8, 8))
    first, second, third = of(gm, aten.convolution.default)
    assert is_last(first.meta["val"]) and is_last(second.meta["val"])
    assert third.args[0].op == "placeholder"


def grouped(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(2):
        x = F.silu(F.group_norm(F.conv2d(x, w, padding=1, groups=32), 4))
    return x


def test_each_conversion_counts_what_it_costs_within_a_component_too() -> None:
    """The groups of a norm mix channels with places: images are converted before and behind it."""
    for fn, taken in ((depthwise, True), (grouped, False)):
        (gm,) = rewritten(fn, *GIVEN)
        convolutions = of(gm, aten.convolution.default)
        assert [n.meta[DECISIONS][0].taken for n in convolutions] == [taken] * 2
        assert bool(of(gm, aten.clone.default)) == taken


@pytest.mark.parametrize("us", (40.0, -1.0))
def test_what_is_timed_is_what_is_most_expected_of(us: float) -> None:
    judged = []

    def judge(choice: Choice) -> Decided:
        judged.append(choice)
        return gain(us)

    def net(x: Tensor, w: Tensor) -> Tensor:
        x = F.max_pool2d(depthwise(x, w), 4)
        return depthwise(x, w)

    (gm,) = rewritten(net, *GIVEN, judge=judge)
    assert len(judged) == 2  # those of large images
    gains = [n.meta[DECISIONS][0].saved_us for n in of(gm, aten.convolution.default)]
    assert gains[:2] == [us, us] and gains[2] == pytest.approx(us / 16)


def test_gains_that_are_a_small_part_of_the_time_change_nothing() -> None:
    for of_us, taken in ((1e5, False), (1e3, True)):
        (gm,) = rewritten(depthwise, *GIVEN, judge=lambda choice, of_us=of_us: gain(2e3, of_us))
        assert all(n.meta[DECISIONS][0].taken == taken for n in of(gm, aten.convolution.default))
