"""Rates and sizes of a target's machine: the only source for the cost model and for tile sizes.

``codegen/targets.py`` has one for each target. The rates are approximate and only rank candidates;
measurements override them. H200: measured copy bandwidth 4.3 TB/s and the issue budget that follows
(6.9 thread instructions a byte). CPU: two cores of a shared socket, measured 2026-11 within a
factor of two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fusec.ir.dtype import DType
from fusec.ir.tuning import (
    CachedTuning,
    CodeTuning,
    FusionTuning,
    LoopTuning,
    RaceTuning,
    RowTuning,
    TileTuning,
)


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources and features of a GPU's multiprocessor that one program may use.

    Attributes:
        registers: 32-bit registers, which its programs share.
        programs: most programs that it holds.
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

    registers: int = 65536
    programs: int = 32
    shared_bytes: int = 0
    tile_registers: int = 0
    from_shared: bool = False
    tf32: bool = False
    descriptors: bool = False
    group_registers: int = 0


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
        lanes: longest axis of a kernel with products that is lanes without a loop: a row of an
            operand, so that scores are recomputed.
        skinny_rows: most rows of a skinny product, which a kernel of plain loops may compute.
        sm: resources of a multiprocessor.
        fusion, races, code: thresholds and sizes of graph passes and fusion, of races, of printers.
        rows, tiles: those of the schedules of a GPU.
        cached, loops: those of the schedules of a CPU.
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
    lanes: int = 256
    skinny_rows: int = 0
    threads: int = 1
    sm: Resources = Resources()
    part_share: float = 1.0
    fusion: FusionTuning = field(default_factory=FusionTuning)
    races: RaceTuning = field(default_factory=RaceTuning)
    rows: RowTuning = field(default_factory=RowTuning)
    tiles: TileTuning = field(default_factory=TileTuning)
    cached: CachedTuning = field(default_factory=CachedTuning)
    loops: LoopTuning = field(default_factory=LoopTuning)
    code: CodeTuning = field(default_factory=CodeTuning)

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
