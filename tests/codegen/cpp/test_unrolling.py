"""Which loops a C++ compiler is asked to take apart."""

from __future__ import annotations

from fusec.codegen.cpp.unrolling import has_many_gathers, is_unrolled
from fusec.ir.dtype import BOOL, F32, I32, U8
from fusec.ir.expr import Buffer, Cast, Load, Var
from fusec.ir.index import Axis, Index, Size, floordiv, index
from fusec.ir.machine import CodeTuning
from fusec.ir.program import For, Let, Statement

CODE = CodeTuning()
LANE = Axis("lane", index(16))
X = Buffer("x", (index(4096),), (index(1),), F32)


def read(offset: Index, times: int = 1, guard: Var | None = None) -> tuple[Statement, ...]:
    """Loads of ``x[offset]``."""
    value = Load(X, (offset,), guard)
    return (Let(Var("v", F32, value.axes), value),) * times


def loop(trips: int | Size, *body: Statement) -> For:
    axis = Axis("k", index(trips))
    return For(axis, index(0), (index(trips),), body)


def test_few_iterations_of_a_known_number_are_taken_apart() -> None:
    body = read(index(LANE))
    assert is_unrolled(loop(CODE.unrolled, *body), LANE, CODE)
    assert not is_unrolled(loop(CODE.unrolled + 1, *body), LANE, CODE)
    assert not is_unrolled(loop(Size("n", 8, 0, None), *body), LANE, CODE)


def test_a_loop_is_taken_apart_with_all_loops_inside_it_or_not_at_all() -> None:
    body = read(index(LANE))
    assert is_unrolled(loop(3, loop(3, *body)), LANE, CODE)
    assert not is_unrolled(loop(3, loop(CODE.unrolled + 1, *body)), LANE, CODE)
    assert not is_unrolled(loop(3, loop(Size("n", 8, 0, None), *body)), LANE, CODE)


def test_lanes_that_are_no_neighbours_are_an_instruction_each() -> None:
    lane = index(LANE)
    assert is_unrolled(loop(4, *read(lane, 8)), LANE, CODE)
    assert not is_unrolled(loop(4, *read(4 * lane, 8)), LANE, CODE)
    assert is_unrolled(loop(4, *read(2 * lane, 32)), LANE, CODE)  # pairs are two vectors
    assert not is_unrolled(loop(4, *read(2 * lane, 33)), LANE, CODE)
    assert is_unrolled(loop(4, *read(index(5), 8)), LANE, CODE)  # one element for all lanes
    assert is_unrolled(loop(4, *read(index(5), 8)), None, CODE)


def test_what_a_load_widens_is_no_instruction() -> None:
    byte = Var("b", U8, frozenset({LANE}))
    widened = Let(Var("w", I32, byte.axes), Cast(byte, I32))
    converted = Let(Var("f", F32, byte.axes), Cast(byte, F32))
    assert is_unrolled(loop(8, *[widened] * 100), LANE, CODE)
    assert not is_unrolled(loop(8, *[converted] * 100), LANE, CODE)


def test_a_load_that_a_condition_of_all_lanes_may_skip_is_a_branch() -> None:
    lane = index(LANE)
    everywhere, masked = (Var("m", BOOL, axes) for axes in (frozenset(), frozenset({LANE})))
    assert not is_unrolled(loop(4, *read(lane, 16, everywhere)), LANE, CODE)
    assert is_unrolled(loop(4, *read(lane, 16, masked)), LANE, CODE)


def test_a_loop_that_starts_late_has_as_many_iterations_as_are_left() -> None:
    (body,) = read(4 * index(LANE))
    late = For(Axis("k", index(8)), index(7), (index(8),), (body,) * 9)
    assert is_unrolled(late, LANE, CODE)
    assert not is_unrolled(loop(8, *late.body), LANE, CODE)


def test_many_gathers_under_masks_are_calls() -> None:
    lane = index(LANE)
    masked = Var("m", BOOL, frozenset({LANE}))
    gathered = floordiv(lane * 9 + 4, index(8))
    assert not has_many_gathers(read(gathered, CODE.gathers, masked), LANE, CODE.gathers)
    assert has_many_gathers(
        (loop(2, *read(gathered, CODE.gathers + 1, masked)),), LANE, CODE.gathers
    )
    assert not has_many_gathers(read(gathered, CODE.gathers + 1), LANE, CODE.gathers)
    assert not has_many_gathers(read(2 * lane, CODE.gathers + 1, masked), LANE, CODE.gathers)
    assert not has_many_gathers(read(gathered, CODE.gathers + 1, masked), None, CODE.gathers)
