"""Which convolutions become products of matrices, and that nothing but time shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fusec.codegen.targets import CPU_MACHINE, find_target
from fusec.driver.context import CompileContext
from fusec.driver.trace import Trace
from fusec.frontend.fx_passes.channel_products import multiply_channels
from fusec.options import Options
from tests.frontend.tracing import captured_graphs
from tests.support import TRAINED, check

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


class Squeeze(nn.Module):
    """Squeeze and excitation (Hu et al., 2018)."""

    def __init__(self, channels: int = 24, inner: int = 8) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1))))
        return x * gate.sigmoid()


def rewritten(
    fn: Callable[..., Any],
    *inputs: Tensor,
    train: bool = False,
    target: str = "cpu",
    **options: Any,
) -> list[fx.GraphModule]:
    """Return the graphs that go to capture."""
    context = CompileContext(find_target(target), Options(**options), Trace("joint"))
    return captured_graphs(fn, *inputs, context=context, train=train)


def count(graphs: list[fx.GraphModule], *targets: Any) -> int:
    return sum(
        len(g.graph.find_nodes(op="call_function", target=t)) for g in graphs for t in targets
    )


def weights(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape) * 0.3).to(dtype)


# -- what is computed ------------------------------------------------------------------------------

LAYOUTS = pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last))


@pytest.mark.sampled(2)
@TRAINED
@LAYOUTS
def test_squeeze_and_excitation_does_what_eager_does(
    layout: torch.memory_format, train: bool
) -> None:
    x = torch.randn(3, 24, 5, 7).contiguous(memory_format=layout)
    check(Squeeze().to(memory_format=layout), x, train=train)


@pytest.mark.slow
@TRAINED
def test_batches_may_be_dynamic_and_empty(train: bool) -> None:
    more = [(torch.randn(5, 24, 4, 4),), (torch.randn(0, 24, 4, 4),), (torch.randn(1, 24, 4, 4),)]
    check(Squeeze(), torch.randn(3, 24, 4, 4), train=train, dynamic=True, more=more)


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "plain": (F.conv2d, (torch.randn(3, 8, 1, 1), weights(6, 8, 1, 1))),
    "bias": (F.conv2d, (torch.randn(3, 8, 1, 1), weights(6, 8, 1, 1), weights(6))),
    "one image": (F.conv2d, (torch.randn(1, 8, 1, 1), weights(6, 8, 1, 1), weights(6))),
    "no batch": (F.conv2d, (torch.randn(8, 1, 1), weights(6, 8, 1, 1), weights(6))),
    "no images": (F.conv2d, (torch.randn(0, 8, 1, 1), weights(6, 8, 1, 1), weights(6))),
    "many images": (F.conv2d, (torch.randn(40, 8, 1, 1), weights(6, 8, 1, 1), weights(6))),
    "one channel": (F.conv2d, (torch.randn(3, 1, 1, 1), weights(6, 1, 1, 1), weights(6))),
    "to one channel": (F.conv2d, (torch.randn(3, 8, 1, 1), weights(1, 8, 1, 1), weights(1))),
    "steps": (
        lambda x, w: F.conv2d(x, w, stride=2, dilation=3),
        (torch.randn(3, 8, 1, 1), weights(6, 8, 1, 1)),
    ),
    "1d": (F.conv1d, (torch.randn(3, 8, 1), weights(6, 8, 1), weights(6))),
    "3d": (F.conv3d, (torch.randn(3, 8, 1, 1, 1), weights(6, 8, 1, 1, 1), weights(6))),
    "channels last": (
        F.conv2d,
        tuple(
            t.contiguous(memory_format=torch.channels_last)
            for t in (torch.randn(3, 8, 1, 1), weights(6, 8, 1, 1))
        ),
    ),
    "every second channel": (
        lambda x, w: F.conv2d(x[:, ::2], w),
        (torch.randn(3, 16, 1, 1), weights(6, 8, 1, 1)),
    ),
    "a place of an image": (
        lambda x, w: F.conv2d(x[:, :, 1:2, 2:3], w),
        (torch.randn(3, 8, 4, 5), weights(6, 8, 1, 1)),
    ),
    "the same image": (
        lambda x, w: F.conv2d(x.expand(3, 8, 1, 1), w),
        (torch.randn(1, 8, 1, 1), weights(6, 8, 1, 1)),
    ),
    "a part of the weights": (
        lambda x, w: F.conv2d(x, w[::2, :, 1:2, 1:2]),
        (torch.randn(3, 8, 1, 1), weights(12, 8, 3, 3)),
    ),
    "bf16": (
        F.conv2d,
        (
            torch.randn(3, 8, 1, 1).bfloat16(),
            weights(6, 8, 1, 1, dtype=torch.bfloat16),
            weights(6, dtype=torch.bfloat16),
        ),
    ),
    "f16": (F.conv2d, (torch.randn(3, 8, 1, 1).half(), weights(6, 8, 1, 1, dtype=torch.half))),
    "f64": (F.conv2d, (torch.randn(3, 8, 1, 1).double(), weights(6, 8, 1, 1).double())),
}


@pytest.mark.sampled(11)
@TRAINED
@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_of_each_kind_match_eager(kind: str, train: bool) -> None:
    convolve, inputs = PRODUCTS[kind]
    check(lambda x, *w: F.relu(convolve(x.sin(), *w)), *inputs, train=train)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", PRODUCTS)
def test_convolutions_of_one_place_are_products(kind: str) -> None:
    convolve, inputs = PRODUCTS[kind]
    graphs = rewritten(convolve, *inputs)
    assert count(graphs, *CONVOLUTIONS) == 0
    assert count(graphs, aten.mm.default) == 1


@LAYOUTS
def test_results_have_eagers_strides_on_axes_of_one_element_too(
    layout: torch.memory_format,
) -> None:
    x, w = (
        t.contiguous(memory_format=layout) for t in (torch.randn(3, 8, 1, 1), weights(6, 8, 1, 1))
    )
    (gm,) = rewritten(lambda x, w: F.conv2d(x, w), x, w)
    assert gm(x, w)[0].stride() == F.conv2d(x, w).stride()


def test_gradients_are_products_those_that_are_wanted() -> None:
    x, (w, b) = torch.randn(3, 8, 1, 1), (weights(6, 8, 1, 1), weights(6))
    x.requires_grad_()
    graphs = rewritten(F.conv2d, x, w, b, train=True)
    assert (count(graphs, *CONVOLUTIONS), count(graphs, aten.mm.default)) == (0, 2)
    w.requires_grad_()
    b.requires_grad_()
    graphs = rewritten(F.conv2d, x, w, b, train=True)
    assert (count(graphs, *CONVOLUTIONS), count(graphs, aten.mm.default)) == (0, 3)


def test_a_gradient_of_the_weights_alone_matches_eager() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Conv2d(8, 6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x.detach()).tanh()

    check(Fixed(), torch.randn(3, 8, 1, 1), train=True)


# -- what stays a convolution ----------------------------------------------------------------------

OTHERS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "places": (F.conv2d, (torch.randn(3, 8, 2, 2), weights(6, 8, 1, 1))),
    "a row": (F.conv2d, (torch.randn(3, 8, 1, 4), weights(6, 8, 1, 1))),
    "kernel": (
        lambda x, w: F.conv2d(x, w, padding=1),
        (torch.randn(3, 8, 1, 1), weights(6, 8, 3, 3)),
    ),
    "padded": (
        lambda x, w: F.conv2d(x, w, padding=1),
        (torch.randn(3, 8, 1, 1), weights(6, 8, 1, 1)),
    ),
    "groups": (
        lambda x, w: F.conv2d(x, w, groups=2),
        (torch.randn(3, 8, 1, 1), weights(6, 4, 1, 1)),
    ),
    "transposed": (F.conv_transpose2d, (torch.randn(3, 8, 1, 1), weights(8, 6, 1, 1))),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_convolutions_stay(kind: str) -> None:
    convolve, inputs = OTHERS[kind]
    graphs = rewritten(convolve, *inputs)
    assert (count(graphs, *CONVOLUTIONS), count(graphs, aten.mm.default)) == (1, 0)


def test_convolutions_stay_on_gpus_and_where_roundings_are_eagers() -> None:
    convolve, inputs = PRODUCTS["bias"]
    assert count(rewritten(convolve, *inputs, target="sm_90"), *CONVOLUTIONS) == 1
    assert count(rewritten(convolve, *inputs, precision="eager"), *CONVOLUTIONS) == 1


# -- gradients of channels-last images -------------------------------------------------------------


def last(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last)


class Narrow(nn.Module):
    """A wide convolution of 1 x 1 with a norm, and a narrow one with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Conv2d(8, 20, 1, bias=False), nn.BatchNorm2d(20)
        self.narrow = nn.Conv2d(20, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.hardswish(self.norm(self.wide(x))))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_gradients_of_channels_last_images_match_eager(dtype: torch.dtype) -> None:
    net = Narrow().to(dtype=dtype, memory_format=torch.channels_last)
    check(net, last(3, 8, 5, 7, dtype=dtype), train=True)


@pytest.mark.slow
def test_gradients_of_channels_last_images_may_be_dynamic_or_empty() -> None:
    net = Narrow().to(memory_format=torch.channels_last)
    check(net.eval(), last(3, 8, 5, 7), train=True, dynamic=True, more=[(last(2, 8, 6, 4),)])
    check(nn.Conv2d(8, 6, 1), last(0, 8, 5, 7), train=True)


def test_gradients_of_channels_last_images_are_products() -> None:
    net = nn.Conv2d(8, 6, 1).to(memory_format=torch.channels_last)
    graphs = rewritten(lambda x: net(x).tanh(), last(3, 8, 5, 7).requires_grad_(), train=True)
    assert count(graphs, *CONVOLUTIONS) == 0
    assert count(graphs, aten.mm.default) == 3


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("wanted", ("image", "weight", "both"))
def test_a_gradient_alone_is_a_product_where_it_is_no_slower(
    wanted: str, dtype: torch.dtype
) -> None:
    net = nn.Conv2d(8, 6, 1).to(dtype=dtype, memory_format=torch.channels_last)
    net.requires_grad_(wanted != "image")
    x = last(3, 8, 5, 7, dtype=dtype).requires_grad_(wanted != "weight")
    graphs = rewritten(lambda x: net(x).tanh(), x, train=True)
    gains = wanted == "both" or (wanted == "image" and dtype is torch.float32)
    assert count(graphs, aten.convolution_backward.default) == (0 if gains else 1)


@pytest.mark.parametrize(("images", "products"), [(3, 1), (3 << 17, 0)])
def test_a_short_convolution_of_channels_last_images_is_a_product(
    images: int, products: int
) -> None:
    graph = fx.Graph()
    read, weight = graph.placeholder("x"), graph.placeholder("w")
    settings = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    made = graph.call_function(aten.convolution.default, (read, weight, *settings))
    with FakeTensorMode():
        read.meta["val"] = last(images, 8, 5, 7)
        weight.meta["val"] = weights(6, 8, 1, 1)
        made.meta["val"] = aten.convolution(read.meta["val"], weight.meta["val"], *settings)
        graph.output(made)
        gm = fx.GraphModule({}, graph)
        multiply_channels(gm, CPU_MACHINE.fusion.channel_product)
    assert count([gm], aten.mm.default) == products


@pytest.mark.parametrize("kind", ("bf16", "one channel", "made one channel"))
def test_other_short_convolutions_stay(kind: str) -> None:
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    channels, made = 1 if kind == "one channel" else 8, 1 if kind == "made one channel" else 6
    (gm,) = rewritten(
        F.conv2d, last(3, channels, 5, 7, dtype=dtype), weights(made, channels, 1, 1, dtype=dtype)
    )
    assert count([gm], aten.convolution.default) == 1


UNLIKE: dict[str, tuple[nn.Module, Tensor]] = {
    "contiguous": (nn.Conv2d(8, 6, 1), torch.randn(3, 8, 5, 7)),
    "steps": (nn.Conv2d(8, 6, 1, stride=2), last(3, 8, 5, 7)),
    "groups": (nn.Conv2d(8, 6, 1, groups=2), last(3, 8, 5, 7)),
    "padding": (nn.Conv2d(8, 6, 1, padding=1), last(3, 8, 5, 7)),
    "kernel": (nn.Conv2d(8, 6, 3), last(3, 8, 5, 7)),
    "transposed": (nn.ConvTranspose2d(8, 6, 1), last(3, 8, 5, 7)),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_other_gradients_stay(kind: str) -> None:
    net, x = UNLIKE[kind]
    graphs = rewritten(lambda x: net(x).tanh(), x.requires_grad_(), train=True)
    assert count(graphs, aten.convolution_backward.default) == 1


# -- sound -----------------------------------------------------------------------------------------


class Points(nn.Module):
    """Layers of each place of a sound, or of each point of a cloud (Qi et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16)
        self.second = nn.Conv1d(16, 24, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.norm(self.first(x)))).amax(2)


@TRAINED
def test_convolutions_of_each_place_of_a_sound_match_eager(train: bool) -> None:
    check(Points(), weights(2, 3, 50), train=train)


def test_sounds_may_be_dynamic_or_empty() -> None:
    more = tuple((weights(n, 3, places),) for n, places in ((3, 50), (2, 70), (0, 9)))
    check(Points().eval(), weights(4, 3, 50), dynamic=True, more=more)


@torch.no_grad()
def test_they_are_a_product_for_each_sound() -> None:
    graphs = rewritten(Points().eval(), weights(2, 3, 50))
    assert count(graphs, *CONVOLUTIONS) == 0
    assert count(graphs, aten.bmm.default) == 2


@pytest.mark.parametrize(
    ("shape", "settings"),
    [((2, 4, 50), {"stride": 2}), ((2, 4, 50), {"padding": 1}), ((2, 8, 50), {"groups": 2})],
    ids=str,
)
def test_other_convolutions_of_sound_stay(shape: tuple[int, ...], settings: Any) -> None:
    graphs = rewritten(lambda x, w: F.conv1d(x, w, **settings), weights(*shape), weights(8, 4, 1))
    assert count(graphs, aten.convolution.default) == 1


def test_sounds_that_lie_otherwise_stay() -> None:
    x, w = weights(2, 50, 4).mT, weights(8, 4, 1)
    assert count(rewritten(F.conv1d, x, w), aten.convolution.default) == 1
    assert count(rewritten(F.conv1d, x.double(), w.double()), aten.convolution.default) == 1
