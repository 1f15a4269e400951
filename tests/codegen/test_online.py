"""Sums beside their maximum: what may run in one loop with it, and what has to wait."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tests.triton_backend  # noqa: F401 (registers the backends)
from fusec.ir.dtype import F32
from fusec.ir.expr import Buffer, Const, Expr, Load, Op, Reduce, Select, loads
from fusec.ir.graph import Def
from fusec.ir.index import Axis, index
from fusec.ir.monoid import MAX, SUM
from fusec.ir.online import ONLINE_RULES, SCALE_RULES, find_row_maxima, scale_of
from fusec.ir.rewrite import rewrite
from fusec.ir.strides import contiguous_strides
from fusec.tools.interpreter.graph import run_graph
from tests.ir.graphs import graph
from tests.support import FUSED, check, tune, values

LOWEST = Const(float("-inf"), F32)


def _buffer(name: str, *shape: int) -> Buffer:
    extents = tuple(index(n) for n in shape)
    return Buffer(name, extents, contiguous_strides(extents), F32)


class _Row:
    """Scores ``s[n]`` of one row, a condition, and the exponential of a score below a maximum."""

    def __init__(self) -> None:
        self.n = Axis("n", index(64))
        self.score = self.load("s")
        self.keep = Op("lt", (self.load("k"), Const(0.5, F32)))
        self.masked = Select(self.keep, self.score, LOWEST)

    def load(self, name: str) -> Expr:
        return Load(_buffer(name, 64), (index(self.n),))

    def top(self, body: Expr) -> Reduce:
        return Reduce(MAX, (self.n,), body)

    def is_online(self, body: Expr) -> bool:
        return bool(find_row_maxima((Reduce(SUM, (self.n,), body),)))


def _above(score: Expr, top: Expr) -> Expr:
    return Op("exp", (Op("sub", (score, top)),))


def test_a_sum_of_the_exponentials_of_what_the_maximum_has_seen_is_online():
    row = _Row()
    assert row.is_online(_above(row.score, row.top(row.score)))
    assert row.is_online(_above(row.masked, row.top(row.masked)))
    assert row.is_online(_above(row.masked, row.top(row.score)))


def test_a_factor_within_the_maximum_and_in_the_scores_is_no_hindrance():
    row = _Row()
    scores = Op("mul", (row.score, Const(0.125, F32)))
    assert row.is_online(_above(scores, row.top(scores)))
    assert row.is_online(Op("mul", (_above(scores, row.top(scores)), row.load("v"))))


def test_a_score_that_may_exceed_the_maximum_so_far_waits_for_the_last_one():
    row = _Row()
    weight = _above(row.score, row.top(row.masked))
    assert not row.is_online(weight)
    assert not row.is_online(Op("mul", (weight, row.load("v"))))
    assert row.is_online(Select(row.keep, weight, Const(0.0, F32)))
    assert not row.is_online(_above(row.load("t"), row.top(row.score)))


def test_a_sum_that_mentions_the_maximum_otherwise_waits():
    row = _Row()
    top = row.top(row.score)
    weight = _above(row.score, top)
    assert not row.is_online(Op("mul", (weight, top)))
    assert not row.is_online(Op("add", (weight, row.load("v"))))
    assert not row.is_online(Op("mul", (weight, weight)))


def test_a_positive_factor_leaves_the_maximum_and_the_mask():
    row = _Row()
    scaled = Op("mul", (row.score, Const(0.25, F32)))
    score = Select(row.keep, scaled, LOWEST)
    total = Reduce(SUM, (row.n,), _above(score, row.top(score)))
    (after,) = rewrite((total,), SCALE_RULES)
    (top,) = find_row_maxima((after,)).values()
    assert top is row.top(row.masked)
    assert scale_of(after, top) == ("mul", 0.25)


@pytest.mark.parametrize("shown", (True, False))
def test_a_condition_of_the_row_leaves_its_sum(shown: bool):
    """``sum(n: where(hidden, 0, exp(s - m) / l) * v)`` divides, and asks, after the sum."""
    row = _Row()
    top, zero = row.top(row.score), Const(0.0, F32)
    weight = _above(row.score, top)
    total = Reduce(SUM, (row.n,), weight)
    hidden = Op("eq", (top, LOWEST))
    branches = (Op("div", (weight, total)), zero)
    chosen = Select(hidden, *(branches if shown else branches[::-1]))
    v = row.load("v")
    (after,) = rewrite((Reduce(SUM, (row.n,), Op("mul", (chosen, v))),), ONLINE_RULES)
    assert isinstance(after, Select)
    assert after.condition is hidden
    inner, other = (after.then, after.other) if shown else (after.other, after.then)
    assert other is zero
    assert isinstance(inner, Op)
    assert inner.args == (Reduce(SUM, (row.n,), Op("mul", (weight, v))), total)


@pytest.mark.parametrize("name", ("maximum", "add"))
def test_what_is_subtracted_beside_the_maximum_leaves_the_sum(name: str):
    """A sink is the larger one; a log-sum-exp is the maximum and more. Twice shifted is once."""
    row = _Row()
    top, sink = row.top(row.score), Load(_buffer("sink", 1), (index(0),))
    base = Op(name, (top, sink))
    for weight in (_above(row.score, base), _above(Op("sub", (row.score, sink)), base)):
        body = Op("mul", (weight, row.load("v")))
        assert not row.is_online(body)
        (after,) = rewrite((Reduce(SUM, (row.n,), body),), ONLINE_RULES)
        (total,) = find_row_maxima((after,))
        assert find_row_maxima((after,))[total] is top
        assert total.body.args[0] is _above(row.score, top)


def test_a_logarithm_of_weights_is_no_weight():
    """``sum(n: s - u)`` has no exponential: a loss with smoothed labels."""
    row = _Row()
    shifted = Op("sub", (row.score, Op("add", (row.top(row.score), Const(0.5, F32)))))
    for body in (shifted, Op("mul", (shifted, row.load("v"))), Op("mul", (shifted, shifted))):
        total = Reduce(SUM, (row.n,), body)
        assert rewrite((total,), ONLINE_RULES) == (total,)


@pytest.mark.parametrize("also", ("sink", "nothing"))
def test_the_maximum_of_shifted_scores_is_shifted(also: str):
    row = _Row()
    top = row.top(row.score)
    base = Op("maximum", (top, Const(0.5, F32))) if also == "sink" else top
    (after,) = rewrite((row.top(Op("sub", (row.score, base))),), ONLINE_RULES)
    assert after is Op("sub", (top, base))
    (other,) = rewrite((row.top(Op("sub", (row.score, Const(0.5, F32)))),), ONLINE_RULES)
    assert isinstance(other, Reduce)


def test_a_condition_of_each_term_stays_in_its_sum():
    row = _Row()
    weight = Select(row.keep, _above(row.score, row.top(row.score)), Const(0.0, F32))
    total = Reduce(SUM, (row.n,), Op("mul", (weight, row.load("v"))))
    assert rewrite((total,), ONLINE_RULES) == (total,)


@pytest.mark.parametrize("factor", (-0.25, 0.0, float("inf"), float("nan"), 1e-40))
def test_a_factor_that_may_turn_or_lose_the_order_stays(factor: float):
    row = _Row()
    top = row.top(Op("mul", (row.score, Const(factor, F32))))
    assert rewrite((top,), SCALE_RULES) == (top,)


def test_sums_of_two_temperatures_beside_one_maximum():
    def attention(q, k, v):
        raw = q @ k.mT
        top = raw.amax(-1, keepdim=True)
        sharp, flat = (torch.exp(raw * t - top * t) for t in (0.5, 0.125))
        return sharp @ v / sharp.sum(-1, keepdim=True) + flat @ v / flat.sum(-1, keepdim=True)

    q, k, v = (values(1, n, 16, seed=s) for s, n in enumerate((40, 90, 90)))
    check(attention, q, k, v, backend="triton_fused")


def _far_apart() -> tuple[torch.Tensor, ...]:
    """Scores of about 160 among the first keys, all hidden, and of 240 among the last."""
    q, v = torch.ones(1, 16, 16), values(1, 128, 16)
    k = torch.cat([torch.full((1, 64, 16), 40.0), torch.full((1, 64, 16), 60.0)], 1)
    return q, k, v, torch.cat([torch.zeros(64), torch.ones(64)])


def _hidden(scores: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    top = torch.where(keep > 0, scores, float("-inf")).amax(-1, keepdim=True)
    weight = torch.exp(scores - top) * keep
    return weight / weight.sum(-1, keepdim=True)


def test_weights_that_are_hidden_after_the_exponential_do_not_overflow():
    def attention(q, k, v, keep):
        return _hidden(q @ k.transpose(-1, -2) * 0.25, keep) @ v

    check(attention, *_far_apart(), backend="triton_fused")


@pytest.mark.parametrize("keep", ("none", "some"))
def test_sums_of_a_row_whose_scores_are_all_hidden_are_nan_as_in_eager(keep: str):
    def weighted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        row, key = torch.arange(40)[:, None], torch.arange(90)
        scores = (q @ k.mT * 0.25).masked_fill(row < key + 20, float("-inf"))
        weight = torch.exp(scores - scores.amax(-1, keepdim=True))
        if keep == "some":
            weight = torch.where(row >= key + 20, weight, 0.0)
        return weight.sum(-1), weight @ v

    q, k, v = (values(1, n, 16, seed=s) for s, n in enumerate((40, 90, 90)))
    check(weighted, q, k, v, backend="triton_fused")


def _top(scores: torch.Tensor) -> torch.Tensor:
    return scores.amax(-1, keepdim=True)


SPELLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "times the maximum": lambda s: torch.exp(s - _top(s)) * _top(s),
    "plus the maximum": lambda s: torch.exp(s - _top(s)) + _top(s),
    "squared": lambda s: torch.exp(s - _top(s)) ** 2,
    "below a larger maximum": lambda s: torch.exp(s - _top(s.abs())),
    "above the maximum of some": lambda s: torch.exp(s - _top(s[..., :75])),
    "below a clamped maximum": lambda s: torch.exp(s - _top(s).clamp_min(0)),
    "twice": lambda s: torch.softmax(torch.softmax(s, -1) * 9, -1),
    "two of them": lambda s: torch.softmax(s, -1) - 0.3 * torch.softmax(s * s, -1),
    "logarithm": lambda s: torch.log_softmax(s, -1),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_weights_in_other_spellings(spelling: str):
    q, k, v = (values(1, n, 16, seed=s) for s, n in enumerate((40, 90, 90)))
    weights = SPELLINGS[spelling]
    check(lambda q, k, v: weights(q @ k.mT * 0.25) @ v, q, k, v, backend="triton_fused")


def _with_sink(scores: torch.Tensor, sink: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = (scores - top).exp()
    return weights / (weights.sum(-1, keepdim=True) + (sink - top).exp()) @ v


@pytest.mark.parametrize("hidden", ("none", "some", "all"))
@pytest.mark.parametrize("sink", (1.0, 80.0, -math.inf))
def test_weights_beside_a_sink(sink: float, hidden: str):
    """A row of which all is hidden has weights of 0 beside a sink, and is NaN without one."""
    scores, v = values(3, 40), values(40, 16, seed=1)
    if hidden != "none":
        scores[1, 3:] = -math.inf
    if hidden == "all":
        scores[1] = -math.inf
    check(_with_sink, scores, torch.tensor(sink), v)


@pytest.mark.parametrize("fill", (-1e4, -1e9, torch.finfo(torch.float32).min))
def test_rows_far_from_zero_keep_the_weights_of_a_log_softmax(fill: float):
    """``m + log(l)`` is m there: each of 64 hidden keys had a weight of 1 in place of 1/64."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.mT).masked_fill(torch.arange(16)[:, None] < 8, fill)
        return torch.log_softmax(scores, -1).exp() @ v

    q, k, v = (values(n, 16, seed=s) for s, n in enumerate((16, 64, 64)))
    check(attend, q, k, v, backend=FUSED)


BASES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "the maximum": lambda s, c: _top(s),
    "a sink": lambda s, c: torch.maximum(_top(s), c),
    "shifted": lambda s, c: _top(s) + c,
    "0 where -inf": lambda s, c: torch.where(_top(s) == -math.inf, 0.0, _top(s)),
    "log-sum-exp": lambda s, c: torch.logsumexp(s, -1, keepdim=True),
    "0 where infinite": lambda s, c: torch.where(_top(s).abs() == math.inf, 0.0, _top(s)),
    "0 where not finite": lambda s, c: torch.where(_top(s).isfinite(), _top(s), 0.0),
    "clamped": lambda s, c: _top(s).clamp(max=80.0),
    "the smaller": lambda s, c: torch.minimum(_top(s), c),
}
"""What exponents are relative to, given scores and a finite number; the last four may be finite
where the maximum is inf."""
BOUNDED = list(BASES)[-4:]
_INF = math.inf
EXTREME = ((), (0,), (-_INF,), (_INF,), (_INF, _INF), (_INF, math.nan), (math.nan,))
"""What rows of scores have behind their first number."""


def _extreme_rows(n: int) -> torch.Tensor:
    scores = values(len(EXTREME) + 2, n)
    for row, begin in zip(scores, EXTREME, strict=False):
        row[1 : 1 + len(begin)] = torch.tensor(begin)
    scores[-2] = -math.inf
    scores[-1, 1:] = -math.inf
    return scores


def _sums(base: Callable, s: torch.Tensor, c: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    e = torch.exp(s - base(s, c))
    total = e.sum(-1, keepdim=True)
    return [total, (e * v[:, 0]).sum(-1), e @ v, e / total @ v, e @ v / total]


@pytest.mark.parametrize("way", ("fusec", "triton_fused"))
def test_sums_of_rows_with_infinities_and_nan_are_eagers(way: str):
    s, c, v = _extreme_rows(40), torch.tensor(0.5), values(40, 4, seed=1)
    v[3] = 0

    def every(s: torch.Tensor, c: torch.Tensor, v: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        return {name: _sums(base, s, c, v) for name, base in BASES.items()}

    check(every, s, c, v, backend=way)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
def test_a_logsumexp_of_infinity_is_infinity(dtype: torch.dtype):
    """And its gradient is NaN at the infinity, 0 elsewhere."""
    x = _extreme_rows(40).to(dtype)
    cube = torch.stack([x, x.flip(0), values(*x.shape).to(dtype)])
    check(lambda x: torch.logsumexp(x, -1), x, train=dtype is not torch.float64)
    check(lambda x: (torch.logsumexp(x, (0, 2)), x.logsumexp((1, 2))), cube)


def test_a_logsumexp_in_parts_of_scores_with_infinity():
    q, k = torch.ones(1, 4, 16), values(1, 400, 16, seed=1)
    k[0, 7] = torch.tensor([math.inf, *[0.0] * 15])
    check(lambda q, k: torch.logsumexp(q @ k.mT, -1), q, k, backend="triton_fused")


def _shifted_maximum(name: str, top: Expr, other: Expr) -> Expr:
    zero = Const(0.0, F32)
    match name:
        case "the maximum":
            return top
        case "a sink" | "the smaller":
            return Op("maximum" if name == "a sink" else "minimum", (top, other))
        case "shifted":
            return Op("add", (top, other))
        case "0 where -inf":
            return Select(Op("eq", (top, LOWEST)), zero, top)
        case "0 where infinite":
            return Select(Op("isinf", (top,)), zero, top)
        case "0 where not finite":
            finite = Op("and", (Op("eq", (top, top)), Op("not", (Op("isinf", (top,)),))))
            return Select(finite, top, zero)
        case _:
            return Op("minimum", (top, Const(80.0, F32)))


@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("name", [name for name in BASES if name != "log-sum-exp"])
def test_sums_beside_the_maximum_mean_the_same_at_infinities(name: str, weighted: bool):
    """And a sum goes into the loop of its maximum, unless weights may have either sign there."""
    row = _Row()
    top = row.top(row.score)
    weight = _above(row.score, _shifted_maximum(name, top, Load(_buffer("c"), ())))
    body = Op("mul", (weight, row.load("v"))) if weighted else weight
    before: Expr = Reduce(SUM, (row.n,), body)
    (after,) = rewrite((before,), ONLINE_RULES)
    assert bool(find_row_maxima((after,))) is not (weighted and name in BOUNDED)
    for scores in _extreme_rows(64).numpy():
        arrays = {"s": scores, "v": values(64, seed=1).numpy(), "c": np.float32(0.5)}
        with np.errstate(all="ignore"):
            found, wanted = (_value(expr, arrays) for expr in (after, before))
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_quotient_by_the_plain_sum_is_nan_at_infinity_whatever_the_weights_are():
    """So a softmax that is divided behind its sum is one loop, with 0 for a base that is inf."""
    row = _Row()
    weight = _above(row.score, _shifted_maximum("0 where infinite", row.top(row.score), LOWEST))
    total, weighted = (Reduce(SUM, (row.n,), e) for e in (weight, weight * row.load("v")))
    quotients = Op("div", (weighted, total)), Reduce(SUM, (row.n,), weight / total * row.load("v"))
    for (after,) in (rewrite((quotient,), ONLINE_RULES) for quotient in quotients):
        assert len(find_row_maxima((after,))) == 2
    (after,) = rewrite((Op("div", (weighted, row.load("v"))),), ONLINE_RULES)
    assert not find_row_maxima((after,))


def _value(expr: Expr, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return the value of an expression without axes, by the interpreter."""
    inputs = tuple(dict.fromkeys(node.buffer for node in loads((expr,))))
    out = _buffer("out")
    example = graph(inputs, (Def(out, (), expr),), out)
    (found,) = run_graph(example, [arrays[buffer.name] for buffer in inputs])
    return found


@pytest.mark.parametrize("hidden", ("none", "some", "all"))
def test_a_softmax_of_rows_beyond_the_registers(hidden: str, monkeypatch: pytest.MonkeyPatch):
    tune(monkeypatch, "rows", resident_row=16, row_tile=32)
    x = values(5, 300) * 20
    x[:, :40] = float("-inf") if hidden != "none" else x[:, :40]
    x[2] = float("-inf") if hidden == "all" else x[2]

    def rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.softmax(-1), x.log_softmax(-1), x.amax(-1), (x * 0.5).exp().sum(-1)

    check(rows, x, backend="triton_fused")


def test_the_gradient_of_a_cross_entropy_beyond_the_registers(monkeypatch: pytest.MonkeyPatch):
    tune(monkeypatch, "rows", resident_row=16, row_tile=32)
    target = torch.tensor([0, 7, 298, -100, 3])
    check(lambda x: F.cross_entropy(x, target), values(5, 299), backend="triton_fused", train=True)
