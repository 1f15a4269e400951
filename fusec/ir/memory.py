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
    for store in kernel.stores:
        own = footprint(store.buffer)
        fits = [b for b, size in operands.items() if size == own]
        over = tuple(b for b in fits if _is_read_before(kernel, store, b))
        if over and kernel.writes.count(store.buffer) == 1:
            found[store.buffer] = over
    return found


def _is_read_before(kernel: Kernel, store: Store, operand: Buffer) -> bool:
    """Return True if a kernel reads an operand where it stores a result, and before it does.

    Reductions over the inside axes of a point are complete before anything is stored there. Without
    inside axes a point is one block, in which all operands of a store precede it. A reduction
    beside the store (``_beside``) uses the element that the store has loaded.
    """
    place = store.buffer.offset(store.indices)
    for load in loads(s.expr for s in kernel.stores):
        if load.buffer is operand and operand.offset(load.indices) is not place:
            return False
    inside = frozenset(kernel.inside)
    awaited = {
        node
        for node in postorder((store.expr,))
        if not inside or (isinstance(node, Reduce) and node.axes.isdisjoint(inside))
    }
    awaited |= _beside(kernel, store, operand)
    return not any(
        _reads_outside(s.expr, operand, awaited, at_element=s is store) for s in kernel.stores
    )


def _beside(kernel: Kernel, store: Store, operand: Buffer) -> set[Expr]:
    """Return the reductions in a store's loop nest that load the operand only as the store does.

    They have its axes, and depend on no reduction that the store does not depend on: the gradient
    of a bias is summed in the loops that store its summands.
    """
    axes = store.buffer.offset(store.indices).axes
    at_store = reach((store.expr,), lambda node: () if isinstance(node, Reduce) else children(node))
    loaded = {node for node in at_store if isinstance(node, Load) and node.buffer is operand}
    awaited = set(postorder((store.expr,)))
    return {
        node
        for node in postorder(s.expr for s in kernel.stores)
        if isinstance(node, Reduce)
        and frozenset(node.over) | node.axes == axes
        and awaited.issuperset(n for n in postorder(node.bodies) if isinstance(n, Reduce))
        and loaded.issuperset(n for n in loads(node.bodies) if n.buffer is operand)
    }


def _reads_outside(root: Expr, operand: Buffer, awaited: set[Expr], *, at_element: bool) -> bool:
    """Return True if an expression reads an operand outside the nodes ``awaited``.

    Args:
        at_element: loads outside reductions are allowed.
    """
    waiting, seen = [root], set(awaited)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        match node:
            case Load(buffer=buffer) if buffer is operand and not at_element:
                return True
            case Reduce() if any(load.buffer is operand for load in loads((node,))):
                return True
        waiting += children(node)
    return False


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
