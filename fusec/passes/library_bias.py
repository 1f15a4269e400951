"""Give a bias back to the library's GEMM where nothing else wants to fuse with it.

Spec: ``schedule -> schedule``. A kernel that does nothing but add a row vector to the result of one
``mm`` costs a round trip through memory, and the library adds it for free: ``addmm``. The choice
comes after fusion, because a bias that shares a kernel with an activation, a residual or a norm is
better there.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from fusec.ir.expr import Buffer, Cast, Expr, Load, Op, index_exprs, loads
from fusec.ir.graph import (
    Chunked,
    Extern,
    Kernel,
    Schedule,
    Step,
    Store,
    View,
    argument_views,
    extern_views,
)
from fusec.ir.index import contiguous_strides, index

_REASON = "contraction with its bias: runs in the library"


def library_bias(schedule: Schedule) -> Schedule:
    """Return the schedule with lone bias additions merged into their matrix products."""
    products = {
        s.outputs[0]: s
        for s in schedule.steps
        if isinstance(s, Extern) and s.target == "aten.mm.default" and s.outputs[0] is not None
    }
    if not products:
        return schedule
    readers = _readers(schedule)
    steps: list[Step] = []
    dropped: set[Extern] = set()
    for step in schedule.steps:
        found = _lone_bias(step) if isinstance(step, Kernel) else None
        product = products.get(found[0]) if found is not None else None
        if found is None or product is None or readers.get(found[0]) != 1:
            steps.append(step)
            continue
        assert isinstance(step, Kernel)
        dropped.add(product)
        steps.append(_addmm(product, found[1], step))
    if not dropped:
        return schedule
    return replace(schedule, steps=_numbered([s for s in steps if s not in dropped]))


def _numbered(steps: list[Step]) -> tuple[Step, ...]:
    """Return the steps with the kernels named k0, k1, ... again."""
    count = itertools.count()
    return tuple(replace(s, name=f"k{next(count)}") if isinstance(s, Kernel) else s for s in steps)


def _addmm(product: Extern, vector: View, kernel: Kernel) -> Extern:
    return Extern(
        product.node,
        "aten.addmm.default",
        (vector, *product.args),
        (),
        (kernel.stores[0].buffer,),
        _REASON,
        product.origin + kernel.origin,
        meaning=product.meaning,  # of the product: it is what the call costs
    )


def _readers(schedule: Schedule) -> dict[Buffer, int]:
    """Return how many steps (the graph's outputs are one) read each buffer."""
    count: dict[Buffer, int] = {}
    for step in schedule.steps:
        if isinstance(step, Extern):
            read = {v.buffer for v in extern_views(step)}
        elif isinstance(step, Chunked):
            read = {v.buffer for v in step.views}
        else:
            read = {n.buffer for n in loads(s.expr for s in step.stores)}
        for buffer in read:
            count[buffer] = count.get(buffer, 0) + 1
    for view in argument_views(schedule.graph.outputs):
        count[view.buffer] = count.get(view.buffer, 0) + 1
    return count


def _lone_bias(kernel: Kernel) -> tuple[Buffer, View] | None:
    """Return (matrix, vector) if the kernel is ``out[m, n] = matrix[m, n] + vector[n]``."""
    if len(kernel.stores) != 1 or kernel.inside:
        return None
    (store,) = kernel.stores
    expr = _uncast(store.expr)
    if not isinstance(expr, Op) or expr.name != "add" or len(store.indices) != 2:
        return None
    sides = [_uncast(a) for a in expr.args]
    for matrix, vector in (sides, sides[::-1]):
        if not isinstance(matrix, Load) or not isinstance(vector, Load):
            continue
        same = matrix.indices == store.indices and matrix.buffer.shape == store.buffer.shape
        window = _along_columns(vector, store)
        if not same or window is None or matrix.guard or vector.guard:
            continue
        types = {matrix.buffer.dtype, vector.buffer.dtype, store.buffer.dtype}
        dense = store.buffer.strides == contiguous_strides(store.buffer.shape)
        if len(types) == 1 and dense:
            return matrix.buffer, window
    return None


def _along_columns(vector: Load, store: Store) -> View | None:
    """Return the part of a buffer that is read along the columns, if it is read there alone."""
    column = store.indices[1]
    offset = vector.buffer.offset(vector.indices)
    axis = next(iter(column.axes), None)
    step = None if axis is None or column is not index(axis) else offset.coefficient(axis)
    if step is None or step is index(0):
        return None
    start = offset - step * column
    if start.axes or any(True for _ in index_exprs(start)):
        return None
    return View(vector.buffer, store.buffer.shape[1:], (step,), start)


def _uncast(expr: Expr) -> Expr:
    return expr.arg if isinstance(expr, Cast) else expr
