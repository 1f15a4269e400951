"""A result in a window of a buffer that exists, in the place of a buffer of its own.

What is copied over an input, a cache's next position and a part of a cat have this in common: the
kernel that makes them may store them where they end. A pass finds such a result (``in_place``,
``store_parts``) and sees to other steps; whether the kernel can is asked here. It can if each of
its points reads the buffer, if at all, at the element alone that it writes, and before it does.
Loops take stores in an order of their own: there nothing but the store itself may read the buffer,
once for each point of the grid.

Worked example: ``a[i, j] = x*2`` with ``Destination(c, Window(1, 8, 1))`` is ``c[i, j + 8] = x*2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusec.ir.expr import Buffer, loads
from fusec.ir.extern import Window
from fusec.ir.graph import Kernel, Store
from fusec.ir.index import index, is_in_range
from fusec.passes.dag import in_order


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a result belongs.

    Attributes:
        window: where in the whole; None if it is all of it.
        axes: of the result, that the window's axes are, None for one element; all in order if None.
        kept: something reads the result where it was: it is stored there, too.
    """

    whole: Buffer
    window: Window | None = None
    axes: tuple[int | None, ...] | None = None
    kept: bool = False

    def stored(self, store: Store) -> Store:
        """Return what stores in the whole what another stores in the result."""
        at = store.indices
        if self.axes is not None:
            at = tuple(index(0) if k is None else at[k] for k in self.axes)
        if self.window is not None:
            at = self.window.indices(at)
        return Store(self.whole, at, store.expr)


def redirected(kernel: Kernel, into: Mapping[Buffer, Destination]) -> Kernel | None:
    """Return a kernel that stores results where they belong; None if that is not legal in it."""
    stores: list[Store] = []
    for store in kernel.stores:
        destination = into.get(store.buffer)
        if destination is None or destination.kept:
            stores.append(store)
        if destination is not None:
            stores.append(destination.stored(store))
            inside = map(is_in_range, stores[-1].indices, destination.whole.shape)
            if destination.window is not None and not all(inside):
                return None
    made = replace(kernel, stores=tuple(stores))
    return None if in_reading_order(made) is None else made


def in_reading_order(kernel: Kernel) -> Kernel | None:
    """Return a kernel that reads what it writes before it does; None if a point cannot."""
    if set(kernel.reads).isdisjoint(kernel.writes):
        return kernel
    writers: dict[Buffer, list[int]] = {}
    for k, store in enumerate(kernel.stores):
        writers.setdefault(store.buffer, []).append(k)
    before: dict[int, set[int]] = {}
    for k, store in enumerate(kernel.stores):
        for load in loads((store.expr,)):
            for writer in writers.get(load.buffer, ()):
                at = kernel.stores[writer].indices
                swept = any(not i.axes.isdisjoint(kernel.inside) for i in at)
                swept |= writer != k and bool(kernel.inside)
                if load.indices != at or load.guard is not None or swept:
                    return None
                before.setdefault(writer, set()).update({k} - {writer})
    order = in_order(range(len(kernel.stores)), before)
    if order is None:
        return None
    return replace(kernel, stores=tuple(kernel.stores[k] for k in order))
