"""What a target's machine can do: the one description that fusion prices and schedules tile by.

``codegen/targets.py`` has one for each target. Rates are modelled ones and rank alternatives; a
benchmark has the last word. H200: measured copy 4.3 TB/s and its issue budget (6.9
thread-instructions a byte). CPU: one shared socket, two cores, measured 2026-11 within a factor of
two.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """

    shared_bytes: int = 0
    tile_registers: int = 0
    from_shared: bool = False
    tf32: bool = False
    descriptors: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """A target's machine.

    Attributes:
        bytes_per_us: memory traffic, reads and writes together.
        operations_per_us: multiply-adds of one f32 lane.
        launch_us: from one kernel to the next, host and device.
        units: grid points that keep the machine busy: a GPU's multiprocessors.
        parts: partial results of a split reduction, where their bytes allow it.
        part_share: bytes that these may move, as a share of what is summed; where so many parts as
            above take more, there is one for each of ``units``.
        tile: elements of the fastest axis that one grid point takes where that axis is on the grid.
        vector: f32 lanes of a CPU's vector registers.
        products_per_us: multiply-adds of 16-bit matrix products; 0 where no schedule has them.
        sm: what a program may take of a multiprocessor.
        chunk_rows: rows of a chunk at least: weights are read, and their gradient is read and
            written, once a chunk, which so many rows of products hide.
    """

    bytes_per_us: float
    operations_per_us: float
    launch_us: float
    units: int
    parts: int
    tile: int
    vector: int = 1
    products_per_us: float = 0.0
    sm: Resources = Resources()
    chunk_rows: int = 256
    part_share: float = 1.0

    @property
    def multiplies(self) -> bool:
        """Whether kernels may multiply matrices themselves; else products stay the library's."""
        return self.products_per_us > 0

    @property
    def slow_f32(self) -> int:
        """How much longer products in f32 take than in 16 bits."""
        return 2 if self.sm.tf32 else 8
