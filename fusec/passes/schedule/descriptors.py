"""Plans in which hardware copies tiles of operands: offered beside those that load by pointers.

A copy by tensor descriptor needs no registers for addresses and no instruction of most threads. It
needs memory in which rows lie multiples of 16 bytes apart, and products that read shared memory:
lanes that multiply f32 operands one by one would spill 20 KB of them (128x128, sm_90, 2026-11).
What a program makes of such a plan, ``codegen/triton/descriptors.py`` says, access by access.

Nothing of this was measured on a device yet (2026-11), so the plan chosen by rule stays with
pointers, and descriptors come second: a race tries them, however short it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fusec.ir.contraction import Factors
from fusec.ir.expr import Cast, Expr, Load, Reduce
from fusec.ir.index import Index, Size, index
from fusec.ir.program import MULTIPLE
from fusec.passes.machine import Resources
from fusec.passes.schedule.plan import Plan


def with_descriptors(
    plans: tuple[Plan, ...], products: Mapping[Reduce, Factors], sm: Resources
) -> tuple[Plan, ...]:
    """Return plans and, behind the first, each of them with descriptors where an operand allows it.

    The order is first, first with descriptors, second with descriptors, second, ...: what few
    configurations show is the difference and the likeliest tile.
    """
    on_tensor_cores = [p for p in products.values() if p.left.dtype.itemsize == 2 or sm.tf32]
    operands = [load for parts in on_tensor_cores for load in _loads(parts)]
    if not sm.descriptors or not any(map(is_describable, operands)):
        return plans
    first, *others = plans
    pairs = [(replace(plan, descriptors=True), plan) for plan in others]
    return (first, replace(first, descriptors=True), *(plan for pair in pairs for plan in pair))


def _loads(parts: Factors) -> Iterator[Load]:
    """Yield the operands of a product that are loaded as they are, but for their type."""
    for side in (parts.left, parts.right):
        node: Expr = side
        while isinstance(node, Cast):
            node = node.arg
        if isinstance(node, Load):
            yield node


def is_describable(load: Load) -> bool:
    """Return True if an axis walks memory by one element, and nothing else but by 16 bytes."""
    offset = load.buffer.offset(load.indices)
    units = [a for a in offset.axes if offset.steps_by_one(a)]
    if load.guard is not None or len(units) != 1:
        return False
    return is_multiple(offset - index(units[0]), MULTIPLE // load.dtype.itemsize)


def is_multiple(value: Index, of: int) -> bool:
    """Return True if each term is a multiple of ``of``, at most 16: by itself, or by a size.

    A launch promises of sizes what their hints are: multiples of 16, or nothing.
    """

    def divides(monomial: tuple[object, ...], coefficient: int) -> bool:
        sizes = (a for a in monomial if isinstance(a, Size))
        return coefficient % of == 0 or any(s.hint % MULTIPLE == 0 for s in sizes)

    return value.const % of == 0 and all(divides(m, c) for m, c in value.terms)
