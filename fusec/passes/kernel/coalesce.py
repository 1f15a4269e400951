"""Address memory by flat offsets, and merge adjacent axes where the strides of accesses allow.

Spec: ``kernel -> flat kernel``; same stores. Each load and store has one index afterwards, the
element offset. Axes a, b (a slower) become one axis n of extent A*B where every offset and every
index value has ``B * coefficient(b)`` for the coefficient of a, and every reduction runs over both
or neither: then ``a = n // B``, ``b = n % B`` and no division is left.

On GPUs, pointwise kernels also merge short rows that no vector divides, such as images of 7 x 7.
What all elements of a row share, as the numbers of a channel, is loaded at ``n // B``. Worked
example, 2048 channels, B = 49::

    y[i, c, k] = x[100352*i + 49*c + k] * s[c]      k < 49, loaded one by one
    y[i, n]    = x[100352*i + n] * s[n // 49]       n < 2048 * 49, x in vectors of 16 bytes

BatchNorm and ReLU of 64 x 2048 x 7 x 7 take 12.6 us merged and 44 row by row. Longer rows stay
(``RowTuning.short_row``): 64 x 512 x 13 x 13 would take 11.4 merged, and takes 10.2 (inference,
bf16, model of sm_90, 2026-11).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from fusec.ir.expr import Expr, IndexValue, Load, Reduce
from fusec.ir.graph import FlatKernel, Kernel, kernel_nodes
from fusec.ir.index import Axis, Index, index
from fusec.ir.machine import Machine
from fusec.ir.rewrite import rewrite
from fusec.ir.strides import begin_aligned
from fusec.passes.graph.reduction_rules import repeated_body


def coalesce(kernel: Kernel) -> FlatKernel:
    """Return the kernel with flat accesses and all mergeable axes merged."""
    flat = flatten(kernel)
    while True:
        neighbours = (*pairwise(flat.grid), *pairwise(flat.inside))
        pair = next((both for both in neighbours if _mergeable(flat, *both)), None)
        if pair is None:
            return flat
        flat = _merge(flat, *pair)


def merge_short_rows(kernel: FlatKernel, machine: Machine) -> FlatKernel:
    """Return a pointwise kernel with its innermost axes merged if these are short, odd rows."""
    if machine.is_cpu or kernel.inside or len(kernel.grid) < 2:
        return kernel
    outer, inner = kernel.grid[-2:]
    short = inner.extent.is_constant and inner.extent.const < machine.rows.short_row
    if not short or _is_ragged(kernel, outer, inner):
        return kernel
    stores = {store.indices[0]: store.buffer.dtype.itemsize for store in kernel.stores}
    if begin_aligned(inner.extent.const, stores.values()):
        return kernel
    shared = {offset for offset in offsets(kernel) if offset.coefficient(inner) is index(0)}
    varying = set(offsets(kernel)) - shared
    walked = all(_walks_as_one(offset, outer, inner) for offset in varying)
    return _merge(kernel, outer, inner) if walked and stores.keys() <= varying else kernel


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
    if _is_ragged(kernel, outer, inner):
        return False
    for node in kernel_nodes(kernel):
        if isinstance(node, Reduce) and (outer in node.over) != (inner in node.over):
            return False
    return all(_walks_as_one(offset, outer, inner) for offset in offsets(kernel))


def _is_ragged(kernel: FlatKernel, outer: Axis, inner: Axis) -> bool:
    """Return True if one of two axes has a limit, or is in one."""
    if outer.limit is not None or inner.limit is not None:
        return True
    limits = (axis.limit for axis in kernel.axes if axis.limit is not None)
    return any(limit.axes & {outer, inner} for limit in limits)


def _walks_as_one(offset: Index, outer: Axis, inner: Axis) -> bool:
    slow, fast = offset.coefficient(outer), offset.coefficient(inner)
    return slow is not None and fast is not None and slow is fast * inner.extent


def _merge(kernel: FlatKernel, outer: Axis, inner: Axis) -> FlatKernel:
    both = Axis(f"{outer.name}{inner.name}", outer.extent * inner.extent)
    mapping = {outer: index(both) // inner.extent, inner: index(both) % inner.extent}
    return FlatKernel(kernel.substitute(mapping))
