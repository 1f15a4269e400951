"""Convolutions by minimal filtering: the operations' eager kernels, and what is compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusec.codegen.targets import find_target
from fusec.frontend.ops.winograd import winograd, winograd_weight
from fusec.options import Options
from fusec.processors import PROCESSORS
from fusec.runtime.kernels.cpp_kernel import vector_width
from fusec.tools.report import explain
from fusec.tools.report.observe import observe
from fusec.tools.report.stages import take_through
from tests.support import BACKEND, check, on_processor, tune, values

pytestmark = pytest.mark.skipif(BACKEND != "fusec", reason="is about fusec's own kernels")


@pytest.fixture(autouse=True)
def from_few_places_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, "fusion", filtered_places=1, filtered_places_each=1)


def last(*shape: int, seed: int = 0) -> Tensor:
    return values(*shape, seed=seed).contiguous(memory_format=torch.channels_last)


# -- eager kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [(1, 1), (0, 2), (2, 0)], ids=str)
@pytest.mark.parametrize("size", [(8, 8), (7, 6), (5, 9)], ids=str)
def test_the_operations_convolve(size: tuple[int, int], padding: tuple[int, int]) -> None:
    x, w, b = (
        last(2, 16, *size).double(),
        values(32, 16, 3, 3, seed=1).double(),
        values(32).double(),
    )
    found = winograd(x, winograd_weight(w, 16), b, padding)
    wanted = F.conv2d(x, w, b, padding=padding)
    torch.testing.assert_close(found, wanted)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_their_fakes_are_theirs() -> None:
    x, w = last(2, 16, 7, 6), values(32, 16, 3, 3)
    tests = ("test_schema", "test_faketensor")
    weight, image = torch.ops.fusec.winograd_weight.default, torch.ops.fusec.winograd.default
    torch.library.opcheck(weight, (w, 8), test_utils=tests)
    for bias in (None, values(32)):
        torch.library.opcheck(image, (x, winograd_weight(w, 8), bias, [1, 0]), test_utils=tests)


# -- compiled --------------------------------------------------------------------------------------


class Filters(nn.Module):
    """Two convolutions with what stands around them in a residual network."""

    def __init__(self, channels: int, outputs: int, padding: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, outputs, 3, padding=padding, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        return F.silu(self.second(y * 0.5) + y)


CASES = {
    "even": (Filters(16, 32), (2, 16, 8, 10)),
    "odd": (Filters(32, 16), (1, 32, 7, 9)),
    "padding": (Filters(16, 16, (2, 0)), (3, 16, 8, 8)),
    "several blocks": (Filters(16, 48), (5, 16, 24, 24)),
    "few tiles, many columns": (Filters(16, 256), (1, 16, 5, 4)),
}


def calls(fn: nn.Module, *inputs: Tensor, **how: bool) -> list[str]:
    """Return the operations that eager kernels run."""
    return [e.op for graph in explain(fn, *inputs, **how).graphs for e in graph.externs]


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_compiled_is_eager_s(name: str, train: bool) -> None:
    torch.manual_seed(0)
    fn, shape = CASES[name]
    check(fn, last(*shape), train=train)


def test_the_library_convolves_nothing_else_than_the_gradient_of_weights() -> None:
    fn, shape = CASES["even"]
    assert calls(fn, last(*shape)) == []
    assert {*calls(fn, last(*shape).requires_grad_(), train=True)} == {
        "convolution_backward.default"
    }


@pytest.mark.parametrize("name", ["cpu:avx2", "cpu:sse4"])
def test_on_narrower_vectors(name: str) -> None:
    processor = PROCESSORS[name]
    with on_processor(processor.features):
        assert vector_width() == processor.lanes
        check(Filters(processor.lanes, 3 * processor.lanes), last(2, processor.lanes, 7, 10))


def test_a_batch_of_any_size() -> None:
    more = tuple((last(n, 16, 8, 9, seed=n),) for n in (1, 3, 30))
    check(Filters(16, 32), last(4, 16, 8, 9), dynamic=True, more=more)


def test_a_part_of_a_cat_and_a_result_that_is_also_read_elsewhere() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filters = nn.Conv2d(16, 32, 3, padding=1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.filters(x)
            return torch.cat((x, y), 1), y.mean((2, 3))

    check(Dense(), last(2, 16, 8, 8))


BEHIND = {
    "contiguous": lambda y, r: y.contiguous(),
    "turned": lambda y, r: (y * 2).permute(2, 0, 3, 1).contiguous(),
    "flat": lambda y, r: torch.relu(y).flatten(1).topk(3).values,
    "a larger batch": lambda y, r: y[:1] + r,
    "one more axis": lambda y, r: y + r[:, None],
    "an axis that images lack": lambda y, r: y[:1].expand(4, -1, -1, -1) * 2 - r[:1],
    "a part": lambda y, r: torch.relu(y[:, 8:24, 1:, ::2]) * r[:, :, 1:, ::2],
    "a sum of channels": lambda y, r: y.softmax(1).sum((2, 3)),
}


@pytest.mark.parametrize("name", BEHIND)
@torch.no_grad()
def test_what_stands_behind_it(name: str) -> None:
    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filters = nn.Conv2d(16, 32 if name == "a part" else 16, 3, padding=1)

        def forward(self, x: Tensor, r: Tensor) -> Tensor:
            return BEHIND[name](self.filters(x), r)

    for images, size in ((3, 8), (1, 7)):
        check(Behind(), last(images, 16, size, 10), values(3, 16, size, 10, seed=2))


def test_images_are_converted_by_a_kernel_of_their_own() -> None:
    """Each tile would gather its channels, and each pixel is in four tiles."""
    filters = Filters(16, 32)

    def convert(x: Tensor) -> Tensor:
        return filters(x.contiguous(memory_format=torch.channels_last))

    (graph,) = observe(convert, (values(2, 16, 8, 10),))
    stages = take_through(graph, find_target("cpu:avx512"), Options())
    kernels = stages.text("source").split('extern "C"')[1:]
    assert all("ldg_f32" not in k for k in kernels if "f_multiply" in k)
    assert sum("f_multiply" in k for k in kernels) == 2


def test_its_error_is_no_larger_than_that_of_a_direct_sum() -> None:
    torch.manual_seed(0)
    fn, x = nn.Conv2d(64, 64, 3, padding=1), torch.randn(2, 64, 32, 32)
    x = x.contiguous(memory_format=torch.channels_last)
    exact = F.conv2d(x.double(), fn.weight.double(), fn.bias.double(), padding=1)
    with torch.no_grad():
        found = torch.compile(fn, backend="fusec", options={"strict": True, "freeze": True})(x)
        error, eager = ((y - exact).pow(2).mean() for y in (found, fn(x)))
    assert error <= eager
