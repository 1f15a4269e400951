"""Neighbours in memory are loaded and stored together, where lanes are two elements apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fusec.codegen.triton.pairs import join_pairs
from fusec.ir.dtype import F32, I32, DType
from fusec.ir.expr import Load
from fusec.ir.index import Axis, index
from fusec.ir.program import Let, Program, Put, Unzip, Zip, print_program
from fusec.ir.verify_program import verify_program
from fusec.tools.interpreter.program import run_program
from tests.codegen.programs import Builder, buffer


def swapped(
    dtype: DType = F32, *, apart: int = 2, guard: str = "", between: bool = False
) -> Program:
    """y[r, 2*c] = x[r, 2*c + 1] and the other way round; or with elements further apart.

    Args:
        guard: "rows" for a guard that varies along them, "columns" for another.
        between: the first element is stored before the second one is read, of one tensor.
    """
    row, column, block = Axis("r", index(4)), Axis("c", index(8)), Axis("b", index(2))
    b = Builder("swap", (block,), (row, column))
    x = buffer("x", dtype, 8, 8 * apart)
    y = x if between else buffer("y", dtype, 8, 8 * apart)
    at = (index(block) * 4 + index(row)) * 8 * apart + index(column) * apart
    along = {"rows": row, "columns": column}.get(guard)
    kept = None if along is None else b.op("lt", b.position(index(along)), b.position(index(3)))
    first = b.load(x, at, guard=kept)
    if between:
        b.put(y, at + 1, first, guard=kept)
        b.put(y, at, b.load(x, at + 1, guard=kept), guard=kept)
        return b.program()
    second = b.load(x, at + 1, guard=kept)
    b.put(y, at, second, guard=kept)
    b.put(y, at + 1, first, guard=kept)
    return b.program()


def ran(program: Program) -> np.ndarray:
    memory = {b.base: np.arange(1.0, 129.0, dtype="f4") * (b.name == "x") for b in program.buffers}
    run_program(program, memory, {})
    return next(array for b, array in memory.items() if b in program.writes)


@pytest.mark.parametrize("guard", ["", "rows"])
def test_a_pair_is_one_load_and_one_store(guard: str) -> None:
    program = swapped(guard=guard)
    found = join_pairs(program)
    verify_program(found)
    loads = [s for s in found.body if isinstance(s, Let) and isinstance(s.value, Load)]
    kinds = [sum(isinstance(s, kind) for s in found.body) for kind in (Unzip, Zip, Put)]
    assert len(loads) == 1 and kinds == [1, 1, 1], print_program(found)
    np.testing.assert_array_equal(ran(found), ran(program))


@pytest.mark.parametrize(
    "program",
    [
        swapped(guard="columns"),
        swapped(I32),
        swapped(apart=4),
        swapped(between=True),
        replace(swapped(), lanes=()),
    ],
    ids=["a mask that ends in a pair", "integers", "others between", "read after a store", "none"],
)
def test_what_is_no_pair_stays(program: Program) -> None:
    assert join_pairs(program) is program
