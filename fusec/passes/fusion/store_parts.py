"""Store the parts of a concatenation in the result directly, instead of copying them there.

Spec: ``schedule -> schedule``. A kernel that only concatenates tensors is removed if one earlier
kernel produces all of them: it stores each part at its offset in the result. Legal if

1. no other step reads a part, nor does the producing kernel itself;
2. along one axis the parts cover the whole, each element once; the other axes are equal.

Cheap parts are inlined into the concatenating kernel (``inline``) and do not occur here.

Worked example: ``a[i, j] = x*2; b[i, j] = x*3`` and ``c[i, k] = where(k < 8, a[i, k] if k < 8,
b[i, k - 8] if k >= 8)`` become ``c[i, j] = x*2; c[i, j + 8] = x*3``.
"""

from __future__ import annotations

from dataclasses import replace

from fusec.ir.contraction import factors
from fusec.ir.expr import Buffer, Load, Select, loads
from fusec.ir.extern import Window
from fusec.ir.graph import Kernel, Schedule, Store, kernel_nodes
from fusec.ir.index import Axis, index, product
from fusec.passes.dag import count_readers
from fusec.passes.graph.simplify import simplifier
from fusec.passes.memory.destination import Destination, redirected


def store_parts(schedule: Schedule) -> Schedule:
    """Return the schedule without concatenations whose parts one kernel can store in place."""
    maker = {buffer: kernel for kernel in schedule.kernels for buffer in kernel.writes}
    latest: dict[Kernel, tuple[Kernel, ...]] = {kernel: (kernel,) for kernel in schedule.kernels}
    readers = count_readers(schedule)
    for joining in schedule.kernels:
        parts = _parts(joining)
        makers = {maker.get(part) for part in parts}
        first = makers.pop() if len(makers) == 1 else None
        if first is None or any(readers[part] > 1 for part in parts):
            continue
        made = redirected(latest[first][0], parts)
        if made is None or any(map(factors, kernel_nodes(made))):  # tiles assume a whole buffer
            continue
        origin, defs = made.origin + joining.origin, (*made.defs, *joining.defs)
        latest.update({first: (replace(made, origin=origin, defs=defs),), joining: ()})
        maker.update((whole, first) for whole in joining.writes)
    return schedule.map_kernels(lambda kernel: latest[kernel])


def _parts(joining: Kernel) -> dict[Buffer, Destination]:
    """Return part -> its window in the result of a concatenation; empty for other kernels.

    The windows are disjoint, so they cover the result if they have as many elements.
    """
    store, *others = joining.stores
    if joining.inside or others or not isinstance(store.expr, Select):
        return {}
    parts: dict[Buffer, Destination] = {}
    for load in loads((store.expr,)):
        window = _window(store, load)
        if window is None:
            return {}
        parts[load.buffer] = Destination(store.buffer, window)
    covered = sum((product(part.shape) for part in parts), index(0))
    return parts if covered is product(store.buffer.shape) else {}


def _window(store: Store, load: Load) -> Window | None:
    """Return the window of the stored buffer that is a copy of all that a load reads, or None."""
    whole, part = store.buffer, load.buffer
    if part.dtype is not whole.dtype or len(part.shape) != len(whole.shape):
        return None
    shorter = [
        k for k, (a, b) in enumerate(zip(part.shape, whole.shape, strict=True)) if a is not b
    ]
    axis = store.indices[shorter[0]].as_axis() if len(shorter) == 1 else None
    if axis is None:
        return None
    (k,) = shorter
    start = store.indices[k] - load.indices[k]
    within = index(Axis(axis.name, part.shape[k]))
    (found,) = simplifier()((store.expr.substitute({axis: start + within}),))
    same = Load(part, (*store.indices[:k], within, *store.indices[k + 1 :]))
    return Window(k, start, index(1)) if found is same and not start.axes else None
