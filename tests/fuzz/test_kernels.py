"""Kernels of random graphs as Triton prints them, run by Triton's interpreter, to the last bit.

The same for C++, whose kernels are built as one library, is in
``tests/codegen/cpp/test_printer.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fusec.errors import InvalidIR
from fusec.tools.interpreter.graph import run_graph
from tests.fuzz.graphs import copy_extern, example
from tests.fuzz.kernels import compile_example, run_kernels
from tests.fuzz.pipeline import small_target
from tests.triton_backend import InterpretedKernel

BATCH = 5
"""Graphs a test: enough to be worth a line, few enough to find the seed at once."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def check_triton(seed: int, *, symbols: bool) -> bool:
    """Assert that a graph's kernels compute what it does; False if the verifier refuses it."""
    drawn = example(seed, symbols=symbols, count=2 + seed % 4)
    try:
        schedule, programs = compile_example(drawn, small_target("sm_90"))
    except InvalidIR as error:  # the prover's limits, on some gathers below divisions
        assert "not provably" in str(error)
        return False
    expected = run_graph(drawn.graph, drawn.inputs, copy_extern)
    found = run_kernels(schedule, programs, drawn.inputs, InterpretedKernel)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(b, a, err_msg=f"seed {seed}")
    return True


@pytest.mark.parametrize("symbols", [False, True], ids=["constant", "sizes"])
@pytest.mark.parametrize("start", range(5000, 5000 + 2 * BATCH, BATCH))
def test_triton_kernels_of_random_graphs_compute_what_the_graphs_do(
    start: int, symbols: bool
) -> None:
    checked = [check_triton(seed, symbols=symbols) for seed in range(start, start + BATCH)]
    assert any(checked)


@pytest.mark.slow
@pytest.mark.parametrize("symbols", [False, True], ids=["constant", "sizes"])
@pytest.mark.parametrize("start", range(6000, 6000 + 40 * BATCH, BATCH))
def test_triton_kernels_of_more_random_graphs_compute_what_the_graphs_do(
    start: int, symbols: bool
) -> None:
    checked = [check_triton(seed, symbols=symbols) for seed in range(start, start + BATCH)]
    assert any(checked)
