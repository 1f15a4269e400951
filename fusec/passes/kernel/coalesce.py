"""Address memory by flat offsets, and collapse adjacent axes where the strides of accesses allow.

Spec: ``kernel -> flat kernel``; same stores. Each load and store has one index afterwards, the
element offset. Axes a, b (a slower) become one axis n of extent A*B where every offset and every
index value has ``B * coefficient(b)`` for the coefficient of a, and every reduction runs over both
or neither: then ``a = n // B``, ``b = n % B`` and no division is left.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from fusec.ir.expr import Expr, IndexValue, Load, Reduce
from fusec.ir.graph import FlatKernel, Kernel, kernel_nodes
from fusec.ir.index import Axis, Index, index
from fusec.ir.rewrite import rewrite
from fusec.passes.graph.simplify import repeated_body


def coalesce(kernel: Kernel) -> FlatKernel:
    """Return the kernel with flat accesses and all mergeable axes merged."""
    flat = flatten(kernel)
    while True:
        neighbours = (*pairwise(flat.grid), *pairwise(flat.inside))
        pair = next((both for both in neighbours if _mergeable(flat, *both)), None)
        if pair is None:
            return flat
        flat = _merge(flat, *pair)


def flatten(kernel: Kernel) -> FlatKernel:
    """Return the kernel with every load and store addressed by its element offset."""

    def flat(node: Expr) -> Expr:
        if isinstance(node, Load) and node.buffer.base is node.buffer:
            return Load(node.buffer.flat(), (node.buffer.offset(node.indices),), node.guard)
        # A flat offset with a stride of 0 does not vary along that axis: drop it from reductions.
        return repeated_body(node) if isinstance(node, Reduce) else node

    kernel = kernel.map(lambda exprs: rewrite(exprs, flat))
    stores = (
        replace(s, buffer=s.buffer.flat(), indices=(s.buffer.offset(s.indices),))
        for s in kernel.stores
    )
    return FlatKernel(replace(kernel, stores=tuple(stores)))


def offsets(kernel: FlatKernel) -> list[Index]:
    """Return every distinct index of a kernel: of loads, stores and index values."""
    found: dict[Index, None] = {}
    for store in kernel.stores:
        found[store.indices[0]] = None
    for node in kernel_nodes(kernel):
        if isinstance(node, Load):
            found[node.indices[0]] = None
        elif isinstance(node, IndexValue):
            found[node.index] = None
    return list(found)


def _mergeable(kernel: FlatKernel, outer: Axis, inner: Axis) -> bool:
    if outer.limit is not None or inner.limit is not None:
        return False
    for axis in kernel.axes:
        if axis.limit is not None and axis.limit.axes & {outer, inner}:
            return False
    for node in kernel_nodes(kernel):
        if isinstance(node, Reduce) and (outer in node.over) != (inner in node.over):
            return False
    for offset in offsets(kernel):
        slow, fast = offset.coefficient(outer), offset.coefficient(inner)
        if slow is None or fast is None or slow is not fast * inner.extent:
            return False
    return True


def _merge(kernel: FlatKernel, outer: Axis, inner: Axis) -> FlatKernel:
    both = Axis(f"{outer.name}{inner.name}", outer.extent * inner.extent)
    mapping = {outer: index(both) // inner.extent, inner: index(both) % inner.extent}
    return FlatKernel(kernel.substitute(mapping))
