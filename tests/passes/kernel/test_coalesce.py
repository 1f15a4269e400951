"""Coalescing: flat offsets, and one axis where two walk through memory as one."""

from __future__ import annotations

import pytest
from hypothesis import given

from fusec.codegen.targets import A100_MACHINE, CPU_MACHINE, HOPPER_MACHINE
from fusec.ir.dtype import F32
from fusec.ir.expr import Buffer, Cast, Expr, IndexValue, Op, Reduce, loads
from fusec.ir.graph import Def, Graph, Kernel, Schedule
from fusec.ir.index import Axis, IntoIndex, index
from fusec.ir.monoid import SUM
from fusec.passes.fusion.fuse import separate
from fusec.passes.kernel.coalesce import coalesce, flatten, merge_short_rows
from tests.fuzz.graphs import Example
from tests.ir.graphs import axes, buffer, graph, layer_norm, load, position, total
from tests.passes.pipelines import BOUNDED, check_same, kernel_of, numbers, random_graphs


def extents(kernel: Kernel) -> tuple[list[int], list[int]]:
    """Return the extents of the grid's and of the inside axes."""
    grid, inside = ([a.extent.const for a in axes] for axes in (kernel.grid, kernel.inside))
    return grid, inside


def one(expr: Expr, own: tuple[Axis, ...], *inputs: Buffer) -> Graph:
    out = buffer("out", *(a.extent for a in own))
    return graph(inputs, (Def(out, own, expr),), out)


def strided(name: str, shape: tuple[int, ...], strides: tuple[IntoIndex, ...]) -> Buffer:
    return Buffer(name, tuple(map(index, shape)), tuple(map(index, strides)), F32)


def test_all_axes_of_contiguous_tensors_are_one() -> None:
    x = buffer("x", 3, 4, 5)
    own = axes("a b c", 3, 4, 5)
    kernel = kernel_of(one(Op("neg", (load(x, *own),)), own, x))
    assert extents(kernel) == ([60], [])
    (store,) = kernel.stores
    (axis,) = kernel.grid
    assert store.indices == (index(axis),)
    assert [n.indices for n in loads((store.expr,))] == [(index(axis),)]


def test_an_axis_that_one_tensor_walks_otherwise_stays_apart() -> None:
    own = axes("a b c", 3, 4, 5)
    for x in (strided("x", (3, 4, 5), (1, 15, 3)), strided("x", (3, 4, 5), (24, 6, 1))):
        kernel = kernel_of(one(Op("neg", (load(x, *own),)), own, x))
        assert len(kernel.grid) > 1
    rows = strided("x", (3, 4, 5), (24, 6, 1))  # rows of 5 at a pitch of 6: a and b walk as one
    assert extents(kernel_of(one(Op("neg", (load(rows, *own),)), own, rows))) == ([12, 5], [])


def test_a_row_vector_keeps_rows_apart_from_columns() -> None:
    x, bias = buffer("x", 3, 4, 5), buffer("bias", 5)
    own = axes("a b c", 3, 4, 5)
    kernel = kernel_of(one(Op("add", (load(x, *own), load(bias, own[2]))), own, x, bias))
    assert extents(kernel) == ([12, 5], [])


def test_a_sum_over_two_axes_is_a_loop_over_one() -> None:
    x, out = buffer("x", 3, 4, 5), buffer("out", 3)
    a, b, c = axes("a b c", 3, 4, 5)
    before = graph((x,), (Def(out, (a,), Reduce(SUM, (b, c), load(x, a, b, c))),), out)
    kernel = kernel_of(before)
    assert extents(kernel) == ([3], [20])


def test_an_axis_that_is_reduced_alone_stays_alone() -> None:
    """One sum is over b and c, which walk memory as one; another is over c within b."""
    x, y, z = buffer("x", 3, 4, 5), buffer("y", 3), buffer("z", 3)
    a, b, c = axes("a b c", 3, 4, 5)
    first = Def(y, (a,), Reduce(SUM, (b, c), load(x, a, b, c)))
    a, b, c = axes("a b c", 3, 4, 5)
    rows = total(SUM, c, load(x, a, b, c))
    second = Def(z, (a,), total(SUM, b, Op("abs", (rows,))))
    assert extents(kernel_of(graph((x,), (first,), y))) == ([3], [20])
    assert extents(kernel_of(graph((x,), (first, second), y, z))) == ([3], [4, 5])


def test_positions_merge_only_if_they_walk_as_memory_does() -> None:
    own = axes("a b", 4, 5)
    a, b = own
    flat = Cast(IndexValue(index(a) * 5 + index(b)), F32)
    assert extents(kernel_of(one(flat, own))) == ([20], [])
    column = Cast(position(b), F32)
    assert extents(kernel_of(one(column, own))) == ([4, 5], [])


def test_ragged_axes_stay() -> None:
    x, out = buffer("x", 3, 10), buffer("out", 3, 4)
    a, o = axes("a o", 3, 4)
    i = Axis("i", index(3), limit=index(10) - index(o) * 3)
    body = load(x, a, index(o) * 3 + i)
    before = graph((x,), (Def(out, (a, o), total(SUM, i, body)),), out)
    kernel = kernel_of(before)
    assert extents(kernel) == ([3, 4], [3])
    check_kernels(before, (numbers(3, 10),))


def test_what_is_read_through_a_stride_of_zero_is_not_summed_in_a_loop() -> None:
    x, out = strided("x", (3, 4), (1, 0)), buffer("out", 3)
    a, b = axes("a b", 3, 4)
    before = graph((x,), (Def(out, (a,), total(SUM, b, load(x, a, b))),), out)
    assert not any(isinstance(s.expr, Reduce) for s in kernel_of(before).stores)


def test_a_norm_keeps_its_rows() -> None:
    assert extents(kernel_of(layer_norm(6, 8))) == ([6], [8])


def scaled(rows: int, length: int, *, along: str = "c") -> Graph:
    """y[i, c, k] = x[i, c, k] * s[along]"""
    own = axes("i c k", 2, rows, length)
    (shared,) = (a for a in own if a.name == along)
    x, s = buffer("x", 2, rows, length), buffer("s", shared.extent)
    return one(Op("mul", (load(x, *own), load(s, shared))), own, x, s)


@pytest.mark.parametrize(
    ("length", "along", "merged"),
    [(49, "c", True), (3, "c", True), (50, "c", False), (65, "c", False), (49, "k", False)],
    ids=["odd", "very short", "of whole vectors", "long", "what places share"],
)
def test_short_odd_rows_are_one_axis_on_a_gpu(length: int, along: str, merged: bool) -> None:
    before = scaled(6, length, along=along)
    kernel = coalesce(kernel_of(before))
    rows = kernel.grid[-1].extent.const == 6 * length
    assert not rows and merge_short_rows(kernel, CPU_MACHINE) is kernel
    for machine in (HOPPER_MACHINE, A100_MACHINE):
        made = merge_short_rows(kernel, machine)
        assert (made.grid[-1].extent.const == 6 * length) is merged
    if merged:
        (factor,) = (n for n in loads(s.expr for s in made.stores) if n.buffer.base.name == "s")
        assert factor.indices == (index(made.grid[-1]) // length,)


def test_rows_of_a_sum_stay() -> None:
    x, s, out = buffer("x", 2, 6, 7, 9), buffer("s", 6), buffer("out", 2, 6, 7)
    i, c, k, r = axes("i c k r", 2, 6, 7, 9)
    summed = total(SUM, r, load(x, i, c, k, r) * load(s, c))
    kernel = coalesce(kernel_of(graph((x, s), (Def(out, (i, c, k), summed),), out)))
    assert len(kernel.grid) > 1 and merge_short_rows(kernel, HOPPER_MACHINE) is kernel


def test_short_rows_that_lie_apart_stay() -> None:
    own = axes("i c k", 2, 6, 7)
    apart, s = strided("x", (2, 6, 7), (48, 8, 1)), buffer("s", 6)
    body = Op("mul", (load(apart, *own), load(s, own[1])))
    kernel = coalesce(kernel_of(one(body, own, apart, s)))
    assert merge_short_rows(kernel, HOPPER_MACHINE) is kernel


def short_rows(kernel: Kernel) -> Kernel:
    return merge_short_rows(coalesce(kernel), HOPPER_MACHINE)


def check_kernels(before: Graph, inputs: tuple[object, ...]) -> None:
    """Assert that the flat and the coalesced forms of each kernel store what a graph defines."""
    schedule = separate(before)
    for form in (flatten, coalesce, short_rows):
        steps = tuple(form(s) if isinstance(s, Kernel) else s for s in schedule.steps)
        check_same(before, Schedule(before, steps), inputs)


@BOUNDED
@given(drawn=random_graphs(symbols=True))
def test_kernels_of_random_graphs_store_the_same(drawn: Example) -> None:
    check_kernels(drawn.graph, drawn.inputs)
