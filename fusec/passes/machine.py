"""Rates and sizes of a target's machine: the only source for the cost model and for tile sizes.

``codegen/targets.py`` has one for each target. The rates are approximate and only rank candidates;
measurements override them. H200: measured copy bandwidth 4.3 TB/s and the issue budget that follows
(6.9 thread instructions a byte). CPU: two cores of a shared socket, measured 2026-11 within a
factor of two.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusec.ir.dtype import DType


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources and features of a GPU's multiprocessor that one program may use.

    Attributes:
        shared_bytes: shared memory of a block.
        tile_registers: registers of a thread for the f32 tiles of a loop with products; the rest is
            for addresses, and for operands where tensor cores do not read them from shared memory.
        from_shared: tensor cores read operands from shared memory; otherwise operands go through
            registers, and a loop of n stages holds n - 1 tiles of each in shared memory.
        tf32: tensor cores multiply f32, rounded to 10 bits of mantissa; else FMAs do, exactly.
        descriptors: hardware copies tiles described by a tensor descriptor (NVIDIA's TMA).
        group_registers: registers of a consumer warp's thread for f32 tiles under warp
            specialization, where the producer warp gives up most of its own; 0 for targets without
            it, whose products are not asynchronous (Hopper's wgmma) or have another form.
    """

    shared_bytes: int = 0
    tile_registers: int = 0
    from_shared: bool = False
    tf32: bool = False
    descriptors: bool = False
    group_registers: int = 0


@dataclass(frozen=True, slots=True)
class Tuning:
    """Thresholds and sizes by which passes and schedules decide, found by measurement.

    Tests lower them, so that graphs small enough to interpret take the paths of large ones.

    Attributes:
        split_elements: elements of a reduction from which it becomes partial and final sums.
            Fewer are not worth a second kernel (a launch is some 5 us).
        least_part_rows, most_part_rows: rows of a partial column sum. They are added one by one:
            longer chains lose digits that eager's sum keeps. On a GPU there may be more: short
            rows share an iteration, and the partial sums of long ones are limited in bytes (one
            percent of the input: 266 rows a part of a LayerNorm in 16 bits, 133 in f32).
        min_reused_input_bytes: bytes of a shared input from which fusing two consumers can pay.
        detour_launches: savings, in launches, that a merge must promise at best before it is tried
            together with all the groups between producer and consumer.
        kernel_definitions: most definitions in one kernel, for compile time and legibility.
        kernel_nodes: most operations and loads in one kernel: g++ takes 0.5 to 3 ms for each
            (2026-11), 10 s for all.
        resident_row: elements of a row that stay in a GPU's registers.
        row_tile: elements of a tile where a loop walks the row.
        warp_row: elements of a row that one warp of a GPU holds, without barriers.
        point_elements: elements of one grid point of a CPU's pointwise kernel: 16 KB of f32, well
            inside a 32 KB L1 cache.
        least_points: grid points that balance the load of a few threads.
        kept_cost: multiply-adds, loads and conversions an element from which a CPU stores a value
            for the next sweep instead of computing it again: a store, and a load in each sweep.
        kept_bytes: bytes of the longest array for such values: it has to stay in a core's cache.
        chunk_bytes: bytes of an expansion in one chunk: few enough to bound memory, many enough
            for a GEMM whose other operand, read once a chunk, is as large (measured 2026-11: no
            difference between 16 and 128 MiB).
        chunk_rows: least rows of a chunk: weights are read, and their gradient is read and
            written, once a chunk; the arithmetic of so many rows hides that traffic.
        raced_product: multiply-adds from which libraries race for a product: below, the overhead
            of a call decides, and ATen's is the least (64 x 64 x 64: 6 us, oneDNN 20).
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
    """Rates of matrix products, as fractions of the rate of the library's single product.

    Attributes:
        tiled: fusec's single product (Triton beside cuBLAS: 0.8 to 1.0).
        nested: fusec's products of products in one kernel, as in an attention.
        library_nested: the library's attention.
        alone: whether fusec's product may win outside an attention.
    """

    tiled: float = 0.85
    nested: float = 0.55
    library_nested: float = 0.75
    alone: bool = True


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates and sizes of one machine.

    Attributes:
        bytes_per_us: memory traffic, reads and writes together.
        operations_per_us: scalar f32 multiply-adds of the whole machine.
        launch_us: time from one kernel to the next, host and device.
        units: grid points that keep the machine busy: a GPU's multiprocessors.
        threads: CPU threads that share a grid: few long grid points leave some of them idle.
        parts: partial results of a split reduction, where their bytes allow so many.
        part_share: bytes that partial results may move, as a share of the bytes that are summed;
            where ``parts`` of them would move more, there is one for each of ``units``.
        tile: elements of the fastest axis that one grid point takes where that axis is on the grid.
        vector: f32 lanes of a CPU's vector registers.
        products_per_us: multiply-adds of 16-bit matrix products; 0 where no schedule has them.
        slow_exact: slowdown of the library's products in f32, unless operands round to TF32.
        widened: types that fusec's own products widen to f32, for want of instructions.
        slow_widened: slowdown of these products beside the library's, which has instructions.
        rates: rates of products, relative to the library's.
        cache_bytes: bytes of a CPU core's second-level cache that the tiles of a product may take;
            0 where tiles are in registers.
        skinny_rows: most rows of a skinny product, which a kernel of plain loops may compute.
        sm: resources of a multiprocessor.
        tuning: thresholds and sizes found by measuring, or chosen.
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
    def is_cpu(self) -> bool:
        """Whether products keep their tiles in a core's cache; else in registers, as on a GPU."""
        return self.cache_bytes > 0

    @property
    def multiplies(self) -> bool:
        """Whether kernels may compute matrix products; else all products are library calls."""
        return self.products_per_us > 0

    @property
    def slow_f32(self) -> int:
        """Slowdown of products in f32, relative to 16 bits."""
        return 2 if self.sm.tf32 else self.slow_exact
