"""Fusion: what shares a kernel, what may not, and why."""

from __future__ import annotations

import pytest

from fusec.codegen.targets import find_target
from fusec.ir.dtype import BF16, F32
from fusec.ir.expr import Buffer, Cast, Op, Reduce
from fusec.ir.graph import Def, Extern, Graph
from fusec.ir.index import index
from fusec.ir.monoid import MAX, SUM
from fusec.passes.fusion.fuse import fuse
from fusec.passes.fusion.unify import Rejection, unify
from tests.ir.graphs import (
    axes,
    below,
    buffer,
    f32,
    graph,
    layer_norm,
    load,
    position,
    softmax,
    total,
    whole,
)
from tests.passes.pipelines import check_full, check_small, kernels, numbers


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_layer_norm_is_one_kernel_with_rows_on_the_grid(target: str) -> None:
    example = layer_norm(6, 32)
    machine = find_target(target)
    schedule = fuse(example, machine.machine, machine.accepts)
    (kernel,) = kernels(schedule)
    assert [a.extent for a in kernel.grid] == [index(6)]
    assert [a.extent for a in kernel.inside] == [index(32)]


def test_softmax_over_one_axis_keeps_rows_apart() -> None:
    schedule = fuse(softmax(5, 8), find_target("cpu").machine, find_target("cpu").accepts)
    (kernel,) = kernels(schedule)
    assert [a.extent for a in kernel.grid] == [index(5)]
    assert len(kernel.inside) == 1


def test_square_matrix_plus_its_transpose_keeps_its_axes_apart() -> None:
    x, y, z = buffer("x", 4, 4), buffer("y", 4, 4), buffer("z", 4, 4)
    m, c = axes("m c", 4, 4)
    first = Def(y, (m, c), Op("mul", (load(x, m, c), f32(2))))
    m, c = axes("m c", 4, 4)
    second = Def(z, (m, c), Op("add", (load(y, m, c), load(y, c, m))))
    check_small(graph((x,), (first, second), z, y), (numbers(4, 4),))
    check_small(graph((x,), (first, second), z), (numbers(4, 4),), "sm_90")


def test_mean_by_rows_read_by_columns_is_rejected_when_extents_agree() -> None:
    x, mean, y = buffer("x", 4, 4), buffer("mean", 4), buffer("y", 4, 4)
    m, c = axes("m c", 4, 4)
    first = Def(mean, (m,), total(SUM, c, load(x, m, c)))
    m, c = axes("m c", 4, 4)
    second = Def(y, (m, c), Op("sub", (load(x, m, c), load(mean, c))))
    check_small(graph((x,), (first, second), y), (numbers(4, 4),))
    check_small(graph((x,), (first, second), y, mean), (numbers(4, 4),), "sm_90")


def test_reduction_read_at_another_place_is_rejected_with_the_reason() -> None:
    x, s, y = buffer("x", 4, 6), buffer("s", 4), buffer("y", 4)
    m, c = axes("m c", 4, 6)
    first = Def(s, (m,), total(SUM, c, load(x, m, c)))
    (n,) = axes("n", 4)
    second = Def(y, (n,), Op("add", (load(s, n), load(s, index(3) - index(n)))))
    with pytest.raises(Rejection, match="y reads s at another place") as caught:
        unify((first, second), frozenset((y,)))
    assert "computed" in caught.value.reason


def test_pointwise_producer_read_at_another_place_is_computed_again() -> None:
    x, s, y = buffer("x", 8), buffer("s", 8), buffer("y", 8)
    (m,) = axes("m", 8)
    first = Def(s, (m,), Op("mul", (load(x, m), f32(3))))
    (n,) = axes("n", 8)
    second = Def(y, (n,), Op("add", (load(s, n), load(s, index(7) - index(n)))))
    kernel = unify((first, second), frozenset((y, s)))
    assert len(kernel.stores) == 2
    check_small(graph((x,), (first, second), y, s), (numbers(8),))


def test_reshape_that_merges_axes_leaves_no_division() -> None:
    x, s, y = buffer("x", 3, 4, 5), buffer("s", 3, 4, 5), buffer("y", 12)
    a, b, c = axes("a b c", 3, 4, 5)
    first = Def(s, (a, b, c), Op("exp", (load(x, a, b, c),)))
    m, k = axes("m k", 12, 5)
    row = load(s, index(m) // 4, index(m) % 4, k)
    second = Def(y, (m,), total(SUM, k, row))
    kernel = unify((first, second), frozenset((y, s)))
    assert [a.extent for a in kernel.grid] == [index(3), index(4)]
    assert "//" not in repr(kernel.stores) and "%" not in repr(kernel.stores)


def test_kernel_does_not_close_a_cycle_through_an_extern() -> None:
    # a -> extern -> b, and b reads a too: a and b together would wait for themselves.
    x, a, e, b = (buffer(n, 4, 4) for n in "xaeb")
    m, c = axes("m c", 4, 4)
    first = Def(a, (m, c), Op("mul", (load(x, m, c), f32(2))))
    middle = Extern("e", "copy", (whole(a),), (), (e,), "a copy")
    m, c = axes("m c", 4, 4)
    last = Def(b, (m, c), Op("add", (load(a, m, c), load(e, m, c))))
    schedule = check_small(graph((x,), (first, middle, last), b, a), (numbers(4, 4),))
    assert len(kernels(schedule)) == 2


def test_stored_16_bit_value_is_read_rounded_in_its_own_kernel() -> None:
    x, h, y = buffer("x", 8), buffer("h", 8, dtype=BF16), buffer("y", 8)
    (m,) = axes("m", 8)
    first = Def(h, (m,), Cast(Op("mul", (load(x, m), f32(257))), BF16))
    (n,) = axes("n", 8)
    second = Def(y, (n,), Op("sub", (Cast(load(h, n), F32), load(x, n))))
    schedule = check_small(graph((x,), (first, second), y, h), (numbers(8) + 8,))
    assert len(kernels(schedule)) == 1


def test_guard_along_a_bound_axis_is_not_captured() -> None:
    # y pads s, the sum of rows, by one on each side: its guard varies along the summed extent.
    x, s, y = buffer("x", 4, 4), buffer("s", 4), buffer("y", 6)
    m, c = axes("m c", 4, 4)
    first = Def(s, (m,), Op("neg", (total(MAX, c, load(x, m, c)),)))
    (n,) = axes("n", 6)
    here = index(n) - 1
    inside = Op("and", (Op("ge", (position(here), position(0))), below(here, 4)))
    second = Def(y, (n,), load(s, here, guard=inside))
    for target in ("cpu", "sm_90"):
        check_small(graph((x,), (first, second), y), (numbers(4, 4),), target)


def row_and_column_sums(rows: int) -> Graph:
    """dx and dgamma: y = x * sum over columns, w = sum over rows of x*x."""
    x, s = buffer("x", rows, 48), buffer("s", rows)
    y, w = buffer("y", rows, 48), buffer("w", 48)
    m, c = axes("m c", rows, 48)
    first = Def(s, (m,), total(SUM, c, load(x, m, c)))
    m, c = axes("m c", rows, 48)
    second = Def(y, (m, c), Op("mul", (load(x, m, c), load(s, m))))
    m, c = axes("m c", rows, 48)
    square = Op("mul", (load(x, m, c), load(x, m, c)))
    third = Def(w, (c,), Reduce(SUM, (m,), square))
    return graph((x,), (first, second, third), y, w)


@pytest.mark.parametrize("rows", [64, 197])
def test_row_kernel_takes_the_partial_column_sums_along(rows: int) -> None:
    example = row_and_column_sums(rows)
    schedule = check_small(example, (numbers(rows, 48),))
    made = [[s.buffer.name for s in k.stores] for k in kernels(schedule)]
    assert len(made) <= 2
    assert "y" in made[0]


def test_sizes_of_one_share_kernels_with_anything() -> None:
    check_full(layer_norm(1, 1), (numbers(1, 1), numbers(1), numbers(1)))


def test_a_limit_takes_the_best_merges_and_no_more() -> None:
    target, example = find_target("cpu"), layer_norm(6, 32)
    whole_run = fuse(example, target.machine, target.accepts)
    taken = [decision for decision in whole_run.decisions if decision.taken]
    assert len(taken) > 1
    for limit in range(len(taken) + 1):
        schedule = fuse(example, target.machine, target.accepts, limit)
        assert [d for d in schedule.decisions if d.taken] == taken[:limit]
        assert len(kernels(schedule)) == len(example.nodes) - limit


def test_what_stands_between_two_products_is_the_first_one_s_epilogue() -> None:
    x, w, v = buffer("x", 256, 512), buffer("w", 512, 128), buffer("v", 128, 512)

    def multiply(name: str, left: Buffer, right: Buffer) -> Def:
        (rows, terms), columns = left.shape, right.shape[1]
        m, n, k = axes("m n k", rows, columns, terms)
        body = Op("mul", (load(left, m, k), load(right, k, n)))
        return Def(buffer(name, rows, columns), (m, n), total(SUM, k, body))

    y = multiply("y", x, w)
    m, n = axes("m n", 256, 128)
    h = Def(buffer("h", 256, 128), (m, n), Op("exp", (load(y.buffer, m, n),)))
    z = multiply("z", h.buffer, v)
    target = find_target("sm_90")
    made = fuse(graph((x, w, v), (y, h, z), z.buffer), target.machine, target.accepts)
    assert [sorted(b.name for b in k.defs) for k in kernels(made)] == [["h", "y"], ["z"]]
