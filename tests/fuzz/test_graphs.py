"""Random graphs through the whole pipeline, each structure run by its interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fusec.errors import InvalidIR
from fusec.ir.verify import verify_graph
from tests.fuzz.graphs import copy_extern, example
from tests.fuzz.pipeline import check_pipeline, small_target

TARGETS = ("cpu", "sm_90")
BATCH = 10
"""Graphs a test: enough to be worth a line, few enough to find the seed at once."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def check_seeds(seeds: range, target: str, *, symbols: bool) -> None:
    for seed in seeds:
        drawn = example(seed, symbols=symbols, count=2 + seed % 6)
        try:
            verify_graph(drawn.graph)
        except InvalidIR:
            continue
        chosen = small_target(target, (16, 8, 4)[seed % 3])
        try:
            check_pipeline(drawn.graph, drawn.inputs, chosen, copy_extern)
        except Exception as error:
            raise AssertionError(f"seed {seed} on {target}: {error}") from error


@pytest.mark.sampled(7)  # a diagonal
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("start", range(0, 40, BATCH))
def test_pipeline_computes_what_the_graph_does(start: int, target: str) -> None:
    check_seeds(range(start, start + BATCH), target, symbols=False)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("start", range(40, 1000, BATCH))
def test_pipeline_computes_what_more_graphs_do(start: int, target: str) -> None:
    check_seeds(range(start, start + BATCH), target, symbols=False)
