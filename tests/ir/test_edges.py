"""What conditions say of indices: each point is tried."""

from __future__ import annotations

from itertools import product

import pytest

from fusec.ir.dtype import BOOL, I64
from fusec.ir.edges import all_edges_when, edges_when
from fusec.ir.expr import Buffer, Const, Expr, IndexValue, Load, Op, substitute
from fusec.ir.index import Axis, index
from fusec.ir.strides import contiguous_strides

EXTENT = 7
M, N = Axis("m", index(EXTENT)), Axis("n", index(EXTENT))


def compared(name: str, shift: int = 0) -> Expr:
    return Op(name, (IndexValue(index(N) * 2), IndexValue(index(M) + shift)))


def negated(condition: Expr) -> Expr:
    return Op("not", (condition,))


CONDITIONS = {
    "lt": compared("lt"),
    "le": compared("le"),
    "gt": compared("gt"),
    "ge": compared("ge", -2),
    "a constant": Op("le", (IndexValue(index(M)), Const(3, I64))),
    "both": Op("and", (compared("le", 4), negated(compared("lt", -3)))),
}
OPERATIONS = {"lt": int.__lt__, "le": int.__le__, "gt": int.__gt__, "ge": int.__ge__}


def truth(node: Expr, m: int, n: int) -> bool:
    here = {M: index(m), N: index(n)}
    match node:
        case Op(name="not", args=(a,)):
            return not truth(a, m, n)
        case Op(name="and", args=(a, b)):
            return truth(a, m, n) and truth(b, m, n)
        case Op(name=name, args=args):
            a, b = (
                int(x.value) if isinstance(x, Const) else substitute(x.index, here).const
                for x in args
            )
            return OPERATIONS[name](a, b)
    raise AssertionError(node)


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_holds_within_all_its_edges_and_nowhere_else(name: str):
    edges = all_edges_when(CONDITIONS[name], True)
    assert edges is not None and edges == edges_when(CONDITIONS[name], True)
    for m, n in product(range(EXTENT), repeat=2):
        here = {M: index(m), N: index(n)}
        inside = all(substitute(edge, here).const <= 0 for edge in edges)
        assert inside is truth(CONDITIONS[name], m, n)


@pytest.mark.parametrize("name", ("lt", "le", "gt", "ge"))
def test_the_opposite_has_the_opposite_edge(name: str):
    condition = CONDITIONS[name]
    assert all_edges_when(condition, False) == all_edges_when(negated(condition), True)
    for m, n in product(range(EXTENT), repeat=2):
        (edge,) = edges_when(condition, False)
        at = substitute(edge, {M: index(m), N: index(n)}).const
        assert (at <= 0) is not truth(condition, m, n)


def test_what_data_or_a_choice_decide_is_unknown_but_the_rest_stays_necessary():
    shape = (index(EXTENT),)
    flag = Load(Buffer("flag", shape, contiguous_strides(shape), BOOL), (index(M),))
    both = Op("and", (CONDITIONS["lt"], flag))
    assert all_edges_when(both, True) is None
    assert edges_when(both, True) == edges_when(CONDITIONS["lt"], True)
    assert all_edges_when(both, False) is None and not edges_when(both, False)
