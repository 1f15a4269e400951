"""Floats that are made of some bits of a byte."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

import fusec
from fusec.codegen.cpp.fields import Field, fields
from fusec.ir.dtype import F32, I32, U8, DType
from fusec.ir.expr import Buffer, Cast, Const, Expr, Load, Op, Var
from fusec.ir.index import Axis, index
from fusec.ir.program import Let, Put, Statement
from tests.support import compile_with

LANE = Axis("l", index(8))


@functools.cache
def named(name: str, dtype: DType) -> Var:
    return Var(name, dtype, frozenset({LANE}))


def var(name: str, dtype: DType = I32) -> Var:
    """Always the same variable: they are compared by identity."""
    return named(name, dtype)


def number(value: int) -> Const:
    return Const(value, I32)


def program(*values: Expr, dtype: DType = U8) -> list[Statement]:
    """``w``, a widened byte of memory, then ``t0``, ``t1`` and so on; the last one is stored."""
    byte = Load(Buffer("x", (index(8),), (index(1),), dtype), (index(LANE),))
    out = Buffer("y", (index(8),), (index(1),), F32)
    made = [Let(var("b", dtype), byte), Let(var("w"), Cast(var("b", dtype), I32))]
    made += [Let(var(f"t{k}", value.dtype), value) for k, value in enumerate(values)]
    return [*made, Put(out, index(LANE), made[-1].var, None)]


SHIFT = Op("shr", (var("w"), number(4)))
LESS = Op("sub", (var("t0"), number(8)))


def test_a_shift_or_a_mask_less_a_number_is_a_field_without_them() -> None:
    whole = Cast(var("t1"), F32)
    word, made, none = var("w"), var("t2", F32), {var("t0"): None, var("t1"): None}
    assert fields(program(SHIFT, LESS, whole)) == {made: Field(word, 240, 8), **none}
    low = Op("and", (word, number(15)))
    assert fields(program(low, LESS, whole)) == {made: Field(word, 15, 8), **none}


def test_some_bits_in_the_middle_are_a_field() -> None:
    bits = Op("and", (var("t0"), number(3)))
    found = fields(program(Op("shr", (var("w"), number(2))), bits, Cast(var("t1"), F32)))
    assert found[var("t2", F32)] == Field(var("w"), 12, 0)


@pytest.mark.parametrize(
    "value",
    [Op("and", (var("w"), number(10))), Op("and", (var("w"), number(255))),
     Op("shr", (var("w"), number(8))), Op("shr", (var("w"), var("w"))), Op("not", (var("w"),))],
)  # fmt: skip
def test_other_bits_are_converted(value: Expr) -> None:
    assert fields(program(value, Cast(var("t0"), F32))) == {}


@pytest.mark.parametrize("zero", [-1, 256])
def test_a_number_that_is_no_byte_is_subtracted(zero: int) -> None:
    less = Op("sub", (var("t0"), number(zero)))
    assert fields(program(SHIFT, less, Cast(var("t1"), F32))) == {}


def test_a_word_that_is_no_byte_of_memory_is_converted() -> None:
    body = program(SHIFT, Cast(var("t0"), F32), dtype=I32)
    assert fields(body) == {}


def test_bits_that_are_read_otherwise_are_computed() -> None:
    squared = Op("mul", (var("t0"), var("t0")))
    body = program(SHIFT, Cast(var("t0"), F32), squared, Cast(var("t2"), F32))
    assert fields(body) == {var("t1", F32): Field(var("w"), 240, 0)}


FORMS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: (x & 15).to(torch.int32) - 8,
    lambda x: (x >> 4).to(torch.int32) - 8,
    lambda x: (x >> 4).to(torch.int32) - 255,
    lambda x: x >> 2 & 3,
    lambda x: x & 127,
    lambda x: x >> 7,
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [256, 259])
def test_each_byte_is_eager_s(form: Callable[[torch.Tensor], torch.Tensor], count: int) -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return form(x).to(torch.float32) * 0.5

    torch._dynamo.reset()
    x = torch.arange(count).to(torch.uint8)
    (kernel,) = fusec.kernels(scaled, x)
    assert "f_field<" in kernel.source
    ours, theirs = compile_with(scaled)(x), scaled(x)
    assert torch.equal(ours, theirs)
    assert not (ours.signbit() ^ theirs.signbit()).any()
