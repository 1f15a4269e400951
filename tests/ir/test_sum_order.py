"""Which sizes are in the bounds of the loops that add: in carries, in arrays, in products."""

from __future__ import annotations

import pytest

from fusec.ir.dtype import F32
from fusec.ir.expr import Buffer, Const, Load, Op, Var
from fusec.ir.index import Axis, Index, Size, index
from fusec.ir.program import (
    Carry,
    For,
    Let,
    Matrix,
    Multiply,
    Program,
    Put,
    Scratch,
    Statement,
    Update,
)
from fusec.ir.sum_order import sizes_of_sums
from tests.ir.graphs import buffer

BATCH, TERMS = Size("batch", 8), Size("terms", 16)
m, k = Axis("m", index(BATCH)), Axis("k", index(TERMS))
x, out = buffer("x", BATCH, TERMS), buffer("out", BATCH)
ACC, V, S = (Var(name, F32, frozenset()) for name in ("acc", "v", "s"))


def program(*body: Statement) -> Program:
    return Program("p", (x,), (out,), (BATCH, TERMS), (), (), body)


def loop(axis: Axis, *body: Statement) -> For:
    return For(axis, index(0), (axis.extent,), body)


def loaded() -> Let:
    return Let(V, Load(x.flat(), (index(m) * TERMS + k,), None))


def names(made: Program) -> set[str]:
    return {size.name for size in sizes_of_sums(made)}


ADD = Update(ACC, Op("add", (ACC, V)))
STORE = Put(out, index(m), ACC, None)


def test_a_carry_adds_in_the_loops_inside_of_its_scope() -> None:
    inside = loop(m, Carry(ACC, Const(0.0, F32)), loop(k, loaded(), ADD), STORE)
    assert names(program(inside)) == {"terms"}


def test_a_carry_around_both_loops_adds_in_both() -> None:
    around = (Carry(ACC, Const(0.0, F32)), loop(m, loop(k, loaded(), ADD)))
    assert names(program(*around)) == {"batch", "terms"}


@pytest.mark.parametrize(
    "offset, wanted", [(index(m), {"terms"}), (index(0), {"batch", "terms"})], ids=["own", "shared"]
)
def test_an_array_adds_in_the_loops_that_do_not_walk_it(offset: Index, wanted: set[str]) -> None:
    array = Buffer("a", (index(BATCH),), (index(1),), F32)
    read = Let(S, Load(array, (offset,), None))
    add = Let(ACC, Op("add", (S, V)))
    body = loop(k, loop(m, loaded(), read, add, Put(array, offset, ACC, None)))
    assert names(program(Scratch(array, index(BATCH)), body)) == wanted


def test_an_array_that_is_only_overwritten_adds_nothing() -> None:
    array = Buffer("a", (index(BATCH),), (index(1),), F32)
    kept = loop(m, loop(k, loaded(), Put(array, index(k), V, None)))
    assert names(program(Scratch(array, index(TERMS)), kept)) == set()


def test_an_array_adds_what_a_carry_has_read_of_it() -> None:
    array = Buffer("a", (index(BATCH),), (index(1),), F32)
    read = Let(S, Load(array, (index(0),), None))
    through = (Carry(ACC, Const(0.0, F32)), read, Update(ACC, Op("add", (ACC, S))))
    body = loop(m, *through, Put(array, index(0), ACC, None))
    assert names(program(Scratch(array, index(1)), body)) == {"batch"}


def test_a_product_adds_its_terms_in_the_loops_that_do_not_walk_its_result() -> None:
    array = Buffer("c", (index(64),), (index(1),), F32)
    one = index(1)
    left = Matrix(x, index(0), one, one, one)

    def multiply(start: Index) -> Multiply:
        into = Matrix(array, start, one, one, one)
        return Multiply(into, left, left, (index(BATCH),), (one,), (index(TERMS),), 8, one)

    own = (Scratch(array, index(64)), loop(m, multiply(index(m))))
    assert names(program(*own)) == {"terms"}
    shared = (Scratch(array, index(64)), loop(m, multiply(index(0))))
    assert names(program(*shared)) == {"batch", "terms"}
