"""Programs of transformed products compute what their kernels say, with the fewest operations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fusec.codegen.cpp.vector_tiles import vector_tiles
from fusec.codegen.lowering.lower import lower
from fusec.codegen.targets import CPU_MACHINE
from fusec.ir.expr import Op
from fusec.ir.program import For, Let, Multiply, Program, statements
from fusec.ir.verify_program import verify_program
from fusec.passes.schedule.transformed import plans
from fusec.tools.interpreter.program import run_program
from tests.passes.schedule.short_filters import convolved, filtered, transformed

MACHINE = replace(CPU_MACHINE, vector=16)


def program_of(*sizes: int) -> tuple[Program, tuple]:
    kernel, buffers = filtered(*sizes)
    (plan,) = plans(kernel, MACHINE)
    program = lower(kernel, plan)
    verify_program(program)
    return program, buffers


@pytest.mark.parametrize(
    "sizes",
    [(2, 8, 32, 32), (1, 7, 16, 16), (3, 5, 16, 48), (1, 400, 16, 32), (2, 9, 16, 256)],
    ids=["even", "odd", "odd lines", "blocks", "parts"],
)
def test_the_interpreter_finds_the_convolution(sizes: tuple[int, int, int, int]) -> None:
    lines, places, channels, outputs = sizes
    program, (x, u, r, y) = program_of(*sizes)
    numbers = np.random.default_rng(1)
    image = numbers.integers(-4, 5, (lines, places, channels)).astype(np.float32)
    weight = numbers.integers(-4, 5, (outputs, channels, 3)).astype(np.float32)
    more = numbers.integers(-4, 5, (lines, places, outputs)).astype(np.float32)
    storage = {
        r: more.reshape(-1),
        x: image.reshape(-1),
        u: np.ascontiguousarray(transformed(weight), np.float32).reshape(-1),
        y: np.full(lines * places * outputs, np.nan, np.float32),
    }
    run_program(program, storage, {})
    found = storage[y].reshape(lines, places, outputs)
    assert np.array_equal(found, np.maximum(convolved(image, weight) + more, 0))


def loops(program: Program) -> list[For]:
    return [s for s in program.body if isinstance(s, For)]


def operations(loop: For) -> list[str]:
    lets = (s.value for s in statements((loop,)) if isinstance(s, Let))
    return [value.name for value in lets if isinstance(value, Op) and value.dtype.is_float]


def test_transforms_are_written_out_without_zeros_and_ones() -> None:
    program, _ = program_of(2, 8, 32, 32)
    first, products, last = loops(program)
    # Four terms of two pixels each; two results of three terms each, which share a sum of two.
    assert sorted(operations(first)) == ["add", "sub", "sub", "sub"]
    assert sorted(operations(last)) == [*["add"] * 4, "maximum", "maximum", "sub", "sub"]
    assert [type(s) for s in statements((products,))] == [For, Multiply]


def test_it_is_over_vectors_already() -> None:
    program, _ = program_of(2, 8, 32, 32)
    assert vector_tiles(program, 16) is program
