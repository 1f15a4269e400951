"""Sums of groups of integer weights: what multiplies a group leaves its sum."""

from __future__ import annotations

import pytest

from fusec.codegen.targets import CPU_MACHINE, find_target
from fusec.ir.dtype import BF16, F32, I8, I32, U8
from fusec.ir.expr import Cast, Const, Expr, Op, Reduce, Select, children, reductions
from fusec.ir.graph import Def, FlatKernel, Graph, Schedule
from fusec.ir.machine import Machine
from fusec.ir.monoid import SUM
from fusec.passes.kernel.group_factors import factor_groups
from fusec.passes.kernel.unroll_pairs import unroll_pairs
from fusec.passes.schedule import accepts_cpu
from tests.ir.graphs import axes, below, buffer, graph, load
from tests.passes.pipelines import check_same, kernel_of, numbers

TILES = find_target("cpu:amx").machine
ROWS, COLUMNS, GROUPS, TERMS = 32, 48, 6, 16


def product(
    *, zero: bool = False, rounded: bool = False, scaled: str = "n g", rows: int = ROWS
) -> Graph:
    """y[m, n] = sum(g, k: x[m, g, k] * (w[n, g, k] * s[n, g] + z[n, g]))."""
    x = buffer("x", rows, GROUPS, TERMS, dtype=BF16)
    w = buffer("w", COLUMNS, GROUPS, TERMS, dtype=I8)
    m, n, g, k = axes("m n g k", rows, COLUMNS, GROUPS, TERMS)
    where = [{"n": n, "g": g}[name] for name in scaled.split()]
    s, z, y = (buffer(name, *(a.extent for a in where)) for name in "szy")
    y = buffer("y", rows, COLUMNS)
    weight: Expr = Op("mul", (Cast(load(w, n, g, k), F32), load(s, *where)))
    if zero:
        weight = Op("add", (weight, load(z, *where)))
    if rounded:
        weight = Op("round_bf16", (weight,))
    body = Op("mul", (Cast(load(x, m, g, k), F32), weight))
    inputs = (x, w, s, z) if zero else (x, w, s)
    return graph(inputs, (Def(y, (m, n), Reduce(SUM, (g, k), body)),), y)


def values(before: Graph) -> tuple[object, ...]:
    return tuple(numbers(*(e.const for e in b.shape), seed=i) for i, b in enumerate(before.inputs))  # type: ignore[union-attr]


def outer_and_inner(kernel: FlatKernel) -> list[tuple[str, ...]]:
    return sorted(tuple(axis.name for axis in node.over) for node in kernel.reductions)


@pytest.mark.parametrize("scaled", ("n g", "g"))
@pytest.mark.parametrize("zero", (False, True), ids=("a scale", "a scale and a zero"))
def test_a_group_is_summed_before_it_is_scaled(*, zero: bool, scaled: str) -> None:
    before = product(zero=zero, scaled=scaled)
    made = factor_groups(kernel_of(before), TILES)
    assert outer_and_inner(made) == [("g",), ("k",), *[("k",)] * zero]
    assert [axis.name for axis in made.inside] == ["g", "k"]
    assert accepts_cpu(made, TILES)
    check_same(before, Schedule(before, (made,)), values(before))


def test_what_is_added_to_a_product_stands_behind_it() -> None:
    """The loop that adds computes both terms, in whichever order a model writes them."""
    made = factor_groups(kernel_of(product(zero=True)), TILES)
    (total,) = (n for n in made.reductions if [a.name for a in n.over] == ["g"])
    first, second = (reductions(term) for term in children(total.body))
    assert "w" in str(first) and "w" not in str(second)


def nibbles(*, normalised: bool = False) -> Graph:
    """The same of two weights in a byte: y[m, n] = sum(g, k, p: x[m, 2*k + p] * ...).

    Args:
        normalised: rows are multiplied by their own sums, over the same axes.
    """
    x = buffer("x", ROWS, GROUPS, TERMS, 2, dtype=BF16)
    w, s = buffer("w", COLUMNS, GROUPS, TERMS, dtype=U8), buffer("s", COLUMNS, GROUPS)
    y = buffer("y", ROWS, COLUMNS)
    m, n, g, k, p = axes("m n g k p", ROWS, COLUMNS, GROUPS, TERMS, 2)
    byte = Cast(load(w, n, g, k), I32)
    low, high = Op("and", (byte, Const(15, I32))), Op("shr", (byte, Const(4, I32)))
    code = Op("sub", (Select(below(p, 1), low, high), Const(8, I32)))
    weight = Op("mul", (Cast(code, F32), load(s, n, g)))
    row: Expr = Cast(load(x, m, g, k, p), F32)
    if normalised:
        row = Op("round_bf16", (Op("mul", (row, Reduce(SUM, (g, k, p), row))),))
    body = Op("mul", (row, weight))
    return graph((x, w, s), (Def(y, (m, n), Reduce(SUM, (g, k, p), body)),), y)


def test_sums_of_two_weights_in_a_byte_keep_the_axis_of_the_pairs() -> None:
    before = nibbles()
    made = factor_groups(kernel_of(before), TILES)
    assert outer_and_inner(made) == [("g",), ("k", "p")]
    x, w, s = values(before)
    check_same(before, Schedule(before, (made,)), (x, abs(w) * 31, s))  # type: ignore[operator, arg-type]


@pytest.mark.parametrize("normalised", (False, True), ids=("rows", "rows with sums of their own"))
def test_both_weights_of_a_byte_are_terms_of_one_product(*, normalised: bool) -> None:
    before = nibbles(normalised=normalised)
    made = unroll_pairs(factor_groups(kernel_of(before), TILES), TILES)
    assert outer_and_inner(made) == [("g",), *[("g", "k")] * normalised, ("k",)]
    assert [str(axis.extent) for axis in made.inside][-1] == str(2 * TERMS)
    assert accepts_cpu(made, TILES)
    x, w, s = values(before)
    check_same(before, Schedule(before, (made,)), (x, abs(w) * 31, s))  # type: ignore[operator, arg-type]


@pytest.mark.parametrize(
    ("before", "machine"),
    [
        pytest.param(product(), CPU_MACHINE, id="bf16 is widened"),
        pytest.param(product(rows=4), TILES, id="few rows stream"),
        pytest.param(product(scaled="n"), TILES, id="no groups"),
        pytest.param(product(rounded=True), TILES, id="rounded by the user"),
    ],
)
def test_other_kernels_stay_as_they_are(before: Graph, machine: Machine) -> None:
    kernel = kernel_of(before)
    assert factor_groups(kernel, machine) is kernel


def test_a_scale_of_each_term_is_none_of_a_group() -> None:
    x, w = buffer("x", ROWS, 16, dtype=BF16), buffer("w", COLUMNS, 16, dtype=I8)
    s, y = buffer("s", 16), buffer("y", ROWS, COLUMNS)
    m, n, k = axes("m n k", ROWS, COLUMNS, 16)
    weight = Op("mul", (Cast(load(w, n, k), F32), load(s, k)))
    body = Op("mul", (Cast(load(x, m, k), F32), weight))
    kernel = kernel_of(graph((x, w, s), (Def(y, (m, n), Reduce(SUM, (k,), body)),), y))
    assert factor_groups(kernel, TILES) is kernel
