"""Unrolled pairs: what is stored side by side is two stores, and lanes run along the pairs."""

from __future__ import annotations

import pytest
from hypothesis import given

from fusec.codegen.targets import CPU_MACHINE, find_target
from fusec.ir.dtype import BF16, F32, I32, U8
from fusec.ir.expr import Cast, Const, Expr, Op, Reduce, Select
from fusec.ir.graph import Def, Graph, Kernel, Schedule
from fusec.ir.index import Axis, Size, index
from fusec.ir.monoid import MAX, MIN, PROD, SUM, Monoid
from fusec.passes.fusion.fuse import separate
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.kernel.unroll_pairs import unroll_pairs
from tests.fuzz.graphs import Example
from tests.ir.graphs import axes, below, buffer, f32, graph, load
from tests.passes.pipelines import BOUNDED, check_same, kernel_of, numbers, random_graphs


def turned(*shape: int | Size, last: int = 2) -> Graph:
    """y[..., p] = where(p < 1, x[..., 0] - x[..., 1], x[..., p])."""
    x, y = buffer("x", *shape, last), buffer("y", *shape, last)
    own = axes(" ".join("abc"[: len(shape)]) + " p", *shape, last)
    rest, p = own[:-1], own[-1]
    difference = Op("sub", (load(x, *rest, 0), load(x, *rest, 1)))
    body: Expr = Select(below(p, 1), difference, load(x, *rest, p))
    return graph((x,), (Def(y, own, body),), y)


def stores(kernel: Kernel) -> list[str]:
    return [
        f"{store.indices[0]} = {store.expr}"
        for store in unroll_pairs(coalesce(kernel), CPU_MACHINE).stores
    ]


def test_a_pair_is_two_stores_without_a_choice() -> None:
    assert stores(kernel_of(turned(8))) == ["2*a = x[2*a] - x[2*a + 1]", "2*a + 1 = x[2*a + 1]"]


def test_pairs_of_symbolic_number_are_unrolled() -> None:
    kernel = unroll_pairs(kernel_of(turned(Size("n", 8))), CPU_MACHINE)
    assert [axis.name for axis in kernel.axes] == ["a"] and len(kernel.stores) == 2


@pytest.mark.parametrize("example", (turned(8, last=3), turned(8, last=4)), ids=("3", "4"))
def test_other_axes_stay(example: Graph) -> None:
    kernel = kernel_of(example)
    assert unroll_pairs(kernel, CPU_MACHINE) is kernel


def test_a_pair_alone_stays() -> None:
    x, y = buffer("x", 2), buffer("y", 2)
    (p,) = axes("p", 2)
    body = Select(below(p, 1), load(x, 1), load(x, 0))
    kernel = kernel_of(graph((x,), (Def(y, (p,), body),), y))
    assert unroll_pairs(kernel, CPU_MACHINE) is kernel


def test_a_pair_that_is_summed_stays() -> None:
    x, y, z = buffer("x", 8, 2), buffer("y", 8), buffer("z", 8, 2)
    a, p = axes("a p", 8, 2)
    total = Def(y, (a,), Reduce(SUM, (p,), load(x, a, p)))
    i, q = axes("i q", 8, 2)
    scaled = Def(z, (i, q), Op("mul", (load(x, i, q), load(y, i))))
    kernel = kernel_of(graph((x,), (total, scaled), y, z))
    assert any(p.extent is index(2) for p in kernel.axes)
    assert unroll_pairs(kernel, CPU_MACHINE) is kernel


def test_sums_of_both_parts_are_computed_once() -> None:
    x, w, y = buffer("x", 6, 4), buffer("w", 4, 6), buffer("y", 6, 2)
    a, p = axes("a p", 6, 2)
    first, second = (Axis("k", index(4)) for _ in range(2))
    body = Select(
        below(p, 1),
        Reduce(SUM, (first,), load(x, a, first)),
        Reduce(SUM, (second,), load(w, second, a)),
    )
    before = graph((x, w), (Def(y, (a, p), body),), y)
    kernel = unroll_pairs(kernel_of(before), CPU_MACHINE)
    assert [sum(isinstance(n, Reduce) for n in (store.expr,)) for store in kernel.stores] == [1, 1]
    check_same(before, Schedule(before, (kernel,)), (numbers(6, 4), numbers(4, 6)))


@pytest.mark.parametrize("monoid", (SUM, MAX, MIN, PROD), ids=repr)
@pytest.mark.parametrize("over", ("ip", "i", "p", ""))
def test_pairs_that_are_added_up_may_be_read_otherwise(monoid: Monoid, over: str) -> None:
    """y = sum(i, p: x[i, p] * (1 if p < 1 else 2)), beside another reduction of the terms."""
    x, total = buffer("x", 8, 2), buffer("y")

    def term(i: Axis, p: Axis) -> Expr:
        return Op("mul", (load(x, i, p), Select(below(p, 1), f32(1), f32(2))))

    i, p = axes("i p", 8, 2)
    both = Def(total, (), Reduce(SUM, (i, p), term(i, p)))
    j, q = axes("i p", 8, 2)
    reduced = tuple(axis for axis, name in ((j, "i"), (q, "p")) if name in over)
    kept = tuple(axis for axis in (j, q) if axis not in reduced)
    other = buffer("z", *(axis.extent for axis in kept))
    body = Reduce(monoid, reduced, term(j, q)) if reduced else term(j, q)
    before = graph((x,), (both, Def(other, kept, body)), total, other)
    after = Schedule(before, (unroll_pairs(kernel_of(before), CPU_MACHINE),))
    check_same(before, after, (numbers(8, 2),))


@pytest.mark.parametrize("shared", (False, True), ids=("own bytes", "shared bytes"))
def test_columns_that_share_bytes_are_products_of_their_own(*, shared: bool) -> None:
    """y[m, p, n] = sum(k: x[m, k] * (w[n, k] & 15 if p < 1 else w[n, k] >> 4)), in tiles."""
    x, w = buffer("x", 32, 64, dtype=BF16), buffer("w", 2, 48, 64, dtype=U8)
    y = buffer("y", 32, 2, 48)
    m, p, n, k = axes("m p n k", 32, 2, 48, 64)
    byte = Cast(load(w, 0 if shared else p, n, k), I32)
    half = Select(below(p, 1), Op("and", (byte, Const(15, I32))), Op("shr", (byte, Const(4, I32))))
    body = Op("mul", (Cast(load(x, m, k), F32), Cast(half, F32)))
    before = graph((x, w), (Def(y, (m, p, n), Reduce(SUM, (k,), body)),), y)
    kernel = unroll_pairs(coalesce(kernel_of(before)), find_target("cpu:amx").machine)
    assert len(kernel.stores) == 1 + shared
    check_same(before, Schedule(before, (kernel,)), (numbers(32, 64), abs(numbers(2, 48, 64))))


def test_columns_that_are_a_symbolic_distance_apart_stay_one_product() -> None:
    """Stores at ``2*N*m + n`` and ``N`` behind it are not seen to be apart."""
    columns = Size("N", 48)
    x, w = buffer("x", 32, 64, dtype=BF16), buffer("w", columns, 64, dtype=U8)
    y = buffer("y", 32, 2, columns)
    m, p, n, k = axes("m p n k", 32, 2, columns, 64)
    byte = Cast(load(w, n, k), I32)
    half = Select(below(p, 1), Op("and", (byte, Const(15, I32))), Op("shr", (byte, Const(4, I32))))
    body = Op("mul", (Cast(load(x, m, k), F32), Cast(half, F32)))
    before = graph((x, w), (Def(y, (m, p, n), Reduce(SUM, (k,), body)),), y)
    kernel = coalesce(kernel_of(before))
    assert unroll_pairs(kernel, find_target("cpu:amx").machine) is kernel


def test_two_axes_of_pairs_in_one_sum_are_both_unrolled() -> None:
    x, w, y = buffer("x", 8, 2), buffer("w", 8, 2), buffer("y")
    i, p, q = axes("i p q", 8, 2, 2)
    term = Op("mul", (load(x, i, p), Op("exp", (load(w, i, q),))))
    shifted = Op("add", (Op("add", (load(x, i, p), load(w, i, q))), term))
    before = graph((x, w), (Def(y, (), Reduce(SUM, (i, p, q), shifted)),), y)
    kernel = unroll_pairs(kernel_of(before), CPU_MACHINE)
    assert [axis.extent for axis in kernel.axes] == [index(8)]
    check_same(before, Schedule(before, (kernel,)), (numbers(8, 2), numbers(8, 2)))


def test_a_factor_of_bytes_and_of_elements_is_not_joined() -> None:
    """y[m, n] = sum(k, p: x[m, k, p] * (w[n, k] if p < 1 else 2 * w[n, k]) * s[n, k, p])."""
    x, w, s = buffer("x", 32, 16, 2), buffer("w", 48, 16), buffer("s", 48, 16, 2)
    y = buffer("y", 32, 48)
    m, n, k, p = axes("m n k p", 32, 48, 16, 2)
    byte = load(w, n, k)
    weight = Op("mul", (Select(below(p, 1), byte, byte * f32(2)), load(s, n, k, p)))
    body = Op("mul", (load(x, m, k, p), weight))
    before = graph((x, w, s), (Def(y, (m, n), Reduce(SUM, (k, p), body)),), y)
    made = unroll_pairs(kernel_of(before), CPU_MACHINE)
    assert set(made.inside) == {axis for node in made.reductions for axis in node.over}
    inputs = (numbers(32, 16, 2), numbers(48, 16, seed=1), numbers(48, 16, 2, seed=2))
    check_same(before, Schedule(before, (made,)), inputs)


def test_values_stay_the_same() -> None:
    for shape in ((8,), (3, 5), (2, 3, 4)):
        before = turned(*shape)
        after = Schedule(before, (unroll_pairs(kernel_of(before), CPU_MACHINE),))
        check_same(before, after, (numbers(*shape, 2),))


@BOUNDED
@given(drawn=random_graphs(symbols=True))
def test_kernels_of_random_graphs_store_the_same(drawn: Example) -> None:
    schedule = separate(drawn.graph)
    steps = tuple(
        unroll_pairs(coalesce(s), CPU_MACHINE) if isinstance(s, Kernel) else s
        for s in schedule.steps
    )
    check_same(drawn.graph, Schedule(drawn.graph, steps), drawn.inputs)
