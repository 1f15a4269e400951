"""Rewrite rules for kernels that are printed as Triton.

On CPUs the printer checks an index that was loaded from memory and reports it (``cpp/printer.py``).
A GPU kernel cannot return an error, so its load is masked, and the value is 0.
"""

from __future__ import annotations

from fusec.ir.dtype import I64
from fusec.ir.expr import Expr, IndexValue, Load, as_value, both, cast, index_of, op, substitute
from fusec.ir.index import Runtime
from fusec.ir.rewrite import Rules, rewrite
from fusec.passes.stage import Stage


def unguarded_gather(node: Load) -> Expr:
    """``x[[k]*64 + c]`` is ``x[[k]*64 + c] if k >= 0 and k < 40``, with k below 40 in range."""
    guard = node.guard
    for place in dict.fromkeys(a for i in node.indices for a in i.atoms()):
        if isinstance(place, Runtime):
            value = cast(_named(place.expr), I64)
            low, high = op("ge", value, 0), op("lt", value, as_value(place.extent))
            guard = both(guard, low & high)
    if guard is node.guard:
        return node
    return Load(node.buffer, tuple(substitute(i, {}, _named) for i in node.indices), guard)


def _named(value: Expr) -> Expr:
    """Return an index that was read; a constant, which may be out of range, as a value to name."""
    known = index_of(value)
    return value if known is None else IndexValue(known)


GPU_RULES = Rules((unguarded_gather, Load))
"""Rules that are applied once."""

TRITON_FLAT = (
    Stage(
        "guard_gathers",
        "mask loads whose index was read from memory where it is out of range (GPU)",
        lambda flat, context: flat.map(lambda exprs: rewrite(exprs, GPU_RULES)),
        "FlatKernel",
        "FlatKernel",
        needs=("coalesce",),
    ),
)
