"""Faults planted in the compiler are found by random programs, within few of them.

A fuzzer that finds nothing proves nothing. Each fault here is one that a change could bring in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusec.codegen.cpp.stages import CPP_FORM
from fusec.ir.dtype import BF16, F32
from fusec.ir.expr import Const, Op, Select, postorder
from fusec.ir.program import Let, Program, Statement, Update, map_statements, reads, statements
from fusec.ir.scalar import ROUND
from fusec.passes.stage import Stage
from tests.fuzz.programs import draw, failure
from tests.planted import lower, recode


def one_too_early(
    rule: Callable[..., Any], call: Any, x: Any, dim: int = 0, start: Any = None, *rest: Any
) -> Any:
    early = start - 1 if isinstance(start, int) and start > 0 else start
    return rule(call, x, dim, early, *rest)


def rounded(program: Program) -> Program:
    """Round an accumulator in f32 to bf16 after each update."""

    def rule(statement: Statement) -> Iterable[Statement]:
        yield statement
        if isinstance(statement, Update) and statement.var.dtype is F32:
            yield Update(statement.var, Op(ROUND[BF16], (statement.var,)))

    return replace(program, body=tuple(map_statements(program.body, rule)))


def unmasked(program: Program) -> Program:
    """Fold lanes without the identities that stand in masked ones."""
    updates = [s for s in statements(program.body) if isinstance(s, Update)]
    folded = set(postorder(expr for update in updates for expr in reads(update)))

    def rule(statement: Statement) -> Iterable[Statement]:
        match statement:
            case Let(var, Select(then=body, other=Const())) if var in folded:
                yield Let(var, body)
            case _:
                yield statement

    return replace(program, body=tuple(map_statements(program.body, rule)))


def behind_lowering(fault: Callable[[Program], Program]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what plants a rewrite of programs, before they are made ready to print."""
    stage = Stage("fault", "", lambda program, context: fault(program), "Program", "Program")
    return lambda patch: recode(patch, "cpu", form=(stage, *CPP_FORM))


# Each with a seed whose program shows it.
FAULTS: dict[str, tuple[int, Callable[[pytest.MonkeyPatch], None]]] = {
    "a mask forgotten in a reduction": (33, behind_lowering(unmasked)),
    "a slice off by one": (
        3,
        lambda patch: lower(patch, torch.ops.aten.slice.Tensor, one_too_early),
    ),
    "a bf16 accumulator": (31, behind_lowering(rounded)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed, plant = FAULTS[fault]
    assert failure(draw(seed)) is None
    plant(monkeypatch)
    assert isinstance(failure(draw(seed)), AssertionError)
