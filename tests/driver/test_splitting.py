"""Graphs with operations that AOTAutograd does not trace: what is beside them is compiled."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fusec.driver.compiler import RECENT
from fusec.errors import note_stage
from tests.planted import before, observed
from tests.support import check, values


@contextmanager
def nothing_falls_back() -> Iterator[None]:
    """Turn fusec's warnings into errors, and those of torch's own code off."""
    RECENT.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusec")
        yield


def kept() -> list[str]:
    """Return what ran between compiled parts."""
    return [trace.problem for trace in RECENT if trace.problem]


class Untraced(torch.autograd.Function):
    """The sine, whose gradient no trace survives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        if type(x) is not torch.Tensor:
            raise RuntimeError("a gradient that reads values")
        return gradient * x.cos()


@torch.compiler.allow_in_graph
def sine_without_traced_gradient(x: torch.Tensor) -> torch.Tensor:
    return Untraced.apply(x)


class UntracedPair(torch.autograd.Function):
    """The same with two results."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, of_sine: torch.Tensor, of_cosine: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        if type(x) is not torch.Tensor:
            raise RuntimeError("a gradient that reads values")
        return of_sine * x.cos() - of_cosine * x.sin()


@torch.compiler.allow_in_graph
def sine_and_cosine(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return UntracedPair.apply(x)


def turned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    sine, cosine = sine_and_cosine(x.sin() * 2)
    return (sine * 2).sin() @ w + cosine


def test_a_call_whose_gradient_is_not_traced_leaves_the_rest_compiled_and_is_told(caplog):
    caplog.set_level(logging.INFO, logger="fusec.compile")
    with nothing_falls_back():
        check(turned, values(6, 5), values(5, 5, seed=1), train=True)
    (problem,) = kept()
    assert "a gradient that reads values" in problem
    names = [trace.name for trace in RECENT if not trace.problem]
    assert names.count("forward") == 2 and names.count("backward") == 2
    assert "sine_and_cosine runs as PyTorch runs it: torch does not trace it" in caplog.text


def test_an_operation_whose_gradient_fails_is_found_without_its_node():
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = (x * 2).exp() + y
        return sine_without_traced_gradient(a).cos() * y + a

    with nothing_falls_back():
        check(fn, values(4, 5), values(4, 5, seed=1), train=True)
    assert len(kept()) == 1 and "a gradient that reads values" in kept()[0]


def test_several_operations_run_between_parts():
    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = sine_without_traced_gradient(x * 1.5 + 1)
        return x.tanh()

    with nothing_falls_back():
        check(fn, values(4, 5), train=True)
    assert len(kept()) == 3


def test_a_write_where_elements_share_memory_leaves_the_rest_compiled():
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x * 2).exp()
        windows = y.unfold(0, 4, 1)
        windows.mul_(0.5)
        return y.sin(), windows.sum(1)

    with nothing_falls_back():
        check(fn, values(9))
    assert kept() and all("share" in one or "unfold" in one for one in kept())


def test_views_and_writes_go_through_the_cut():
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y.mul_(2)
        whole = x * 3
        row = whole[1]
        middle = sine_without_traced_gradient(whole)
        row.add_(1)
        y.add_(middle.detach())
        return whole, row, middle * y, y[0]

    with nothing_falls_back():
        check(fn, values(4, 5), values(4, 5, seed=1))


def test_a_graph_is_cut_where_sizes_are_symbolic():
    def fn(x: torch.Tensor, n: int) -> torch.Tensor:
        y = torch.cat((x, x.sin())) * n
        y = sine_without_traced_gradient(y)
        return (y.view(2, -1, x.shape[1]) + x.shape[0]).cos().sum(0)

    with nothing_falls_back():
        check(fn, values(4, 5), 7, train=True, dynamic=True, more=((values(6, 3), 5),))


def test_a_region_of_autocast_and_one_without_gradients_may_hold_the_cut():
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = x.float() @ w.float()
            y = sine_without_traced_gradient(y.float())
            y = y @ w.float()
        with torch.no_grad():
            scale = y.float().abs().amax() + 1
        return y.float() / scale

    with nothing_falls_back():
        check(fn, values(4, 4), values(4, 4, seed=1), train=True, tol=3e-2)


def in_no_grad(x):
    y = x * 2
    with torch.no_grad():
        z = y.exp()
        z.unfold(0, 2, 1).mul_(0.5)
        z = z + 1
    return y * z


def beside_results_in_a_list(x):
    a, b = torch.split(x * 2, 2)
    a = sine_without_traced_gradient(a)
    return a * b.cos()


def behind_a_mask(x):
    y = x[x > 0] * 2
    return sine_without_traced_gradient(y).cos() * y, y.shape[0] * x


def of_two_names_of_one_tensor(x):
    y = x * 2
    z = y.add_(1)
    w = sine_without_traced_gradient(y)
    return w * z.cos() * y, z


def twice_as_results(x):
    y = sine_without_traced_gradient(x * 2)
    return y, y, y.view(-1), y.detach()


def with_a_random_draw(x):
    y = torch.nn.functional.dropout(x, 0.0) * 2
    return sine_without_traced_gradient(y) + torch.rand(3).mul(0).sum()


def with_several_results(x):
    sine, cosine = sine_and_cosine(x * 1.5)
    return cosine.cos() + sine


def through_a_checkpoint(x):
    y = torch.utils.checkpoint.checkpoint(lambda t: t.sin() * 2, x, use_reentrant=False)
    return sine_without_traced_gradient(y).exp()


def first(x):
    return sine_without_traced_gradient(x).cos() * x


def last(x):
    return sine_without_traced_gradient(x.cos() * x)


def through_a_branch(x):
    y = torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos() * 2, (x * 2,))
    return sine_without_traced_gradient(y) * 2


def of_a_number(x):
    y = sine_without_traced_gradient(x * 2)
    return y * x.argmax().item()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize(
    "fn",
    (
        in_no_grad, beside_results_in_a_list, behind_a_mask, of_two_names_of_one_tensor,
        twice_as_results, with_a_random_draw, with_several_results, through_a_checkpoint, first,
        last, through_a_branch, of_a_number,
    ),
)  # fmt: skip
def test_one_operation_is_kept_and_all_else_is_compiled(fn, dynamic):
    captured = torch._dynamo.config.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    )
    with nothing_falls_back(), captured:
        check(fn, values(4, 5), train=True, dynamic=dynamic)
    assert len(set(kept())) == 1
    assert any(not trace.problem for trace in RECENT)


def test_a_transform_that_dynamo_has_opened_is_not_cut():
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.vmap(lambda row: row.sin() * 2)(x)
        return sine_without_traced_gradient(y)

    torch._dynamo.reset()
    given = [values(4, 5).requires_grad_() for _ in range(2)]
    call = torch.compile(fn, backend="fusec", fullgraph=True)
    with pytest.warns(UserWarning, match="a graph, forward and backward, runs as eager"):
        torch.testing.assert_close(call(given[0]), fn(given[1]))


@pytest.mark.parametrize("strict", (False, True))
def test_what_a_call_changes_for_later_ones_is_not_cut(strict):
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).exp()
        y.unsqueeze_(0)
        return sine_without_traced_gradient(y).cos()

    torch._dynamo.reset()
    x = values(4, 5).requires_grad_()
    call = torch.compile(fn, backend="fusec", fullgraph=True, options={"strict": strict})
    if strict:
        with pytest.raises(Exception, match="a gradient that reads values"):
            call(x)
    else:
        with pytest.warns(UserWarning, match="a graph, forward and backward, runs as eager"):
            torch.testing.assert_close(call(x), fn(x))


def test_a_cut_graph_is_cut_again_from_the_cache(tmp_path):
    def fn(x: torch.Tensor) -> torch.Tensor:
        return sine_without_traced_gradient(x * 2).cos() + x

    options = {"strict": True, "cache_dir": str(tmp_path)}
    for seed in range(3):
        torch._dynamo.reset()
        given = [values(4, 5, seed=seed).requires_grad_() for _ in range(2)]
        with nothing_falls_back():
            found = torch.compile(fn, backend="fusec", fullgraph=True, options=options)(given[0])
            wanted = fn(given[1])
            found.sum().backward(), wanted.sum().backward()
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(given[0].grad, given[1].grad)
        assert len(kept()) == 1
        traces = [trace for trace in RECENT if not trace.problem]
        assert len(traces) == 4 and all(trace.cached for trace in traces) == (seed > 0)


def test_a_trace_that_fails_leaves_no_mode_behind():
    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            y = x.exp()
            y.unfold(0, 2, 1).mul_(0.5)
        return y + x

    modes = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
    for strict in (True, False):
        torch._dynamo.reset()
        call = torch.compile(fn, backend="fusec", options={"strict": strict})
        torch.testing.assert_close(call(values(4, 5)), fn(values(4, 5)))
        assert modes == (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
        assert torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()


def test_a_defect_of_fusec_is_no_reason_to_cut():
    def broken(_: Any) -> None:
        error = ValueError("a stage that fails")
        note_stage(error, "draws")
        raise error

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.sin() + 1, backend=observed(before("draws", broken)))
    with pytest.raises(Exception, match="a stage that fails"):
        compiled(values(4))


def test_a_graph_whose_gradient_eager_refuses_runs_uncut():
    def fn(a, b):
        h, states = a[0], []
        for t in range(9):
            h = (a[t] * h + b[t]).sin()
            states.append(h)
        made = torch.stack(states)
        states[5].add_(1)
        return made, states[5]

    torch._dynamo.reset()
    a, b = values(9, 4).requires_grad_(), values(9, 4, seed=1).requires_grad_()
    with nothing_falls_back():
        made, state = torch.compile(fn, backend="fusec")(a, b)
    assert kept() == []
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (made.sum() + state.sum()).backward()
