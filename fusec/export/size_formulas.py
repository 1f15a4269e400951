"""Convert a trace's symbolic sizes to data of an archive (``archive/sizes.py``).

Names are those of the trace's symbols. Worked example, of a table of 64 positions that is read up
to the second extent of ``x: f32[s0, s1, 8]``::

    specs       ("size", "s0"), ("size", "s1"), ("f32", ("s0", "s1", 8), (("*", 8, "s1"), 8, 1))
    conditions  ("<=", "s1", 64)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fusec.archive import sizes
from fusec.archive.graph import NAMES, Spec
from fusec.errors import Unsupported
from fusec.frontend.shapes import SizeMap
from fusec.ir.argument import Comparison, Condition, Junction
from fusec.ir.atoms import Size
from fusec.ir.formula import formula_of


def specs_of(values: Sequence[Any]) -> tuple[tuple[Spec, ...], tuple[sizes.SizeCondition, ...]]:
    """Return the specs of some traced arguments, and the conditions on their sizes.

    The spec of anything but a strided tensor or a size is None.

    Raises:
        Unsupported: for sizes that are no sums, products, quotients and minima of symbols.
    """
    known = SizeMap().plain()
    specs = tuple(_spec(value, known) for value in values)
    bounds = [bound for size in known.used.values() for bound in _bounds(size)]
    shapes = (v.shape if isinstance(v, torch.Tensor) else (v,) for v in values)
    numbers = (n for shape in shapes for n in shape if isinstance(n, torch.SymInt))
    env = next((number.node.shape_env for number in numbers), None)  # all have the same
    asked = [] if env is None else [_condition(one) for one in known.asked(env)]
    return specs, tuple(dict.fromkeys((*bounds, *asked)))


def _spec(value: Any, known: SizeMap) -> Spec:
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return "size", formula_of(known.index(value))
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    seen = known.tensor(value)
    shape, strides = (tuple(map(formula_of, each)) for each in (seen.shape, seen.strides))
    return NAMES.get(value.dtype, str(value.dtype)), shape, strides


def _bounds(size: Size) -> Iterator[sizes.SizeCondition]:
    if size.least:
        yield ">=", size.name, size.least
    if size.most is not None:
        yield "<=", size.name, size.most


def _condition(condition: Condition) -> sizes.SizeCondition:
    match condition:
        case Comparison():
            made = condition.sign, formula_of(condition.left), formula_of(condition.right)
            match made:
                case ("==", size, ("min", *parts)) | ("==", ("min", *parts), size) if size in parts:
                    (most,) = (part for part in parts if part != size)
                    return "<=", size, most
            return made
        case Junction():
            return condition.sign, *map(_condition, condition.parts)
    raise Unsupported(f"a condition {condition}")
