"""What a trace knows of sizes, as the data that an archive holds (``runtime/sizes.py``).

Names are those of the trace's symbols. Worked example, of a table of 64 positions that is read up
to the second extent of ``x: f32[s0, s1, 8]``::

    specs       ("size", "s0"), ("size", "s1"), ("f32", ("s0", "s1", 8), (("*", 8, "s1"), 8, 1))
    conditions  ("<=", "s1", 64)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fusec.errors import Unsupported
from fusec.frontend.shapes import Sizes
from fusec.ir.argument import Comparison, Condition, Junction
from fusec.ir.atoms import Atom, FloorDiv, Minimum, Mod, Size
from fusec.ir.index import Index, index
from fusec.runtime import sizes
from fusec.runtime.loading import NAMES, Spec
from fusec.runtime.sizes import Formula


def specs_of(values: Sequence[Any]) -> tuple[tuple[Spec, ...], tuple[sizes.Condition, ...]]:
    """Return what some traced arguments are, and what is asked of their sizes.

    What is no tensor with plain memory, and no size, is None.

    Raises:
        Unsupported: for sizes that are no sums, products, quotients and least ones of symbols.
    """
    known = Sizes().plain()
    specs = tuple(_spec(value, known) for value in values)
    bounds = [bound for size in known.used.values() for bound in _bounds(size)]
    asked = [_condition(one) for env in _environments(values) for one in known.asked(env)]
    return specs, tuple(dict.fromkeys((*bounds, *asked)))


def not_empty(values: Sequence[Any]) -> tuple[sizes.Condition, ...]:
    """Return what has to hold so that no traced tensor is empty.

    A trace for sizes of any value does not ask it, and ``x[:, -1]`` reads what is not there.
    """
    known = Sizes().plain()
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    extents = dict.fromkeys(n for tensor in tensors for n in known.tensor(tensor).shape)
    return tuple(
        (">=", _formula(n - n.const), 1 - n.const)
        for n in extents
        if not (n.is_constant or _grows(n)) or n in map(index, known.used.values())
    )


def _grows(extent: Index) -> bool:
    """Return True for what is at least one where all sizes are."""
    signs = (c > 0 and all(isinstance(a, Size) for a in atoms) for atoms, c in extent.terms)
    return extent.const >= 0 and all(signs)


def _environments(values: Sequence[Any]) -> Iterator[Any]:
    """Yield the one environment of the symbols in some arguments, if there are any."""
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                yield size.node.shape_env
                return


def _spec(value: Any, known: Sizes) -> Spec:
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return "size", _formula(known.index(value))
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    seen = known.tensor(value)
    shape, strides = (tuple(map(_formula, each)) for each in (seen.shape, seen.strides))
    return NAMES.get(value.dtype, str(value.dtype)), shape, strides


def _bounds(size: Size) -> Iterator[sizes.Condition]:
    if size.least:
        yield ">=", size.name, size.least
    if size.most is not None:
        yield "<=", size.name, size.most


def _formula(value: Index) -> Formula:
    terms = [_term(factor, atoms) for atoms, factor in value.terms]
    if value.const or not terms:
        terms.append(value.const)
    return terms[0] if len(terms) == 1 else ("+", *terms)


def _term(factor: int, atoms: Sequence[Atom]) -> Formula:
    factors = [*((factor,) if factor != 1 else ()), *map(_atom, atoms)]
    return factors[0] if len(factors) == 1 else ("*", *factors)


def _atom(atom: Atom) -> Formula:
    match atom:
        case Minimum():
            return "min", *map(_formula, atom.args)
        case Size():
            return atom.name
        case FloorDiv() | Mod():
            sign = "//" if isinstance(atom, FloorDiv) else "%"
            return sign, _formula(atom.dividend), _formula(atom.divisor)
    raise Unsupported(f"a size with {atom}")


def _condition(condition: Condition) -> sizes.Condition:
    match condition:
        case Comparison():
            made = condition.sign, _formula(condition.left), _formula(condition.right)
            match made:
                case ("==", size, ("min", *parts)) | ("==", ("min", *parts), size) if size in parts:
                    (most,) = (part for part in parts if part != size)
                    return "<=", size, most
            return made
        case Junction():
            return condition.sign, *map(_condition, condition.parts)
    raise Unsupported(f"a condition {condition}")


def renamed_spec(spec: Spec, names: Mapping[str, str]) -> Spec:
    """Return what an argument is with other names for its sizes; raises as ``renamed``."""
    match spec:
        case (dtype, tuple() as shape, tuple() as strides):
            own, steps = (tuple(renamed(n, names) for n in each) for each in (shape, strides))
            return dtype, own, steps
        case (kind, formula):
            return kind, renamed(formula, names)
    return None


def renamed(formula: Any, names: Mapping[str, str]) -> Any:
    """Return a formula or condition with other names for its sizes.

    Raises:
        Unsupported: for a size that has none: no input's extent is it.
    """
    match formula:
        case str():
            if formula not in names:
                raise Unsupported(f"a size {formula} that no input has by itself")
            return names[formula]
        case (sign, *parts):
            return sign, *(renamed(part, names) for part in parts)
    return formula
