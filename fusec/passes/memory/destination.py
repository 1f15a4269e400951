"""Redirect a kernel's result into a window of an existing buffer, if that is legal in the kernel.

A new value of an input, the next position of a cache and a part of a concatenation have this in
common: the producing kernel can store them where they are copied to. A pass finds such a result
(``in_place``, ``store_parts``) and orders the other steps; this module checks the kernel. It is
legal if each iteration loads the destination, if at all, only at the element that it stores, and
before the store. Loops reorder stores: in a kernel with inside axes only the store's own expression
may load the destination, and the store may not vary along an inside axis.

Worked example: ``a[i, j] = x*2`` with ``Destination(c, Window(1, 8, 1))`` is ``c[i, j + 8] = x*2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusec.ir.expr import Buffer, loads
from fusec.ir.extern import Window
from fusec.ir.graph import Kernel, Store
from fusec.ir.index import index, is_in_range
from fusec.passes.dag import stable_topological_sort


@dataclass(frozen=True, slots=True)
class Destination:
    """The buffer, and the window of it, to which a result is redirected.

    Attributes:
        window: the window in ``whole``; None for all of it.
        axes: window axis -> result axis, None for one of extent 1; None if they are in order.
        kept: the result has other consumers, so it is also stored in its own buffer.
    """

    whole: Buffer
    window: Window | None = None
    axes: tuple[int | None, ...] | None = None
    kept: bool = False

    def stored(self, store: Store) -> Store:
        """Return the store of the same value into ``whole``."""
        at = store.indices
        if self.axes is not None:
            at = tuple(index(0) if k is None else at[k] for k in self.axes)
        if self.window is not None:
            at = self.window.indices(at)
        return Store(self.whole, at, store.expr)


def redirected(kernel: Kernel, into: Mapping[Buffer, Destination]) -> Kernel | None:
    """Return the kernel with results redirected to their destinations, or None if not legal."""
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
    """Return the kernel with stores ordered so that loads precede overwrites, or None."""
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
    order = stable_topological_sort(range(len(kernel.stores)), before)
    if order is None:
        return None
    return replace(kernel, stores=tuple(kernel.stores[k] for k in order))
