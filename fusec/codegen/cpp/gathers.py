"""Indices read from memory that are the same in all iterations of a loop: checked before it.

A check in the loop writes the kernel's status where it fails, so that compilers neither move it nor
unroll the loop. Worked example, rows of a table at places that are read::

    for m:                                       for m:
      v = place[m]                                 v = place[m]
      for k:                            ->         ok = v in 0 .. n, else report
        y[m, k] = x[v, k] if v in 0 .. n           s = v if ok else 0
                          else report              for k:
                                                     y[m, k] = x[s, k]

A check before a loop without iterations reports what no load reads; eager reports it, too.
"""

from __future__ import annotations

from fusec.ir.expr import Load, Var
from fusec.ir.index import Axis, Runtime, index, is_in_range
from fusec.ir.program import For, Let, statements


def steady_gathers(loop: For, lane: Axis | None) -> list[Runtime]:
    """Return the gathers of a loop's unguarded loads whose index has a name before the loop.

    Not those along an axis that may have no elements, which has none to read instead.
    """
    lets = [s for s in statements(loop.body) if isinstance(s, Let)]
    inside: set[object] = {let.var for let in lets}
    found: dict[Runtime, None] = {}
    for let in lets:
        if not isinstance(let.value, Load) or let.value.guard is not None:
            continue
        for gather in (a for a in let.value.indices[0].atoms() if isinstance(a, Runtime)):
            place = gather.expr
            named = isinstance(place, Var) and place not in inside and lane not in place.axes
            if named and is_in_range(index(0), gather.extent):
                found[gather] = None
    return list(found)
