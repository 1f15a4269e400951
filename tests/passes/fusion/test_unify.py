"""Unification: which definitions may share a kernel, over which axes, and why others may not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusec.ir.dtype import BF16, F32
from fusec.ir.expr import Buffer, Cast, Op, Reduce, loads, postorder
from fusec.ir.graph import Def, Graph, Kernel, Schedule, Store, argument_views
from fusec.ir.index import Axis, IntoIndex, Size, index
from fusec.ir.monoid import MAX, SUM
from fusec.passes.dag import find_uses
from fusec.passes.fusion.unify import Rejection, unify
from tests.fuzz.graphs import Example
from tests.ir.graphs import axes, buffer, f32, graph, load, total
from tests.passes.pipelines import BOUNDED, check_same, numbers, random_graphs

X, R = buffer("x", 6, 8), buffer("r", 6, 8)


def row_sum(name: str, source: Buffer = X) -> Def:
    m, c = axes("m c", *source.shape)
    return Def(buffer(name, source.shape[0]), (m,), total(SUM, c, load(source, m, c)))


def column_sum(name: str, source: Buffer = X) -> Def:
    m, c = axes("m c", *source.shape)
    return Def(buffer(name, source.shape[1]), (c,), total(SUM, m, load(source, m, c)))


def together(*defs: Def, stored: tuple[Def, ...] = ()) -> Kernel:
    """Unify some lines; stored is the last one, unless others are named."""
    return unify(defs, frozenset(d.buffer for d in stored or defs[-1:]))


def check_kernel(kernel: Kernel, *defs: Def, inputs: tuple[Buffer, ...] = (X,)) -> None:
    """Assert that a kernel stores what its definitions say."""
    outputs = tuple(s.buffer for s in kernel.stores)
    before = graph(inputs, defs, *outputs)
    shapes = [tuple(n.const for n in b.shape) for b in inputs]
    values = tuple(numbers(*shape, seed=k) for k, shape in enumerate(shapes))
    check_same(before, Schedule(before, (kernel,)), values)


def rejection(*defs: Def, stored: tuple[Def, ...] = ()) -> str:
    with pytest.raises(Rejection) as caught:
        together(*defs, stored=stored or defs)
    return caught.value.reason


# -- axes that unify -------------------------------------------------------------------------------


def test_a_reader_s_axes_become_its_producer_s() -> None:
    s = row_sum("s")
    n, k = axes("n k", 6, 8)
    y = Def(buffer("y", 6, 8), (n, k), Op("sub", (load(X, n, k), load(s.buffer, n))))
    kernel = together(s, y)
    assert [a.extent for a in kernel.grid] == [index(6)]
    assert [a.extent for a in kernel.inside] == [index(8)]
    assert {b.name for b in kernel.defs} == {"s", "y"}
    assert len(loads(e.expr for e in kernel.stores)) == 1  # x is loaded at one place
    check_kernel(kernel, s, y)


def test_sums_of_two_tensors_of_one_shape_run_in_one_loop() -> None:
    """Nothing ties dgamma's rows to dbeta's, but their extents."""
    s, t = column_sum("s", X), column_sum("t", R)
    kernel = together(s, t, stored=(s, t))
    assert (len(kernel.grid), len(kernel.inside)) == (1, 1)
    check_kernel(kernel, s, t, inputs=(X, R))


def test_sums_over_another_number_of_rows_keep_loops_of_their_own() -> None:
    other = buffer("o", 5, 8)
    s, t = column_sum("s", X), column_sum("t", other)
    kernel = together(s, t, stored=(s, t))
    assert sorted(a.extent.const for a in kernel.inside) == [5, 6]
    check_kernel(kernel, s, t, inputs=(X, other))


def reshaped(name: str, source: Buffer, shape: tuple[int, int]) -> Def:
    """name[a, b] = source[flat // 8, flat % 8] * 2 of a (6, 8) tensor"""
    a, b = axes("a b", *shape)
    flat = index(a) * shape[1] + index(b)
    value = load(source, flat // 8, flat % 8)
    return Def(buffer(name, *shape), (a, b), Op("mul", (value, f32(2))))


@pytest.mark.parametrize("shape", [(3, 16), (12, 4), (2, 24), (24, 2), (48, 1), (1, 48)])
def test_a_reshape_is_cut_to_the_common_refinement(shape: tuple[int, int]) -> None:
    m, c = axes("m c", 6, 8)
    first = Def(buffer("y", 6, 8), (m, c), Op("exp", (load(X, m, c),)))
    second = reshaped("z", first.buffer, shape)
    kernel = together(first, second, stored=(first, second))
    assert "//" not in repr(kernel.stores) and "%" not in repr(kernel.stores)
    assert len([n for n in postorder(s.expr for s in kernel.stores) if is_exp(n)]) == 1
    check_kernel(kernel, first, second)


def is_exp(node: object) -> bool:
    return isinstance(node, Op) and node.name == "exp"


def test_extents_without_a_common_refinement_compute_a_pointwise_value_twice() -> None:
    y = buffer("y", 8)
    (i,) = axes("i", 8)
    first = Def(y, (i,), Op("exp", (load(X, 0, i),)))
    (j,) = axes("j", 6)
    second = Def(buffer("z", 6), (j,), Op("neg", (load(y, j),)))
    kernel = together(first, second, stored=(first, second))
    assert len([n for n in postorder(s.expr for s in kernel.stores) if is_exp(n)]) == 2
    check_kernel(kernel, first, second)


def test_extents_of_sizes_unify_by_their_canonical_form() -> None:
    n = Size("N", 4)
    x = buffer("x", index(n) * 2, 8)
    s = row_sum("s", x)
    m, c = axes("m c", 2 * index(n), 8)
    y = Def(buffer("y", 2 * index(n), 8), (m, c), Op("sub", (load(x, m, c), load(s.buffer, m))))
    kernel = together(s, y)
    assert [a.extent for a in kernel.grid] == [index(n) * 2]


# -- what is stored and read -----------------------------------------------------------------------


def test_what_nobody_outside_needs_never_reaches_memory() -> None:
    s = row_sum("s")
    (n,) = axes("n", 6)
    y = Def(buffer("y", 6), (n,), Op("sqrt", (Op("abs", (load(s.buffer, n),)),)))
    assert [store.buffer.name for store in together(s, y).stores] == ["y"]
    assert [store.buffer.name for store in together(s, y, stored=(s, y)).stores] == ["s", "y"]


def half_and_reader(*, stored: bool) -> Store:
    m, c = axes("m c", 6, 8)
    h = Def(buffer("h", 6, 8, dtype=BF16), (m, c), Cast(Op("exp", (load(X, m, c),)), BF16))
    m, c = axes("m c", 6, 8)
    widened = Cast(load(h.buffer, m, c), F32)
    y = Def(buffer("y", 6, 8), (m, c), Op("neg", (widened,)))
    return together(h, y, stored=(h, y) if stored else (y,)).stores[-1]


def test_a_half_value_that_is_also_stored_is_read_rounded() -> None:
    assert "round_bf16" in repr(half_and_reader(stored=True).expr)
    assert "bf16" not in repr(half_and_reader(stored=False).expr)


# -- rejections ------------------------------------------------------------------------------------


def pointwise(name: str, source: Buffer, *at: IntoIndex, own: tuple[Axis, ...]) -> Def:
    value = Op("mul", (load(source, *at), f32(2)))
    return Def(buffer(name, *(a.extent for a in own)), own, value)


def test_a_sum_is_not_read_backwards() -> None:
    s = row_sum("s")
    (n,) = axes("n", 6)
    y = pointwise("y", s.buffer, 5 - index(n), own=(n,))
    assert rejection(s, y).startswith("y reads s at another place: index")


def test_a_sum_is_not_read_by_another_number_of_rows() -> None:
    s = row_sum("s")
    (n,) = axes("n", 5)
    y = pointwise("y", s.buffer, n, own=(n,))
    assert "extents 5 and 6 have no common refinement" in rejection(s, y)


def test_two_axes_of_one_definition_do_not_become_one() -> None:
    square = buffer("q", 6, 6)
    s = row_sum("s", square)
    m, c = axes("m c", 6, 6)
    outer = Op("mul", (load(s.buffer, m), load(s.buffer, c)))
    y = Def(buffer("y", 6, 6), (m, c), outer)
    assert "two axes of y would become one" in rejection(s, y)


def test_a_reduction_does_not_capture_a_free_axis_of_its_body() -> None:
    """y[m] = max(k: s[m] - s[k]) of row sums s: k cannot be s's axis as well, for m is."""
    s = row_sum("s")
    m, k = axes("m k", 6, 6)
    both = Op("sub", (load(s.buffer, m), load(s.buffer, k)))
    y = Def(buffer("y", 6), (m,), total(MAX, k, both))
    assert "a reduction in y would capture an axis" in rejection(s, y)


def test_sums_without_a_common_axis_run_one_after_the_other() -> None:
    """Legal, but without a grid: the cost model decides."""
    other = buffer("o", 5, 7)
    s, t = row_sum("s"), row_sum("t", other)
    kernel = together(s, t, stored=(s, t))
    assert kernel.grid == ()
    check_kernel(kernel, s, t, inputs=(X, other))


def test_sums_by_rows_and_by_columns_leave_nothing_on_the_grid() -> None:
    m, c = axes("m c", 6, 8)
    y = pointwise("y", X, m, c, own=(m, c))
    m, c = axes("m c", 6, 8)
    s = Def(buffer("s", 8), (c,), Reduce(SUM, (m,), load(y.buffer, m, c)))
    t = row_sum("t")
    kernel = together(y, s, t, stored=(y, s, t))
    assert kernel.grid == ()
    check_kernel(kernel, y, s, t)


def test_an_outer_axis_of_the_grid_is_not_run_inside_an_inner_one() -> None:
    """z[c] lacks m, which is slower than c: a grid over c alone would walk down y's columns."""
    row = buffer("b", 8)
    m, c = axes("m c", 6, 8)
    scaled = Op("mul", (load(X, m, c), load(row, c)))
    y = Def(buffer("y", 6, 8), (m, c), scaled)
    (c,) = axes("c", 8)
    z = pointwise("z", row, c, own=(c,))
    assert rejection(y, z) == "z lacks the outer axis m of the others"


# -- any graph -------------------------------------------------------------------------------------


@BOUNDED
@given(drawn=random_graphs(symbols=True), data=st.data())
def test_neighbours_in_random_graphs_share_a_kernel_or_say_why_not(
    drawn: Example, data: st.DataObject
) -> None:
    before = drawn.graph
    runs = runs_of_definitions(before)
    if not runs:
        return
    first, last = data.draw(st.sampled_from(runs))
    try:
        schedule = merged(before, first, last)
    except Rejection as rejection:
        assert rejection.reason
    else:
        check_same(before, schedule, drawn.inputs)


def runs_of_definitions(before: Graph) -> list[tuple[int, int]]:
    """Return (first, last) of all runs of two to four definitions without an extern among them."""
    found = []
    for first in range(len(before.nodes)):
        for last in range(first + 1, min(first + 4, len(before.nodes))):
            if all(isinstance(n, Def) for n in before.nodes[first : last + 1]):
                found.append((first, last))
    return found


def merged(before: Graph, first: int, last: int) -> Schedule:
    """Return a schedule with some neighbouring definitions in one kernel, the others apart."""
    nodes = before.nodes
    needed = {v.buffer for v in argument_views(before.outputs)} | find_uses(before).live_out
    for node in (*nodes[:first], *nodes[last + 1 :]):
        needed.update(node.reads)
    steps = []
    for k, node in enumerate(nodes):
        if k == first:
            run = tuple(n for n in nodes[first : last + 1] if isinstance(n, Def))
            steps.append(unify(run, frozenset(needed), f"k{k}"))
        elif first < k <= last:
            continue
        elif isinstance(node, Def):
            steps.append(unify((node,), frozenset((node.buffer,)), f"k{k}"))
        else:
            steps.append(node)
    return Schedule(before, tuple(steps))
