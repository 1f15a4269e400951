"""Bodies of unrolled loops with an axis more, and what they must not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.frontend.fx_passes.test_rolled_loops import calls, fusec_alone, is_rolled, rolled
from tests.support import BACKEND, check, values

A, B, C = (values(2, 9, 3, 4, seed=k) for k in range(3))
W = values(4, 4, seed=5)
Body = Callable[..., Any]


def collected(body: Body, start: Callable[..., Any] = lambda a: a.new_zeros(2, 3, 4)) -> Body:
    """Return a loop over ``h, y = body(h, t, a, b, c, w)``, which stacks y."""

    def loop(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
        h, ys = start(a), []
        for t in range(a.shape[1]):
            h, y = body(h, t, a, b, c, w)
            ys.append(y)
        return torch.stack(ys, 1)

    return loop


def mamba(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    a, b, c = (x.movedim(1, 2) for x in (a, b, c[:, :, 0]))
    c = c.contiguous()
    h, ys = a.new_zeros(2, 3, 4), []
    for t in range(a.shape[2]):
        h = torch.exp(-a[:, :, t].abs()) * h + b[:, :, t]
        ys.append(torch.einsum("bdn,bn->bd", h, c[:, :, t]))
    return torch.stack(ys, 2), h


def mamba_of_transformers(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    h, ys = a.new_zeros(2, 3, 4), []
    for t in range(a.shape[1]):
        h = a[:, t, :, :] * h + b[:, t, :, :]
        y = torch.matmul(h.to(a.dtype), c[:, t, 0, :].unsqueeze(-1))
        ys.append(y[:, :, 0])
    return torch.stack(ys, dim=-1)


def rwkv(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    h, out = a.new_zeros(2, 3, 4, 4), torch.zeros(2, 9, 3, 4)
    for t in range(a.shape[1]):
        kv = b[:, t].unsqueeze(-1) @ c[:, t].unsqueeze(-2)
        out[:, t] = (a[:, t].unsqueeze(-2) @ (w.unsqueeze(-1)[0] * kv + h)).squeeze(-2)
        h = kv + a[:, t].sigmoid().unsqueeze(-1) * h
    return out, h


def of_several_results(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    h, g, ys, zs = torch.zeros_like(a[:, 0]), b[:, 0], [], []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        g = 0.5 * g + h * c[:, t]
        ys.append((g @ w).relu())
        zs.append(h.sum(-1))
    return torch.stack(ys), torch.cat([z.unsqueeze(1) for z in zs], 1), g, h * 2


def of_layers(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    for gate in (a, c):
        h, ys = torch.zeros_like(a[:, 0]), []
        for t in range(a.shape[1]):
            h = gate[:, t] * h + b[:, t]
            ys.append(h @ w)
        b = F.layer_norm(torch.stack(ys, 1), (4,))
    return b


def from_the_end(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    h, ys = torch.zeros_like(a[:, 0]), []
    for t in reversed(range(a.shape[1])):
        h = a[:, t] * h + b[:, t]
        ys.insert(0, h * c[:, t])
    return torch.stack(ys, 1), h


def of_every_second(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    a, b = torch.cat([a, c], 1), torch.cat([b, b], 1)
    h, ys = torch.zeros_like(a[:, 0]), []
    for t in range(1, a.shape[1], 2):
        h = a[:, t] * h + b[:, t : t + 1].squeeze(1)
        ys.append(h.sin())
    return torch.stack(ys)


def into_a_slice(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    h, out = torch.zeros_like(a[:, 0]), torch.ones(2, 3, 11, 4)
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        out[:, :, t + 1] = h + 1
    return out


def backwards_into_a_slice(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    h, out = torch.zeros_like(a[:, 0]), torch.zeros_like(a)
    for t in range(8, -1, -1):
        h = a[:, t] * h + b[:, t]
        out[:, t : t + 1] = h.unsqueeze(1) * 2
    return out


def of_parts(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    h, ys = torch.zeros_like(a[:, 0]), []
    for x, y, z in zip(a.unbind(1), b.split(1, dim=1), torch.chunk(c, 9, 1), strict=True):
        h = x * h + y.squeeze(1)
        p, q = (h + z[:, 0]).chunk(2, dim=-1)
        ys.append(torch.cat([q, p * 2], -1).max(-1).values)
    return torch.stack(ys, -1)


def of_rows(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    h, ys = torch.zeros_like(a[0, 0]), []
    for t in range(a.shape[1]):
        h = a[1, t] * h + b.select(1, t)[0].narrow(0, 0, 3)
        ys.append(h.view(12)[None] + c[..., t - 9, :, :].sum((0, 1)).repeat(3))
    return torch.cat(ys)


def read_by_another_chain(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    h, g, ys, out = torch.zeros_like(a[:, 0]), a[:, 0], [], torch.zeros_like(a)
    for t in range(9):
        h = w[0] * h + b[:, t]
        g = a[:, t] * g + h
        ys.append(h @ w)
        out[:, t : t + 1] = ys[-1].unsqueeze(1)
    return torch.cat(ys, -1), out, g, ys[3] * 2


ROLLED = {
    f.__name__: f
    for f in (mamba, mamba_of_transformers, rwkv, of_several_results, of_layers, from_the_end,
              of_every_second, into_a_slice, backwards_into_a_slice, of_parts, of_rows,
              read_by_another_chain)
}  # fmt: skip
BODIES: dict[str, Body] = {
    "with an equal value in all": lambda h, t, a, b, c, w: (
        h := w[0].exp() * h + b[:, t],
        h - w[1],
    ),
    "that read the state before": lambda h, t, a, b, c, w: (h * a[:, t] + b[:, t], h @ w),
    "that read both states": lambda h, t, a, b, c, w: (g := h * a[:, t] + b[:, t], g - h),
    "without a factor": lambda h, t, a, b, c, w: (h := h + b[:, t], h.tanh()),
    "of a number": lambda h, t, a, b, c, w: (h := h * 0.5 - b[:, t], h),
    "with a softmax": lambda h, t, a, b, c, w: (h := h * a[:, t] + b[:, t], F.softmax(h @ w, -1)),
    "of another type": lambda h, t, a, b, c, w: (h := h * a[:, t] + b[:, t], h.bfloat16() * 2),
    "transposed": lambda h, t, a, b, c, w: (h := h * a[:, t] + b[:, t], h.transpose(1, 2)),
    "detached": lambda h, t, a, b, c, w: (h := h * a[:, t].detach() + b[:, t], h.detach() * w[0]),
    "of a view": lambda h, t, a, b, c, w: (h := h * a[:, t] + b[:, t], h.view(2, 12)),
    "without dropout": lambda h, t, a, b, c, w: (
        h := h * a[:, t] + b[:, t],
        F.dropout(h, 0.5, False),
    ),
    "indexed": lambda h, t, a, b, c, w: (h := h * a[:, t] + b[:, t], h[:, [0, 2]]),
    "times draws": lambda h, t, a, b, c, w: (h := h * a[:, t] + b[:, t], h * torch.rand(4)),
    "of draws": lambda h, t, a, b, c, w: (h * torch.bernoulli(a[:, t].sigmoid()), h),
    "where": lambda h, t, a, b, c, w: (
        h := h * a[:, t] + b[:, t],
        torch.where(c[:, t] > 0, h, 0.0),
    ),
}


@pytest.mark.parametrize("name", ROLLED)
def test_a_loop_is_rolled_up(name: str) -> None:
    found = calls(ROLLED[name], A, B, C, W)
    assert is_rolled(found)
    assert len(found) < 60


@pytest.mark.parametrize("name", BODIES)
def test_a_body_has_an_axis_more(name: str) -> None:
    assert is_rolled(calls(collected(BODIES[name]), A, B, C, W))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0])
@pytest.mark.parametrize("name", ["mamba_of_transformers", "from_the_end", "into_a_slice"])
def test_numbers_of_any_kind_go_as_far_as_in_eager(name: str, value: float) -> None:
    a, b = A.clone(), B.clone()
    a[0, 3, 1, 2], b[1, 4, 0, 1], b[:, :3] = value, value, -0.0
    assert is_rolled(calls(ROLLED[name], a, b, C, W))


def test_a_negative_zero_stays_one() -> None:
    zeros = torch.full_like(B, -0.0)
    for name in ("without a factor", "of a number", "that read the state before"):
        start = lambda a: -a.new_zeros(2, 3, 4)  # noqa: E731
        assert is_rolled(calls(collected(BODIES[name], start), A.abs(), zeros, C, W))
    only = collected(
        lambda h, t, a, b, c, w: (h := h * a[:, t], h), lambda a: -a.new_zeros(2, 3, 4)
    )
    assert is_rolled(calls(only, A.abs(), B, C, W))


def test_a_start_of_fewer_axes_is_broadcast() -> None:
    affine = lambda h, t, a, b, c, w: (h := h * a[:, t] + b[:, t], h @ w)  # noqa: E731
    for start in (
        lambda a: a[0, 0, 0],
        lambda a: a.new_zeros(()),
        lambda a: 0.0,
        lambda a: a[:1, 0],
    ):
        assert is_rolled(calls(collected(affine, start), A, B, C, W))


def test_states_read_elsewhere_are_rows() -> None:
    def read(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
        states, norms = [b[:, 0]], []
        for t in range(1, b.shape[1]):
            states.append(a[:, t] * states[-1] + b[:, t])
            if t == 4:
                norms.append(states[-1].norm())
        return torch.stack(states, 1) @ w, states[5] * 2, norms[0], states[-1], states[-2].T

    found = calls(read, A, B, C, W)
    assert is_rolled(found) and found.count("add") == 0


def test_a_state_written_behind_the_loop_is_a_copy() -> None:
    def written(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
        states = [b[:, 0] * 1]
        for t in range(1, b.shape[1]):
            states.append(a[:, t] * states[-1] + b[:, t])
        made = torch.stack(states, 1)
        states[3].mul_(2)
        made[:, 2].add_(1)
        return made, states[3], states[2] + 1

    assert is_rolled(calls(written, A, B, C, W, train=False))


# -- loops that stay -------------------------------------------------------------------------------


def changing_mode(enter: Callable[[int], Any]) -> Body:
    def body(h: Tensor, t: int, a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
        h = h * a[:, t] + b[:, t]
        with enter(t):
            y = h @ w
        return h, y

    return collected(body)


def wrote(body: Body) -> Body:
    def loop(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
        a, b, c = a * 1, b * 1, c * 1
        h, ys = a[:, 0] * 1, []
        for t in range(9):
            h = h * a[:, t] + b[:, t]
            ys.append(h * c[:, t])
            body(t, a, b, c, h, ys)
        return torch.stack(ys, 1), a, b, c

    return loop


def out_read(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    h, out = torch.zeros_like(a[:, 0]), torch.zeros_like(a)
    for t in range(9):
        h = a[:, t] * h + b[:, t] + out.mean()
        out[:, t] = h
    return out


def out_of_the_users(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    h, c = torch.zeros_like(a[:, 0]), c * 1
    for t in range(9):
        h = a[:, t] * h + b[:, t]
        c[:, t] = h
    return c


def out_twice(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    h, out = torch.zeros_like(a[:, 0]), torch.zeros_like(a)
    for t in range(9):
        h = a[:, t] * h + b[:, t]
        out[:, t // 2] = h
    return out


def added_up(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    h, total, ys = torch.zeros_like(a[:, 0]), a.new_zeros(()), []
    for t in range(9):
        h = a[:, t] * h + b[:, t]
        ys.append(h)
        total = total + h.square().sum().sqrt()
    return torch.stack(ys), total


def under_no_grad(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    h, ys = torch.zeros_like(a[:, 0]), []
    for t in range(9):
        with torch.no_grad():
            gate = a[:, t].sigmoid()
        h = gate * h + b[:, t]
        ys.append(h)
    return torch.stack(ys)


def no_grad_before(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
    with torch.no_grad():
        gates = [a[:, t].sigmoid() for t in range(9)]
    h, ys = torch.zeros_like(a[:, 0]), []
    for t in range(9):
        h = gates[t] * h + b[:, t]
        ys.append(h)
    return torch.stack(ys)


affine = lambda h, t, a, b: h * a[:, t] + b[:, t]  # noqa: E731
STAYS: dict[str, Body] = {
    "under dropout": collected(lambda h, t, a, b, c, w: (h := affine(h, t, a, b), F.dropout(h))),
    "of a dropout": collected(lambda h, t, a, b, c, w: (F.dropout(h, 0.2) * a[:, t] + b[:, t], h)),
    "one differs": collected(
        lambda h, t, a, b, c, w: (affine(h, t, a, b), h.sin() if t == 4 else h.cos())
    ),
    "another number": collected(
        lambda h, t, a, b, c, w: (affine(h, t, a, b), h * (1.0 if t == 4 else 1))
    ),
    "the sign of zero": collected(
        lambda h, t, a, b, c, w: (affine(h, t, a, b), h * (-0.0 if t == 4 else 0.0))
    ),
    "numbers": collected(lambda h, t, a, b, c, w: (affine(h, t, a, b), h * t)),
    "no grad in between": changing_mode(lambda t: torch.no_grad()),
    "autocast in between": changing_mode(lambda t: torch.autocast("cpu", torch.bfloat16)),
    "autocast once": changing_mode(lambda t: torch.autocast("cpu", torch.bfloat16, enabled=t == 3)),
    "no grad for factors": under_no_grad,
    "writes a factor later": wrote(lambda t, a, b, c, h, ys: a[:, min(t + 2, 8)].add_(1)),
    "writes a factor before": wrote(lambda t, a, b, c, h, ys: a[:, t].mul_(2)),
    "writes what results read": wrote(lambda t, a, b, c, h, ys: c.add_(1)),
    "writes a result": wrote(lambda t, a, b, c, h, ys: ys[-1].add_(1)),
    "writes the state": wrote(lambda t, a, b, c, h, ys: h.mul_(0.5)),
    "writes an item": wrote(lambda t, a, b, c, h, ys: operator_set(b, t)),
    "reads what it wrote": out_read,
    "writes where others wrote": out_of_the_users,
    "writes twice": out_twice,
    "adds up": added_up,
    "of no state": collected(lambda h, t, a, b, c, w: (h, a[:, t] @ w)),
}


def operator_set(x: Tensor, t: int) -> None:
    x[:, t] = 0.0


@pytest.mark.parametrize("name", STAYS)
def test_a_loop_stays(name: str) -> None:
    found = calls(STAYS[name], A, B, C, W, train=not name.startswith("writes "))
    assert not is_rolled(found) and "scan" not in found


# -- what is written behind a loop -----------------------------------------------------------------

Step = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Write = Callable[[list[Tensor], Tensor, Tensor, Tensor], Any]


def written(step: Step, write: Write) -> Body:
    """Return a loop behind which memory of a value, or of what steps read, is written."""

    def loop(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
        a, b, w = a * 1, b * 1, w * 1
        h, ys = a[:, 0], []
        for t in range(9):
            h, y = step(h, a[:, t], b[:, t], w)
            ys.append(y)
        made = torch.stack(ys, 1)
        write([*ys, h], a, b, w)
        return made, ys[5], h, a, b, w

    return loop


def last_written(step: Step, write: Write) -> Body:
    """Return such a loop of which the last state alone is read."""

    def loop(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
        a, b, w = a * 1, b * 1, w * 1
        h = a[:, 0]
        for t in range(9):
            h, _ = step(h, a[:, t], b[:, t], w)
        made = h.sum()
        write([h] * 9, a, b, w)
        return made, h, a, b, w

    return loop


def without_gradients(x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(2)


STEPS: dict[str, Step] = {
    "a recurrence": lambda h, a, b, w: (h := a * h + b, h),
    "a scan": lambda h, a, b, w: (h := torch.tanh(a * (h @ w) + b), h),
    "a body": lambda h, a, b, w: (h := a * h + b, h.sigmoid()),
}
WRITES: dict[str, Write] = {
    "a value": lambda states, a, b, w: states[5].add_(1),
    "a view of a value": lambda states, a, b, w: states[5].mT.mul_(2),
    "the last state": lambda states, a, b, w: F.relu(states[-1], inplace=True),
    "an item": lambda states, a, b, w: operator_set(states[5], 1),
    "without gradients": lambda states, a, b, w: without_gradients(states[5]),
    "a list": lambda states, a, b, w: torch._foreach_mul_([states[5]], 2.0),
    "a factor": lambda states, a, b, w: a[:, 3].add_(1),
    "weights": lambda states, a, b, w: w.add_(1),
}


def gradients(run: Callable[..., Any]) -> list[Tensor | None]:
    """Return the gradients of a function's arguments; nothing where they are refused."""
    torch._dynamo.reset()
    given = [x.clone().requires_grad_() for x in (A, B, C, W)]
    try:
        sum(x.square().sum() for x in run(*given)).backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return []
    return [x.grad for x in given]


@pytest.mark.parametrize("loop", [written, last_written])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("write", WRITES)
def test_a_gradient_that_eager_refuses_stays_refused(
    write: str, step: str, loop: Callable[[Step, Write], Body]
) -> None:
    fn = loop(STEPS[step], WRITES[write])
    made, expected = gradients(rolled(fn, [])), gradients(fn)
    torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("write", WRITES)
def test_a_loop_without_gradients_reads_no_later_write(write: str, step: str) -> None:
    found = calls(written(STEPS[step], WRITES[write]), A, B, C, W, train=False)
    assert is_rolled(found) or "scan" in found


def test_a_gradient_is_refused_by_a_compiled_loop_as_by_eager() -> None:
    fn = written(STEPS["a recurrence"], WRITES["a value"])
    assert gradients(fn) == gradients(torch.compile(fn, backend=BACKEND)) == []


def test_a_loop_behind_which_other_memory_is_written_is_rolled_up() -> None:
    def kept(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> Any:
        h, states, last = a[:, 0], [], torch.zeros(2, 3, 4)
        for t in range(9):
            h = a[:, t] * h + b[:, t]
            states.append(h)
        made = torch.stack(states, 1)
        last.copy_(h.detach())
        made[:, 2].add_(1)
        return made, last

    assert is_rolled(calls(kept, A, B, C, W))


def test_a_scalar_of_a_wider_type_is_not_rounded_to_the_tensors() -> None:
    def loop(a: Tensor, b: Tensor, scales: Tensor) -> Tensor:
        h, ys = torch.zeros_like(a[0]), []
        for t in range(len(a)):
            h = a[t] * h + b[t]
            ys.append(h * scales[t])
        return torch.stack(ys)

    a, b = (values(12, 5, seed=k).half() * 0.1 for k in range(2))
    calls(loop, a, b, torch.arange(12) * 10000.0, train=False)


@torch.library.custom_op("fusec_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


def test_a_long_loop_of_calls_without_a_batching_rule_stays(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def loop(a: Tensor, b: Tensor) -> Tensor:
        h, ys = a.new_zeros(2), []
        for t in range(a.shape[1]):
            h = a[:, t] * h + b[:, t]
            ys.append(twice(h))
        return torch.stack(ys)

    assert not is_rolled(calls(loop, values(2, 400), values(2, 400, seed=1), train=False))
    assert "Traceback" not in capsys.readouterr().err


def test_a_gradient_that_was_not_wanted_is_not_made() -> None:
    calls(no_grad_before, A, B, C, W)


@pytest.mark.parametrize("name", ["mamba", "rwkv", "of_several_results", "into_a_slice"])
def test_a_rolled_loop_matches_eager(name: str) -> None:
    check(ROLLED[name], A, B, C, W, train=True)


@fusec_alone
@pytest.mark.parametrize("given", [True, False])
def test_a_kernel_keeps_negative_zeros(given: bool) -> None:
    def loop(a: Tensor, b: Tensor) -> Tensor:
        states = [b[:, 0]] if given else [torch.full_like(b[:, 0], -0.0) * a[:, 0] + b[:, 0]]
        for t in range(1, b.shape[1]):
            states.append(a[:, t] * states[-1] + b[:, t])
        return torch.stack(states, 1)

    a, b = A.abs(), torch.full_like(B, -0.0)
    made = torch.compile(loop, backend="fusec")(a, b)
    assert torch.equal(made.signbit(), loop(a, b).signbit()) and bool(made.signbit().all())
