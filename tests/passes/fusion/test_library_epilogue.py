"""Biases, residuals and activations that the library's calls apply to their results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusec.frontend.fx_passes.packing import has_onednn
from fusec.ir.dtype import BF16, DType
from fusec.ir.expr import Buffer, Cast, Expr, Op
from fusec.ir.graph import Def, Extern, Graph, Kernel, Schedule
from fusec.ir.index import index
from fusec.passes.fusion.fuse import separate
from fusec.passes.fusion.library_epilogue import library_epilogue
from fusec.tools.report import explain
from tests.ir.graphs import axes, buffer, f32, graph, load, mm, whole
from tests.passes.pipelines import check_same, kernels, numbers
from tests.support import seeded

needs_onednn = pytest.mark.skipif(not has_onednn(), reason="this torch is built without oneDNN")
M, N, K = 4, 6, 3


def library(node: Extern, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    *bias, a, b = args
    return [a @ b + (bias[0] if bias else 0)]


class Product:
    """``y = f(a @ b)``: a graph with one matrix product, and a definition that reads it."""

    def __init__(self, dtype: DType | None = None) -> None:
        kind = {} if dtype is None else {"dtype": dtype}
        self.a, self.b = buffer("a", M, K, **kind), buffer("b", K, N, **kind)
        self.made, self.y = buffer("mm", M, N, **kind), buffer("y", M, N, **kind)
        self.bias = buffer("bias", N, **kind)
        views = (whole(self.a), whole(self.b))
        self.extern = mm("mm", *views, self.made)
        self.axes = axes("m n", M, N)

    def graph(self, expr: Expr, *more: Buffer, bias: Buffer | None = None) -> Graph:
        line = Def(self.y, self.axes, expr)
        inputs = (self.a, self.b, bias or self.bias)
        return graph(inputs, (self.extern, line), self.y, *more)

    def biased(self, vector: Buffer | None = None) -> Op:
        m, n = self.axes
        return Op("add", (load(self.made, m, n), load(vector or self.bias, n)))


def inputs(*, bias: int = N) -> tuple[np.ndarray, ...]:
    return numbers(M, K), numbers(K, N, seed=1), numbers(bias, seed=2)


def targets(schedule: Schedule) -> list[str]:
    return [s.target if isinstance(s, Extern) else s.name for s in schedule.steps]


def test_a_lone_bias_is_added_by_the_library() -> None:
    product = Product()
    before = product.graph(product.biased())
    after = library_epilogue(separate(before))
    assert targets(after) == ["aten.addmm.default"]
    check_same(before, after, inputs(), library)


def test_the_order_of_the_summands_is_no_matter() -> None:
    product = Product()
    swapped = Op("add", product.biased().args[::-1])
    assert targets(library_epilogue(separate(product.graph(swapped)))) == ["aten.addmm.default"]


def test_half_types_that_are_added_in_f32_are_a_bias_too() -> None:
    product = Product(BF16)
    wide = tuple(Cast(a, f32(0).dtype) for a in product.biased().args)
    line = Cast(Op("add", wide), BF16)
    assert targets(library_epilogue(separate(product.graph(line)))) == ["aten.addmm.default"]


def test_a_part_of_a_longer_bias_is_passed_as_that_part() -> None:
    product = Product()
    m, n = product.axes
    packed = buffer("bias", 3 * N)
    part = load(packed, index(n) + N)
    before = product.graph(Op("add", (load(product.made, m, n), part)), bias=packed)
    after = library_epilogue(separate(before))
    assert targets(after) == ["aten.addmm.default"]
    check_same(before, after, inputs(bias=3 * N), library)


def activation(product: Product) -> Graph:
    return product.graph(Op("maximum", (product.biased(), f32(0))))


def column_bias(product: Product) -> Graph:
    m, n = product.axes
    by_row = buffer("bias", M)
    return product.graph(Op("add", (load(product.made, m, n), load(by_row, m))), bias=by_row)


def other_reader(product: Product) -> Graph:
    return product.graph(product.biased(), product.made)


def other_type(product: Product) -> Graph:
    double = buffer("bias", N, dtype=BF16)
    m, n = product.axes
    wide = Cast(load(double, n), product.made.dtype)
    return product.graph(Op("add", (load(product.made, m, n), wide)), bias=double)


def scaled(product: Product) -> Graph:
    m, n = product.axes
    return product.graph(Op("mul", (load(product.made, m, n), load(product.bias, n))))


def own_row(product: Product) -> Graph:
    m, n = product.axes
    return product.graph(Op("add", (load(product.made, m, n), load(product.made, 0, n))))


@pytest.mark.parametrize(
    "case", [activation, column_bias, other_reader, other_type, scaled, own_row]
)
def test_anything_else_stays_a_kernel(case: Any) -> None:
    before = case(Product())
    schedule = separate(before)
    assert library_epilogue(schedule) is schedule


def test_a_matrix_that_is_no_product_stays_a_kernel() -> None:
    product = Product()
    product.extern = Extern(
        "bmm", "aten.other.default", product.extern.args, (), (product.made,), "a contraction"
    )
    schedule = separate(product.graph(product.biased()))
    assert library_epilogue(schedule) is schedule


def test_kernels_that_are_left_are_numbered_without_gaps() -> None:
    product = Product()
    m, n = axes("m n", M, N)
    z = buffer("z", M, N)
    last = Def(z, (m, n), Op("maximum", (load(product.y, m, n), f32(0))))
    before = product.graph(product.biased())
    before = Graph("g", before.inputs, (*before.nodes, last), (whole(z), whole(product.y)))
    after = library_epilogue(separate(before))
    assert targets(after) == ["aten.addmm.default", "k0"]
    assert all(isinstance(k, Kernel) for k in kernels(after))
    check_same(before, after, inputs(), library)


# -- convolutions ----------------------------------------------------------------------------------

PLAIN = "mkldnn._convolution_pointwise.default"
ADDED = "mkldnn._convolution_pointwise.binary"


class Net(nn.Module):
    """A convolution, and a function of its result and of its images."""

    def __init__(self, behind: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        with seeded(0):
            self.conv = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.conv(x), x)


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    with seeded(1):
        made = torch.randn(2, 8, 6, 6)
    made[0, 0, 0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    return made.to(dtype).contiguous(memory_format=torch.channels_last)


def squeezed(y: Tensor, x: Tensor) -> Tensor:
    y = F.silu(y)
    return y * y.mean((2, 3), keepdim=True)


def gated(y: Tensor, x: Tensor) -> Tensor:
    return x * y.sigmoid()


BEHIND: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str, int]] = {
    "silu": (lambda y, x: F.silu(y), PLAIN, 0),
    "hardswish": (lambda y, x: F.hardswish(y), PLAIN, 0),
    "sigmoid": (lambda y, x: y.sigmoid(), PLAIN, 0),
    "residual": (lambda y, x: x + y, ADDED, 0),
    "beside a sum": (squeezed, PLAIN, 1),
    "in a gate": (gated, PLAIN, 1),
    "silu of a residual": (lambda y, x: F.silu(x + y), PLAIN, 1),
    "relu, of which NaN is NaN": (lambda y, x: F.relu(y), PLAIN, 1),
    "read twice": (lambda y, x: F.silu(y) + y, PLAIN, 1),
    "itself added": (lambda y, x: y + y, PLAIN, 1),
    "as tokens": (lambda y, x: y.flatten(2).transpose(1, 2) + 1.5, PLAIN, 1),
    "channels shuffled": (lambda y, x: y.view(2, 2, 4, 6, 6).transpose(1, 2) * 2, PLAIN, 1),
    "in another format": (lambda y, x: F.silu(y).contiguous(), PLAIN, 1),
}
"""Function, the call of the convolution, and how many kernels are left."""


@needs_onednn
@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize(
    "dtype", (torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow))
)
def test_the_call_computes_what_stands_behind_it(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bf16 on this processor")
    monkeypatch.setenv("FUSEC_FREEZE", "1")
    behind, call, kernels = BEHIND[name]
    module, x = Net(behind).eval().to(dtype), images(dtype)
    torch._dynamo.reset()
    with torch.no_grad():
        (graph,) = explain(module, x).graphs
        assert [extern.op for extern in graph.externs] == [call]
        assert len(graph.kernels) <= kernels
        made = torch.compile(module, backend="fusec", options={"strict": True})(x)
        eager, exact = module(x), copy.deepcopy(module).double()(x.double())
    assert made.stride() == eager.stride()
    torch.testing.assert_close(made.isnan(), eager.isnan())
    usual = eager.isfinite()
    worst = (eager - exact)[usual].abs().max()
    floor = 4 * torch.finfo(dtype).eps * exact[usual].abs().max()
    assert (made - exact)[usual].abs().max() <= 4 * worst + floor


@needs_onednn
def test_a_residual_of_another_type_stays_in_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_FREEZE", "1")
    x = images()[1:]
    module, places = Net(lambda y, x: y).eval(), x.mul(9).long()

    def added(x: Tensor, places: Tensor) -> Tensor:
        return module(x) + places

    torch._dynamo.reset()
    with torch.no_grad():
        made = torch.compile(added, backend="fusec", options={"strict": True})(x, places)
        torch.testing.assert_close(made, added(x, places), atol=1e-4, rtol=1e-4)


KEPT = {
    "integers": lambda y, b: (y.long() + b.long()).float(),
    "a cast around": lambda y, b: (y.int() + b.int()).float(),
    "doubles in f32": lambda y, b: (y.double().float() + b.float()).double(),
    "flipped": lambda y, b: y + b.flip(0),
    "flipped part": lambda y, b: y + torch.cat([b, b]).view(2, -1)[0].flip(0),
    "flipped view": lambda y, b: y + b.expand(2, -1).reshape(-1)[: b.shape[0]].flip(0),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_sum_of_other_types_or_in_reverse_is_no_bias(name: str) -> None:
    behind = KEPT[name]
    x, w, b = (torch.randn(*sizes) * 9 for sizes in ((70, 33), (33, 40), (80,)))

    def summed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return behind(x @ w, b[:40])

    torch._dynamo.reset()
    made = torch.compile(summed, backend="fusec", options={"strict": True})(x, w, b)
    torch.testing.assert_close(made, summed(x, w, b), atol=1e-3, rtol=1e-5)
