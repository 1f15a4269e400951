"""Measure a machine's peak rates, once a process: the rates that floors are computed from.

Copies: PyTorch copies a tensor, and reads and writes count together. A copy that stays in a CPU's
cache is faster than memory, so there is one rate for each size: the next power of four bytes, 1 MB
at least. Products: one square product of PyTorch's, for each type that is needed. Both are the best
of several, on the threads that torch uses.

Worked example: of a kernel that moves 3 MB and multiplies nothing, the floor is the time in which
``copy_`` moves 3 MB at the rate of 4 MB.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

_LEAST_BYTES, _MOST_BYTES = 1 << 20, {"cpu": 1 << 28, "cuda": 1 << 30}
_SIDE = {"cpu": 1024, "cuda": 8192}
_TIMES = 15
"""Runs of which the best counts."""
_BATCH = {"cpu": 1, "cuda": 10}
"""Calls of one run: a GPU's are asynchronous, and timed several at once."""
_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}


@dataclass(slots=True)
class Ceilings:
    """The rates of one device, each measured on first use.

    Attributes:
        copies: bytes -> bytes a second, reads and writes together.
        products: type -> multiply-adds a second.
    """

    device: torch.device
    copies: dict[int, float] = field(default_factory=dict)
    products: dict[str, float] = field(default_factory=dict)

    def floor_seconds(self, moved: int, multiplied: dict[str, int]) -> float:
        """Return the least time for so many bytes and multiply-adds: the longer of both."""
        copied = moved / self.copy_rate(moved) if moved else 0.0
        return max(copied, sum(n / self.product_rate(dtype) for dtype, n in multiplied.items()))

    def copy_rate(self, moved: int) -> float:
        """Return the bytes a second of a copy of about that size."""
        size = _LEAST_BYTES
        while size < min(moved, _MOST_BYTES[self.device.type]):
            size *= 4
        if size not in self.copies:
            source = torch.ones(size // 8, dtype=torch.float32, device=self.device)
            target = torch.empty_like(source)
            self.copies[size] = size / self._best(lambda: target.copy_(source))
        return self.copies[size]

    def product_rate(self, dtype: str) -> float:
        """Return the multiply-adds a second of a product of matrices of a type."""
        if dtype not in self.products:
            side = _SIDE[self.device.type]
            kind = _DTYPES.get(dtype, torch.float32)
            operand = torch.ones(side, side, dtype=kind, device=self.device)
            self.products[dtype] = side**3 / self._best(lambda: torch.mm(operand, operand))
        return self.products[dtype]

    def _best(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call, the best of several."""
        batch, best = _BATCH[self.device.type], float("inf")
        for _ in range(_TIMES):
            self._wait()
            start = time.perf_counter()
            for _ in range(batch):
                call()
            self._wait()
            best = min(best, (time.perf_counter() - start) / batch)
        return best

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
