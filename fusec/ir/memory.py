"""What steps do to memory: which buffers they need, may overwrite, or may keep views of.

``passes/memory/buffers.py`` decides by these where buffers lie; ``ir/host.py`` verifies it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fusec.ir.expr import Buffer, Expr, Load, Reduce, children, loads, postorder, reach
from fusec.ir.extern import Convolution, Fresh, Product
from fusec.ir.graph import Extern, ForeachKernel, Kernel, RowLoop, Schedule, Step, Store
from fusec.ir.index import Index, index


def made_by(step: Step) -> tuple[Buffer, ...]:
    """Return the buffers that need memory before a step, including inputs written in place."""
    match step:
        case Kernel() | ForeachKernel() | RowLoop():
            return step.writes
        case _:
            return ()


def added_to(step: Step) -> tuple[Buffer, ...]:
    """Return the buffers that have to begin as zeros before a step, for it adds to them."""
    match step:
        case RowLoop(added=added):
            return added
        case Kernel():
            return tuple(dict.fromkeys(s.buffer.base for s in step.stores if s.adds))
        case _:
            return ()


def owned(step: Step) -> tuple[Buffer, ...]:
    """Return the buffers that a step writes and nothing else aliases: their memory is reusable."""
    match step:
        case Extern(effect=Fresh() | Product() | Convolution()):
            return step.writes
        case _:
            return made_by(step)


def overwritable(kernel: Kernel) -> Mapping[Buffer, tuple[Buffer, ...]]:
    """Return result -> operands that it may overwrite, if the stores of a point run in order.

    Each element of the operand is read before the result is stored there: only by the point that
    stores it, or by reductions that the store waits for. Both have the same footprint.
    """
    found: dict[Buffer, tuple[Buffer, ...]] = {}
    operands = {b: footprint(b) for b in kernel.reads if b not in kernel.writes}
    places: dict[Buffer, set[Index]] = {b: set() for b in operands}
    for load in kernel.loads:
        if load.buffer in places:
            places[load.buffer].add(load.buffer.offset(load.indices))
    for store in kernel.stores:
        own, place = footprint(store.buffer), {store.buffer.offset(store.indices)}
        fits = [b for b, size in operands.items() if size == own and places[b] <= place]
        if fits and kernel.writes.count(store.buffer) == 1:
            over = _read_before(kernel, store, fits)
            if over:
                found[store.buffer] = over
    return found


def _read_before(kernel: Kernel, store: Store, operands: list[Buffer]) -> tuple[Buffer, ...]:
    """Return the operands that a kernel reads before it stores a result over them.

    Reductions over the inside axes of a point are complete before anything is stored there. Without
    inside axes a point is one block, in which all operands of a store precede it. So does what
    reductions beside the store read, if it is the element that the store has loaded. The kernel is
    walked once for the store, and again only for operands that a reduction beside it reads.
    """
    inside = frozenset(kernel.inside)
    awaited = {
        node
        for node in postorder((store.expr,))
        if not inside or (isinstance(node, Reduce) and node.axes.isdisjoint(inside))
    }
    late = _read_outside(kernel, store, awaited)
    beside = _beside(kernel, store) if late.intersection(operands) else []

    def is_late(operand: Buffer) -> bool:
        if operand not in late or not beside:
            return operand in late
        fitting = {node for node, loads_others in beside if operand not in loads_others}
        return operand in _read_outside(kernel, store, awaited | fitting)

    return tuple(operand for operand in operands if not is_late(operand))


def _beside(kernel: Kernel, store: Store) -> list[tuple[Reduce, set[Buffer]]]:
    """Return the reductions in a store's loop nest, with the buffers that they load otherwise.

    They have its axes, and depend on no reduction that the store does not depend on: the gradient
    of a bias is summed in the loops that store its summands. Buffers that they load as the store
    does are at its element.
    """
    axes = store.buffer.offset(store.indices).axes
    at_store = reach((store.expr,), lambda node: () if isinstance(node, Reduce) else children(node))
    loaded = {node for node in at_store if isinstance(node, Load)}
    awaited = set(postorder((store.expr,)))
    found = []
    for node in kernel.reductions:
        if frozenset(node.over) | node.axes != axes:
            continue
        if awaited.issuperset(n for n in postorder(node.bodies) if isinstance(n, Reduce)):
            found.append((node, {n.buffer for n in loads(node.bodies) if n not in loaded}))
    return found


def _read_outside(kernel: Kernel, store: Store, awaited: set[Expr]) -> set[Buffer]:
    """Return the buffers that a kernel reads outside the nodes ``awaited``.

    The store's own expression may load them outside reductions: those are the element's.
    """
    found: set[Buffer] = set()
    others = [s.expr for s in kernel.stores if s is not store]
    for roots in ([store.expr], others):
        nodes = reach(roots, lambda node: () if node in awaited else children(node))
        outside = [node for node in nodes if node not in awaited]
        found.update(n.buffer for n in loads(n for n in outside if isinstance(n, Reduce)))
        if roots is others:
            found.update(node.buffer for node in outside if isinstance(node, Load))
    return found


def footprint(buffer: Buffer) -> tuple[object, ...]:
    """Return a key that is equal for buffers that can use the same memory: extent, type and form.

    Their shapes may differ: a library makes a matrix where a kernel writes [batch, time, c].
    The number of elements distinguishes empty buffers from others.
    """
    elements = math.prod(buffer.shape, start=index(1))
    return elements, buffer.flat().shape, buffer.dtype, buffer.form


def kept_views(schedule: Schedule) -> set[Buffer]:
    """Return the buffers of which an eager kernel may have kept a view."""
    return {b for call in schedule.externs if call.may_alias for b in call.reads}


def bytes_of(buffer: Buffer) -> int:
    """Return the bytes of a buffer's storage, at the hints of sizes."""
    extents: tuple[Index, ...] = buffer.base.flat().shape
    return extents[0].hint() * buffer.dtype.itemsize
