"""Chains of operations on a product's tiles run one element at a time."""

from __future__ import annotations

from fusec.codegen.triton.elementwise import Chain, find_chains, readers
from fusec.ir.dtype import BF16, F32
from fusec.ir.expr import Cast, Const, Expr, Load, Op, Reduce, Var
from fusec.ir.index import Axis, index
from fusec.ir.monoid import SUM
from fusec.ir.program import Let, Program, Put, Statement
from tests.codegen.programs import buffer

M, N = Axis("m", index(32)), Axis("n", index(64))
TILE, ROW = frozenset((M, N)), frozenset((N,))
X, W, Y = buffer("x", F32, 32, 64), buffer("w", F32, 64), buffer("y", BF16, 32, 64)


class _Body:
    """Statements of a block, each value named after its number."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []

    def let(self, value: Expr, axes: frozenset[Axis] = TILE) -> Var:
        number = len(self.statements)
        var = Var(f"t{number}", value.dtype, axes)
        self.statements.append(Let(var, value))
        return var

    def put(self, value: Var) -> None:
        self.statements.append(Put(Y.flat(), index(M) * 64 + index(N), value, None))

    def items(self) -> list[Statement | Chain]:
        body = tuple(self.statements)
        program = Program("k", (), (), (), (), (M, N), body, (), (), warps=4)
        return list(find_chains(body, readers(program), program.code.chain))


def _loaded(body: _Body) -> Var:
    return body.let(Load(X.flat(), (index(M) * 64 + index(N),)))


def _powers(body: _Body, value: Var, count: int) -> Var:
    for _ in range(count):
        value = body.let(Op("mul", (value, value)))
    return value


def test_a_long_chain_is_one_function_of_what_it_reads() -> None:
    body = _Body()
    x = _loaded(body)
    w = body.let(Load(W.flat(), (index(N),)), ROW)
    last = _powers(body, body.let(Op("add", (x, w))), 3)
    body.put(body.let(Cast(last, BF16)))
    *loads, chain, put = body.items()
    assert len(loads) == 2 and isinstance(put, Put)
    assert isinstance(chain, Chain)
    assert (chain.inputs, len(chain.lets), chain.outputs) == ((x, w), 5, (put.value,))


def test_a_load_in_the_midst_of_a_chain_comes_before_it() -> None:
    body = _Body()
    x = _powers(body, _loaded(body), 2)
    w = body.let(Load(W.flat(), (index(N),)), ROW)
    body.put(body.let(Cast(_powers(body, body.let(Op("add", (x, w))), 2), BF16)))
    kinds = [type(item).__name__ for item in body.items()]
    assert kinds == ["Let", "Let", "Chain", "Put"]


def test_values_that_others_read_are_results_of_the_function() -> None:
    body = _Body()
    x = _powers(body, _loaded(body), 4)
    body.put(body.let(Cast(x, BF16)))
    body.put(body.let(Cast(body.let(Op("neg", (x,))), BF16)))
    (chain,) = (item for item in body.items() if isinstance(item, Chain))
    assert chain.outputs == (x, chain.lets[-1].var)


def test_short_chains_rows_and_reductions_stay_as_they_are() -> None:
    body = _Body()
    x = _powers(body, _loaded(body), 2)
    row = body.let(Reduce(SUM, (M,), x), ROW)
    for _ in range(6):
        row = body.let(Op("add", (row, Const(1.0, F32))), ROW)
    body.put(body.let(Cast(body.let(Op("add", (x, row))), BF16)))
    assert body.items() == body.statements


def test_a_reduction_ends_a_chain() -> None:
    body = _Body()
    x = _powers(body, _loaded(body), 4)
    inner = body.let(Reduce(SUM, (N,), x), frozenset((M,)))
    body.let(Op("add", (x, inner)))
    assert [type(item).__name__ for item in body.items()][:2] == ["Let", "Chain"]
