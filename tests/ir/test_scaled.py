"""Factors with a scale for each block of terms: what tensor cores may take as it lies there."""

from __future__ import annotations

import pytest

from fusec.ir.contraction import factors, without_scales
from fusec.ir.dtype import BF16, F4X2, F8E4M3FN, F8E8M0FNU, F32, I32, DType
from fusec.ir.expr import Expr, Reduce, as_value, cast, op
from fusec.ir.index import Axis, index
from fusec.ir.monoid import SUM
from fusec.ir.scaled import scaled_factor
from tests.ir.graphs import axes, buffer, load

M, K = 128, 256
m, n, k = axes("m n k", M, M, K)


def number(row: Axis, name: str, kind: DType = F8E4M3FN, low: int = 0) -> Expr:
    if kind is not F4X2:
        return cast(load(buffer(name, M, K, dtype=kind), row, k), F32)
    pair = cast(load(buffer(name, M, K // 2, dtype=kind), row, index(k) // 2), I32)
    return op("e2m1", op("shr", pair, cast(as_value((index(k) + low) % 2 * 4), I32)))


def scale(row: Axis, name: str, block: int = 32, kind: DType = F8E8M0FNU) -> Expr:
    return cast(load(buffer(name, M, K // block, dtype=kind), row, index(k) // block), F32)


def test_numbers_of_8_bits_with_powers_of_two_are_operands_with_scales() -> None:
    left, right = (op("mul", number(a, f"x{a.name}"), scale(a, f"s{a.name}")) for a in (m, n))
    node = Reduce(SUM, (k,), op("mul", left, right))
    parts = factors(node)
    assert parts is not None and parts.left.dtype is F8E4M3FN and parts.block == 32
    assert [s.dtype for s in parts.scales] == [F8E8M0FNU] * 2
    whole = without_scales(node, parts)
    assert whole.left.dtype is BF16 and not whole.scales


@pytest.mark.parametrize("turned", [False, True])
def test_a_scale_may_stand_on_either_side(turned: bool) -> None:
    pair = number(m, "x"), scale(m, "s")
    found = scaled_factor(op("mul", *(pair[::-1] if turned else pair)), (k,))
    assert found is not None and found.value.dtype is F8E4M3FN


@pytest.mark.parametrize(
    ("kind", "of", "block", "known"),
    [
        (F8E4M3FN, F8E8M0FNU, 32, True),
        (F8E4M3FN, F8E8M0FNU, 16, False),
        (F8E4M3FN, F8E4M3FN, 32, False),
        (F8E4M3FN, F32, 32, False),
        (F4X2, F8E8M0FNU, 32, True),
        (F4X2, F8E4M3FN, 16, True),
        (F4X2, F8E4M3FN, 8, False),
        (F8E8M0FNU, F8E8M0FNU, 32, False),
    ],
    ids=str,
)
def test_types_and_blocks_are_those_of_the_instruction(
    kind: DType, of: DType, block: int, known: bool
) -> None:
    factor = op("mul", number(m, "x", kind), scale(m, "s", block, of))
    assert (scaled_factor(factor, (k,)) is not None) is known


def test_pairs_whose_first_number_is_in_the_high_bits_are_none() -> None:
    swapped = op("mul", number(m, "x", F4X2, low=1), scale(m, "s"))
    assert scaled_factor(swapped, (k,)) is None


def test_a_scale_that_is_computed_is_none() -> None:
    twice = op("add", scale(m, "s"), scale(m, "t"))
    assert scaled_factor(op("mul", number(m, "x"), twice), (k,)) is None


def test_both_factors_need_scales() -> None:
    scaled = op("mul", number(m, "x"), scale(m, "s"))
    parts = factors(Reduce(SUM, (k,), op("mul", scaled, number(n, "y"))))
    assert parts is not None and not parts.scales
