"""Symbolic sizes of a trace as data of an archive (``archive/sizes.py``), and their conditions.

Names are those of the trace's symbols, until they get those of the user. Worked example, of a table
of 64 positions that is read up to the second extent of ``x: f32[s0, s1, 8]``::

    specs       ("size", "s0"), ("size", "s1"), ("f32", ("s0", "s1", 8), (("*", 8, "s1"), 8, 1))
    conditions  ("<=", "s1", 64)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusec.archive import sizes
from fusec.archive.graph import NAMES, Spec
from fusec.errors import Unsupported
from fusec.frontend.shapes import SizeMap
from fusec.ir.argument import Comparison, Condition, Junction
from fusec.ir.atoms import Atom, FloorDiv, Minimum, Mod, Size
from fusec.ir.index import Index, index
from fusec.torch_interior import pytree


def formula_of(value: Index) -> sizes.SizeFormula:
    """Return an index without axes as a tree, its sizes by their names.

    Raises:
        Unsupported: for an atom that is no size, minimum, quotient or remainder of sizes.
    """
    products = [[*([k] if k != 1 else ()), *map(_atom, atoms)] for atoms, k in value.terms]
    terms = [factors[0] if len(factors) == 1 else ("*", *factors) for factors in products]
    if value.const or not terms:
        terms.append(value.const)
    return terms[0] if len(terms) == 1 else ("+", *terms)


def _atom(atom: Atom) -> sizes.SizeFormula:
    match atom:
        case Minimum():
            return "min", *map(formula_of, atom.args)
        case Size():
            return atom.name
        case FloorDiv() | Mod():
            sign = "//" if isinstance(atom, FloorDiv) else "%"
            return sign, formula_of(atom.dividend), formula_of(atom.divisor)
    raise Unsupported(f"a size with {atom}")


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


def not_empty(values: Sequence[Any]) -> tuple[sizes.SizeCondition, ...]:
    """Return the conditions under which no traced tensor is empty.

    A trace for sizes of any value does not guard that, and ``x[:, -1]`` would read out of bounds.
    """
    known = SizeMap().plain()
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    extents = dict.fromkeys(n for tensor in tensors for n in known.tensor(tensor).shape)
    return tuple(
        (">=", formula_of(n - n.const), 1 - n.const)
        for n in extents
        if not (n.is_constant or _grows(n)) or n in map(index, known.used.values())
    )


def shape_guards(gm: fx.GraphModule) -> tuple[sizes.SizeCondition, ...]:
    """Return the conditions on sizes under which a graph of ATen runs as it was traced.

    Raises:
        Unsupported: as ``specs_of`` does.
    """
    nodes = gm.graph.nodes
    traced = pytree.tree_leaves([node.meta.get("val") for node in nodes])
    given = [node.meta.get("val") for node in nodes if node.op == "placeholder"]
    return tuple(dict.fromkeys((*not_empty(traced), *specs_of(given)[1])))


def _grows(extent: Index) -> bool:
    """Return True for an extent that is at least one if all sizes are."""
    signs = (c > 0 and all(isinstance(a, Size) for a in atoms) for atoms, c in extent.terms)
    return extent.const >= 0 and all(signs)


def renamed_spec(spec: Spec, names: Mapping[str, str]) -> Spec:
    """Return the spec of an argument with its sizes renamed; raises as ``renamed``."""
    match spec:
        case (dtype, tuple() as shape, tuple() as strides):
            own, steps = (tuple(renamed(n, names) for n in each) for each in (shape, strides))
            return dtype, own, steps
        case (kind, formula):
            return kind, renamed(formula, names)
    return None


def renamed(formula: Any, names: Mapping[str, str]) -> Any:
    """Return a formula or condition with its sizes renamed.

    Raises:
        Unsupported: for a size without a new name: no input has it as an extent.
    """
    match formula:
        case str():
            if formula not in names:
                raise Unsupported(f"a size {formula} that no input has by itself")
            return names[formula]
        case (sign, *parts):
            return sign, *(renamed(part, names) for part in parts)
    return formula
