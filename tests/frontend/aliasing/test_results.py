"""What a graph returns: one object a node, in the memory of what it is a view of, detached or not.

What a caller sees of it, trained, from the cache and at random: tests/fuzz/test_training.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from fusec.driver import compiler
from fusec.frontend.aliasing.results import detach_again
from fusec.ir.graph import OwnTensor
from fusec.ir.text import print_argument
from tests.frontend.tracing import notation_of
from tests.support import BACKEND, compile_with, values, without_compiler


def returned(fn: Callable[..., Any]) -> list[str]:
    """Return what the graph of a function of a 2 x 3 tensor returns, as it is printed."""
    traced = make_fx(fn, tracing_mode="fake")(torch.ones(2, 3))
    detach_again(traced)  # from torch 2.15 on a trace has views for them
    graph = notation_of(traced)
    return [print_argument(argument) for argument in graph.outputs]


def sine(results: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    return lambda x: results(torch.sin(x))


RESULTS = {
    "one node twice": (lambda y: (y, y), ["sin", "sin"]),
    "a detached one beside its maker": (lambda y: (y.detach(), y), ["detached sin", "sin"]),
    "a view of the same shape": (lambda y: (y.view(2, 3), y), ["view of sin", "sin"]),
    "a detached one by itself": (lambda y: (y.detach(),), ["sin"]),
    "a view of a detached one": (lambda y: (y.detach()[0],), ["detached sin[3 : 1 + 0]"]),
    "two views alike": (lambda y: (y[0], y[0]), ["sin[3 : 1 + 0]", "view of sin[3 : 1 + 0]"]),
    "a copy": (lambda y: (y, y.clone()), ["sin", "clone"]),
    "views of a copy": (
        lambda y: [y, *(lambda c: (c[0], c.view(-1)))(y.clone())],
        ["sin", "clone[3 : 1 + 0]", "clone[6 : 1 + 0]"],
    ),
    "views of what no memory has": (
        lambda y: (lambda a: (a.view(2, 2), a))(torch.arange(4)),
        ["arange[2, 2 : 2, 1 + 0]", "arange"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_each_node_is_one_object(name: str) -> None:
    results, printed = RESULTS[name]
    assert returned(sine(results)) == printed


def test_equal_results_are_one_object_and_others_are_not() -> None:
    def fn(x):
        y = x + 1
        v = y[0]
        return v, v, y[0]

    graph = notation_of(make_fx(fn, tracing_mode="fake")(torch.ones(2, 3)))
    first, again, other = graph.outputs
    assert first == again != other
    assert isinstance(other, OwnTensor)
    assert first == other.view


@pytest.mark.skipif(BACKEND != "fusec", reason="reads fusec's own wrapper")
def test_a_window_that_is_returned_twice_has_a_name() -> None:
    def fn(x):
        v = (x + 1)[0]
        return v, x * 2, v.view(3, 1), v.detach()

    compile_with(fn)(values(2, 3))
    last = compiler.RECENT[-1].wrapper.rstrip().splitlines()[-1]
    assert last.count("window(") == 3
    assert last.count(".detach()") == 1


def test_a_view_that_is_resized_leaves_what_it_was_a_view_of() -> None:
    def fn(x):
        b = x + 1
        a = b.view(-1)
        a.resize_(12)
        return b + 1

    torch._dynamo.reset()
    made = torch.compile(fn, backend=BACKEND)(torch.ones(4))
    assert torch.equal(made, fn(torch.ones(4)))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(values(3, 4))

    def forward(self, x):
        scaled = self.weight * 2
        return scaled, scaled.t(), x @ scaled


@pytest.mark.skipif(BACKEND != "fusec", reason="an option of fusec")
def test_a_frozen_constant_that_is_returned_is_the_caller_s_own() -> None:
    module = Scaled()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="fusec", options={"freeze": True, "autotune": False})
    with torch.no_grad():
        for _ in range(2):
            made, expected = compiled(values(2, 3)), module(values(2, 3))
            for one, other in zip(made, expected, strict=True):
                torch.testing.assert_close(one, other)
            assert made[0].data_ptr() == made[1].data_ptr()
            made[0].zero_()


def test_a_conjugate_beside_what_it_conjugates_stays_one() -> None:
    """The gradient of ``eig`` saves the conjugate of a result: bits of a view, no memory."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, vectors = torch.linalg.eig(x)
        return values, vectors.abs()

    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.fft.fft(x)
        return y, y.conj(), y.t().conj(), y.conj().imag

    x = torch.arange(25.0).reshape(5, 5).sin().requires_grad_()
    for one in (fn, both):
        torch.compiler.reset()
        made, wanted = compile_with(one)(x), one(x)
        torch.testing.assert_close(made, wanted)
        assert [t.is_conj() for t in made] == [t.is_conj() for t in wanted]
        found, expected = (torch.autograd.grad(sum(t.abs().sum() for t in r), x)
                           for r in (made, wanted))  # fmt: skip
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def images(*shape: int) -> torch.Tensor:
    return values(*shape).to(memory_format=torch.channels_last)


NEW: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "linear": (F.linear, (values(2, 3, 4), values(5, 4))),
    "convolution": (F.conv2d, (images(2, 16, 8, 8), values(32, 16, 1, 1))),
    "convolution of one place": (F.conv1d, (values(2, 16, 1), values(32, 16, 1))),
    "group norm": (lambda x: F.group_norm(x, 4), (images(2, 16, 8, 8),)),
    "stack": (lambda x: torch.stack([x, x], 1), (images(2, 16, 8, 8),)),
    "kron": (lambda x: torch.kron(x, x), (values(2, 2),)),
    "unfold": (lambda x: F.unfold(x, 2), (values(1, 3, 4, 4),)),
    "beside a saved one": (lambda x, w: F.linear(x, w).exp(), (values(2, 3, 4), values(5, 4))),
    "beside one that is not viewed": (
        lambda x, w: (F.linear(x, w), x.sin()),
        (values(2, 3, 4), values(5, 4)),
    ),
}


@pytest.mark.parametrize("compiler", (True, False), ids=("compiled", "without a compiler"))
@pytest.mark.parametrize("name", NEW)
def test_a_new_result_may_be_written(name: str, compiler: bool) -> None:
    """A product is viewed in its result's shape, but a view of a custom Function is read-only."""
    fn, inputs = NEW[name]

    def written(call: Callable[..., Any], train: bool) -> list[torch.Tensor]:
        given = [x.clone().requires_grad_(train) for x in inputs]
        scale = torch.full((), 0.5, requires_grad=True)  # also beside a result without gradients
        made = call(*given)
        first = made[0] if isinstance(made, tuple) else made
        assert not first._is_view()
        first.mul_(scale)
        loss = first.square().sum() + (made[1].sum() if isinstance(made, tuple) else 0)
        return [first, *torch.autograd.grad(loss, [scale, *(given if train else ())])]

    with nullcontext() if compiler else without_compiler():
        for train in (True, False):
            torch._dynamo.reset()
            compiled = torch.compile(fn, backend=BACKEND)
            expected, made = (outcome(written, call, train) for call in (fn, compiled))
            if isinstance(expected, str):  # autograd needs the value that is written
                assert isinstance(made, str)
            else:
                torch.testing.assert_close(made, expected)


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("beside", ("saved", "returned"))
def test_a_write_to_what_a_backward_needs_raises(beside: str, dynamic: bool) -> None:
    """Also from the cache; and where eager, which tracks views, has a gradient."""

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.linear(x, w, b if beside == "saved" else None)
        return (y, y @ w) if beside == "saved" else (y, y.view(-1))

    for _ in range(2):
        torch._dynamo.reset()
        given = [values(*shape).requires_grad_() for shape in ((2, 3, 4), (5, 4), (5,))]
        y, other = compile_with(fn, dynamic=dynamic)(*given)
        with pytest.raises(RuntimeError, match=r"in-?place"):
            y.mul_(2)
            (y.sum() + other.sum()).backward()


def outcome(call: Callable[..., Any], *given: Any) -> Any:
    """Return what a call returns, or the message of its error."""
    try:
        return call(*given)
    except RuntimeError as error:
        return str(error)


SHARED: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "a view of the other's": (lambda x, y: (x + y.view(4)) * 2, ((4,), (2, 2))),
    "a transposed one": (lambda x, y: (x + y.t()).sin(), ((2, 3), (3, 2))),
    "parts side by side": (lambda x, y: torch.cat([x, y]) * 2, ((3,), (4,))),
    "expanded ones": (lambda x, y: x.sum() + y.sum(), ((3,), (4,))),
}


@pytest.mark.parametrize("name", SHARED)
def test_gradients_have_no_elements_in_common(name: str) -> None:
    fn, shapes = SHARED[name]

    def clipped(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaves = [values(*shape, seed=k).requires_grad_() for k, shape in enumerate(shapes)]
        call(*leaves).sum().backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        return [leaf.grad for leaf in leaves]

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=BACKEND)
    torch.testing.assert_close(clipped(compiled), clipped(fn))


def _changed(x: torch.Tensor, dtype: torch.dtype) -> Any:
    y = x.view(dtype) * 1
    x.add_(1)
    return y, x.view(dtype)


def _of_a_result(x: torch.Tensor, dtype: torch.dtype) -> Any:
    s = x * 2
    return s, s.view(dtype).flip(0).flip(0), s.view(dtype)


REINTERPRETED: dict[str, Callable[[torch.Tensor, torch.dtype], Any]] = {
    "beside a write": _changed,
    "of an input": lambda x, dtype: x.view(dtype) * 1,
    "of a result": _of_a_result,
    "viewed back": lambda x, dtype: (x.view(dtype) * 1).view(x.dtype),
}


@pytest.mark.parametrize("dtype", (torch.int32, torch.bfloat16, torch.int64), ids=str)
@pytest.mark.parametrize("name", REINTERPRETED)
def test_what_is_computed_of_a_view_of_another_type_is_new(name: str, dtype: torch.dtype) -> None:
    """``x * 1`` is lowered to loads of x, here of memory that a call returns as another type's."""
    fn = REINTERPRETED[name]

    def left_by(call: Callable[..., Any]) -> list[torch.Tensor]:
        """Return results and the input, then what is left of them once one result is zero."""
        x = values(4, 6)
        made = [*(m if isinstance(m := call(x, dtype), tuple) else (m,)), x]
        before = [one.clone() for one in made]
        made[1 if len(made) > 2 else 0].zero_()
        return before + made

    torch._dynamo.reset()
    made, expected = (left_by(call) for call in (torch.compile(fn, backend=BACKEND), fn))
    assert [one.dtype for one in made] == [one.dtype for one in expected]
    assert all(map(torch.equal, made, expected))
