"""Products and convolutions of 16 bits, in f32 where a CPU has no instructions for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fusec.codegen.targets import find_target
from fusec.driver.context import CompileContext
from fusec.driver.trace import Trace
from fusec.options import Options
from fusec.processors import PROCESSORS
from tests.frontend.tracing import captured_graphs
from tests.support import BACKEND, check, compile_with, on_processor, values

aten = torch.ops.aten
fusec_alone = pytest.mark.skipif(BACKEND != "fusec", reason="asks for another processor's code")
NARROW = (torch.bfloat16, torch.float16)
Call = Callable[[Tensor, Tensor], Tensor]

ROWS, SIDE = 20, 24
IMAGE, FILTERS = (2, 8, 10, 10), (12, 8, 3, 3)
CALLS: dict[str, tuple[Call, tuple[int, ...], tuple[int, ...]]] = {
    "a product": (lambda x, w: x @ w, (ROWS, SIDE), (SIDE, 40)),
    "a linear": (lambda x, w: F.linear(x, w, w[:, 0]), (ROWS, SIDE), (40, SIDE)),
    "a batch": (lambda x, w: x @ w, (3, ROWS, SIDE), (3, SIDE, 40)),
    "a batch, added": (lambda x, w: torch.baddbmm(x[:, :1, :1], x, w), (3, 5, 6), (3, 6, 40)),
    "a convolution": (lambda x, w: F.conv2d(x, w, w[:, 0, 0, 0], padding=1), IMAGE, FILTERS),
    "a transposed one": (lambda x, w: F.conv_transpose2d(x, w, stride=2), IMAGE, (8, 12, 3, 3)),
}


def types_multiplied(call: Call, x: Tensor, w: Tensor, target: str) -> set[torch.dtype]:
    """Return the types of the results of products and convolutions in what is captured."""
    context = CompileContext(find_target(target), Options(), Trace("joint"))
    (graph,) = captured_graphs(call, x, w, context=context)
    return {node.meta["val"].dtype for node in _multiplying(graph)}


def _multiplying(graph: fx.GraphModule) -> Iterator[fx.Node]:
    for kind in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution):
        yield from graph.graph.find_nodes(op="call_function", target=kind.default)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_operands_are_widened_where_the_library_has_no_instructions(
    name: str, dtype: torch.dtype
) -> None:
    call, *shapes = CALLS[name]
    x, w = (values(*shape, dtype=dtype) for shape in shapes)
    found = {target: types_multiplied(call, x, w, target) for target in PROCESSORS}
    wide, own = {torch.float32}, {dtype}
    of_avx512 = own if dtype is torch.bfloat16 else wide
    wanted = {"cpu:sse4": wide, "cpu:avx2": wide, "cpu:avx512": of_avx512, "cpu:amx": own}
    assert found == wanted


@pytest.mark.parametrize("name", CALLS)
def test_wide_operands_stay(name: str) -> None:
    call, *shapes = CALLS[name]
    for dtype in (torch.float32, torch.float64):
        x, w = (values(*shape, dtype=dtype) for shape in shapes)
        assert types_multiplied(call, x, w, "cpu:avx2") == {dtype}


def test_a_row_stays_where_weights_lie_along_their_terms() -> None:
    x, w = values(1, SIDE, dtype=torch.bfloat16), values(40, SIDE, dtype=torch.bfloat16)
    assert types_multiplied(lambda x, w: x @ w.t(), x, w, "cpu:avx2") == {torch.bfloat16}
    strided = w.t().contiguous()
    assert types_multiplied(lambda x, w: x @ w, x, strided, "cpu:avx2") == {torch.float32}


def test_few_rows_stay_beside_weights_that_will_be_packed() -> None:
    layer = torch.nn.Linear(SIDE, 64, bias=False, dtype=torch.bfloat16)
    for rows, kind in ((4, torch.bfloat16), (20, torch.float32)):
        x = values(rows, SIDE, dtype=torch.bfloat16)
        options = Options(freeze=True)
        context = CompileContext(find_target("cpu:avx2"), options, Trace("joint"))
        (graph,) = captured_graphs(layer, x, context=context)
        assert {n.meta["val"].dtype for n in _multiplying(graph)} == {kind}


def test_gpus_and_batch_invariant_compiles_have_no_such_stage() -> None:
    x, w = values(ROWS, SIDE, dtype=torch.bfloat16), values(SIDE, 40, dtype=torch.bfloat16)
    assert types_multiplied(lambda x, w: x @ w, x, w, "sm_90") == {torch.bfloat16}
    options = Options(batch_invariant=True)
    context = CompileContext(find_target("cpu:avx2"), options, Trace("joint"))
    (graph,) = captured_graphs(lambda x, w: x @ w, x, w, context=context)
    assert {n.meta["val"].dtype for n in _multiplying(graph)} == {torch.bfloat16}


@fusec_alone
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_results_and_gradients_are_eager_s(name: str, dtype: torch.dtype) -> None:
    call, *shapes = CALLS[name]
    given = [values(*shape, dtype=dtype) for shape in shapes]
    with on_processor(PROCESSORS["cpu:avx2"].features):
        check(lambda x, w: F.gelu(call(x, w)), *given, train=True)


@fusec_alone
def test_a_gradient_that_nobody_wants_is_not_computed() -> None:
    x, w = (values(*shape, dtype=torch.bfloat16) for shape in (IMAGE, FILTERS))
    with on_processor(PROCESSORS["cpu:avx2"].features):
        check(lambda x, w: F.conv2d(x.sin(), w.detach()).cos(), x, w, train=True)


@fusec_alone
def test_any_number_of_rows() -> None:
    x, w = values(ROWS, SIDE, dtype=torch.bfloat16), values(40, SIDE, dtype=torch.bfloat16)
    with on_processor(PROCESSORS["cpu:avx2"].features):
        check(lambda x, w: F.linear(x, w).relu(), x, w, more=[(x[:3], w), (x[:9], w)], dynamic=True)


@fusec_alone
def test_what_a_backward_reads_is_saved_in_16_bits() -> None:
    def mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.gelu(F.conv2d(x, w, padding=1)).flatten(1), v).relu()

    x, w = (values(*shape, dtype=torch.bfloat16).requires_grad_() for shape in (IMAGE, FILTERS))
    v = values(40, 1200, dtype=torch.bfloat16).requires_grad_()
    saved: list[torch.dtype] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.dtype)
        return tensor

    torch.compiler.reset()
    with (
        on_processor(PROCESSORS["cpu:avx2"].features),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        compile_with(mlp)(x, w, v)
    assert saved and set(saved) == {torch.bfloat16}
