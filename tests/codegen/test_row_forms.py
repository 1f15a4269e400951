"""Forms that rows take: parts that are lanes together, one sweep for a maximum and its sums."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import tests.triton_backend  # noqa: F401 (registers the backends)
from tests.codegen.test_contraction import tensor
from tests.support import check, tune


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", (272, 275))
def test_many_short_rows_that_programs_take_in_turn(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(monkeypatch, "sm", programs=1)
    tune(monkeypatch, "rows", waves=1)
    x, w, b = tensor(count, 520), tensor(520, seed=1), tensor(520, seed=2)
    run = functools.partial(F.layer_norm, normalized_shape=(520,))
    check(lambda x, w, b: run(x, weight=w, bias=b), x, w, b, backend="triton_interpreter")


def test_rows_that_no_tile_divides() -> None:
    x, b = tensor(5, 600), tensor(600, seed=1)
    check(lambda x, b: torch.cos(x + b) * x, x, b, backend="triton_interpreter")


@pytest.mark.parametrize(("count", "width"), [(131, 384), (128, 512)])
def test_rows_that_a_warp_has_alone_beside_column_sums(count: int, width: int) -> None:
    """131 rows end within an iteration, 384 columns within the lanes of a warp's last turn."""
    x, w, b = tensor(count, width), tensor(width, seed=1), tensor(width, seed=2)
    run = functools.partial(F.layer_norm, normalized_shape=(width,))
    check(
        lambda x, w, b: run(x, weight=w, bias=b), x, w, b, backend="triton_interpreter", train=True
    )


@pytest.mark.sampled(2)
def test_a_batch_norm_whose_slices_no_cache_keeps_is_computed_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tune(monkeypatch, "rows", kept_bytes=1 << 12)
    x, w, b = tensor(12, 67, 9, 11), tensor(67, seed=1), tensor(67, seed=2)
    check(
        lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, training=True)),
        *(x, w, b),
        backend="triton_interpreter",
        train=True,
    )
