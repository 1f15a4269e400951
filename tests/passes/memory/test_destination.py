"""A kernel stores a result where it belongs, or says that it cannot."""

from __future__ import annotations

from fusec.ir.expr import Buffer, Expr, Op
from fusec.ir.extern import Window
from fusec.ir.graph import Kernel, Store
from fusec.ir.index import Axis, Index, index
from fusec.ir.monoid import SUM
from fusec.ir.verify import verify_kernel
from fusec.passes.memory.destination import Destination, in_reading_order, redirected
from tests.ir.graphs import axes, buffer, f32, load, total

A, B = axes("a b", 4, 6)
X, Y, Z, XY = buffer("x", 4), buffer("y", 4), buffer("z", 4), buffer("xy", 4, 6)
NEW, ALL = buffer("new", 4, 6), buffer("all", 4, 8)


def put(target: Buffer, expr: Expr, *indices: Axis) -> Store:
    return Store(target, tuple(map(index, indices)), expr)


def kernel(*stores: Store, grid: tuple[Axis, ...] = (A,), inside: tuple[Axis, ...] = ()) -> Kernel:
    return Kernel("k0", grid, inside, stores)


DOUBLED = kernel(put(NEW, Op("mul", (load(XY, A, B), f32(2))), A, B), grid=(A, B))


def places(made: Kernel | None) -> list[tuple[str, tuple[Index, ...]]]:
    """Return where a legal kernel stores what."""
    assert made is not None
    verify_kernel(made)
    return [(store.buffer.name, store.indices) for store in made.stores]


def test_a_result_lies_where_its_window_does() -> None:
    two_on = Destination(ALL, Window(1, index(2), index(1)))
    assert places(redirected(DOUBLED, {NEW: two_on})) == [("all", (index(A), index(B) + 2))]
    beyond = Destination(ALL, Window(1, index(3), index(1)))
    assert redirected(DOUBLED, {NEW: beyond}) is None


def test_axes_of_a_result_may_stand_in_another_order_in_its_window() -> None:
    transposed = Destination(buffer("whole", 6, 3, 4), Window(1, index(2), None), (1, 0))
    assert places(redirected(DOUBLED, {NEW: transposed})) == [
        ("whole", (index(B), index(2), index(A))),
    ]


def test_a_result_that_others_read_is_stored_twice() -> None:
    both = places(redirected(DOUBLED, {NEW: Destination(buffer("other", 4, 6), kept=True)}))
    assert [name for name, _ in both] == ["new", "other"]


def test_points_read_what_they_write_and_nothing_beside_it() -> None:
    def into_x(expr: Expr) -> Kernel | None:
        return redirected(kernel(put(Y, expr, A)), {Y: Destination(X)})

    assert places(into_x(Op("neg", (load(X, A),)))) == [("x", (index(A),))]
    assert into_x(load(X, 3 - index(A))) is None


def test_stores_that_read_what_another_writes_come_first() -> None:
    updated, old = put(X, f32(0), A), put(Y, load(X, A), A)
    found = in_reading_order(kernel(updated, old))
    assert found is not None and found.stores == (old, updated)
    assert in_reading_order(kernel(put(X, load(Y, A), A), old)) is None


def test_a_loop_reads_nothing_that_it_writes() -> None:
    summed = total(SUM, B, load(XY, A, B))
    row = put(NEW, Op("add", (load(XY, A, B), summed)), A, B)
    assert redirected(kernel(row, inside=(B,)), {NEW: Destination(XY)}) is None
    assert redirected(kernel(row, inside=(B,)), {NEW: Destination(buffer("other", 4, 6))})
    once = put(Y, Op("add", (load(X, A), summed)), A)
    assert redirected(kernel(once, inside=(B,)), {Y: Destination(X)})
    also = put(Z, load(X, A), A)
    assert redirected(kernel(once, also, inside=(B,)), {Y: Destination(X)}) is None
