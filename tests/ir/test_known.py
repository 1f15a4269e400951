"""What an expression is where some of its nodes are known, compared with the interpreter."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from fusec.ir.dtype import BOOL, F16, F32, I32
from fusec.ir.expr import Cast, Const, Expr, Select, op
from fusec.ir.graph import Def
from fusec.ir.known import is_known_nan
from fusec.tools.interpreter.graph import run_graph
from tests.ir.graphs import axes, buffer, f32, graph, load

INF, NAN = math.inf, math.nan
NUMBERS = (INF, -INF, NAN, 0.0, 1.0, -1.0, 80.0)
(AT,) = axes("i", len(NUMBERS) ** 2)
M, C = (buffer(name, len(NUMBERS) ** 2) for name in "mc")
TOP, OTHER = load(M, AT), load(C, AT)
NEGATIVE = op("lt", OTHER, 0.0)
FINITE = op("and", op("eq", TOP, TOP), op("ne", op("abs", TOP), INF))
AT_INFINITY = {
    "inf - inf": (op("sub", TOP, TOP), True),
    "beside a larger": (op("sub", TOP, op("maximum", TOP, OTHER)), True),
    "beside a smaller": (op("sub", TOP, op("minimum", TOP, OTHER)), False),
    "shifted": (op("exp", op("sub", TOP, op("add", OTHER, TOP))), True),
    "shifted below": (op("sub", TOP, op("sub", OTHER, TOP)), False),
    "clamped": (op("sub", TOP, op("minimum", TOP, f32(80))), False),
    "0 where infinite": (op("sub", TOP, Select(op("isinf", TOP), f32(0), TOP)), False),
    "0 where not finite": (op("sub", TOP, Select(FINITE, TOP, f32(0))), False),
    "0 where -inf": (op("sub", TOP, Select(op("eq", TOP, -INF), f32(0), TOP)), True),
    "by what is unknown": (op("mul", op("exp", op("neg", TOP)), OTHER), False),
    "0 * inf": (op("mul", op("exp", op("neg", TOP)), TOP), True),
    "a quotient": (op("div", TOP, op("log", TOP)), True),
    "a rounding": (op("sub", TOP, op("round_bf16", TOP)), True),
    "a type": (op("sub", TOP, Cast(Cast(TOP, F16), F32)), True),
    "an integer": (op("sub", TOP, Cast(Cast(OTHER, I32), F32)), False),
    "either": (Select(NEGATIVE, op("sub", TOP, TOP), f32(NAN)), True),
    "one of two": (Select(NEGATIVE, op("sub", TOP, TOP), TOP), False),
    "a question": (Select(Cast(Cast(op("isnan", TOP), I32), BOOL), TOP, f32(NAN)), True),
    "a disjunction": (
        Select(op("or", NEGATIVE, op("gt", TOP, 80.0)), f32(NAN), TOP),
        True,
    ),
    "a denial": (Select(op("not", op("isinf", TOP)), TOP, f32(NAN)), True),
}


def _values(expr: Expr) -> tuple[np.ndarray, np.ndarray]:
    """Return m, and an expression of m and c, for all pairs of numbers."""
    m, c = np.array([*itertools.product(NUMBERS, NUMBERS)], np.float32).T
    out = buffer("out", len(m))
    (found,) = run_graph(graph((M, C), (Def(out, (AT,), expr),), out), [m, c])
    return m, found


@pytest.mark.parametrize("name", AT_INFINITY)
def test_nan_beside_an_infinity_is_known_whatever_the_rest_is(name: str):
    expr, known = AT_INFINITY[name]
    with np.errstate(all="ignore"):
        m, found = _values(expr)
    assert is_known_nan(expr, {TOP: INF}) is known
    assert bool(np.isnan(found[m == INF]).all()) is known


def test_a_rounding_of_finite_numbers_is_not_known():
    least = op("sub", op("mul", f32(3e38), f32(10.0)), TOP)  # inf - inf, in f32
    assert not is_known_nan(least, {TOP: INF})
    assert is_known_nan(Const(NAN, F32), {})
