"""Plans in which tensor descriptors (TMA) copy tiles of operands, offered beside pointer loads.

A copy by tensor descriptor needs no registers for addresses and no instruction of most threads. It
needs rows that lie multiples of 16 bytes apart, and products that read shared memory: FMAs on f32
operands would spill 20 KB of them (128x128, sm_90, 2026-11). ``codegen/triton/descriptors.py``
decides for each access whether a plan's descriptors apply.

The plan chosen by rule uses pointers, and descriptors come second: a plain product of 128 x 128
takes 0.94 to 1.02 of the time with them (0.98 on the mean of six), an attention of 128 rows 1.01 to
1.44, for they may cost it the second program of a multiprocessor (H100, 2026-11-26). Small tiles of
nested products were measured with descriptors alone, which come first there (``contraction.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fusec.ir.contraction import Factors
from fusec.ir.expr import Cast, Expr, Load, Reduce
from fusec.ir.index import Index, Size, index
from fusec.ir.machine import Resources
from fusec.ir.program import MULTIPLE
from fusec.passes.schedule.plan import Plan

WORD_BYTES = 4
"""Least bytes of an asynchronous copy."""


def with_descriptors(
    plans: tuple[Plan, ...], products: Mapping[Reduce, Factors], sm: Resources
) -> tuple[Plan, ...]:
    """Return plans and, after the first, variants with descriptors where an operand allows them.

    The order is first, first with descriptors, second with descriptors, second, ...: a race over
    few configurations compares descriptors with pointers, and tries the likeliest tile.
    """
    on_tensor_cores = [p for p in products.values() if p.left.dtype.itemsize <= 2 or sm.tf32]
    operands = [load for parts in on_tensor_cores for load in _loads(parts)]
    if not sm.descriptors or not any(map(is_describable, operands)):
        return plans
    first, *others = plans
    pairs = [(replace(plan, descriptors=True), plan) for plan in others]
    return (first, replace(first, descriptors=True), *(plan for pair in pairs for plan in pair))


def _loads(parts: Factors) -> Iterator[Load]:
    """Yield the operands of a product that are loads, apart from casts."""
    for side in (parts.left, parts.right):
        node: Expr = side
        while isinstance(node, Cast):
            node = node.arg
        if isinstance(node, Load):
            yield node


def is_describable(load: Load) -> bool:
    """Return True if one axis has unit stride and all others have multiples of 16 bytes."""
    offset = load.buffer.offset(load.indices)
    units = [a for a in offset.axes if offset.steps_by_one(a)]
    if load.guard is not None or len(units) != 1:
        return False
    return is_multiple(offset - index(units[0]), MULTIPLE // load.dtype.itemsize)


def is_copied(load: Load) -> bool:
    """Return True if threads can copy rows to shared memory (cp.async): these are words apart."""
    offset = load.buffer.offset(load.indices)
    steps = (offset.coefficient(a) for a in offset.axes if not offset.steps_by_one(a))
    return all(n is None or is_multiple(n, WORD_BYTES // load.dtype.itemsize or 1) for n in steps)


def is_multiple(value: Index, of: int) -> bool:
    """Return True if each term is a multiple of ``of``, at most 16: by its coefficient or a size.

    A launch guarantees that a size is a multiple of 16 if its hint is one.
    """

    def divides(monomial: tuple[object, ...], coefficient: int) -> bool:
        sizes = (a for a in monomial if isinstance(a, Size))
        return coefficient % of == 0 or any(s.hint % MULTIPLE == 0 for s in sizes)

    return value.const % of == 0 and all(divides(m, c) for m, c in value.terms)
