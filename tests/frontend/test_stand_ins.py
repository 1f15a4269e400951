"""Rules of real operations, run on complex tensors."""

from __future__ import annotations

import pytest
import torch

from fusec.errors import Unsupported
from fusec.frontend.stand_ins import StandIns, constant
from fusec.frontend.value import ComplexValue, Value, make_axes, positions, whole
from fusec.ir.dtype import BOOL, F32, F64, I64
from fusec.ir.expr import Cast, Expr, Op, Reduce, Select, op
from fusec.ir.graph import Extern
from fusec.ir.index import Axis, index
from fusec.ir.monoid import PROD, SUM
from tests.frontend.tracing import body, lowered
from tests.ir.graphs import buffer

RE, IM, X = whole(buffer("re", 4)), whole(buffer("im", 4)), whole(buffer("x", 4))
AXES = make_axes((index(4),))
HERE = positions(AXES)


def parts(make) -> list[str]:
    """Return the parts of an expression of a stand-in and of a real tensor."""
    stand_ins = StandIns()
    found = stand_ins.split(make(stand_ins.of(ComplexValue(RE, IM)).at(HERE), X.at(HERE)))
    return [repr(part) for part in (found.re, found.im) if part is not None]


def test_sums_and_choices_are_those_of_the_parts() -> None:
    assert parts(lambda z, x: op("add", z, x)) == ["re[i0] + x[i0]", "im[i0] + 0.0"]
    assert parts(lambda z, x: Cast(z, F64)) == ["f64(re[i0])", "f64(im[i0])"]
    assert parts(lambda z, x: Select(Cast(x, BOOL), z, x)) == [
        "where(bool(x[i0]), re[i0], x[i0])",
        "where(bool(x[i0]), im[i0], 0.0)",
    ]


def test_sum_over_an_axis_is_two_sums() -> None:
    k = Axis("k", index(4))
    stand_ins = StandIns()
    z = stand_ins.of(ComplexValue(RE, IM)).at((index(k),))
    found = stand_ins.split(Reduce(SUM, (k,), z))
    assert [repr(found.re), repr(found.im)] == ["sum(k: re[k])", "sum(k: im[k])"]
    with pytest.raises(Unsupported, match="prod of complex numbers"):
        stand_ins.split(Reduce(PROD, (k,), z))


def test_real_results_of_complex_numbers_are_real() -> None:
    assert parts(lambda z, x: op("abs", z)) == ["hypot(re[i0], im[i0])"]
    assert parts(lambda z, x: op("add", op("abs", z), x)) == ["hypot(re[i0], im[i0]) + x[i0]"]
    assert parts(lambda z, x: Cast(z, BOOL)) == ["(re[i0] != 0.0) | (im[i0] != 0.0)"]
    assert parts(lambda z, x: Op("eq", (z, x))) == ["(re[i0] == x[i0]) & (im[i0] == 0.0)"]


def test_expression_of_real_tensors_stays_the_same_object() -> None:
    expr = op("exp", X.expr)
    assert StandIns().split(expr).re is expr
    assert parts(lambda z, x: op("exp", x)) == ["exp(x[i0])"]


@pytest.mark.parametrize(
    "make",
    (lambda z, x: op("maximum", z, x), lambda z, x: op("lt", z, x), lambda z, x: Cast(z, I64)),
)
def test_what_has_no_meaning_for_complex_numbers_is_refused(make) -> None:
    with pytest.raises(Unsupported):
        parts(make)


def test_a_view_of_a_stand_in_is_a_complex_view() -> None:
    stand_ins = StandIns()
    z = stand_ins.of(ComplexValue(RE, IM))
    axes = make_axes((index(2),))
    made = stand_ins.resolved(Value((index(2),), F32, axes, z.at((index(axes[0]) * 2,))))
    assert isinstance(made, ComplexValue)
    assert list(map(repr, made.exprs)) == ["re[2*i0]", "im[2*i0]"]


def test_a_number_is_its_parts() -> None:
    stand_ins = StandIns()
    number: Expr = stand_ins.number(2 - 3j).expr
    assert [repr(part) for part in stand_ins.split(number).both] == ["2.0", "-3.0"]
    assert list(map(repr, constant(1j, F32).exprs)) == ["0.0", "1.0"]


# -- in a graph -----------------------------------------------------------------------------------


def test_product_is_two_definitions() -> None:
    z, w = torch.zeros(2, 4, dtype=torch.complex64)
    assert body(lowered(lambda z, w: (z * w).real.sum(), z, w))[:2] == [
        "mul_re[i0] = (z_1[i0, 0] * w_1[i0, 0]) - (z_1[i0, 1] * w_1[i0, 1])",
        "mul_im[i0] = (z_1[i0, 0] * w_1[i0, 1]) + (z_1[i0, 1] * w_1[i0, 0])",
    ]


def test_what_no_rule_computes_is_an_eager_call_with_the_reason() -> None:
    graph = lowered(lambda z: torch.asin(z * 2).prod(), torch.ones(4, dtype=torch.complex64))
    reasons = [n.reason for n in graph.nodes if isinstance(n, Extern)]
    assert reasons == ["asin of complex numbers", "prod of complex numbers"]


def test_half_precision_stays_with_eager_kernels() -> None:
    graph = lowered(lambda z: z * 2, torch.ones(4, dtype=torch.complex32))
    (call,) = (n for n in graph.nodes if isinstance(n, Extern))
    assert call.reason == "a type that only eager kernels compute with"
