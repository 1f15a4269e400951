"""Loops of any step become scans of a body that makes the calls of one iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusec.driver.compiler import RECENT
from tests.frontend.fx_passes.test_rolled_loops import calls, fusec_alone, is_rolled
from tests.support import check, trains_scans, values

A, B = values(3, 12, 5), values(3, 12, 5, seed=1)
W, U = values(5, 5, seed=2), values(5, 5, seed=3)
GATES = values(5, 15, seed=4), values(5, 15, seed=5)
Loop = Callable[..., Any]


def scans(fn: Loop, *inputs: Tensor, **how: Any) -> int:
    """Return how many scans a function becomes; check its results and gradients."""
    return calls(fn, *inputs, **how).count("scan")


def stepping(step: Callable[..., Tensor]) -> Loop:
    """Return a loop over ``h = step(h, a, b, w)`` that stacks h."""

    def loop(a: Tensor, b: Tensor, w: Tensor) -> Any:
        h, states = torch.zeros_like(b[:, 0]), []
        for t in range(b.shape[1]):
            h = step(h, a[:, t], b[:, t], w)
            states.append(h)
        return torch.stack(states, 1), h

    return loop


STEPS: dict[str, Callable[..., Tensor]] = {
    "tanh of a sum": lambda h, a, b, w: torch.tanh(h @ w + a),
    "a gate of the state": lambda h, a, b, w: torch.sigmoid(h) * h + b,
    "the state twice": lambda h, a, b, w: h + a.sigmoid() * (b - h),
    "a divisor": lambda h, a, b, w: b / (h.square() + 1),
    "a quotient": lambda h, a, b, w: h / (2 + a.abs()) + b,
    "behind a sum": lambda h, a, b, w: (h - b) * a,
    "two factors": lambda h, a, b, w: h * a * b + 1,
    "mixed columns": lambda h, a, b, w: a * h.flip(-1) + b,
    "a sum": lambda h, a, b, w: a * h.sum(-1, keepdim=True) + b,
    "a reset": lambda h, a, b, w: torch.where(b[:, :1] > 0, a, h * w[0] + b),
    "a view of itself": lambda h, a, b, w: (h.t().t() + a).view(3, 5).tanh(),
    "a transposed state": lambda h, a, b, w: (w @ (h + a).t()).t().sin(),
    "a norm": lambda h, a, b, w: F.layer_norm(h @ w + a, (5,)),
    "parts": lambda h, a, b, w: torch.cat([x.sin() for x in (h + a).split([2, 3], -1)], -1),
    "a maximum": lambda h, a, b, w: torch.maximum(h + w[0], a),
    "a detached state": lambda h, a, b, w: torch.tanh(h.detach() * a + h * b),
    "what is detached": lambda h, a, b, w: (h.detach() * a + b.detach()).sin().detach(),
    "a softmax": lambda h, a, b, w: F.softmax(h @ w + a, -1) * b,
    "nothing that varies": lambda h, a, b, w: torch.tanh(h @ w + 0.1),
    "a mask": lambda h, a, b, w: (h @ w + a).masked_fill(b > 0.5, 0.0).relu(),
    "an inner loop": lambda h, a, b, w: [h := torch.tanh(h @ w + a) for _ in range(3)][-1],
}


@trains_scans
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_any_kind_is_the_body_of_a_scan(name: str) -> None:
    assert scans(stepping(STEPS[name]), A, B, W) == 1


# -- loops -----------------------------------------------------------------------------------------


def gru(a: Tensor, w: Tensor, u: Tensor) -> Any:
    h, states = a.new_zeros(len(a), 5), []
    for t in range(a.shape[1]):
        r, z, n = (a[:, t] @ w).chunk(3, -1)
        hr, hz, hn = (h @ u).chunk(3, -1)
        z = torch.sigmoid(z + hz)
        h = (1 - z) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + z * h
        states.append(h)
    return torch.stack(states, 1), h


def lstm(a: Tensor, w: Tensor, u: Tensor) -> Any:
    h, c, states = a.new_zeros(len(a), 5), a.new_zeros(len(a), 5), []
    w, u = torch.cat([w, w[:, :5]], 1), torch.cat([u, u[:, 5:10]], 1)
    for t in range(a.shape[1]):
        i, f, g, o = (a[:, t] @ w + h @ u).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        states.append(h)
    return torch.stack(states, 1), h, c


def gru_cell(a: Tensor, w: Tensor, u: Tensor) -> Any:
    h, states = a.new_zeros(len(a), 5), []
    for t in range(a.shape[1]):
        h = torch.gru_cell(a[:, t], h, w.t(), u.t(), w[0], u[0])
        states.append(h)
    return torch.stack(states)


def lstm_cell(a: Tensor, w: Tensor, u: Tensor) -> Any:
    h, c, states = a.new_zeros(len(a), 5), a.new_ones(len(a), 5), []
    w, u = torch.cat([w, w[:, :5]], 1), torch.cat([u, u[:, 5:10]], 1)
    for t in range(a.shape[1]):
        h, c = torch.lstm_cell(a[:, t], (h, c), w.t(), u.t())
        states.append(h * 2)
    return torch.stack(states)


def linear_attention(a: Tensor, b: Tensor, w: Tensor) -> Any:
    state, out = torch.eye(5, dtype=a.dtype).expand(3, 5, 5), torch.zeros_like(a)
    for t in range(a.shape[1]):
        read = (state @ b[:, t, :, None]).squeeze(-1)
        out[:, t] = read + a[:, t]
        state = state * a[:, t].sigmoid()[:, None] + (a[:, t] - read)[:, :, None] * b[:, t, None]
    return out


def max_decay(a: Tensor, b: Tensor, w: Tensor) -> Any:
    """The time mixing of RWKV."""
    out, decay = torch.zeros_like(a), -w[0].exp()
    total, count = torch.zeros_like(a[:, 0]), torch.zeros_like(a[:, 0])
    most = torch.zeros_like(a[:, 0]) - 1e38
    for t in range(a.shape[1]):
        k = a[:, t].float()
        top = torch.maximum(most, k + w[1])
        e1, e2 = torch.exp(most - top), torch.exp(k + w[1] - top)
        out[:, t] = (e1 * total + e2 * b[:, t]) / (e1 * count + e2)
        top = torch.maximum(most + decay, k)
        e1, e2 = torch.exp(most + decay - top), torch.exp(k - top)
        total, count, most = e1 * total + e2 * b[:, t], e1 * count + e2, top
    return out


def of_two_states(a: Tensor, b: Tensor, w: Tensor) -> Any:
    g, h, ys = torch.zeros_like(a[:, 0]), torch.ones_like(a[:, 0]), []
    for t in range(a.shape[1]):
        g, h = torch.sin(a[:, t] * g + h), b[:, t] * h + g
        ys.append(g * h)
    return torch.stack(ys)


def one_behind_another(a: Tensor, b: Tensor, w: Tensor) -> Any:
    for gate in (a, b):
        h, ys = torch.zeros_like(a[:, 0]), []
        for t in range(a.shape[1]):
            h = torch.tanh(gate[:, t] * h @ w + b[:, t])
            ys.append(h)
        b = F.layer_norm(torch.stack(ys, 1), (5,))
    return b


def from_the_end(a: Tensor, b: Tensor, w: Tensor) -> Any:
    h, ys = b[:, 0], []
    for t in reversed(range(a.shape[1])):
        h = torch.sin(a[:, t] * h + b[:, t])
        ys.insert(0, h @ w)
    return torch.stack(ys, 1), h


def several_values(a: Tensor, b: Tensor, w: Tensor) -> Any:
    h, gates, norms, hs = a[:, 0], [], [], []
    for t in range(a.shape[1]):
        gate = torch.sigmoid(h @ w + a[:, t])
        h = h * gate + b[:, t] * (1 - gate)
        gates.append(gate)
        norms.append(h.norm(dim=-1))
        hs.append(h)
    return torch.stack(gates), torch.stack(norms, -1), torch.stack(hs, 2), hs[4] * 2


def starting_late(a: Tensor, b: Tensor, w: Tensor) -> Any:
    h, ys = None, []
    for t in range(a.shape[1]):
        x = a[:, t] @ w
        h = x if h is None else torch.tanh(x + h * b[:, t])
        ys.append(h)
    return torch.cat(ys, -1)


def of_integers(a: Tensor, b: Tensor, w: Tensor) -> Any:
    x, h, ys = (a * 100).long(), torch.zeros(3, 5, dtype=torch.int64), []
    for t in range(a.shape[1]):
        h = (h * 3 + x[:, t]) % 7
        ys.append(h)
    return torch.stack(ys, 1) * b


def of_a_masked_sequence(a: Tensor, b: Tensor, w: Tensor) -> Any:
    h, mask, ys = torch.zeros_like(a[:, 0]), b[:, :, :1] > 0, []
    for t in range(a.shape[1]):
        h = torch.where(mask[:, t], torch.tanh(h @ w + a[:, t]), h)
        ys.append(h)
    return torch.stack(ys, 1), h


def of_views_of_one_start(a: Tensor, b: Tensor, w: Tensor) -> Any:
    g, h, ys = a[:, 0], a[:, 0], []
    for t in range(a.shape[1]):
        g = torch.sin(g * h + b[:, t])
        h = torch.cos(h + g @ w)
        ys.append(h)
    return torch.stack(ys), g


LOOPS: dict[str, tuple[Loop, tuple[Tensor, ...], int]] = {
    **{f.__name__: (f, (A, *GATES), 1) for f in (gru, lstm, gru_cell, lstm_cell)},
    **{
        f.__name__: (f, (A, B, W), count)
        for f, count in (
            (linear_attention, 1), (max_decay, 1), (of_two_states, 1),
            (one_behind_another, 2), (from_the_end, 1), (several_values, 1), (starting_late, 1),
            (of_integers, 1), (of_a_masked_sequence, 1), (of_views_of_one_start, 1),
        )
    },
}  # fmt: skip


@trains_scans
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_becomes_a_scan(name: str) -> None:
    fn, inputs, count = LOOPS[name]
    assert scans(fn, *inputs) == count


@fusec_alone
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_matches_eager(name: str) -> None:
    fn, inputs, _ = LOOPS[name]
    check(fn, *inputs, train=True)
    assert not [trace.problem for trace in RECENT if trace.problem]


@fusec_alone
@pytest.mark.parametrize("name", ["a transposed state", "a detached state"])
def test_a_step_whose_gradient_is_laid_out_otherwise_matches_eager(name: str) -> None:
    check(stepping(STEPS[name]), A, B, W, train=True)
    assert not [trace.problem for trace in RECENT if trace.problem]


@fusec_alone
@pytest.mark.parametrize("inside", [False, True])
def test_a_loop_under_autocast_matches_eager(inside: bool) -> None:
    def loop(a: Tensor, b: Tensor, w: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return stepping(STEPS["tanh of a sum"])(a, b, w)

    torch._dynamo.reset()
    given, own = ([x.clone().requires_grad_() for x in (A, B, W)] for _ in range(2))
    compiled = torch.compile(loop, backend="fusec", options={"strict": True})
    for fn, inputs in ((compiled, given), (loop, own)):
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            states, last = fn(*inputs)
        (states.float().cos().sum() + last.float().sum()).backward()
        inputs.extend((states.detach(), last.detach()))
    for x, y in zip(given, own, strict=True):
        assert x.dtype is y.dtype
        torch.testing.assert_close(x, y, rtol=3e-2, atol=3e-2)
        if y.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_a_loop_of_symbolic_sizes_becomes_a_scan(name: str) -> None:
    fn, inputs, _ = LOOPS[name]
    assert scans(fn, *inputs, symbolic_axis=0, train=False) == 1


@trains_scans
def test_a_loop_of_symbolic_sizes_stays_in_training() -> None:
    assert scans(gru, A, *GATES, symbolic_axis=0) == 0


@trains_scans
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0])
@pytest.mark.parametrize("name", ["a reset", "the state twice", "a maximum", "a quotient"])
def test_numbers_of_any_kind_go_as_far_as_in_eager(name: str, value: float) -> None:
    a, b = A.clone(), B.clone()
    a[0, 3, 2], b[1, 4, 1], b[:, 0] = value, value, -0.0
    assert scans(stepping(STEPS[name]), a, b, W) == 1


# -- loops of which the last state alone is read ---------------------------------------------------


def final(step: Callable[..., Tensor]) -> Loop:
    """Return a loop over ``h = step(h, a, b, w)`` of which others read the last h."""

    def loop(a: Tensor, b: Tensor, w: Tensor) -> Any:
        h = torch.zeros_like(b[:, 0])
        for t in range(b.shape[1]):
            h = step(h, a[:, t], b[:, t], w)
        return h @ w

    return loop


@trains_scans
@pytest.mark.parametrize("name", STEPS)
def test_a_loop_of_which_the_last_state_is_read_is_a_scan(name: str) -> None:
    count = 0 if name == "nothing that varies" else 1
    assert scans(final(STEPS[name]), A, B, W) == count


def test_a_recurrence_of_which_the_last_state_is_read_stores_no_states() -> None:
    affine = final(lambda h, a, b, w: a * h + b)
    assert is_rolled(calls(affine, A, B, W))
    check(affine, A, B, W, train=True)


class Cells(torch.nn.Module):
    """A network that reads a sequence by a cell, and its last state by a linear layer."""

    def __init__(self, cell: type[Any]) -> None:
        super().__init__()
        self.cell, self.head = cell(5, 7), torch.nn.Linear(7, 3)
        self.is_lstm = cell is torch.nn.LSTMCell

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 7)
        state = (h, h) if self.is_lstm else h
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        result: Tensor = self.head(state[0] if self.is_lstm else state)
        return result


@trains_scans
@pytest.mark.parametrize("cell", [torch.nn.RNNCell, torch.nn.GRUCell, torch.nn.LSTMCell])
def test_a_cell_of_torch_whose_last_state_is_read_is_a_scan(cell: type[Any]) -> None:
    torch.manual_seed(0)
    assert scans(Cells(cell), A) == 1


def two_back(a: Tensor, b: Tensor, w: Tensor) -> Any:
    states = [a[:, 0], b[:, 0]]
    for t in range(2, 12):
        states.append(torch.tanh(a[:, t] * states[-2] + states[-1] @ w))
    return torch.stack(states, 1), states[-1]


def two_back_alone(a: Tensor, b: Tensor, w: Tensor) -> Any:
    states = [a[:, 0], b[:, 0]]
    for t in range(2, 12):
        states.append(torch.tanh(a[:, t] + states[-2] @ w))
    return torch.stack(states, 1)


def last_of_two_back(a: Tensor, b: Tensor, w: Tensor) -> Any:
    g, h = a[:, 0], b[:, 0]
    for t in range(12):
        g, h = h, torch.tanh(a[:, t] * g + h @ w)
    return h.sin()


def swapping(a: Tensor, b: Tensor, w: Tensor) -> Any:
    g, h, states = a[:, 0], b[:, 0], []
    for t in range(12):
        g, h = torch.tanh(h @ w + a[:, t]), torch.sin(g + b[:, t])
        states.append(g)
    return torch.stack(states)


def truncated(a: Tensor, b: Tensor, w: Tensor) -> Any:
    a = torch.cat([a, b, a], 1)
    h = a[:, 0]
    for t in range(36):
        h = torch.tanh(a[:, t] + h @ w)
        if t % 4 == 3:
            h = h.detach()
    return torch.tanh(h @ w)


def of_delay(a: Tensor, b: Tensor, w: Tensor) -> Any:
    states = [a[:, 0]] * 3
    for t in range(12):
        states.append(torch.tanh(a[:, t] + states[-3] @ w) - states[-1])
    return states[-1] * 2


def taking_turns(a: Tensor, b: Tensor, w: Tensor, steps: int = 24) -> Any:
    a = torch.cat([a, b], 1)
    h, states = a[:, 0], []
    for t in range(steps):
        h = torch.tanh(h @ w + a[:, t]) if t % 2 else torch.sin(h * 2 - a[:, t])
        states.append(h)
    return torch.stack(states, 1), states[-1] * 2


def an_odd_number(a: Tensor, b: Tensor, w: Tensor) -> Any:
    return taking_turns(a, b, w, 23)[0]


@pytest.mark.parametrize(
    "fn", (
        *(two_back, two_back_alone, taking_turns, an_odd_number),
        *(last_of_two_back, swapping, truncated, of_delay),
    ),
    ids=lambda fn: fn.__name__,
)  # fmt: skip
@trains_scans
def test_a_loop_that_reads_states_further_back_is_a_scan(fn: Loop) -> None:
    assert scans(fn, A, B, W) == 1


def residual(x: Tensor, *weights: Tensor) -> Any:
    for weight in weights:
        x = x + torch.tanh(x @ weight.t())
    return x * 2


def test_layers_whose_last_result_is_read_stay() -> None:
    weights = [values(5, 5, seed=k) for k in range(9)]
    assert scans(residual, A, *weights) == 0


def each_state(a: Tensor, b: Tensor, w: Tensor) -> Any:
    h, states = torch.zeros_like(a[:, 0]), []
    for t in range(12):
        h = torch.tanh(a[:, t] + h @ w)
        states.append(h)
    return tuple(states)


def test_states_that_are_each_returned_stay_and_the_graph_is_as_it_was() -> None:
    assert scans(each_state, A, B, W) == 0
    check(each_state, A, B, W, train=True)
    assert not [trace.problem for trace in RECENT if trace.problem]


# -- loops that stay -------------------------------------------------------------------------------


def differing(step: Callable[..., Tensor]) -> Loop:
    """Return a loop over ``h = step(h, t, a, b)``."""

    def loop(a: Tensor, b: Tensor, w: Tensor) -> Any:
        a, b = a * 1, b * 1
        h, states = torch.zeros_like(b[:, 0]), []
        for t in range(b.shape[1]):
            h = step(h, t, a, b)
            states.append(h)
        return torch.stack(states, 1), a

    return loop


def written(h: Tensor, t: int, a: Tensor, b: Tensor) -> Tensor:
    a[:, t].mul_(2)
    return torch.tanh(h + a[:, t])


def layers(x: Tensor, *weights: Tensor) -> Any:
    hidden = []
    for weight in weights:
        x = torch.tanh(x @ weight.t())
        hidden.append(x)
    return torch.stack(hidden)


STAYS: dict[str, Callable[..., Tensor]] = {
    "another number": lambda h, t, a, b: torch.tanh(h * (2.0 if t == 4 else 1.0) + a[:, t]),
    "the number of the step": lambda h, t, a, b: torch.tanh(h * t + a[:, t]),
    "the sign of zero": lambda h, t, a, b: torch.tanh(h + (0.0 if t == 4 else -0.0)),
    "another function": lambda h, t, a, b: h.sin() if t % 2 else torch.tanh(h + a[:, t]),
    "a step that is left out": lambda h, t, a, b: h if t == 5 else torch.tanh(h + a[:, t]),
    "writes": written,
    "writes the state": lambda h, t, a, b: torch.tanh(h + a[:, t]).mul_(2),
    "dropout": lambda h, t, a, b: F.dropout(torch.tanh(h + a[:, t]), 0.5),
    "draws": lambda h, t, a, b: torch.tanh(h + torch.rand_like(h)),
    "an earlier state": lambda h, t, a, b: torch.tanh(
        h + (a[:, 0] if t < 6 else a[:, t]).sum(t % 2, True)
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_a_loop_whose_iterations_differ_or_do_more_stays(name: str) -> None:
    assert scans(differing(STAYS[name]), A, B, W, train=not name.startswith("writes")) == 0


def test_layers_with_weights_of_their_own_stay() -> None:
    weights = [values(5, 5, seed=k) for k in range(9)]
    assert scans(layers, A, *weights) == 0


def test_a_mode_that_changes_in_the_loop_stays() -> None:
    def frozen(h: Tensor, t: int, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            gate = h.sigmoid()
        return torch.tanh(gate + a[:, t])

    assert scans(differing(frozen), A, B, W) == 0


@fusec_alone
@pytest.mark.parametrize("written", ["a view", "what a view is of"])
def test_a_view_of_a_state_shares_its_memory_behind_the_loop(written: str) -> None:
    """A state that is a view, and the value it is a view of, are both read behind the loop."""

    def fn(a: Tensor, w: Tensor) -> Any:
        h, states = a.new_zeros(3, 1, 5), []
        for t in range(9):
            y = torch.tanh(h.squeeze(1) @ w + a[:, t])
            h = y.unsqueeze(1)
            states.append(h)
        stacked = torch.cat(states, 1)
        (h if written == "a view" else y).mul_(2)
        return stacked, h, y

    check(fn, A, W)
    assert scans(fn, A, W, train=False) == 1


# -- gradients that a scan has not -----------------------------------------------------------------


def counting(x: Tensor, h: Tensor, k: Tensor) -> Tensor:
    states = []
    for t in range(9):
        h = torch.tanh(x[:, t] + h * (k[:, None] + 1))
        k = torch.where(h.sum(1) > 0, k + 1, k // 2)
        states.append(h)
    return torch.stack(states)


def test_integers_are_carried_only_without_gradients() -> None:
    x, h, k = values(3, 9, 5), values(3, 5, seed=1), torch.arange(3)
    assert scans(counting, x, h, k, train=False) == 1
    assert scans(counting, x, h, k) == 0


@trains_scans
def test_integers_that_vary_may_be_read_beside_gradients() -> None:
    def fn(x: Tensor, k: Tensor) -> Tensor:
        h, states = torch.zeros_like(x[:, 0]), []
        for t in range(9):
            h = torch.where(k[:, t, None] > 1, x[:, t], torch.tanh(h * 2) * k[:, t, None])
            states.append(h)
        return torch.stack(states)

    assert scans(fn, values(3, 9, 5), torch.arange(27).view(3, 9) % 4) == 1


def test_complex_steps_stay_unrolled_in_training() -> None:
    def fn(x: Tensor, a: Tensor) -> Tensor:
        h, states = torch.zeros(3, 2), []
        for t in range(9):
            h = torch.view_as_real(torch.view_as_complex(h + x[t]) * torch.view_as_complex(a)).sin()
            states.append(h)
        return torch.stack(states)

    assert scans(fn, values(9, 3, 2), values(3, 2, seed=1)) == 0


def test_the_body_of_a_checkpoint_stays_unrolled() -> None:
    def fn(x: Tensor, h: Tensor, w: Tensor) -> Tensor:
        def rnn(x: Tensor, h: Tensor, w: Tensor) -> Tensor:
            states = []
            for t in range(9):
                h = torch.tanh(x[:, t] + h @ w)
                states.append(h)
            return torch.stack(states, 1)

        return checkpoint(rnn, x, h, w, use_reentrant=False)

    check(fn, values(3, 9, 5), values(3, 5, seed=1), W, train=True)


def test_what_no_gradient_reaches_has_none() -> None:
    def fn(x: Tensor, h: Tensor, w: Tensor, u: Tensor) -> Tensor:
        states = []
        for t in range(9):
            h = torch.tanh(x[:, t] + h.detach() @ w + (x[:, t] @ u).detach())
            states.append(h)
        return torch.stack(states)

    torch._dynamo.reset()
    for made in (fn, torch.compile(fn, backend="fusec", options={"strict": True})):
        given = [x.detach().clone().requires_grad_() for x in (A[:, :9], A[:, 9], W, U)]
        made(*given).square().sum().backward()
        assert [x.grad is None for x in given] == [False, True, False, True]
