"""What is tuned for a CPU's kernels: tiles in a cache, transformed products, loops over vectors.

Part of a ``Machine`` (``machine.py``), which says where such values come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Sides: TypeAlias = tuple[tuple[int, int], ...]
"""Rows and columns of tiles; of nested products, rows and terms of an iteration."""


@dataclass(frozen=True, slots=True)
class GroupTuning:
    """Blocks of rows of a CPU's grouped products, of which each has the matrix of one group."""

    blocks: tuple[tuple[float, int, int], ...] = (
        (0.5, 1, 1), (1.5, 2, 2), (3, 6, 3), (8, 12, 3), (32, 24, 3),
    )  # fmt: skip
    """Most rows of a group, on average, the rows of its blocks, and of their parts: 12 sums and
    three rows are the registers of AVX2 (``docs/decisions/experts.md``)."""
    tile_block: int = 32
    """Rows of a block where weights lie along columns, or the library has no instructions."""
    half_rows: float = 8
    """Most rows of a group, on average, of 16 bits that the library has instructions for: 16 of 8
    groups of 1024 x 2048 in bf16 take 18 ms there, 26 in parts of three, 24 in tiles (AVX-512,
    2026-11-29)."""
    tiled_rows: tuple[int, int] = (3, 32)
    """Least and most rows of a group, on average, whose f32 weights lie along columns: with others
    the library is as fast (24 groups of 512 x 768, 1024 x 1536; AVX2, 2026-11-29)."""


@dataclass(frozen=True, slots=True)
class CachedTuning:
    """Tiles of a CPU's kernels with products: arrays in a core's second-level cache."""

    nested: Sides = ((96, 128), (96, 64), (64, 64), (32, 64), (32, 32), (16, 16))
    """Rows, and terms of an iteration, of a kernel with nested products, best first."""
    crossed: Sides = ((128, 64), (64, 64), (32, 64), (32, 32), (16, 16))
    """The same where products sum along two loops: tiles of the inner and of the outer loop (a
    training step, f32, 4 heads of 1024 x 64: 0.97 of the time with 96 x 128, causal 0.94)."""
    sides: Sides = ((96, 128), (96, 64), (48, 64), (32, 32))
    """Rows and columns of a tile of products that are not nested, best first."""
    short_sides: Sides = ((96, 512), (96, 256), *sides)
    """The same where an iteration has few terms, such as a group's with a scale: more columns share
    a copy of the rows (int4, 128 x 4096 x 4096: 0.63 of the time of 128 columns; AVX2,
    2026-11-28)."""
    computed_rows: int = 128
    """Rows of such a tile where an operand is computed: 128 rows of int8 take 24.2 ms for 25.2 in
    halves, of int4 29.1 for 31.8 (4096 x 4096, bf16; AVX-512, 2026-11-29)."""
    converted_sides: Sides = ((128, 32), (64, 32), (32, 32))
    """The same for a CPU's tiles (AMX): what is converted stays in the first cache until it is
    packed (4096 x 4096, 128 rows: int4 takes 1.14 of the time of bf16, with 128 columns 1.41, int8
    1.01 for 1.09; medians in turn, beside other work; Xeon, 2026-11-30)."""
    computed_tiles: int = 4
    """Least number of these tiles for each thread."""
    streamed_rows: int = 192
    """Most rows of a product whose frozen f32 weights lie in panels: with more, a library's packing
    is amortised (``docs/decisions/weight-panels.md``)."""
    narrow_rows: int = 256
    """Most rows of a product whose weights are narrow, converted as they are read."""
    panel_rows: tuple[int, ...] = (192, 96)
    """Rows of a tile whose columns are a panel of weights, best first."""
    panel_bytes: int = 1 << 20
    """Bytes of the largest left operand, rows x terms, of such a tile: each panel reads it from a
    core's cache (192 rows of 3072 terms: 1.3 times the time of 96 twice; AVX-512, 2026-11-27)."""
    terms: int = 256
    """Terms that a tile of products that are not nested sums in an iteration."""
    array: int = 1 << 20
    """Most elements of an array in which a product accumulates, one tile in each iteration."""
    full: float = 0.25
    """Programs for each unit that use all cores: there are more units than cores."""


@dataclass(frozen=True, slots=True)
class TransformedTuning:
    """Blocks of a CPU's transformed products, such as a convolution's by Winograd."""

    tiles: int = 48
    """Tiles of a block: of 24 to 96, some 5 % more or less (64 to 512 channels); with fewer than 48
    of 512 channels reading the weights takes as long as multiplying (2026-11-26)."""
    least: int = 24
    """Least tiles of a block where there are few."""
    step: int = 12
    """Tiles are a multiple of it: rows of products that are kept in registers."""
    blocks: int = 4
    """Least number of blocks, for cores to share."""
    columns: int = 64
    """Least columns of a block, where several share its tiles."""


@dataclass(frozen=True, slots=True)
class LoopTuning:
    """Loops of a CPU's kernels."""

    point_elements: int = 4096
    """Elements of one grid point of a pointwise kernel: 16 KB of f32, well inside a 32 KB L1."""
    shared: int = 4
    """Vectors of a scatter's row from which each thread takes some rows, and reads all places."""
    least_points: int = 16
    """Grid points that balance the load of a few threads."""
    kept_cost: int = 5
    """Multiply-adds, loads and conversions an element from which a value is stored for the next
    sweep instead of being computed again: a store, and a load in each sweep."""
    kept_bytes: int = 1 << 19
    """Bytes of the longest array for such values: it has to stay in a core's cache."""
    row_tile: int = 64
    """Rows whose shared values are computed in vectors, before the rows (a channel's gate)."""
    shared_row: int = 256
    """Most elements of such a row; longer ones take most of the time themselves."""
    array: int = 1 << 16
    """Elements of the longest private array: 256 KB of f32, which a core's second-level cache
    holds. On a GPU, of the longest row that a reduction over other axes keeps in lanes."""
    scanned: int = 1024
    """Most columns that each step of a scan along an outer axis takes: 8 KB of f64."""
    least_scanned: int = 64
    """Least columns for which such a step is a loop, and not the inner part of one over columns."""
    window: int = 16
    """Most iterations of a reduction that run innermost, with the accumulator in a register."""
    places: int = 7
    """Places of the widest window whose neighbours are computed together."""
    neighbours: tuple[int, ...] = (5, 4, 7, 6, 3, 2)
    """Neighbouring windows of a grid point, best first."""
    picture_vectors: int = 2
    """Vectors of results of a picture's convolution; with more, the library is as fast."""
    least_parts: int = 8
    """Equal parts of a concatenation from which each is stored by itself."""
    ahead: int = 128
    """Prefetch distance of streamed weights, in iterations: 4 KB of 16 bits. Eight rows of these
    take 0.8 of the time without (2026-11)."""
    ahead_bytes: int = 1 << 12
    """Prefetch distance of panels, in bytes."""
    sum_tiles: int = 64
    """Tiles that are summed one by one; longer rows are summed in blocks of so many tiles."""
    columns: tuple[int, ...] = (4, 2, 1)
    """Columns of a skinny product in one grid point: concurrent streams of weights, best first.
    Products of packed weights beside each other, with sums of groups as well, have no more together
    (gate and up of a layer, 4 bits, one row: 0.95 of the time of eight; wider weights take 1.1;
    AVX2, 2026-11-29)."""
    sums: float = 1.5
    """Its accumulators, per vector lane: 24 of AVX-512's 32 registers, 12 of AVX2's 16."""
    panel_sums: float = 1.75
    """The same for panels, where the rows' elements take no registers."""
    converted_sums: float = 1.25
    """The same for panels of integers, whose scales and masks take some (int4, three rows of
    4096 x 4096: 0.8 of the time of 1.75; AVX2, 2026-11-28)."""
    panel: int = 32
    """Columns of a panel: two vectors of AVX-512, so that sums of 12 rows stay in registers."""
    cached_bytes: int = 1 << 21
    """Bytes of the largest f32 weight in panels of a skinny product: a core's L2 cache."""
    always: int = 12
    """Rows up to which any weights stream: with more, fewer columns share the loads of a point."""
    narrow_block: tuple[int, int] = (4, 12)
    """Least and most rows of a block that shares a conversion of narrow weights, where a product
    has more than ``always``."""
    converted_cost: tuple[int, int] = (1, 3)
    """Instructions to load a vector of a row, and to load and convert one of narrow weights."""
    near_bytes: int = 48 << 10
    """Bytes up to which over ``always`` rows stay in a cache, so that plain f32 weights stream."""
