"""Forms that rows take: parts that are lanes together, one sweep for a maximum and its sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tests.triton_backend  # noqa: F401 (registers the backends)
from tests.codegen.test_contraction import tensor
from tests.support import check


def test_softmax_of_a_row_that_was_split_into_parts() -> None:
    check(lambda x: torch.softmax(x, -1), tensor(4, 4096), backend="triton_interpreter")


@pytest.mark.slow
def test_cross_entropy_of_a_row_beyond_the_registers() -> None:
    classes = torch.tensor([5, 40000])
    check(
        lambda x: F.cross_entropy(x, classes),
        tensor(2, 40001),
        backend="triton_interpreter",
        train=True,
    )


def test_rows_that_no_tile_divides() -> None:
    x, b = tensor(5, 600), tensor(600, seed=1)
    check(lambda x, b: torch.cos(x + b) * x, x, b, backend="triton_interpreter")
