"""Equal parts of an axis are computed side by side."""

from __future__ import annotations

import numpy as np
import pytest

from fusec.codegen.targets import find_target
from fusec.ir.dtype import BF16, F32
from fusec.ir.expr import Buffer, Expr, IndexValue, Load, Op, Reduce, Select, cast, in_range
from fusec.ir.graph import Def, FlatKernel, kernel_nodes
from fusec.ir.index import Index, index
from fusec.ir.monoid import SUM
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.kernel.unroll_parts import unroll_parts
from tests.ir.graphs import axes, buffer, graph, load
from tests.passes.kernel.test_unroll_windows import run
from tests.passes.pipelines import kernel_of

MACHINE = find_target("cpu:avx512").machine


def joined(lengths: tuple[int, ...], *, last: bool = False) -> FlatKernel:
    """y = tanh(cat(parts)), along the first axis or the last."""
    total = sum(lengths)
    shape = (24, total) if last else (total, 24)
    y = buffer("y", *shape)
    parts = [buffer(f"x{k}", *((24, n) if last else (n, 24))) for k, n in enumerate(lengths)]
    i, j = axes("i j", *shape)
    along, start = (j if last else i), total
    value: Expr | None = None
    for part, length in zip(parts[::-1], lengths[::-1], strict=True):
        start -= length
        here = index(along) - start
        inside = in_range(here, index(0), index(length))
        element = Load(part, (index(i), here) if last else (here, index(j)), inside)
        below = Op("lt", (IndexValue(index(along)), IndexValue(index(start + length))))
        value = element if value is None else Select(below, element, value)
    assert value is not None
    line = Def(y, (i, j), Op("tanh", (value,)))
    return coalesce(kernel_of(graph(tuple(parts), (line,), y)))


@pytest.mark.parametrize("length", [1, 3])
def test_each_part_has_a_store_without_comparisons(length: int) -> None:
    kernel = joined((length,) * 9)
    found = unroll_parts(kernel, MACHINE)
    assert len(found.stores) == 9
    assert not [n for n in kernel_nodes(found) if isinstance(n, Select)]
    assert np.array_equal(run(found)["y"], run(kernel)["y"])


def test_parts_of_whole_vectors_are_stored_along_the_lanes() -> None:
    kernel = joined((16,) * 8, last=True)
    found = unroll_parts(kernel, MACHINE)
    assert len(found.stores) == 8
    assert np.array_equal(run(found)["y"], run(kernel)["y"])
    narrow = joined((4,) * 8, last=True)
    assert unroll_parts(narrow, MACHINE) is narrow


@pytest.mark.parametrize(
    "lengths", [(1,) * 7, (5, 1, 1, 1, 1, 1, 1, 1, 1), (8, 8)], ids=["few", "unequal", "two"]
)
def test_few_or_unequal_parts_stay(lengths: tuple[int, ...]) -> None:
    kernel = joined(lengths)
    assert unroll_parts(kernel, MACHINE) is kernel


GPU = find_target("sm_90").machine


def rotated(width: int, *, normed: bool = False, joined: bool = False) -> FlatKernel:
    """y = x*c + cat(-x[half:], x[:half])*s of rows; after an RMS norm; or cat(a, b) of two."""
    x, a = (buffer(name, 24, width) for name in "xa")
    c, s = (buffer(name, width) for name in "cs")
    y, r = buffer("y", 24, width), buffer("r", 24)
    half = width // 2
    i, d = axes("i d", 24, width)
    first = Op("lt", (IndexValue(index(d)), IndexValue(index(half))))
    lines: list[Def] = []

    def element(source: Buffer, place: Index, guard: Expr | None) -> Expr:
        loaded: Expr = Load(source, (index(i), place), guard)
        return Op("mul", (loaded, Load(r, (index(i),)))) if normed else loaded

    if normed:
        row, k = axes("i k", 24, width)
        squares = Op("mul", (load(x, row, k), load(x, row, k)))
        total = Reduce(SUM, (k,), squares)
        lines.append(Def(r, (row,), Op("rsqrt", (total,))))
    upper = element(x, index(d) + half, in_range(index(d) + half, index(0), index(width)))
    lower = element(a if joined else x, index(d) - half, in_range(index(d) - half, index(0), None))
    turned = Select(first, Op("neg", (upper,)), lower)
    whole = Op("mul", (turned, load(s, d)))
    if not joined:
        whole = Op("add", (Op("mul", (element(x, index(d), None), load(c, d))), whole))
    lines.append(Def(y, (i, d), whole))
    inputs = (x, a, c, s) if joined else (x, c, s)
    return coalesce(kernel_of(graph(inputs, tuple(lines), *(line.buffer for line in lines))))


@pytest.mark.parametrize("normed", [False, True])
def test_halves_that_read_one_another_are_computed_together(normed: bool) -> None:
    kernel = rotated(64, normed=normed)
    found = unroll_parts(kernel, GPU)
    places = {
        n.indices for n in kernel_nodes(found) if isinstance(n, Load) and n.buffer.name == "x"
    }
    assert len(places) == 2 and not [n for n in kernel_nodes(found) if isinstance(n, Select)]
    assert [s.buffer.name for s in found.stores] == (["r", "y", "y"] if normed else ["y", "y"])
    for name, numbers in run(kernel).items():
        np.testing.assert_allclose(run(found)[name], numbers, rtol=1e-4)


@pytest.mark.parametrize(
    "kernel",
    [rotated(64, joined=True), rotated(20)],
    ids=["other tensors", "parts of half a vector"],
)
def test_halves_stay_on_a_gpu(kernel: FlatKernel) -> None:
    assert unroll_parts(kernel, GPU) is kernel


@pytest.mark.parametrize(
    ("width", "parts"), [(768, 3), (3072, 3), (5120, 5), (1024, 1), (768 * 11, 1), (96, 1)]
)
def test_a_row_of_no_power_of_two_has_parts_without_idle_lanes(width: int, parts: int) -> None:
    x, y = buffer("x", 8, width), buffer("y", 8, width)
    i, k, d = axes("i k d", 8, width, width)
    total = Reduce(SUM, (k,), load(x, i, k))
    line = Def(y, (i, d), Op("mul", (load(x, i, d), total)))
    kernel = coalesce(kernel_of(graph((x,), (line,), y)))
    found = unroll_parts(kernel, GPU)
    assert len(found.stores) == parts
    np.testing.assert_allclose(run(found)["y"], run(kernel)["y"], rtol=1e-5)


@pytest.mark.parametrize(
    ("width", "parts", "left"),
    [
        (1096, 5, 72),
        (1500, 3, 476),
        (2500, 5, 452),
        (2560, 5, None),
        (3400, 1, None),
        (9000, 5, 808),
        (2501, 5, 453),
        (5428, 1, None),
    ],
)
def test_the_last_part_of_a_row_beside_column_sums_may_be_short(
    width: int, parts: int, left: int | None
) -> None:
    """Parts are eighths of the next power of two, or quarters; half vectors stay whole."""
    x, y, c = buffer("x", 8, width, dtype=BF16), buffer("y", 8, width), buffer("c", width)
    i, j, k, d, e = axes("i j k d e", 8, 8, width, width, width)
    total = Reduce(SUM, (k,), cast(load(x, i, k), F32))
    scaled = Def(y, (i, d), Op("div", (cast(load(x, i, d), F32), total)))
    columns = Def(c, (e,), Reduce(SUM, (j,), cast(load(x, j, e), F32)))
    kernel = coalesce(kernel_of(graph((x,), (scaled, columns), y, c)))
    found = unroll_parts(kernel, GPU)
    guards = [s.guard for s in found.stores if s.guard is not None]
    assert len(found.stores) == 2 * parts and len(guards) == (2 if left else 0)
    assert all(str(guard).endswith(f"({left}):i32") for guard in guards)
    for name, numbers in run(kernel).items():
        np.testing.assert_allclose(run(found)[name], numbers, rtol=1e-4, atol=1e-5)


def turned(*, normed: bool = False, whole: bool = False) -> FlatKernel:
    """y = pairs of x times those of c, as complex numbers, with an axis of two or of one that is
    halved; behind a norm."""
    x, c, y, r = buffer("x", 24, 64), buffer("c", 64), buffer("y", 24, 64), buffer("r", 24)
    i, j, p, k, d = axes("i j p k d", 24, 32, 2, 64, 64)
    pair = index(d) // 2 if whole else index(j)
    which = index(d) % 2 if whole else index(p)
    a, b = (load(x, i, pair * 2 + n) for n in range(2))
    e, f = (load(c, pair * 2 + n) for n in range(2))
    even = Op("sub", (Op("mul", (a, e)), Op("mul", (b, f))))
    odd = Op("add", (Op("mul", (a, f)), Op("mul", (b, e))))
    value: Expr = Select(Op("lt", (IndexValue(which), IndexValue(index(1)))), even, odd)
    lines = []
    if normed:
        row, k = axes("i k", 24, 64)
        squares = Op("mul", (load(x, row, k), load(x, row, k)))
        lines.append(Def(r, (row,), Op("rsqrt", (Reduce(SUM, (k,), squares),))))
        value = Op("mul", (value, load(r, i)))
    place = (d,) if whole else (j, p)
    lines.append(Def(y if whole else buffer("y", 24, 32, 2), (i, *place), value))
    return coalesce(kernel_of(graph((x, c), tuple(lines), *(line.buffer for line in lines))))


def test_one_pair_has_no_axis_left() -> None:
    """y[d] = x[1], -x[0] for d of 2, told apart by a quotient: the gradient of a turned pair."""
    x, y = buffer("x", 2), buffer("y", 2)
    (d,) = axes("d", 2)
    odd = Op("eq", (IndexValue(index(d) - (index(d) + 1) // 2 * 2 + 1), IndexValue(index(0))))
    value = Select(odd, Op("neg", (load(x, 0),)), load(x, 1))
    kernel = coalesce(kernel_of(graph((x,), (Def(y, (d,), value),), y)))
    found = unroll_parts(kernel, GPU)
    assert [str(store.indices[0]) for store in found.stores] == ["0", "1"]
    np.testing.assert_array_equal(run(found)["y"], run(kernel)["y"])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_pairs_are_stored_side_by_side_on_a_gpu(normed: bool, whole: bool) -> None:
    kernel = turned(normed=normed, whole=whole)
    found = unroll_parts(kernel, GPU)
    loads = {n.indices for n in kernel_nodes(found) if isinstance(n, Load) and n.buffer.name == "x"}
    assert len(loads) == 2 and not [n for n in kernel_nodes(found) if isinstance(n, Select)]
    assert [s.buffer.name for s in found.stores] == (["r", "y", "y"] if normed else ["y", "y"])
    for name, numbers in run(kernel).items():
        np.testing.assert_allclose(run(found)[name], numbers, rtol=1e-4)


@pytest.mark.parametrize("also", ["columns", "both", "inner"])
def test_sums_that_read_or_run_along_the_pairs_keep_their_axis(also: str) -> None:
    """y[2*j] and y[2*j + 1] beside t[j] = sum(k: x[k, j]), whose row k has twice the pairs."""
    x, z, t, y = buffer("x", 64, 32), buffer("z", 64, 64), buffer("t", 32), buffer("y", 32, 2)
    (j, p), (c, k, m) = axes("j p", 32, 2), axes("c k m", 32, 64, 64)
    sums: dict[str, Expr] = {
        "columns": Reduce(SUM, (k,), load(x, k, c)),
        "both": Op("mul", (load(x, c, c), Reduce(SUM, (k, m), load(z, k, m)))),
        "inner": Reduce(SUM, (k,), Op("mul", (load(x, k, c), Reduce(SUM, (m,), load(z, k, m))))),
    }
    first = IndexValue(index(p))
    of_pair = Select(
        Op("lt", (first, IndexValue(index(1)))),
        Op("sin", (load(t, j),)),
        Op("cos", (load(t, j),)),
    )
    (d,) = axes("d", 32)
    total = Reduce(SUM, (d,), load(t, d))
    lines = (Def(t, (c,), sums[also]), Def(y, (j, p), Op("div", (of_pair, total))))
    kernel = coalesce(kernel_of(graph((x, z), lines, y)))
    found = unroll_parts(kernel, GPU)
    for name, numbers in run(kernel).items():
        np.testing.assert_allclose(run(found)[name], numbers, rtol=1e-4)
