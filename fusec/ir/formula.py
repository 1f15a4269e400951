"""Sizes as trees of strings and integers: the form in which all files store them.

``2*B + 1`` is ``("+", ("*", 2, "B"), 1)``. ``archive/sizes.py`` owns the grammar, because
it reads these trees without the IR; ``export/native_code.py`` prints them as C.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from fusec.errors import Unsupported
from fusec.ir.atoms import Atom, FloorDiv, Minimum, Mod, Size
from fusec.ir.index import Index

Formula: TypeAlias = "int | str | tuple[Any, ...]"


def formula_of(value: Index) -> Formula:
    """Return an index without axes as a tree, its sizes by their names.

    Raises:
        Unsupported: for an atom that is no size, minimum, quotient or remainder of sizes.
    """
    products = [[*([k] if k != 1 else ()), *map(_atom, atoms)] for atoms, k in value.terms]
    terms = [factors[0] if len(factors) == 1 else ("*", *factors) for factors in products]
    if value.const or not terms:
        terms.append(value.const)
    return terms[0] if len(terms) == 1 else ("+", *terms)


def _atom(atom: Atom) -> Formula:
    match atom:
        case Minimum():
            return "min", *map(formula_of, atom.args)
        case Size():
            return atom.name
        case FloorDiv() | Mod():
            sign = "//" if isinstance(atom, FloorDiv) else "%"
            return sign, formula_of(atom.dividend), formula_of(atom.divisor)
    raise Unsupported(f"a size with {atom}")
