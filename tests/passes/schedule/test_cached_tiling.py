"""Tiles of a CPU's products: whole vectors, and no more than the cache holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusec.codegen.targets import CPU_MACHINE
from fusec.ir.index import Axis, index
from fusec.ir.machine import Machine, TileTuning
from fusec.passes.schedule.cached_tiling import cached_tilings, even_lanes, tile_bytes
from fusec.passes.schedule.tiling import AxisUse, TileResources


def machine(cache: int = 1 << 19) -> Machine:
    return replace(CPU_MACHINE, vector=16, cache_bytes=cache)


def attention(queries: int, keys: int, depth: int) -> tuple[AxisUse, TileResources]:
    m, n, d = (Axis(name, index(e)) for name, e in zip("mnd", (queries, keys, depth), strict=True))
    loads = tuple((frozenset(axes), 4) for axes in ((m, d), (n, d)))
    work = TileResources(
        *((frozenset((m, d)),), (), (frozenset((m, n)),), (), loads, (), (), (), (), ()),
        *(4, 8, 32, False, TileTuning()),
    )
    return AxisUse((m,), n, (), (d,)), work


@pytest.mark.parametrize("cache", (1 << 19, 1 << 18, 1 << 17))
@pytest.mark.parametrize("depth", (24, 64, 128, 256))
def test_tiles_are_whole_vectors_that_the_cache_holds(depth: int, cache: int) -> None:
    roles, work = attention(1024, 1024, depth)
    (tiling,) = cached_tilings(roles, work, machine(cache))
    assert all(lanes % 16 == 0 for lanes in tiling.lanes.values())
    assert tile_bytes(work, tiling) <= cache
    assert tiling.lanes[roles.whole[0]] >= depth


@pytest.mark.parametrize(
    ("rows", "terms", "lanes"), [(128, 768, 128), (128, 3072, 64), (192, 512, 192), (40, 768, 48)]
)
def test_rows_beside_a_panel_fit_the_cache_with_all_their_terms(
    rows: int, terms: int, lanes: int
) -> None:
    m, n, k = (Axis(name, index(e)) for name, e in zip("mnk", (rows, 32, terms), strict=True))
    loads = tuple((frozenset(axes), 4) for axes in ((m, k), (n, k)))
    held = ((frozenset((m, n)),), (), (), (), loads, (), (), (), (), ())
    work = TileResources(*held, 4, 8, 32, False, TileTuning())
    (tiling,) = cached_tilings(AxisUse((m, n), k, (), (), panel=32), work, machine())
    assert (tiling.lanes[m], tiling.lanes[n]) == (lanes, 32)


def test_a_short_axis_has_short_tiles() -> None:
    roles, work = attention(7, 40, 64)
    (tiling,) = cached_tilings(roles, work, machine())
    assert [tiling.lanes[a] for a in (*roles.tiled, roles.looped) if a] == [16, 48]


def test_the_smallest_tiles_are_offered_where_none_fit() -> None:
    roles, work = attention(1024, 1024, 64)
    (tiling,) = cached_tilings(roles, work, machine(1 << 10))
    assert tiling.lanes[roles.tiled[0]] == 16


@pytest.mark.parametrize(
    ("extent", "lanes"), [(16, 16), (96, 96), (128, 64), (197, 80), (256, 96), (1024, 96)]
)
def test_tiles_are_as_few_as_can_be_and_as_even(extent: int, lanes: int) -> None:
    assert even_lanes(Axis("m", index(extent)), 96, 16) == lanes


@pytest.mark.parametrize("vector", (4, 8, 16))
@pytest.mark.parametrize("most", (16, 48, 64, 96, 128))
def test_tiles_are_whole_vectors_and_at_most_so_long(vector: int, most: int) -> None:
    for extent in range(1, 300):
        lanes = even_lanes(Axis("m", index(extent)), most, vector)
        assert lanes % vector == 0 and 0 < lanes <= max(most, vector)


def test_both_of_two_crossed_loops_have_tiles() -> None:
    roles, work = attention(1024, 1024, 64)
    (m,), n = roles.tiled, roles.looped
    assert n is not None
    (tiling,) = cached_tilings(AxisUse((), m, (n,), roles.whole, n), work, machine())
    assert (tiling.lanes[m], tiling.lanes[n]) == (128, 64)


@pytest.mark.parametrize(
    ("threads", "around", "computed", "lanes"),
    [(2, 1, 1, 128), (64, 1, 1, 64), (64, 8, 1, 128), (2, 1, 0, 64)],
)
def test_rows_share_an_operand_that_is_computed_if_threads_have_enough_tiles(
    threads: int, around: int, computed: int, lanes: int
) -> None:
    (m, n), use, work = converted(computed)
    with_threads = replace(machine(1 << 20), threads=threads)
    (tiling,) = cached_tilings(use, work, with_threads, around)
    assert (tiling.lanes[m], tiling.lanes[n]) == (lanes, 128)


@pytest.mark.parametrize(
    ("computed", "itemsize", "lanes"), [(1, 2, (128, 32)), (0, 2, (128, 128)), (1, 4, (128, 128))]
)
def test_few_columns_are_converted_at_a_time_where_a_cpu_s_tiles_multiply_them(
    computed: int, itemsize: int, lanes: tuple[int, int]
) -> None:
    """Tiles multiply types of 16 and 8 bits: products of f32 are as on other CPUs."""
    (m, n), use, work = converted(computed, itemsize)
    tiles = replace(machine(1 << 20), bf16="tiles", threads=2)
    (tiling,) = cached_tilings(use, work, tiles)
    assert (tiling.lanes[m], tiling.lanes[n]) == lanes


def converted(computed: int, itemsize: int = 4) -> tuple[tuple[Axis, Axis], AxisUse, TileResources]:
    """A product of 128 rows by 4096 x 4096 weights, which may be computed."""
    m, n, k = (Axis(name, index(e)) for name, e in zip("mnk", (128, 4096, 4096), strict=True))
    weights = frozenset((n, k))
    loads = tuple((axes, 4) for axes in (frozenset((m, k)), weights))
    held = ((frozenset((m, n)),), (), (), (), loads, (), (weights,) * computed, (), (), ())
    work = TileResources(*held, itemsize, 8, 32, False, TileTuning())
    return (m, n), AxisUse((m, n), k, (), ()), work
