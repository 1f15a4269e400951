"""Merge a bias addition into the library's GEMM where it fused with nothing else.

Spec: ``schedule -> schedule``. A kernel that only adds a row vector to the result of one ``mm``
costs a round trip through memory, and the library adds it for free: ``addmm``. The pass runs after
fusion, because a bias that shares a kernel with an activation, a residual or a norm is cheaper
there.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from fusec.ir.expr import Buffer, Cast, Expr, Load, Op, index_exprs
from fusec.ir.extern import BiasedProduct
from fusec.ir.graph import Extern, Kernel, Schedule, Step, Store, View
from fusec.ir.index import index
from fusec.passes.dag import count_readers

_REASON = "contraction with its bias: runs in the library"


def library_bias(schedule: Schedule) -> Schedule:
    """Return the schedule with lone bias additions merged into their matrix products."""
    products = {call.result: call for call in schedule.externs if call.product}
    if not products:
        return schedule
    readers = count_readers(schedule)
    dropped: set[Step] = set()

    def take(kernel: Kernel) -> tuple[Step]:
        found = _lone_bias(kernel)
        call = None if found is None else products.get(found[0])
        if found is None or call is None or readers[found[0]] != 1:
            return (kernel,)
        if found[1].buffer.base is found[0].base:  # a row of the product is added to it
            return (kernel,)
        dropped.add(call)
        return (_biased(call, found[1], kernel),)

    merged = schedule.map_kernels(take)
    if not dropped:
        return schedule
    left = replace(merged, steps=tuple(step for step in merged.steps if step not in dropped))
    count = itertools.count()
    return left.map_kernels(lambda kernel: (replace(kernel, name=f"k{next(count)}"),))


def _biased(call: Extern, vector: View, kernel: Kernel) -> Extern:
    assert call.product is not None
    return replace(
        call,  # its decomposition stays that of the product: the cost model uses it
        target=call.product.biased,
        args=(vector, *call.args),
        outputs=kernel.writes,
        reason=_REASON,
        origin=call.origin + kernel.origin,
        effect=BiasedProduct(call.product.linear),
    )


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
        if len(types) == 1 and store.buffer.is_row_major:
            return matrix.buffer, window
    return None


def _along_columns(vector: Load, store: Store) -> View | None:
    """Return the view of a vector that is loaded along the store's columns only, or None."""
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
