"""Ranges of integers: bounds hold for each operation, and nothing that may be a float has them."""

from __future__ import annotations

import numpy as np
import pytest

from fusec.ir.dtype import BF16, F16, F32, I8, I32, U8, DType
from fusec.ir.expr import Cast, Const, Expr, Select, loads, op
from fusec.ir.graph import Def
from fusec.ir.ranges import holds, integer_range
from fusec.tools.interpreter.graph import run_graph
from tests.ir.graphs import axes, buffer, graph, load

(N,) = axes("n", 256)
BYTES, CODES, WORDS = (buffer(d.name, 256, dtype=d) for d in (U8, I8, I32))
FLOATS = buffer("f", 256, dtype=F32)
KINDS = {BYTES: np.uint8, CODES: np.int8, WORDS: np.int32}


def byte() -> Expr:
    return Cast(load(BYTES, N), I32)


def code() -> Expr:
    return Cast(load(CODES, N), I32)


def const(value: float, dtype: DType = I32) -> Const:
    return Const(value, dtype)


CASES: dict[str, tuple[Expr, tuple[int, int]]] = {
    "a byte": (byte(), (0, 255)),
    "an int8": (code(), (-128, 127)),
    "the lower nibble, centred": (op("sub", op("and", byte(), const(15)), const(8)), (-8, 7)),
    "the upper nibble": (op("shr", byte(), const(4)), (0, 15)),
    "the upper nibble of an int8": (op("shr", code(), const(4)), (-8, 7)),
    "a shift to the left": (op("shl", code(), const(4)), (-2048, 2032)),
    "a product": (op("mul", code(), code()), (-16256, 16384)),
    "a negation": (op("neg", code()), (-127, 128)),
    "a magnitude": (op("abs", code()), (0, 128)),
    "a minimum": (op("minimum", code(), const(7)), (-128, 7)),
    "a maximum": (op("maximum", code(), const(7)), (7, 127)),
    "a clamp of words": (
        op("minimum", op("maximum", load(WORDS, N), const(-8)), const(7)),
        (-8, 7),
    ),
    "what wraps": (Cast(op("mul", byte(), const(2)), I8), (-128, 127)),
    "a choice": (Select(op("lt", byte(), const(8)), byte(), const(-3)), (-3, 255)),
    "an integer as a float": (op("mul", Cast(code(), F32), const(2.0, F32)), (-256, 254)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_range_holds_all_values(name: str) -> None:
    value, wanted = CASES[name]
    assert integer_range(value) == wanted


@pytest.mark.parametrize("name", CASES)
def test_values_of_all_bytes_are_in_the_range(name: str) -> None:
    value, (low, high) = CASES[name]
    read = tuple(dict.fromkeys(node.buffer for node in loads((value,))))
    out = buffer("out", 256, dtype=value.dtype)
    numbers = [np.arange(256).astype(KINDS[b]) for b in read]
    (made,) = run_graph(graph(read, (Def(out, (N,), value),), out), numbers)
    assert low <= made.min()
    assert made.max() <= high


@pytest.mark.parametrize(
    "value",
    [
        load(FLOATS, N),
        op("minimum", Cast(code(), F32), load(FLOATS, N)),  # NaN
        op("div", Cast(code(), F32), const(2.0, F32)),
        op("mul", Cast(load(WORDS, N), F32), const(2.0, F32)),
        Cast(load(WORDS, N), F32),
        const(0.5, F32),
        const(float("inf"), F32),
    ],
    ids=str,
)
def test_what_may_be_no_integer_or_rounded_has_no_range(value: Expr) -> None:
    assert integer_range(value) is None


def test_bf16_holds_an_int8_and_not_its_double_shifted() -> None:
    wide = Cast(op("add", byte(), byte()), F32)
    assert holds(BF16, Cast(code(), F32))
    assert not holds(BF16, wide)
    assert holds(F16, wide)
    assert not holds(F32, load(FLOATS, N))


def test_a_word_that_may_have_wrapped_has_the_range_of_its_type() -> None:
    wide = op("mul", load(WORDS, N), const(2))
    assert integer_range(wide) == (-(2**31), 2**31 - 1)
