"""The arguments of a foreach kernel's launch: addresses and sizes of each row, and the places.

A *row* is one kernel's buffers and sizes, a *place* one instance of the body: a row, and one of its
blocks: the iterations of the program's grid, the last axis fastest. Sizes do not change from call
to call, so places are computed once; addresses are read at each call.

Worked example: sizes ``((3000,), (100,))`` with ``"(s0 + 1023) // 1024"`` blocks have the places
``(0, 0), (0, 1), (0, 2), (1, 0)``.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Rows = Sequence[tuple[Any, ...]]
"""Tensors of each row."""
RowSizes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Places:
    """The part of a launch that depends on sizes; tensors of i32 on the host.

    Attributes:
        sizes: the sizes of all rows, row by row.
        places: row and block of each instance.
        count: the number of instances.
        work: the number of points (iterations) of all rows.
    """

    sizes: torch.Tensor
    places: torch.Tensor
    count: int
    work: int


@functools.lru_cache(maxsize=1 << 12)
def find_places(sizes: RowSizes, blocks: str) -> Places:
    """Return the places of a launch.

    Args:
        blocks: how many a row has: a Python expression over its sizes s0, s1...
    """
    import torch  # local: the command line loads this module and does without torch

    counted = compile(blocks, "<fusec blocks>", "eval")
    counts = [eval(counted, {f"s{k}": n for k, n in enumerate(row)}) for row in sizes]
    repeats = torch.tensor(counts)
    rows = torch.repeat_interleave(torch.arange(len(sizes)), repeats)
    starts = torch.repeat_interleave(repeats.cumsum(0) - repeats, repeats)
    numbers = torch.arange(len(rows)) - starts
    flat = [size for row in sizes for size in row]
    return Places(
        torch.tensor(flat or [0], dtype=torch.int32),  # no empty array
        torch.stack((rows, numbers), dim=1).to(torch.int32).contiguous(),
        len(rows),
        sum(math.prod(row) for row in sizes),
    )


def are_multiples(values: Sequence[int], of: int) -> bool:
    """Return True if each value is a multiple of a power of two."""
    return functools.reduce(operator.or_, values, 0) % of == 0


def addresses(rows: Rows) -> tuple[int, ...]:
    """Return the addresses of all rows' tensors, row by row."""
    return tuple([tensor.data_ptr() for row in rows for tensor in row])
