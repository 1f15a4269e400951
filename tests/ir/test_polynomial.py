"""Polynomials written in what their atoms have above lower bounds."""

from __future__ import annotations

from fusec.ir.atoms import Atom, Size
from fusec.ir.index import index
from fusec.ir.polynomial import shifted

N, M = Size("N", 5, 2), Size("M", 3, 1)


def _least(atom: Atom) -> int | None:
    return atom.least if isinstance(atom, Size) else None


def test_a_product_is_written_in_what_is_above_the_bounds() -> None:
    found = shifted(index(N) * M - index(M) * 2, _least)
    assert found is not None
    assert {frozenset(m): c for m, c in found.items() if c} == {
        frozenset((N, M)): 1,
        frozenset((N,)): 1,
    }


def test_a_power_has_the_coefficients_of_a_binomial() -> None:
    found = shifted(index(N) * N, _least)
    assert found == {(): 4, (N,): 4, (N, N): 1}


def test_an_atom_without_a_bound_gives_nothing() -> None:
    assert shifted(index(Size("I", 3, None)), _least) is None
