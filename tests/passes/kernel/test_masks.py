"""Masks by the least number: by minus infinity where each row sees a key, untouched elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fusec.codegen.targets import find_target
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import compile_to_source
from fusec.driver.trace import Trace
from fusec.ir.expr import Const, postorder
from fusec.ir.graph import Kernel, Schedule
from fusec.options import Options
from fusec.passes.kernel.masks import mask_by_infinity
from fusec.tools.interpreter.graph import run_graph
from fusec.tools.report.observe import observe
from tests.fuzz.graphs import copy_extern
from tests.support import FUSED, check, values

LEAST = torch.finfo(torch.float32).min
ROWS, KEYS = 24, 40

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Mask = Callable[[Tensor, Tensor], Tensor]

SEES: dict[str, Mask] = {
    "causal": lambda m, n: n <= m,
    "later keys, whose last is seen": lambda m, n: n >= m,
    "a window": lambda m, n: (n <= m) & (m - n < 7),
    "not the later ones": lambda m, n: ~(n > m + 1),
    "a prefix": lambda m, n: n < 9,
}
MAY_SEE_NOTHING: dict[str, Mask] = {
    "earlier keys": lambda m, n: n < m,
    "keys beyond the last": lambda m, n: n > m + 17,
    "one or the other, which is not proven": lambda m, n: (n < m) | (n > m),
}


def filled(mask: Mask, low: float = LEAST) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        m, n = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        return (q @ k.mT * 0.25).masked_fill(~mask(m, n), low).softmax(-1) @ v

    return run


def added(mask: Mask, low: float = LEAST) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        m, n = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        return (q @ k.mT * 0.25 + torch.where(mask(m, n), 0.0, low)).softmax(-1) @ v

    return run


def inputs(**options: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(
        values(2, rows, 16, seed=i, **options) for i, rows in enumerate((ROWS, KEYS, KEYS))
    )


def schedules(function: Attention, *given: Tensor) -> tuple[Schedule, Schedule]:
    """Return the kernels of a function as they were fused, and with their masks rewritten."""
    (stage,) = observe(function, given)
    options = Options.from_compile(None, {"race": "fused"})
    context = CompileContext(find_target("cpu"), options, Trace("masks"))
    before = compile_to_source(stage.graph, context).schedule
    steps = tuple(mask_by_infinity(s) if isinstance(s, Kernel) else s for s in before.steps)
    return before, replace(before, steps=steps)


def masks_of(schedule: Schedule) -> set[float]:
    """Return the numbers below which nothing counts in the kernels of a function."""
    stores = [s.expr for k in schedule.steps if isinstance(k, Kernel) for s in k.stores]
    nodes = (n for n in postorder(stores) if isinstance(n, Const) and n.dtype.is_float)
    return {n.value for n in nodes if n.value < -1000}


@pytest.mark.sampled(3)  # a diagonal
@pytest.mark.parametrize("spelling", (filled, added))
@pytest.mark.parametrize("mask", SEES)
def test_where_each_row_sees_a_key_the_least_number_is_minus_infinity(mask: str, spelling):
    before, after = schedules(spelling(SEES[mask]), *inputs())
    assert masks_of(before) == {LEAST} and masks_of(after) == {-math.inf}
    arrays = tuple(t.numpy() for t in inputs())
    expected, found = (run_graph(s, arrays, copy_extern) for s in (before, after))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(b, a)


@pytest.mark.parametrize("mask", MAY_SEE_NOTHING)
def test_where_a_row_may_see_nothing_its_weights_stay_equal(mask: str):
    _, after = schedules(filled(MAY_SEE_NOTHING[mask]), *inputs())
    assert masks_of(after) == {LEAST}


def test_a_slope_by_distance_does_not_mask():
    def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        distance = torch.arange(KEYS) - torch.arange(ROWS)[:, None]
        scores = q @ k.mT + slopes[:, None, None] * distance
        return scores.masked_fill(distance > 0, LEAST).softmax(-1) @ v

    _, after = schedules(alibi, *inputs(), torch.tensor([0.5, 0.25]))
    assert masks_of(after) == {-math.inf}


def documents_apart(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """A row sees the earlier keys of its document: at least its own."""
    m, n = torch.arange(ROWS)[:, None], torch.arange(KEYS)
    seen = (documents[m] == documents[n]) & (n <= m)
    return (q @ k.mT + torch.where(seen, 0.0, LEAST)).softmax(-1) @ v


def other_documents(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    m, n = torch.arange(ROWS)[:, None], torch.arange(KEYS)
    seen = (documents[m] != documents[n]) & (n <= m)
    return (q @ k.mT + torch.where(seen, 0.0, LEAST)).softmax(-1) @ v


@pytest.mark.parametrize(
    ("function", "masks"), [(documents_apart, {-math.inf}), (other_documents, {LEAST})]
)
def test_what_data_say_holds_where_both_sides_are_one_element(function, masks):
    given = *inputs(), torch.arange(KEYS) // 7
    _, after = schedules(function, *given)
    assert masks_of(after) == masks
    check(function, *given, backend=FUSED)


def sloped_by_powers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As BLOOM writes slopes, and MPT its mask."""
    slopes = torch.pow(torch.tensor(0.25), torch.arange(1, 3))
    shifts = (torch.arange(KEYS) - KEYS) * (1 / torch.pow(2, torch.arange(1, 3) * 2.0))[:, None]
    hidden = torch.where(torch.arange(KEYS) <= torch.arange(ROWS)[:, None], 0.0, LEAST)
    scores = q @ k.mT + slopes[:, None, None] * torch.arange(KEYS) + shifts[:, None]
    return scores.masked_fill(hidden.bool(), LEAST).softmax(-1) @ v


def test_slopes_that_positions_make_are_scores():
    _, after = schedules(sloped_by_powers, *inputs())
    assert masks_of(after) == {-math.inf}
    check(sloped_by_powers, *inputs(), backend=FUSED)


STEEP: dict[str, Callable[[Tensor], Tensor]] = {
    "a power of positions that overflows": lambda heads: torch.pow(2000.0, heads + 40),
    "as large as the mask, times a position": lambda heads: torch.exp2((heads + 123).float()),
    "a power that is 0 as an integer": lambda heads: 1 / torch.exp2(-(heads + 1).float()).int(),
    "an integer that wraps": lambda heads: 1 / (heads + 255).to(torch.uint8),
}


@pytest.mark.parametrize("slope", STEEP)
def test_functions_of_positions_that_may_be_as_low_as_a_mask_are_none(slope: str):
    def steep(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        m, n = torch.arange(ROWS)[:, None], torch.arange(KEYS)
        scores = q @ k.mT + STEEP[slope](torch.arange(2))[:, None, None] * (n - m - 1)
        return torch.where(n <= m, scores, -1e38).softmax(-1) @ v

    _, after = schedules(steep, *inputs())
    assert masks_of(after) == {-1e38}


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    causal = torch.arange(ROWS)[:, None] >= torch.arange(KEYS)
    return torch.where(causal, q @ k.mT + bias, LEAST).softmax(-1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    seen = torch.arange(ROWS)[:, None] + length >= torch.arange(KEYS)
    return torch.where(seen, q @ k.mT, LEAST).softmax(-1) @ v


def stored(scores: Tensor) -> Tensor:
    causal = torch.arange(ROWS)[:, None] >= torch.arange(KEYS)
    return torch.where(causal, scores, LEAST).softmax(-1)


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (biased, (*inputs(), values(ROWS, KEYS))),
        (padded, (*inputs(), torch.tensor(3))),
        (stored, (values(2, ROWS, KEYS),)),
    ],
    ids=["a bias that may mask", "a length", "scores from memory"],
)
def test_scores_and_masks_that_data_decide_stay_as_they_are(function, given):
    _, after = schedules(function, *given)
    assert masks_of(after) == {LEAST}


def test_a_number_that_scores_may_reach_stays():
    _, after = schedules(filled(SEES["causal"], -1e9), *inputs())
    assert masks_of(after) == {-1e9}


def test_what_is_added_where_a_mask_lets_scores_through_stays():
    def sloped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        m, n = torch.arange(70)[:, None], torch.arange(70)
        return (q @ k.mT + torch.where(n <= m, 0.25 * n, LEAST)).softmax(-1) @ v

    check(sloped, *(values(2, 70, 16, seed=i) for i in range(3)), backend=FUSED)


@pytest.mark.parametrize("shift", (lambda s: s.amin(-1, keepdim=True), lambda s: s[..., 60:61]))
def test_what_is_as_low_as_the_mask_may_be_subtracted_from_it(shift):
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.arange(70)[:, None] < torch.arange(70)
        scores = (q @ k.mT).masked_fill(hidden, LEAST)
        return (scores - shift(scores)).exp().clamp(max=2.0)

    check(function, *(values(2, 70, 16, seed=i) for i in range(3)), backend=FUSED)


def test_scores_in_a_narrower_type_are_masked_alike():
    def autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal = torch.arange(ROWS)[:, None] >= torch.arange(KEYS)
        scores = torch.where(causal, q @ k.mT, torch.finfo(q.dtype).min)
        return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v

    _, after = schedules(autocast, *inputs(dtype=torch.bfloat16))
    assert masks_of(after) == {-math.inf}


@pytest.mark.first
@pytest.mark.parametrize("spelling", (filled, added))
def test_a_training_step_skips_what_its_mask_hides_and_is_right(spelling):
    check(spelling(SEES["causal"]), *inputs(), train=True, backend=FUSED)


def test_a_row_that_sees_nothing_has_equal_weights():
    check(filled(MAY_SEE_NOTHING["earlier keys"]), *inputs(), backend=FUSED)
