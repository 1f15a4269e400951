"""Sums of tiles along the same lanes run at once, and each stays the same sum."""

from __future__ import annotations

from fusec.codegen.triton.joint_sums import JointSum, find_joint_sums
from fusec.ir.dtype import F32
from fusec.ir.expr import Var
from fusec.ir.index import Axis, index
from fusec.ir.monoid import MAX, SUM
from fusec.ir.program import Let, Statement
from tests.codegen.programs import Builder, buffer, f32

R, C = Axis("r", index(4)), Axis("c", index(8))
X, Z, Y = buffer("x", F32, 4, 8), buffer("z", F32, 4, 8), buffer("y", F32, 4, 8)
HERE = index(R) * 8 + index(C)


def block() -> Builder:
    return Builder("k", (), (R, C))


def found(builder: Builder) -> list[Statement | JointSum]:
    return list(find_joint_sums(builder.program().body))


def joint(items: list[Statement | JointSum]) -> tuple[Var, ...]:
    """Return the results of the only sums that run at once."""
    (one,) = (item for item in items if isinstance(item, JointSum))
    return tuple(let.var for let in one.lets)


def names(items: list[Statement | JointSum]) -> list[str]:
    return [item.var.name if isinstance(item, Let) else type(item).__name__ for item in items]


def test_a_later_sum_moves_to_the_first_with_what_computes_its_tile() -> None:
    b = block()
    x = b.load(X, HERE)
    s = b.reduce(SUM, (C,), x)
    scaled = b.op("mul", x, s)
    square = b.op("mul", x, x)
    t = b.reduce(SUM, (C,), square)
    b.put(Y, HERE, b.op("sub", scaled, t))
    items = found(b)
    assert joint(items) == (s, t)
    assert names(items)[:4] == [x.name, square.name, "JointSum", scaled.name]


def test_a_sum_of_what_needs_the_first_stays_behind_it() -> None:
    b = block()
    x = b.load(X, HERE)
    s = b.reduce(SUM, (C,), x)
    t = b.reduce(SUM, (C,), b.op("mul", x, s))
    b.put(Y, HERE, b.op("sub", x, t))
    assert found(b) == list(b.program().body)


def test_a_tile_that_is_loaded_in_between_is_summed_by_itself() -> None:
    b = block()
    x = b.load(X, HERE)
    s = b.reduce(SUM, (C,), x)
    b.put(Y, HERE, b.op("mul", x, s))
    t = b.reduce(SUM, (C,), b.load(Z, HERE))
    b.put(buffer("w", F32, 4), index(R), t)
    assert found(b) == list(b.program().body)


def test_sums_along_other_lanes_and_other_reductions_are_apart() -> None:
    b = block()
    x, z = b.load(X, HERE), b.load(Z, HERE)
    sums = b.reduce(SUM, (C,), x), b.reduce(SUM, (R,), z), b.reduce(MAX, (C,), z)
    b.put(Y, HERE, b.op("add", b.op("add", sums[0], sums[1]), sums[2]))
    assert found(b) == list(b.program().body)


def test_a_sum_of_a_carry_stays_behind_its_updates() -> None:
    b = block()
    x = b.load(X, HERE)
    acc = b.carry(f32(0.0), R, C)
    s = b.reduce(SUM, (C,), x)
    b.update(acc, b.op("add", acc, x))
    t = b.reduce(SUM, (C,), acc)
    b.put(Y, HERE, b.op("add", s, t))
    assert found(b) == list(b.program().body)
