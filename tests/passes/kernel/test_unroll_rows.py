"""Products of few rows: rows and columns of one point, against eager, and by the model's choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo import register_backend

import fusec
from fusec import backend
from fusec.codegen.cpp.printer import print_kernel
from fusec.codegen.lowering.lower import lower
from fusec.codegen.targets import CPU_MACHINE
from fusec.ir.dtype import F32
from fusec.ir.expr import Const, Op
from fusec.ir.graph import Def, Graph, Schedule
from fusec.ir.index import floordiv, index, mod
from fusec.ir.monoid import SUM
from fusec.ir.streamed import StreamedProduct, worthwhile
from fusec.ir.verify import verify_schedule
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.kernel.unroll_rows import _shapes, unroll_rows, unrolls_rows
from fusec.passes.schedule import accepts_cpu
from fusec.passes.schedule.vector_loops import loop_plans
from fusec.tools.interpreter.graph import run_graph
from tests.ir.graphs import axes, buffer, graph, load, total
from tests.passes.pipelines import kernel_of, numbers, unified
from tests.support import check

WIDE = replace(CPU_MACHINE, vector=16)
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@register_backend
def fusec_skinny(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """The backend with every product in a kernel of its own that can be in one."""
    return backend.fusec(gm, inputs, options={"strict": True, "verify": True, "race": "fused"})


# -- the pass --------------------------------------------------------------------------------------


def linear(rows: int, columns: int, *, count: int = 1, prologue: bool = False) -> Graph:
    """y0[m, n] = sum(k: x[m, k] * w0[n, k]) + r[m, n], and so on for each of ``count`` weights."""
    x, r = buffer("x", rows, 32), buffer("r", rows, columns)
    inputs, lines = [x, r], []
    for number in range(count):
        m, n, k = axes("m n k", rows, columns, 32)
        w, y = buffer(f"w{number}", columns, 32), buffer(f"y{number}", rows, columns)
        few = Op("exp", (load(x, m, k),)) if prologue else load(x, m, k)
        product = total(SUM, k, Op("mul", (few, load(w, n, k))))
        inputs.append(w)
        lines.append(Def(y, (m, n), Op("add", (product, load(r, m, n)))))
    return graph(tuple(inputs), tuple(lines), *(line.buffer for line in lines))


@pytest.mark.parametrize(
    ("rows", "columns", "count", "vector", "together"),
    [
        (1, 64, 1, 16, 4),
        (2, 64, 1, 16, 4),
        (8, 64, 1, 16, 2),
        (8, 64, 1, 8, 1),
        (12, 64, 1, 16, 2),
        (12, 64, 1, 8, 1),
        (16, 64, 1, 16, 1),
        (4, 62, 1, 16, 2),
        (4, 61, 1, 16, 1),
        (1, 64, 2, 16, 4),
        (1, 64, 3, 16, 4),
        (4, 64, 2, 16, 2),
        (8, 64, 2, 16, 1),
    ],
)
def test_a_point_has_all_rows_and_the_columns_whose_sums_fit_registers(
    rows: int, columns: int, count: int, vector: int, together: int
) -> None:
    kernel = unified(linear(rows, columns, count=count))
    found = unroll_rows(kernel, replace(CPU_MACHINE, vector=vector))
    assert [a.extent.const for a in found.grid] == [columns // together]
    assert len(found.stores) == rows * together * count


@pytest.mark.parametrize(("products", "columns"), [(1, [4, 2, 1]), (2, [2, 1]), (3, [1])])
def test_packed_weights_of_all_products_stream_in_as_many_columns(
    products: int, columns: list[int]
) -> None:
    (n,) = axes("n", 64)
    for packed, wanted in ((True, columns), (False, [4, 2, 1])):
        one = StreamedProduct((), (n,), Const(0.0, F32), index(32), 1, packed=packed)
        assert [c for _, c in _shapes(one, CPU_MACHINE, products, cuts=False)] == wanted


@pytest.mark.parametrize(("rows", "columns"), [(1, 6), (3, 8), (8, 61)])
def test_values_are_what_they_were(rows: int, columns: int) -> None:
    whole = linear(rows, columns, count=2)
    after = Schedule(whole, (unroll_rows(unified(whole), WIDE),))
    verify_schedule(after)
    assert len(after.kernels[0].stores) > 2
    inputs = [numbers(*(n.const for n in b.shape), seed=s) for s, b in enumerate(whole.inputs)]
    for a, b in zip(run_graph(whole, inputs), run_graph(after, inputs), strict=True):
        np.testing.assert_array_equal(b, a)


@pytest.mark.parametrize(
    ("whole", "vector"),
    [(linear(17, 64), 16), (linear(13, 64), 8), (linear(8, 64, count=4), 16), (linear(8, 64), 4)],
)
def test_a_kernel_with_more_rows_than_registers_stays_as_it_is(whole: Graph, vector: int) -> None:
    kernel = unified(whole)
    machine = replace(CPU_MACHINE, vector=vector)
    assert unroll_rows(kernel, machine) is kernel
    assert not unrolls_rows(kernel, machine)


def test_what_reads_a_sum_along_columns_is_another_kernel() -> None:
    assert accepts_cpu(unified(linear(4, 64)), WIDE)
    assert not accepts_cpu(unified(linear(4, 64, prologue=True)), WIDE)


def test_weights_are_loaded_ahead_and_nothing_else_is() -> None:
    kernel = kernel_of(linear(1, 61))
    (plan,) = loop_plans(kernel, WIDE)
    ahead = WIDE.loops.ahead
    assert plan.stages == ahead
    source = print_kernel(lower(kernel, plan))
    (line,) = (line for line in source.splitlines() if "__builtin_prefetch" in line)
    place = f"p_w0 + (i_n * 32LL + i_ko * 16LL + {16 * ahead}LL)"
    assert line.strip() == f"__builtin_prefetch({place});"
    x, y = buffer("x", 64, 32), buffer("y", 64)
    m, k = axes("m k", 64, 32)
    sums = graph((x,), (Def(y, (m,), total(SUM, k, load(x, m, k))),), y)
    (plan,) = loop_plans(kernel_of(sums), WIDE)
    assert plan.stages == 1


# -- whole programs --------------------------------------------------------------------------------


def tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def alone(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def gated(x: Tensor, w: Tensor) -> Tensor:
    gate, up = w.chunk(2)
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def block(x: Tensor, w: Tensor) -> Tensor:
    h = F.rms_norm(x, x.shape[-1:])
    return x + F.linear(F.gelu(F.linear(h, w)), w.t().contiguous())


def biased(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w, w[:, 0]).relu()


def fused(fn: Callable[..., Any], *inputs: Tensor, **how: Any) -> None:
    check(fn, *inputs, backend="fusec_skinny", **how)


@pytest.mark.sampled(13)  # a diagonal
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", [8, *range(1, 8), 9, 12, 13, 16, 17])
def test_any_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    fused(gated, tensor(rows, 80, dtype=dtype), tensor(96, 80, dtype=dtype, seed=1))


@pytest.mark.sampled(19)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("fn", [alone, block, biased])
@pytest.mark.parametrize(("columns", "terms"), [(33, 7), (50, 100), (10, 1037)])
def test_any_number_of_columns_and_terms(
    fn: Callable[..., Tensor], columns: int, terms: int, dtype: torch.dtype
) -> None:
    w = tensor(columns, terms, dtype=dtype, seed=1) / terms**0.5
    for rows in (1, 3):
        fused(fn, tensor(rows, terms, dtype=dtype), w)


@pytest.mark.parametrize("rows", [1, 4])
def test_what_lies_between_rows_is_not_read(rows: int) -> None:
    nan = float("nan")
    x, w = torch.full((rows, 96), nan), torch.full((128, 96), nan)
    x[:, 16:87], w[::2, 16:87] = tensor(rows, 71), tensor(64, 71, seed=1)
    fused(gated, x[:, 16:87], w[::2, 16:87])


def test_operands_of_other_strides() -> None:
    x, w = tensor(64, 4).t(), tensor(64, 128).t()
    for inputs in ((x, w), (x, w.contiguous()), (x.contiguous(), w), (x[:, :1].expand(4, 64), w)):
        fused(alone, *inputs)


def test_rows_of_any_number_are_the_librarys() -> None:
    w = tensor(64, 48, seed=1)
    fused(biased, tensor(3, 48), w, dynamic=True, more=[(tensor(n, 48), w) for n in (1, 2, 8, 17)])


@pytest.mark.parametrize("terms", [16, 48])
def test_columns_of_any_number_are_streamed_one_by_one(terms: int) -> None:
    def scores(x: Tensor, keys: Tensor) -> Tensor:
        return F.linear(x, keys).exp()

    first, *more = ((tensor(1, terms), tensor(n, terms, seed=1)) for n in (33, 1, 7, 64))
    fused(scores, *first, dynamic=True, more=more)


def test_gradients() -> None:
    fused(block, tensor(2, 64), tensor(128, 64, seed=1) / 8, train=True)


# -- the choice ------------------------------------------------------------------------------------


def kernels(fn: Callable[..., Tensor], *inputs: Tensor, target: str = "cpu") -> tuple[int, int]:
    """Return how many kernels and library calls the model's choice has."""
    (report,) = fusec.explain(fn, *inputs, target=target).graphs
    return len(report.kernels), len(report.externs)


@pytest.mark.parametrize("rows", [1, 4])
def test_gate_and_activation_are_one_kernel(rows: int) -> None:
    shapes = (rows, 512), (2048, 512)
    assert kernels(gated, *(torch.empty(s) for s in shapes)) == (1, 0)


def test_more_rows_and_other_weights_stay_the_librarys() -> None:
    assert kernels(gated, torch.empty(17, 512), torch.empty(2048, 512)) == (1, 2)
    assert kernels(alone, torch.empty(4, 512), torch.empty(512, 2048).t()) == (0, 1)


@pytest.mark.parametrize(
    ("rows", "terms", "itemsize", "panel", "streamed"),
    [
        (12, 2048, 2, 0, True),
        (16, 768, 4, 0, True),
        (16, 800, 4, 0, False),
        (13, 768, 2, 0, False),
        (16, 2048, 2, 32, True),
        (29, 2048, 2, 32, False),
    ],
)
def test_more_than_twelve_rows_stream_weights_that_gain_by_it(
    rows: int, terms: int, itemsize: int, panel: int, streamed: bool
) -> None:
    m, n, k = axes("m n k", rows, 64, terms)
    few = load(buffer("x", rows, terms), m, k)
    product = StreamedProduct((m,), (n,), few, index(terms), itemsize, panel)
    assert worthwhile(product, WIDE) is streamed


def test_sixteen_rows_of_a_narrow_layer_are_streamed_and_of_a_wide_one_the_librarys() -> None:
    for terms, made in ((768, (1, 0)), (2048, (1, 1))):
        shapes = (16, terms), (3072, terms)
        assert kernels(biased, *map(torch.empty, shapes), target="cpu:avx512") == made


def test_rows_are_normalised_once() -> None:
    """And not for each few columns of the product, which read all of them."""
    (report,) = fusec.explain(
        block, *map(torch.empty, ((4, 512), (2048, 512))), target="cpu"
    ).graphs
    assert [kernel.bytes < 1 << 20 for kernel in report.kernels] == [True, False, False]
    assert not report.externs


# -- weights in panels -----------------------------------------------------------------------------


def panelled(rows: int, columns: int, *, count: int = 1, terms: int = 32) -> Graph:
    """y0[m, n] = sum(k: x[m, k] * w0[n // 32, k, n % 32]) + b[n], and so on for each weight."""
    x, b = buffer("x", rows, terms), buffer("b", columns)
    inputs, lines = [x, b], []
    for number in range(count):
        m, n, k = axes("m n k", rows, columns, terms)
        w, y = buffer(f"w{number}", columns // 32, terms, 32), buffer(f"y{number}", rows, columns)
        place = (floordiv(index(n), index(32)), k, mod(index(n), index(32)))
        product = total(SUM, k, Op("mul", (load(x, m, k), load(w, *place))))
        inputs.append(w)
        lines.append(Def(y, (m, n), Op("add", (product, load(b, n)))))
    return graph(tuple(inputs), tuple(lines), *(line.buffer for line in lines))


@pytest.mark.parametrize(
    ("rows", "count", "vector", "grid", "together"),
    [
        (1, 1, 16, [4, 16], 2),
        (12, 1, 16, [4, 16], 2),
        (14, 1, 16, [4, 16], 2),
        (4, 2, 16, [4, 16], 2),
        (8, 2, 16, [4, 2, 16], 1),
        (3, 1, 8, [4, 8], 4),
        (4, 1, 8, [4, 2, 8], 2),
        (1, 1, 4, [4, 2, 4], 4),
    ],
)
def test_a_point_has_all_rows_and_the_vectors_of_a_panel_whose_sums_fit_registers(
    rows: int, count: int, vector: int, grid: list[int], together: int
) -> None:
    machine = replace(CPU_MACHINE, vector=vector)
    whole = panelled(rows, 128, count=count)
    kernel = unified(whole)
    assert accepts_cpu(kernel, machine)
    found = unroll_rows(kernel, machine)
    assert [a.extent.const for a in found.grid] == grid
    assert len(found.stores) == rows * together * count
    after = Schedule(whole, (found,))
    verify_schedule(after)
    inputs = [numbers(*(n.const for n in b.shape), seed=s) for s, b in enumerate(whole.inputs)]
    for a, b in zip(run_graph(whole, inputs), run_graph(after, inputs), strict=True):
        np.testing.assert_array_equal(b, a)


@pytest.mark.parametrize(("rows", "count"), [(4, 1), (8, 2)])
def test_sums_of_panels_stay_in_registers(rows: int, count: int) -> None:
    kernel = coalesce(unroll_rows(unified(panelled(rows, 128, count=count, terms=1024)), WIDE))
    (plan,) = loop_plans(kernel, WIDE)
    source = print_kernel(lower(kernel, plan))
    assert "alignas" not in source  # no private array
    assert plan.stages == 32 and f"{32 * 32}LL));" in source
