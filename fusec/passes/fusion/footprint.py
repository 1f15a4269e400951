"""The elements of a buffer that a kernel touches, each once, at the hints of sizes.

An access touches no more elements than its indices have points, and none outside of the box that
its indices span. Several accesses touch no more than all of their points together, and none outside
of the union of their boxes; the account takes the less of these two. An index that is read from
memory spans its whole dimension. Expanded dimensions, of stride 0, have one element.

Worked example, halves that are read apart and together: ``x[i]``, i < 4, and ``x[j + 4]``, j < 4,
have 8 points in boxes [0, 4) and [4, 8): 8 elements. ``x[i]`` and ``x[i + 1]`` have 8 points, too,
in boxes [0, 4) and [1, 5): 5 elements. ``x[2*i]`` has 4 points in the box [0, 7): 4 elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from itertools import pairwise, product
from typing import TypeAlias

from fusec.errors import InternalError
from fusec.ir.expr import Buffer, Load
from fusec.ir.graph import Kernel, Store, kernel_nodes
from fusec.ir.index import Atom, Axis, FloorDiv, Index, Mod, Runtime, Size, index
from fusec.passes.schedule.access import count

Span: TypeAlias = tuple[int, int]
"""The first position, and the one behind the last."""
Box: TypeAlias = tuple[Span, ...]


def kernel_traffic(kernel: Kernel) -> dict[Buffer, tuple[int, int]]:
    """Return buffer -> (bytes read, bytes written), each element counted once."""
    read = _touched(n for n in kernel_nodes(kernel) if isinstance(n, Load))
    written = _touched(kernel.stores)
    return {b: (read.get(b, 0), written.get(b, 0)) for b in dict.fromkeys((*read, *written))}


def _touched(accesses: Iterable[Load | Store]) -> Mapping[Buffer, int]:
    """Return buffer -> the bytes that accesses touch."""
    places: dict[Buffer, dict[tuple[Index, ...], None]] = {}
    for access in accesses:
        places.setdefault(access.buffer, {})[access.indices] = None
    return {b: _elements(b, tuple(found)) * b.dtype.itemsize for b, found in places.items()}


@functools.lru_cache(maxsize=1 << 14)
def _elements(buffer: Buffer, places: tuple[tuple[Index, ...], ...]) -> int:
    """Return the elements at some places of a buffer."""
    zero = index(0)
    dims = [d for d, stride in enumerate(buffer.strides) if stride is not zero]
    points, boxes = 0, set()
    for place in places:
        indices = [place[d] for d in dims]
        points += count(frozenset(axis for i in indices for axis in i.axes))
        boxes.add(tuple(_inside(buffer.shape[d].hint(), place[d]) for d in dims))
    return min(points, _volume(frozenset(boxes)))


def _volume(boxes: frozenset[Box]) -> int:
    """Return the number of positions in any of some boxes: in slabs along the first dimension."""
    if not boxes or () in boxes:
        return len(boxes)
    cuts = sorted({edge for (span, *_) in boxes for edge in span})
    return sum(
        (end - start) * _volume(frozenset(b[1:] for b in boxes if b[0][0] <= start < b[0][1]))
        for start, end in pairwise(cuts)
    )


def _inside(extent: int, place: Index) -> Span:
    """Return the positions of a dimension that an index may have."""
    found = _range(place)
    return (0, extent) if found is None else (max(0, found[0]), max(0, min(extent, found[1] + 1)))


def _range(value: Index) -> Span | None:
    """Return the least and the greatest value of an index; None if it is read from memory."""
    low = high = value.const
    for monomial, coefficient in value.terms:
        ranges = [_range_of(atom) for atom in monomial]
        known = [r for r in ranges if r is not None]
        if len(known) < len(ranges):
            return None
        values = [coefficient * math.prod(corner) for corner in product(*known)]
        low, high = low + min(values), high + max(values)
    return low, high


def _range_of(atom: Atom) -> Span | None:
    match atom:
        case Axis():
            return 0, max(0, atom.extent.hint() - 1)
        case Size():
            return atom.hint, atom.hint
        case FloorDiv() | Mod():
            inside, divisor = _range(atom.dividend), max(1, atom.divisor.hint())
            if inside is None:
                return None
            low, high = (end // divisor for end in inside)
            if isinstance(atom, FloorDiv):
                return low, high
            first, last = (end % divisor for end in inside)
            return (first, last) if low == high else (0, divisor - 1)
        case Runtime():
            return None
        case _:
            raise InternalError(atom, stage="fusion")
