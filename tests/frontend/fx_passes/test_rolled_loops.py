"""Unrolled loops whose iterations are steps of a recurrence are rolled up; others stay."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fusec
from fusec.frontend.fx_passes.rolled_loops import roll_loops
from tests.support import BACKEND, check, externs, values

A, B = values(3, 12, 5), values(3, 12, 5, seed=1)
fusec_alone = pytest.mark.skipif(BACKEND != "fusec", reason="asks fusec alone")


def plain(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h, states = torch.zeros(b.shape[0], b.shape[2], dtype=b.dtype), []
    for t in range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        states.append(h)
    return torch.stack(states, 1), h


def gated(a: Tensor, b: Tensor) -> Tensor:
    h = b[:, 0]
    states, w = [h], a[0, 0]
    for t in range(1, b.shape[1]):
        h = h * torch.exp(-a[:, t, :].abs() * w) + b[:, t].sin() * 0.5
        states.append(h)
    return torch.stack(states)


def averaged(a: Tensor, b: Tensor) -> Tensor:
    h, states = a[:, 0], []
    for x in b.unbind(1):
        h = 0.9 * h + 0.1 * x
        states.append(h)
    return torch.stack(states, dim=-1)


def from_the_end(a: Tensor, b: Tensor) -> Tensor:
    h, states = torch.zeros_like(b[:, 0]), []
    for t in reversed(range(b.shape[1])):
        h = b[:, t] - h * a[..., t, :]
        states.append(h)
    return torch.stack(states, 1)


def summed(a: Tensor, b: Tensor) -> Tensor:
    h, states = a[:, 0], []
    for t in range(b.shape[1]):
        h = h + b[:, t]
        states.append(h)
    return torch.stack(states, 1)


def of_unlike_values(a: Tensor, b: Tensor) -> Tensor:
    h, states = a[:, 0], []
    for t in range(b.shape[1]):
        h = h * (b[:, t] if t % 3 else a[:, 2].cos()) - b[:, t * t % 7].sum(0)
        states.append(h)
    return torch.stack(states, 1)


def of_fewer_axes(a: Tensor, b: Tensor) -> Tensor:
    h, states = torch.zeros_like(b[:, 0]), []
    for t in range(b.shape[1]):
        h = a[0, 0].sigmoid() * h + b[:, t] * a[1, t]
        states.append(h * a[:, t, :1])
    h, states = torch.zeros_like(b[:, 0]), []
    for t in range(b.shape[1]):
        h = torch.sigmoid(a[:, t, None, 0]) * h + b[:, t]
        states.append(h)
    return torch.stack(states, 1)


LOOPS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (plain, gated, averaged, from_the_end, summed, of_unlike_values, of_fewer_axes)
}


def rolled(fn: Callable[..., Any], found: list[str]) -> Callable[..., Any]:
    """Return a function that runs as the pass leaves it, and notes the calls of its graph."""

    def note(gm: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        roll_loops(gm, 8)
        gm.graph.lint()
        nodes = [node for node in gm.graph.nodes if node.op.startswith("call")]
        found.extend(getattr(node.target, "__name__", str(node.target)) for node in nodes)
        return gm.forward

    return torch.compile(fn, backend=note, fullgraph=True)


def calls(
    fn: Callable[..., Any],
    *inputs: Tensor,
    train: bool = True,
    symbolic_axis: int | None = None,
) -> list[str]:
    """Return the calls of a function's graph behind the pass; check its results and gradients."""
    found: list[str] = []
    torch._dynamo.reset()
    given, own = (
        [x.clone().requires_grad_(train and x.is_floating_point()) for x in inputs]
        for _ in range(2)
    )
    if symbolic_axis is not None:
        torch._dynamo.mark_dynamic(given[0], symbolic_axis)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        made = rolled(fn, found)(*given)
        torch.manual_seed(0)
        expected = fn(*own)
    made, expected = ([x] if isinstance(x, Tensor) else list(x) for x in (made, expected))
    for x, y in zip(made, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, equal_nan=True, check_stride=True)
        assert x.requires_grad == y.requires_grad
        assert torch.equal((x == 0) & x.signbit(), (y == 0) & y.signbit())
    for results in (made, expected):
        weighed = [
            x * torch.arange(x.numel()).view(x.shape).cos() for x in results if x.requires_grad
        ]
        if weighed:
            torch.autograd.backward([x.sum() for x in weighed])
    for x, y in zip(given, own, strict=True):
        least = 0.0 if y.grad is None else 1e-5 * float(y.grad.nan_to_num(0, 0, 0).abs().max())
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-4 + least, equal_nan=True)
    return found


def is_rolled(found: list[str]) -> bool:
    """Return True if a loop is a recurrence."""
    return "recurring" in found


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_affine_steps_is_rolled_up(name: str) -> None:
    found = calls(LOOPS[name], A, B)
    assert is_rolled(found)
    assert len(found) < 25 or name in ("of_unlike_values", "of_fewer_axes")


def test_the_length_of_a_graph_is_that_of_one_iteration() -> None:
    longer = values(3, 40, 5), values(3, 40, 5, seed=1)
    assert [len(calls(plain, *both)) for both in ((A, B), longer)] == [len(calls(plain, A, B))] * 2


# -- loops that stay -------------------------------------------------------------------------------


def step(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a loop whose step is ``function(h, a, b, states)``."""

    def loop(a: Tensor, b: Tensor) -> Tensor:
        states = [b[:, 0]]
        for t in range(1, b.shape[1]):
            states.append(function(states[-1], a[:, t], b[:, t], states))
        return torch.stack(states, 1)

    return loop


OTHERS: dict[str, Callable[..., Any]] = {
    "through a function": step(lambda h, a, b, _: torch.tanh(a * h + b)),
    "with a factor that depends on the state": step(lambda h, a, b, _: torch.sigmoid(h) * h + b),
    "with a term that depends on the state": step(lambda h, a, b, _: a * h + torch.sin(h)),
    "with the state twice": step(lambda h, a, b, _: h + a * (b - h)),
    "as a divisor": step(lambda h, a, b, _: b / (h + 5)),
    "with the state before the last": step(lambda h, a, b, s: a * h + s[max(len(s) - 2, 0)]),
    "with other steps each": step(lambda h, a, b, s: a * h + b if len(s) % 2 else a * h - b),
    "multiplied behind a sum, which may cancel": step(lambda h, a, b, _: (h - b) * a),
    "of two factors, whose product may overflow": step(lambda h, a, b, _: h * a * b),
    "of a quotient": step(lambda h, a, b, _: h / (2 + a.abs())),
    "of other numbers each": step(lambda h, a, b, s: h * (len(s) / 8) + b),
    "of a number once": step(lambda h, a, b, s: h * (0.5 if len(s) == 5 else a) + b),
    "that mixes columns": step(lambda h, a, b, _: a * h.flip(-1) + b),
    "that sums": step(lambda h, a, b, _: a * h.sum(-1, keepdim=True) + b),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_loop_is_no_recurrence(name: str) -> None:
    assert not is_rolled(calls(OTHERS[name], A, B))


def test_a_loop_in_which_something_is_written_stays() -> None:
    def written(a: Tensor, b: Tensor) -> Tensor:
        states, b = [b[:, 0] * 1], b * 1
        for t in range(1, b.shape[1]):
            states.append(a[:, t] * states[-1] + b[:, t])
            b[:, t].add_(1)
        return torch.stack(states, 1)

    def behind(a: Tensor, b: Tensor) -> Tensor:
        states, b = [b[:, 0] * 1], b * 1
        for t in range(1, b.shape[1]):
            states.append(a[:, t] * states[-1] + b[:, t])
        states[3].mul_(2)
        return torch.stack(states, 1)

    assert not is_rolled(calls(written, A, B, train=False)) and not is_rolled(
        calls(behind, A, B, train=False)
    )


def test_a_stack_into_a_given_tensor_stays() -> None:
    def given(a: Tensor, b: Tensor) -> Tensor:
        states = [b[:, 0]]
        for t in range(1, b.shape[1]):
            states.append(a[:, t] * states[-1] + b[:, t])
        made = torch.empty(12, 3, 5)
        torch.stack(states, 0, out=made)
        torch.cat(states, out=made.view(36, 5))
        return made

    assert not is_rolled(calls(given, A, B, train=False))
    check(given, A, B)


def test_a_short_loop_and_one_of_integers_stay() -> None:
    assert not is_rolled(calls(plain, A[:, :5], B[:, :5]))
    whole = values(3, 12, 5, dtype=torch.int64)
    assert not is_rolled(calls(plain, whole, whole))


def test_a_number_of_more_digits_than_the_state_has_is_kept() -> None:
    assert not is_rolled(calls(averaged, A.bfloat16(), B.bfloat16()))


# -- beside eager ----------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LOOPS)
def test_loops_match_eager(name: str) -> None:
    check(LOOPS[name], A, B, train=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_loops_of_a_type_match_eager(dtype: torch.dtype) -> None:
    check(plain, A.to(dtype), B.to(dtype), train=True)


@pytest.mark.parametrize("length", [8, 9, 12])
def test_the_gradient_of_a_factor_alone_reads_a_part_of_a_scan(length: int) -> None:
    def loop(a: Tensor) -> Tensor:
        states = [torch.ones(3, 5, dtype=a.dtype)]
        for t in range(1, length):
            states.append(states[-1] * a[:, t])
        return torch.stack(states, 1)

    check(loop, A, train=True)


@fusec_alone
def test_a_loop_is_a_kernel_and_so_is_its_gradient() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        return plain(a.sigmoid(), b)[0]

    explained = fusec.explain(fn, A, B, train=True)
    assert [len(graph.kernels) for graph in explained.graphs] == [1, 1]
    assert externs(fn, A, B, train=True) == []


def test_what_is_not_finite_stays_from_where_it_is() -> None:
    a, b = A.clone(), B.clone()
    a[0, 3], b[1, 4], b[2, 5] = float("nan"), float("inf"), float("nan")
    a[0, 0, 1] = float("inf")
    check(plain, a, b)


@fusec_alone
@torch.no_grad()
def test_a_product_that_a_scan_reads_is_computed_along_the_scan() -> None:
    def selective(x: Tensor, low: Tensor, weight: Tensor, decay: Tensor, into: Tensor) -> Tensor:
        step = torch.nn.functional.softplus(low @ weight.t())
        state, states = torch.zeros_like(decay), []
        for t in range(64):
            added = (step[t, :, None] * into[t]) * x[t, :, None]
            state = torch.exp(step[t, :, None] * decay) * state + added
            states.append(state)
        return torch.stack(states)

    sizes = (64, 512), (64, 16), (512, 16), (512, 16), (64, 16)
    x, low, weight, decay, into = (values(*size, seed=n) for n, size in enumerate(sizes))
    given = x, low, weight, -decay.abs(), into
    torch._dynamo.reset()
    compiled = torch.compile(selective, backend="fusec", options={"strict": True, "race": "fused"})
    torch.testing.assert_close(compiled(*given), selective(*given), rtol=1e-4, atol=1e-4)
