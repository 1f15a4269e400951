"""Sizes, types, promotion and origins: what comes from torch and what the IR gets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, ModularIndexing
from torch.utils._sympy.value_ranges import ValueRanges

from fusec.errors import Unsupported
from fusec.frontend.aot.decompositions import decompositions
from fusec.frontend.call import result_type
from fusec.frontend.origin import printable, source_line
from fusec.frontend.shapes import SizeMap, from_torch_dtype, to_torch_dtype
from fusec.frontend.size_facts import UNSEEN, facts_of
from fusec.frontend.value import Value, make_axes
from fusec.ir.dtype import DTYPES
from fusec.ir.expr import Const
from fusec.ir.index import index, is_nonnegative

S, T = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))


class Environment:
    def __init__(self) -> None:
        self.backed_var_to_val = {S: 12, T: 5}
        self.var_to_range = {S: ValueRanges(2, 99), T: ValueRanges(2, 99)}
        self.guards: list[Any] = []
        self.divisible: set[Any] = set()

    def replace(self, expr: Any) -> Any:
        return expr


def converted(expr: Any) -> str:
    return repr(SizeMap()._convert(sympy.sympify(expr), Environment()))


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (3, "3"),
        (S, "s0"),
        (2 * S * T - 1, "2*s0*s1 - 1"),
        (S**2, "s0*s0"),
        (FloorDiv(S, 4), "(s0)//(4)"),
        (CleanDiv(4 * S, 4), "s0"),
        (S / 2, "(s0)//(2)"),
        (Mod(S, 4), "(s0)%(4)"),
        (ModularIndexing(S, 2, 3), "((s0)//(2))%(3)"),
        (Max(1, S * T), "s0*s1"),
        (Max(0, S - T), "-min_0 + s0"),
        (S - Min(T, S + 1), "-min_0 + s0"),
        (Min(S, FloorDiv(S, 2)), "(s0)//(2)"),
        (Max(Min(S, 3), S), "s0"),
    ],
)
def test_sympy_becomes_an_index(expr: Any, text: str) -> None:
    assert converted(expr) == text


def test_a_stride_allows_for_an_empty_extent_and_a_size_is_what_it_says() -> None:
    few = Max(1, FloorDiv(S, 2) - 3)
    sizes, environment = SizeMap(), Environment()
    written = "(s0)//(2)*s1 - min_0*s1 + s1"
    assert repr(sizes._convert(T * few, environment, True)) == written
    sizes = SizeMap()
    sizes._extents.add(sizes._convert(FloorDiv(S, 2) - 3, environment))
    assert repr(sizes._convert(T * few, environment, True)) == "(s0)//(2)*s1 - 3*s1"
    assert repr(sizes._convert(T * few, environment)) == written


def test_what_an_index_cannot_say_is_unsupported() -> None:
    with pytest.raises(Unsupported):
        converted(sympy.sqrt(S))


def test_the_least_of_two_is_one_size_however_it_is_written() -> None:
    sizes, environment, u = SizeMap(), Environment(), sympy.Symbol("u0")
    environment.var_to_range[u] = ValueRanges(0, 99)
    rows = [Max(0, u - 1), u - Min(1, u), Max(0, u - Min(1, u)), Min(2 * u, 2 * u - Min(u, 1))]
    made = [sizes._convert(expr, environment) for expr in rows]
    assert list(map(repr, made)) == ["-min_0 + u0"] * 3 + ["-min_0 + 2*u0"]
    (size,) = sizes.minima.values()
    assert (size.hint, size.least, size.most) == (1, 0, 1)
    assert not sizes.were_seen(made[0])
    assert sizes.were_seen(sizes._convert(Min(S, T), environment))


def test_the_least_of_two_is_the_one_that_a_guard_says() -> None:
    environment = Environment()
    environment.guards = [SimpleNamespace(expr=sympy.Eq(S, Min(S, 20)))]
    sizes = SizeMap()
    assert sizes._convert(Min(S, 20), environment) is index(sizes.used["s0"])
    assert sizes._convert(T * Min(S, 20), environment) is index(sizes.used["s0"]) * index(
        sizes.used["s1"]
    )
    assert not sizes.minima
    assert facts_of({S}, environment) != facts_of({S}, Environment())


def test_sizes_of_data_equal_and_bound_each_other_as_asserted() -> None:
    u, v, w = sympy.symbols("u0 u1 u2", integer=True)
    environment = Environment()
    for symbol in (u, v, w):
        environment.var_to_range[symbol] = ValueRanges(0, 99)
    asserted = [sympy.Eq(u, v), u <= S, w + u < T]
    environment.deferred_runtime_asserts = {w: list(map(Guard, asserted))}
    sizes = SizeMap()
    texts = [repr(sizes._convert(symbol, environment)) for symbol in (S, T, u, v, w)]
    assert texts == ["s0", "s1", "u0", "u0", "u2"]
    bounds = [list(map(repr, sizes.used[name].bounds)) for name in ("u0", "u2")]
    assert bounds == [["s0"], ["s1 - u0 - 1"]]
    assert repr(SizeMap()._convert(v, environment)) == "u1"  # u0 may not be known yet


@dataclass(frozen=True)
class Guard:
    expr: Any


@pytest.mark.parametrize(
    ("divisible", "guards", "expr", "text"),
    [
        ({Mod(S, 4)}, [], S, "4*(s0)//(4)"),
        ({Mod(S, 4)}, [], FloorDiv(S, 4), "(s0)//(4)"),
        ({Mod(S, 4)}, [], S - FloorDiv(S, 2), "2*(s0)//(4)"),
        ({Mod(S, 4), Mod(S, 6)}, [], FloorDiv(S, 2), "6*(s0)//(12)"),
        ({Mod(S, T)}, [], S * 2, "2*(s0)//(s1)*s1"),
        (set(), [sympy.Eq(S, T * FloorDiv(S, T))], FloorDiv(S, T), "(s0)//(s1)"),
        (set(), [sympy.Eq(S * T, 2 * T * FloorDiv(S, 2))], S, "2*(s0)//(2)"),
        (set(), [sympy.Eq(FloorDiv(S, T), 3)], S, "s0"),
        ({Mod(2 * S, T)}, [], FloorDiv(2 * S, T), "(2*s0)//(s1)"),
        ({Mod(2 * S, T)}, [], S * T * FloorDiv(2 * S, T), "2*s0*s0"),
        ({Mod(2 * S, T)}, [], FloorDiv(2 * S, FloorDiv(2 * S, T)), "s1"),
        ({Mod(S + 2, T)}, [], T * FloorDiv(S + 2, T) - S, "2"),
        ({Mod(S * T, 8)}, [], FloorDiv(S * T, FloorDiv(S * T, 8)), "8"),
        (set(), [sympy.Eq(S - FloorDiv(S + 1, 2), 1)], 1 + FloorDiv(S + 1, 2) - S, "0"),
        ({Mod(S, FloorDiv(S, 2))}, [sympy.Eq(FloorDiv(S, FloorDiv(S, 2)), 2)], S, "2*(s0)//(2)"),
    ],
)  # fmt: skip
def test_a_size_is_written_as_a_product_where_the_trace_knows_a_divisor(
    divisible: set[Any], guards: list[Any], expr: Any, text: str
) -> None:
    environment = Environment()
    environment.divisible, environment.guards = divisible, list(map(Guard, guards))
    assert repr(SizeMap()._convert(expr, environment)) == text


def test_a_key_has_the_divisors_of_sums() -> None:
    environment = Environment()
    environment.divisible = {Mod(2 * S, T)}
    assert facts_of({S, T}, environment) != facts_of({S, T}, Environment())
    assert facts_of({S}, environment) == facts_of({S}, Environment())


def test_a_size_that_was_never_seen_has_a_guess_and_may_be_anything() -> None:
    unseen = SizeMap()._convert(sympy.Symbol("u0"), Environment())
    assert repr(unseen) == "u0" and unseen.hint() == UNSEEN
    assert not is_nonnegative(unseen)


def test_a_size_remembers_its_hint() -> None:
    sizes = SizeMap()
    assert sizes._convert(S * T, Environment()).hint() == 60
    assert set(sizes.used) == {"s0", "s1"}


def test_every_ir_type_but_unknown_has_a_torch_type() -> None:
    for dtype in DTYPES.values():
        if dtype.name != "unknown":
            assert from_torch_dtype(to_torch_dtype(dtype)) is dtype
    assert from_torch_dtype(torch.qint8).is_opaque


TENSORS = [
    torch.empty(shape, dtype=dtype)
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32)
    for shape in ((), (2,))
]


def test_types_promote_as_in_torch() -> None:
    for pair in itertools.product([*TENSORS, True, 3, 2.5], repeat=2):
        if any(isinstance(x, torch.Tensor) for x in pair):
            values = [as_value(x) if isinstance(x, torch.Tensor) else x for x in pair]
            assert result_type(*values) is from_torch_dtype(torch.result_type(*pair)), pair


def as_value(x: torch.Tensor) -> Value:
    shape = tuple(map(index, x.shape))
    dtype = from_torch_dtype(x.dtype)
    return Value(shape, dtype, make_axes(shape), Const(0, dtype))


TRACE = """  File "/home/me/code/model.py", line 41, in forward
    y = x + r
  File "/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 9, in forward
    return F.linear(x)
"""


def test_a_source_line_is_the_users_and_has_no_path() -> None:
    assert source_line(TRACE) == "model.py:41 in forward: y = x + r"
    assert source_line(TRACE.replace("/home/me/code/", "C:\\code\\")) == (
        "model.py:41 in forward: y = x + r"
    )
    assert source_line("no frames") is None


def test_control_characters_cannot_leave_a_comment() -> None:
    assert printable("a\nb\x1b[0m") == "a\\nb\\x1b[0m"


def test_attention_is_never_taken_apart() -> None:
    assert not [t for t in decompositions() if "scaled_dot_product" in str(t)]


def test_a_decomposition_table_is_the_callers_own() -> None:
    decompositions().clear()
    assert decompositions()
