"""How accesses walk along axes, and which axis is the fastest."""

from __future__ import annotations

from fusec.ir.dtype import BF16, F32, I64
from fusec.ir.expr import Buffer, Cast, Op, Reduce
from fusec.ir.graph import Def, Kernel
from fusec.ir.index import Axis, Runtime, index
from fusec.ir.monoid import SUM
from fusec.passes.schedule.access import (
    accesses,
    fastest_axis,
    limiting_axes,
    offsets_with_neighbour,
    step,
)
from tests.ir.graphs import axes, buffer, graph, load
from tests.passes.pipelines import kernel_of
from tests.passes.schedule.flat import rows, transposed


def fastest(kernel: Kernel) -> str | None:
    axis = fastest_axis(kernel, kernel.axes)
    return None if axis is None else axis.name


def test_loads_and_stores_count_once_each_with_their_bytes_and_points() -> None:
    kernel = rows(6, 8, BF16)
    assert [(a.itemsize, a.points) for a in accesses(kernel)] == [(2, 48), (2, 48)]
    assert fastest(kernel) == kernel.inside[0].name


def added(x: Buffer, y: Buffer) -> Kernel:
    """out[c] = sum(m: x[m, c] + y[c, m])"""
    out = buffer("out", 8)
    m, c = axes("m c", 6, 8)
    both = Op("add", (load(x, m, c), load(y, c, m)))
    return kernel_of(graph((x, y), (Def(out, (c,), Reduce(SUM, (m,), both)),), out))


def test_the_axis_of_most_contiguous_bytes_wins() -> None:
    """Of two tensors walked both ways, the store decides."""
    assert fastest(added(buffer("x", 6, 8), buffer("y", 8, 6))) == "c"


def test_a_wider_type_has_more_votes() -> None:
    x, y, out = buffer("x", 60, 80, dtype=BF16), buffer("y", 80, 60), buffer("out", 1)
    (z,), (m, c) = axes("z", 1), axes("m c", 60, 80)
    both = Op("mul", (Cast(load(x, m, c), F32), load(y, c, m)))
    kernel = kernel_of(graph((x, y), (Def(out, (z,), Reduce(SUM, (m, c), both)),), out))
    assert fastest(kernel) == "m"


def test_a_broadcast_along_an_axis_is_free() -> None:
    x, w, out = buffer("x", 6, 8), buffer("w", 6), buffer("out", 6, 8)
    m, c = axes("m c", 6, 8)
    value = Op("mul", (load(x, m, c), load(w, m)))
    kernel = kernel_of(graph((x, w), (Def(out, (m, c), value),), out))
    assert fastest(kernel) == "c"


def test_steps_are_strides_or_unknown_behind_a_gather() -> None:
    table, ids, out = buffer("t", 50, 8), buffer("ids", 6, dtype=I64), buffer("out", 6, 8)
    i, c = axes("i c", 6, 8)
    row = index(Runtime(load(ids, i), index(50)))
    kernel = kernel_of(
        graph((table, ids), (Def(out, (i, c), Op("neg", (load(table, row, c),))),), out)
    )
    i, c = kernel.grid
    known = [(step(a, i), step(a, c)) for a in accesses(kernel)]
    assert (8, 1) in known and (1, 0) in known  # the store and the positions
    assert any(by_row is None and by_column == 1 for by_row, by_column in known)
    assert fastest(kernel) == "c"


def test_where_nothing_is_contiguous_no_axis_is_fast() -> None:
    x = Buffer("x", (index(6), index(8)), (index(32), index(2)), F32)
    out = Buffer("out", (index(6), index(8)), (index(32), index(2)), F32)
    m, c = axes("m c", 6, 8)
    kernel = kernel_of(graph((x,), (Def(out, (m, c), Op("neg", (load(x, m, c),))),), out))
    assert fastest(kernel) is None


def test_ragged_axes_and_those_their_ends_depend_on_have_no_lanes() -> None:
    x, out = buffer("x", 10), buffer("out", 4)
    (o,) = axes("o", 4)
    i = Axis("i", index(3), limit=index(10) - index(o) * 3)
    kernel = kernel_of(
        graph((x,), (Def(out, (o,), Reduce(SUM, (i,), load(x, index(o) * 3 + i))),), out)
    )
    assert limiting_axes(kernel) == {kernel.grid[0]}
    assert fastest(kernel) is None


def test_a_transpose_walks_each_tensor_along_another_axis() -> None:
    kernel = transposed(6, 8)
    m, c = kernel.grid
    assert {(step(a, m), step(a, c)) for a in accesses(kernel)} == {(8, 1), (1, 6)}


def differences(step: int) -> Kernel:
    """y[a, b] = x[step*a, b] - x[step*a + 1, b] of columns x, so that neighbours are adjacent."""
    x = Buffer("x", (index(12 * step), index(8)), (index(1), index(12 * step)), F32)
    y = Buffer("y", (index(12), index(8)), (index(100), index(1)), F32)
    a, b = axes("a b", 12, 8)
    both = Op("sub", (load(x, index(a) * step, b), load(x, index(a) * step + 1, b)))
    return kernel_of(graph((x,), (Def(y, (a, b), both),), y))


def test_pairs_are_contiguous_where_lanes_are_two_apart() -> None:
    kernel = differences(2)
    halves = offsets_with_neighbour(kernel)
    assert {offset.const for offset in halves} == {0, 1} and len(halves) == 2
    assert fastest(kernel) == "b"
    found = fastest_axis(kernel, kernel.axes, halves)
    assert found is not None and found.name == "a"


def test_one_store_of_a_pair_is_none() -> None:
    x, y = buffer("x", 16), buffer("y", 8)
    (a,) = axes("a", 8)
    kernel = kernel_of(graph((x,), (Def(y, (a,), load(x, index(a) * 2)),), y))
    assert offsets_with_neighbour(kernel) == frozenset()
