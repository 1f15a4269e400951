"""Faults planted in the compiler are found by random programs, within few of them.

A fuzzer that finds nothing proves nothing. Each fault here is one that a change could bring in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fusec.codegen.cpp.printer import CppPrinter
from fusec.codegen.lowering.values import Values
from fusec.frontend.ops import views
from fusec.ir.dtype import BF16, F32
from fusec.ir.expr import Expr, Op, Reduce
from fusec.ir.index import Index, index
from fusec.ir.program import Statement, Update
from fusec.ir.scalar import ROUND
from tests.fuzz.programs import draw, failure

slice_start = views.slice_start
as_printed = CppPrinter.statement


def one_too_early(call: object, start: object, extent: Index) -> Index:
    first = slice_start(call, start, extent)
    return index(first.const - 1) if first.is_constant and first.const > 0 else first


def rounded(printer: CppPrinter, statement: Statement) -> None:
    """Print a statement; after an update of an accumulator in f32, round it to bf16."""
    as_printed(printer, statement)
    if isinstance(statement, Update) and statement.var.dtype is F32:
        as_printed(printer, Update(statement.var, Op(ROUND[BF16], (statement.var,))))


def unmasked(self: Any, scope: Any, node: Reduce) -> tuple[Expr, ...]:
    return tuple(self._atom(body) for body in node.bodies)


# Each with a seed whose program shows it.
FAULTS: dict[str, tuple[int, Callable[[pytest.MonkeyPatch], None]]] = {
    "a mask forgotten in a reduction": (
        33,
        lambda patch: patch.setattr(Values, "_masked", unmasked),
    ),
    "a slice off by one": (3, lambda patch: patch.setattr(views, "slice_start", one_too_early)),
    "a bf16 accumulator": (31, lambda patch: patch.setattr(CppPrinter, "statement", rounded)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed, plant = FAULTS[fault]
    assert failure(draw(seed)) is None
    monkeypatch.setattr(
        "fusec.driver.compiler.fingerprint", lambda: fault
    )  # kernels of other sources
    plant(monkeypatch)
    assert isinstance(failure(draw(seed)), AssertionError)
