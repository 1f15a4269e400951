"""Operands of products that read the same elements are computed before the first product."""

from __future__ import annotations

import pytest

from fusec.codegen.cpp.shared_operands import join_operands
from fusec.ir.dtype import F32, DType
from fusec.ir.expr import Buffer, Const, Dot, Load, Op, Var
from fusec.ir.index import Axis, index
from fusec.ir.program import Carry, For, Let, Program, Put, Statement, Update

M, N, K, T = (Axis(name, index(16)) for name in "mnkt")
X, W, Y = (Buffer(name, (index(272),), (index(1),), F32) for name in "xwy")


def value(name: str, *axes: Axis, dtype: DType = F32) -> Var:
    return Var(name, dtype, frozenset(axes))


x, w, v = value("x", M, K), value("w", N, K), value("v", N, K)
a, b = value("a", N, K), value("b", N, K)
s, t, total = value("s", M, N), value("t", M, N), value("total", M, N)
LOADS = (
    Let(x, Load(X, (index(M) * 16 + index(K),))),
    Let(w, Load(W, (index(N) * 16 + index(K),))),
)
FIRST, SECOND = Let(a, Op("exp", (w,))), Let(b, Op("tanh", (w,)))
S, T_ = Let(s, Dot(x, a, (K,), None, False)), Let(t, Dot(x, b, (K,), None, False))
ADD = Update(total, Op("add", (total, s)))


def joined(*body: Statement) -> tuple[Statement, ...]:
    loop = For(T, index(0), (T.extent,), body)
    program = Program("k", (X, W), (Y,), (), (), (M, N, K), (Carry(total, Const(0, F32)), loop))
    _, after = join_operands(program).body
    assert isinstance(after, For)
    return after.body


def test_operands_of_one_load_come_before_the_first_product() -> None:
    assert joined(*LOADS, FIRST, S, ADD, SECOND, T_) == (*LOADS, FIRST, SECOND, S, ADD, T_)


OTHER = Let(v, Load(W, (index(N) * 16 + index(K) + 1,)))
SUM, c, J = value("sum", N, K), value("c", N, K), Axis("j", index(4))
INNER = For(J, index(0), (J.extent,), (Update(c, Op("add", (c, w))),))


@pytest.mark.parametrize(
    "between",
    [
        (OTHER, Let(b, Op("tanh", (v,)))),
        (Let(SUM, Op("add", (w, total))), Let(b, Op("tanh", (SUM,)))),
        (Let(SUM, Op("add", (w, s))), Let(b, Op("tanh", (SUM,)))),
        (Let(b, Load(W, (index(N) * 16 + index(K),))),),
        (Put(Y, index(M), Const(0, F32), None), SECOND),
        (Carry(c, Const(0, F32)), INNER, Let(SUM, Op("add", (w, c))), Let(b, Op("tanh", (SUM,)))),
        (For(J, index(0), (J.extent,), (Put(Y, index(M), Const(0, F32), None),)), SECOND),
    ],
    ids=[
        "another load",
        "a carry that changes",
        "a product's result",
        "a load",
        "a store",
        "a sum of a loop",
        "a store in a loop",
    ],
)
def test_others_stay(between: tuple[Statement, ...]) -> None:
    body = (*LOADS, FIRST, S, ADD, *between, T_)
    after = joined(*body)
    assert len(after) == len(body)
    assert all(a is b for a, b in zip(after, body, strict=True) if not isinstance(b, For))
