"""Split reductions: large column sums become a partial and a final sum, others stay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from fusec.codegen.targets import CPU_MACHINE, HOPPER_MACHINE
from fusec.ir.dtype import BF16, F32
from fusec.ir.expr import Cast, Const, IndexValue, Op, Reduce, postorder
from fusec.ir.graph import Def, Graph
from fusec.ir.index import IntoIndex, Size, index
from fusec.ir.monoid import MAX, SUM, Monoid
from fusec.ir.verify import verify_graph
from fusec.passes.graph.split_reduction import split_reduction
from fusec.tools.interpreter.graph import run_graph
from tests.fuzz.graphs import Example, copy_extern
from tests.fuzz.pipeline import small_target
from tests.ir.graphs import axes, buffer, graph, load, total
from tests.passes.pipelines import BOUNDED, check_same, names, numbers, random_graphs

SIXTEEN = replace(CPU_MACHINE, parts=16)
MOST_ROWS = SIXTEEN.fusion.most_part_rows


def column_sums(rows: IntoIndex, columns: int, monoid: Monoid = SUM) -> Graph:
    x, w = buffer("x", rows, columns), buffer("w", columns)
    m, c = axes("m c", rows, columns)
    sizes = (rows,) if isinstance(rows, Size) else ()
    return graph((*sizes, x), (Def(w, (c,), Reduce(monoid, (m,), load(x, m, c))),), w)


def row_sums(rows: int, columns: int) -> Graph:
    x, w = buffer("x", rows, columns), buffer("w", rows)
    m, c = axes("m c", rows, columns)
    return graph((x,), (Def(w, (m,), total(SUM, c, load(x, m, c))),), w)


def partial(after: Graph) -> Def:
    """Return the partial definition, the first of two."""
    first, second = after.nodes
    assert isinstance(first, Def) and isinstance(second, Def)
    return first


def reduced(line: Def) -> Reduce:
    (found,) = (n for n in postorder((line.expr,)) if isinstance(n, Reduce))
    return found


def test_short_columns_enough_for_all_programs_are_whole() -> None:
    """The windows of a pooling in channels last: nothing would be gained by parts."""
    columns = SIXTEEN.units * SIXTEEN.tile
    for short in (column_sums(9, columns), column_sums(MOST_ROWS, columns)):
        assert split_reduction(short, SIXTEEN) is short
    for other in (column_sums(9, columns // 2), column_sums(2 * MOST_ROWS, columns)):
        assert names(split_reduction(other, SIXTEEN)) == ["w_part", "w"]


@pytest.mark.parametrize("monoid", [SUM, MAX], ids=str)
def test_column_sums_over_many_rows_are_split_into_as_many_parts_as_the_machine_wants(
    monoid: Monoid,
) -> None:
    before = column_sums(512, 40, monoid)
    after = split_reduction(before, SIXTEEN)
    first = partial(after)
    assert names(after) == ["w_part", "w"]
    assert [a.extent for a in first.axes] == [index(16), index(40)]
    assert [a.extent for a in reduced(first).over] == [index(32)]
    assert reduced(first).monoid is monoid
    check_same(before, after, (numbers(512, 40),))


@pytest.mark.parametrize("rows, columns, parts", [(23, 4097, 1), (64, 1024, 1), (4, 262144, 2)])
def test_a_row_that_one_program_reads_at_once_stays_whole(
    rows: int, columns: int, parts: int
) -> None:
    assert len(split_reduction(row_sums(rows, columns), HOPPER_MACHINE).nodes) == parts


def test_rows_that_no_part_divides_leave_a_short_last_part() -> None:
    before = column_sums(509, 40)  # a prime
    first = partial(split_reduction(before, SIXTEEN))
    (part, _), (inner,) = first.axes, reduced(first).over
    assert (part.extent, inner.extent) == (index(16), index(32))
    assert inner.limit is index(509) - index(part) * 32
    check_same(before, split_reduction(before, SIXTEEN), (numbers(509, 40),))


def test_a_divisor_near_the_wanted_rows_makes_even_parts() -> None:
    first = partial(split_reduction(column_sums(36 * 15, 40), SIXTEEN))
    (inner,) = reduced(first).over
    assert (inner.extent, inner.limit) == (index(36), None)  # 34 rows would leave a short part


def test_a_last_part_of_long_rows_is_short_so_that_each_unit_has_one() -> None:
    """A divisor would leave two of 16 units idle."""
    machine = replace(GPU, units=16, parts=32)
    first = partial(split_reduction(column_sums(16 * 30 + 4, 8192), machine))
    (inner,) = reduced(first).over
    assert (first.axes[0].extent.hint(), inner.extent) == (16, index(31))
    assert inner.limit is not None


def test_long_columns_get_more_parts_so_that_chains_of_sums_stay_short() -> None:
    rows = 64 * MOST_ROWS
    first = partial(split_reduction(column_sums(rows, 8), SIXTEEN))
    assert first.axes[0].extent is index(64)
    assert reduced(first).over[0].extent is index(MOST_ROWS)


GPU = replace(SIXTEEN, part_share=0.01, rows=replace(SIXTEEN.rows, warp_row=4))


@pytest.mark.parametrize(
    ("rows", "parts", "why"),
    [
        (16 * 199, 32, "four percent at most: two for each unit"),
        (32 * 200, 32, "one percent: two for each unit"),
        (64 * 199, 63, "more only where chains would be long, one percent at most"),
    ],
)
def test_partial_sums_take_one_percent_or_are_one_for_each_unit(
    rows: int, parts: int, why: str
) -> None:
    """Rows of one f32 tensor: a part costs 8 bytes a column, a row has 4."""
    machine = replace(GPU, units=16, parts=32)
    first = partial(split_reduction(column_sums(rows, 8), machine))
    assert first.axes[0].extent.hint() == parts, why


def test_partial_sums_are_one_for_each_unit_where_twice_as_many_take_far_more() -> None:
    machine = replace(GPU, units=16, parts=32, part_share=0.0005)
    first = partial(split_reduction(column_sums(16 * 199, 8), machine))
    assert first.axes[0].extent.hint() == 16


@pytest.mark.parametrize(
    ("rows", "columns", "parts"),
    [(16384, 4096, 32), (8192, 6400, 16), (8192, 4800, 32), (16384, 1024, 128), (2048, 256, 64)],
)
def test_column_sums_of_their_own_have_equal_parts_for_programs_enough(
    rows: int, columns: int, parts: int
) -> None:
    """Tiles of 128 columns are programs, too; no loop over a part's rows ends within a tile."""
    first = partial(split_reduction(column_sums(rows, columns), HOPPER_MACHINE))
    (inner,) = reduced(first).over
    assert (first.axes[0].extent.hint(), inner.limit) == (parts, None)
    assert inner.extent.hint() % 32 == 0


@pytest.mark.parametrize(("images", "parts"), [(256, 256), (4, None)])
def test_sums_over_several_axes_that_no_cache_keeps_have_parts(
    images: int, parts: int | None
) -> None:
    """What stands behind a BatchNorm's sums would read 206 MB from memory again; 3 MB stay."""
    x, s = buffer("x", images, 256, 3136), buffer("s", 256)
    n, c, i = axes("n c i", images, 256, 3136)
    lines = (Def(s, (c,), Reduce(SUM, (n, i), load(x, n, c, i))),)
    before = graph((x,), lines, s)
    after = split_reduction(before, HOPPER_MACHINE)
    if parts is None:
        assert after is before
    else:
        assert partial(after).axes[0].extent.hint() == parts


@pytest.mark.parametrize(("images", "parts"), [(128, 128), (256, 256)])
def test_parts_of_channels_are_whole_images_where_programs_are_enough(
    images: int, parts: int
) -> None:
    """Half an image would be unlike what is normalised behind the sum: two loops in one kernel."""
    x, w = buffer("x", images, 512, 28, 28), buffer("w", 512)
    n, c, i, j = axes("n c i j", images, 512, 28, 28)
    body = Reduce(SUM, (n, i, j), load(x, n, c, i, j))
    line = partial(split_reduction(graph((x,), (Def(w, (c,), body),), w), HOPPER_MACHINE))
    assert line.buffer.shape[0] == index(parts)
    assert [a.extent for a in reduced(line).over] == [index(28), index(28)]


@pytest.mark.parametrize(
    ("images", "channels", "size", "split"),
    [(96, 192, 27, True), (96, 192, 28, False), (8, 192, 27, False), (512, 192, 7, False),
     (100, 264, 27, False)],
)  # fmt: skip
def test_few_channels_of_odd_images_have_parts_although_they_stay_in_a_cache(
    images: int, channels: int, size: int, split: bool
) -> None:
    """A program alone would load a channel element by element; few elements are no matter."""
    x, w = buffer("x", images, channels, size, size, dtype=BF16), buffer("w", channels)
    n, c, i, j = axes("n c i j", images, channels, size, size)
    body = Reduce(SUM, (n, i, j), Cast(load(x, n, c, i, j), F32))
    before = graph((x,), (Def(w, (c,), body),), w)
    assert (split_reduction(before, HOPPER_MACHINE) is not before) == split


def test_what_stays_in_a_cache_is_counted_in_bytes_of_what_is_read() -> None:
    """128 images of 14 x 14 in 16 bits stay; a line in f32 between them and their sum is none."""
    x, y = buffer("x", 128, 1024, 14, 14, dtype=BF16), buffer("y", 128, 1024, 14, 14)
    w = buffer("w", 1024)
    n, c, i, j = axes("n c i j", 128, 1024, 14, 14)
    wide = Def(y, (n, c, i, j), Cast(load(x, n, c, i, j), F32))
    n2, c2, i2, j2 = axes("n c i j", 128, 1024, 14, 14)
    line = Def(w, (c2,), Reduce(SUM, (n2, i2, j2), load(y, n2, c2, i2, j2)))
    before = graph((x,), (wide, line), w)
    assert split_reduction(before, HOPPER_MACHINE) is before
    alone = graph((y,), (line,), w)
    assert split_reduction(alone, HOPPER_MACHINE) is not alone


def test_column_sums_that_read_a_number_of_each_row_have_parts_for_two_programs() -> None:
    """They share a kernel with rows, as the gradients of a norm's weights do: a part, a program."""
    rows, width = 8192, 1024
    x, mean, w = buffer("x", rows, width), buffer("mean", rows, 1), buffer("w", width)
    m, c = axes("m c", rows, width)
    body = Op("mul", (load(x, m, c), load(mean, m, 0)))
    lines = (Def(w, (c,), Reduce(SUM, (m,), body)),)
    first = partial(split_reduction(graph((x, mean), lines, w), HOPPER_MACHINE))
    assert first.axes[0].extent.hint() == 256


def test_sums_of_one_shape_have_the_same_parts_and_count_together() -> None:
    """Alone, the sum of x could have 40 parts; beside that of x*z, both have two for each unit."""
    rows = 32 * 250
    x, z = buffer("x", rows, 8), buffer("z", rows, 1)
    u, w = buffer("u", 8), buffer("w", 8)
    lines = []
    for target, factor in ((u, False), (w, True)):
        m, c = axes("m c", rows, 8)
        body = load(x, m, c)
        body = Op("mul", (body, load(z, m, 0))) if factor else body
        lines.append(Def(target, (c,), Reduce(SUM, (m,), body)))
    after = split_reduction(graph((x, z), tuple(lines), u, w), replace(GPU, units=16, parts=32))
    parts = [n for n in after.nodes if isinstance(n, Def) and n.buffer.name.endswith("_part")]
    assert [n.axes[0].extent.hint() for n in parts] == [32, 32]


def test_batch_and_time_are_spread_over_one_axis_of_parts() -> None:
    x, w = buffer("x", 3, 200, 40), buffer("w", 40)
    b, t, c = axes("b t c", 3, 200, 40)
    before = graph((x,), (Def(w, (c,), Reduce(SUM, (b, t), load(x, b, t, c))),), w)
    after = split_reduction(before, SIXTEEN)
    first = partial(after)
    assert len(first.axes) == 2
    assert [a.extent for a in reduced(first).over] == [index(40)]  # each b in 5 parts of 40
    assert first.axes[0].extent is index(15)
    check_same(before, after, (numbers(3, 200, 40),))


def test_what_stands_around_the_sum_stays_with_the_final_one() -> None:
    x, w = buffer("x", 512, 40), buffer("w", 40)
    m, c = axes("m c", 512, 40)
    root = Op("sqrt", (Op("abs", (total(SUM, m, load(x, m, c)),)),))
    before = graph((x,), (Def(w, (c,), root),), w)
    after = split_reduction(before, SIXTEEN)
    assert isinstance(partial(after).expr, Reduce)
    assert repr(after.nodes[1].expr).startswith("sqrt(")
    check_same(before, after, (numbers(512, 40),))


@pytest.mark.parametrize(
    ("before", "why"),
    [
        (row_sums(512, 40), "a row kernel has rows enough for every core"),
        (column_sums(64, 40), "too few elements for another kernel"),
        (column_sums(3, 1 << 13), "too few rows: the partial sums would be as large"),
    ],
    ids=["rows", "small", "few rows"],
)
def test_others_stay_as_they_are(before: Graph, why: str) -> None:
    assert split_reduction(before, SIXTEEN) is before, why


def test_a_sum_of_everything_is_split_although_it_walks_rows() -> None:
    x, w = buffer("x", 512, 40), buffer("w", 1)
    (z,), (m, c) = axes("z", 1), axes("m c", 512, 40)
    before = graph((x,), (Def(w, (z,), Reduce(SUM, (m, c), load(x, m, c))),), w)
    after = split_reduction(before, SIXTEEN)
    assert partial(after).axes[0].extent is index(16)
    check_same(before, after, (numbers(512, 40),))


def test_a_line_with_two_reductions_stays() -> None:
    x, w = buffer("x", 512, 40), buffer("w", 40)
    m, n, c = axes("m n c", 512, 512, 40)
    both = Op("sub", (total(SUM, m, load(x, m, c)), total(MAX, n, load(x, n, c))))
    before = graph((x,), (Def(w, (c,), both),), w)
    assert split_reduction(before, SIXTEEN) is before


@pytest.mark.parametrize("rows", [512, 1, 15, 16, 17, 700])
def test_parts_of_an_extent_known_at_launch_cover_it(rows: int) -> None:
    size = Size("N", 512)
    before = column_sums(size, 40)
    after = split_reduction(before, SIXTEEN)
    assert partial(after).axes[0].extent is index(16)
    check_same(before, after, (rows, numbers(rows, 40)))


def variance(rows: IntoIndex, columns: int) -> Graph:
    """Return ``mean[c]`` and ``v[0, c] = sum(m: (x[m, c] - mean[c])^2) / rows``."""
    x, mean, v = buffer("x", rows, columns), buffer("mean", columns), buffer("v", 1, columns)
    (m, c), (n, o, d) = axes("m c", rows, columns), axes("n o d", rows, 1, columns)
    count = Cast(IndexValue(index(rows)), F32)
    away = Op("sub", (load(x, n, d), load(mean, d)))
    total_ = Op("div", (total(SUM, m, load(x, m, c)), count))
    squares = Op("div", (total(SUM, n, Op("mul", (away, away))), count))
    sizes = (rows,) if isinstance(rows, Size) else ()
    return graph((*sizes, x), (Def(mean, (c,), total_), Def(v, (o, d), squares)), mean, v)


def partial_reads(after: Graph) -> dict[str, set[str]]:
    """Return what the lines of a graph read, by name."""
    lines = [n for n in after.nodes if isinstance(n, Def)]
    return {n.buffer.name: {b.name for b in n.reads} for n in lines}


def test_parts_of_a_sum_of_squares_about_a_mean_do_not_wait_for_it() -> None:
    before = variance(512, 40)
    after = split_reduction(before, SIXTEEN)
    assert partial_reads(after) == {
        "mean_part": {"x"},
        "mean": {"mean_part"},
        "v_part": {"x"},
        "v": {"v_part", "mean_part", "mean"},
    }
    check_same(before, after, (numbers(512, 40),))  # exact: parts have a power of two of rows


@pytest.mark.parametrize("rows", [509, Size("N", 512, 0)])
@pytest.mark.parametrize("launched", [512, 17, 5, 1, 0])
def test_ragged_and_empty_parts_add_their_share_of_squares(rows: IntoIndex, launched: int) -> None:
    values = numbers(509 if rows == 509 else launched, 40) * 3 + 100
    before = variance(rows, 40)
    after = split_reduction(before, SIXTEEN)
    assert "v_part" in names(after)
    check_close(before, after, (values,) if rows == 509 else (launched, values))


def check_close(before: Graph, after: Graph, inputs: tuple[object, ...]) -> None:
    verify_graph(after)
    with np.errstate(all="ignore"):
        runs = [run_graph(g, inputs, copy_extern) for g in (before, after)]
    for a, b in zip(*runs, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-6)


@pytest.mark.parametrize("launched", [3, 1, 0])
def test_an_axis_that_is_not_cut_may_have_no_point(launched: int) -> None:
    size = Size("N", 3, 0)
    x, mean, v = buffer("x", 512, size, 40), buffer("mean", 40), buffer("v", 40)
    (m, n, c), (k, o, d) = axes("m n c", 512, size, 40), axes("k o d", 512, size, 40)
    count = Cast(IndexValue(index(size) * 512), F32)
    away = Op("sub", (load(x, k, o, d), load(mean, d)))
    total_ = Op("div", (Reduce(SUM, (m, n), load(x, m, n, c)), count))
    squares = Op("div", (Reduce(SUM, (k, o), Op("mul", (away, away))), count))
    before = graph((size, x), (Def(mean, (c,), total_), Def(v, (d,), squares)), mean, v)
    after = split_reduction(before, SIXTEEN)
    assert "v_part" in names(after)
    check_close(before, after, (launched, numbers(512, launched, 40)))


def test_squares_about_a_mean_of_other_values_are_summed_as_they_are() -> None:
    """The values are not summed beside them: there is no part's mean to refer to."""
    x, v = buffer("x", 512, 40), buffer("v", 40)
    mean = buffer("mean", 40)
    m, c = axes("m c", 512, 40)
    away = Op("sub", (load(x, m, c), load(mean, c)))
    squares = total(SUM, m, Op("mul", (away, away)))
    after = split_reduction(graph((x, mean), (Def(v, (c,), squares),), v), SIXTEEN)
    assert partial_reads(after) == {"v_part": {"x", "mean"}, "v": {"v_part"}}


def test_squares_of_values_that_a_later_line_sums_are_summed_as_they_are() -> None:
    x, v, s = buffer("x", 512, 40), buffer("v", 40), buffer("s", 40)
    (m, c), (n, d) = axes("m c", 512, 40), axes("n d", 512, 40)
    away = Op("sub", (load(x, m, c), Const(1.0, F32)))
    squares = Def(v, (c,), total(SUM, m, Op("mul", (away, away))))
    before = graph((x,), (squares, Def(s, (d,), total(SUM, n, load(x, n, d)))), v, s)
    after = split_reduction(before, SIXTEEN)
    assert names(after) == ["v_part", "v", "s_part", "s"]
    check_same(before, after, (numbers(512, 40),))


@BOUNDED
@given(drawn=random_graphs(symbols=True))
def test_random_graphs_compute_the_same(drawn: Example) -> None:
    with np.errstate(all="ignore"):
        after = split_reduction(drawn.graph, small_target("cpu").machine)
    check_same(drawn.graph, after, drawn.inputs)
