"""What a target's machine can do: the one description that fusion prices and schedules tile by.

``codegen/targets.py`` has one for each target. Rates are modelled ones and rank alternatives; a
benchmark has the last word. H200: measured copy 4.3 TB/s and its issue budget (6.9
thread-instructions a byte). CPU: one shared socket, two cores, measured 2026-11 within a factor of
two.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusec.ir.dtype import DType


@dataclass(frozen=True, slots=True)
class Resources:
    """What one program may take of a GPU's multiprocessor, and what that does by itself.

    Attributes:
        shared_bytes: shared memory of a block.
        tile_registers: registers of a thread for the f32 tiles of a loop with products; the rest is
            for addresses, and for operands where tensor cores do not read them from shared memory.
        from_shared: tensor cores read operands from shared memory; otherwise these leave it for
            registers, and a loop of n stages holds n - 1 tiles of each.
        tf32: tensor cores multiply f32, rounded to 10 bits of mantissa; else lanes do, exactly.
        descriptors: hardware copies tiles that a tensor descriptor names (NVIDIA's TMA).
        group_registers: registers of a thread for f32 tiles where one warp loads and gives most of
            its own away to those that multiply; 0 where warps have no roles: products are not
            asynchronous (Hopper's wgmma), or have another form.
    """

    shared_bytes: int = 0
    tile_registers: int = 0
    from_shared: bool = False
    tf32: bool = False
    descriptors: bool = False
    group_registers: int = 0


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes from which passes and schedules do one thing and not another: measured choices.

    Tests lower them, so that graphs small enough to interpret go through all that large ones do.

    Attributes:
        split_elements: elements of a reduction from which it is split in parts.
            Fewer are not worth a second kernel (a launch is some 5 us).
        least_part_rows, most_part_rows: rows of such a part of a column sum. They are added one by
            one: longer chains lose digits that eager's sum keeps. On a GPU there may be more: short
            rows share an iteration, and long ones have few rows a part until their bytes are many
            (one percent: 266 rows of a LayerNorm in 16 bits, 133 in f32).
        min_reused_input_bytes: two readers of a smaller buffer gain nothing by sharing it.
        detour_launches: launches that a merge may have to save, to be worth a try with all that is
            between the two.
        kernel_definitions: definitions in one kernel: compilers, and readers, have their limits.
        kernel_nodes: operations and loads in one kernel: g++ takes 0.5 to 3 ms for each (2026-11),
            10 s for all.
        resident_row: elements of a row that stay in a GPU's registers.
        row_tile: elements of a tile of a row that is looped.
        warp_row: elements of a row that one warp of a GPU holds: it waits at no barrier.
        point_elements: elements of one grid point of a CPU's pointwise kernel: 16 KB of f32, well
            inside a 32 KB L1 cache.
        least_points: grid points that balance the load of a few threads.
        kept_cost: multiply-adds, loads and conversions a point from which a CPU keeps a value for
            the next sweep: to keep it is a store, and a load for each sweep.
        kept_bytes: the longest array kept for that: it has to stay in a core's cache.
        chunk_bytes: bytes of an expansion in one chunk: few enough to leave memory alone, many
            enough for a GEMM whose other operand, read once a chunk, is as large (measured 2026-11:
            16 to 128 MiB are alike).
        chunk_rows: rows of a chunk at least: weights are read, and their gradient is read and
            written, once a chunk, which so many rows of products hide.
        raced_product: multiply-adds from which libraries race for a product: below, what a call
            costs beside its work decides, and ATen's costs least (64 x 64 x 64: 6 us, oneDNN 20).
        chunk_alignment: chunks begin at multiples of so many rows, which keeps addresses aligned.
    """

    split_elements: int = 1 << 14
    least_part_rows: int = 4
    most_part_rows: int = 64
    min_reused_input_bytes: int = 1 << 12
    detour_launches: float = 1.2
    kernel_definitions: int = 64
    kernel_nodes: int = 4000
    resident_row: int = 32768
    row_tile: int = 4096
    warp_row: int = 1024
    point_elements: int = 4096
    least_points: int = 16
    kept_cost: int = 5
    kept_bytes: int = 1 << 19
    chunk_bytes: int = 1 << 25
    chunk_rows: int = 256
    chunk_alignment: int = 16
    raced_product: int = 1 << 21


@dataclass(frozen=True, slots=True)
class ProductRates:
    """Rates of products of matrices beside the library's of one product.

    Attributes:
        tiled: fusec's (Triton beside cuBLAS: 0.8 to 1.0).
        nested: fusec's of products of products in one kernel, an attention.
        library_nested: the library's attention.
        alone: whether fusec's may win where it is no part of an attention.
    """

    tiled: float = 0.85
    nested: float = 0.55
    library_nested: float = 0.75
    alone: bool = True


@dataclass(frozen=True, slots=True)
class Machine:
    """A target's machine.

    Attributes:
        bytes_per_us: memory traffic, reads and writes together.
        operations_per_us: multiply-adds of one f32 lane.
        launch_us: from one kernel to the next, host and device.
        units: grid points that keep the machine busy: a GPU's multiprocessors.
        threads: of a CPU that share a grid: few long points of it leave the others idle.
        parts: partial results of a split reduction, where their bytes allow it.
        part_share: bytes that these may move, as a share of what is summed; where so many parts as
            above take more, there is one for each of ``units``.
        tile: elements of the fastest axis that one grid point takes where that axis is on the grid.
        vector: f32 lanes of a CPU's vector registers.
        products_per_us: multiply-adds of 16-bit matrix products; 0 where no schedule has them.
        slow_exact: how much longer the library's products in f32 take, unless they are rounded.
        widened: types that fusec's own products widen to f32, for want of hardware.
        slow_widened: how much longer these take than the library's, which has such hardware.
        rates: of products, beside the library's.
        cache_bytes: of a CPU core's second-level cache, what the tiles of a product may take; 0
            where tiles are in registers.
        skinny_rows: rows of a product that streams its weights, and may do so in a kernel of loops.
        sm: what a program may take of a multiprocessor.
        tuning: sizes that were found by measuring, or chosen.
    """

    bytes_per_us: float
    operations_per_us: float
    launch_us: float
    units: int
    parts: int
    tile: int
    vector: int = 1
    products_per_us: float = 0.0
    slow_exact: int = 8
    widened: frozenset[DType] = frozenset()
    slow_widened: int = 1
    rates: ProductRates = ProductRates()
    cache_bytes: int = 0
    skinny_rows: int = 0
    threads: int = 1
    sm: Resources = Resources()
    part_share: float = 1.0
    tuning: Tuning = Tuning()

    @property
    def multiplies(self) -> bool:
        """Whether kernels may multiply matrices themselves; else products stay the library's."""
        return self.products_per_us > 0

    @property
    def slow_f32(self) -> int:
        """How much longer products in f32 take than in 16 bits."""
        return 2 if self.sm.tf32 else self.slow_exact
