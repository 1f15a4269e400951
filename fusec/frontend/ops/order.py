"""The greatest elements of short lines, in order.

These are extremes, each of the elements that are left. NaN is greater than any number. Of equal
elements the first is taken, which PyTorch leaves open. Worked example, ``topk`` of two columns::

    a[m]         = argmax(j: x[m, j])
    b[m]         = argmax(j: x[m, j] if j != a[m])
    places[m, p] = where(p < 1, a[m], b[m])
    values[m, p] = max(j: x[m, j] if j == places[m, p])
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Indices
from fusec.frontend.ops.arithmetic import equal, select
from fusec.frontend.ops.domain import Domain, Domains, Extreme, region
from fusec.frontend.ops.registry import aten, lowers
from fusec.frontend.ops.scatters import as_line, element
from fusec.frontend.ops.views import replaced, wrap
from fusec.frontend.value import ZERO, Value
from fusec.ir.dtype import BOOL, I32, compute_type
from fusec.ir.expr import Expr, IndexValue, both, op
from fusec.ir.index import index
from fusec.ir.monoid import MAX, MIN


def first_of_equal(
    x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[torch.Tensor, ...]:
    """Return what ``topk`` computes here, by eager kernels."""
    found = torch.sort(x, stable=True, dim=dim, descending=largest)
    return tuple(part.narrow(dim, 0, k) if x.dim() else part for part in found)


@lowers(aten.topk.default, choice=first_of_equal)
def topk(
    call: AtenCall, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, Value]:
    """Emit the greatest, or least, elements of each line, and their places.

    Raises:
        Unsupported: for many, for long lines, and for the least floats: NaN is not among them.
    """
    line = as_line(x)
    axis = wrap(dim, len(line.shape))
    over, extent = region(line, axis, keepdim=True), line.shape[axis]
    most, longest = call.lines.fusion.chosen
    few = isinstance(k, int) and 0 < k <= most
    if not (few and extent.is_constant and extent.const <= longest):
        raise Unsupported("sorting")
    if x.dtype is BOOL or (x.dtype.is_float and not largest):
        raise Unsupported("sorting")
    monoid, found = MAX if largest else MIN, list[Value]()
    for rank in range(k):
        left = _without(over.at, tuple(found))
        place = Extreme(line, left, monoid, extent).place
        found.append(call.scratch(f"place{rank}", over.shape, I32, place))

    def place_of(at: Indices) -> Expr:
        at = element(line, at)
        *before, place = (place.at(replaced(at, axis, ZERO)) for place in found)
        for rank in reversed(range(len(before))):
            here = op("lt", IndexValue(at[axis]), IndexValue(index(rank + 1)))
            place = select(here, before[rank], place)
        return place

    places = call.define(place_of, 1)

    def value_of(at: Indices) -> Expr:
        points = over.at(element(line, at))
        here = equal(IndexValue(points.number), places.at(at))
        return points.reduce(monoid, points.exact(line, compute_type(line.dtype)), only=here)

    return call.define(value_of, 0), places


def _without(over: Domains, places: tuple[Value, ...]) -> Domains:
    """Return domains without the points at some places."""

    def at(at: Indices) -> Domain:
        points = over(at)
        number = IndexValue(points.number, I32)
        for place in places:
            guard = both(points.guard, op("ne", number, place.at(at)))
            points = replace(points, guard=guard)
        return points

    return at
