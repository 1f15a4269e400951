"""What a backward is given may lie elsewhere than was traced: gradients are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import BACKEND, values


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.sin().t() @ w).exp().t() * x


HOOKS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "contiguous": (lambda t: t.contiguous(), lambda t: t),
    "a list": (lambda t: t.tolist(), torch.tensor),
    "negative": (lambda t: t, lambda t: torch._neg_view(t.neg())),
    "as saved": (lambda t: t, lambda t: t),
}


def gradients(call: Callable[..., torch.Tensor], hooks: Any, rows: int = 5) -> list[torch.Tensor]:
    x, w = values(rows, 6).t().detach().requires_grad_(), values(6, 6).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        made = call(x, w)
    return [*torch.autograd.grad(made.sum(), (x, w))]


@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("name", HOOKS)
def test_saved_tensors_may_have_other_strides(name: str, dynamic: bool) -> None:
    for _ in range(2):  # from AOTAutograd, and from the cache
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend=BACKEND, dynamic=dynamic)
        for rows in (5, 7) if dynamic else (5,):
            expected = gradients(layer, HOOKS[name], rows)
            torch.testing.assert_close(gradients(compiled, HOOKS[name], rows), expected)


def test_extents_of_saved_tensors_may_be_minima() -> None:
    """The least of two sizes is computed once, behind the inputs."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        return (x[1:].exp() @ x.t()).tanh() @ x

    def gradient(call: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = values(6, 4).requires_grad_()
        torch._dynamo.decorators.mark_unbacked(x, 0)
        with torch.autograd.graph.saved_tensors_hooks(*HOOKS["contiguous"]):
            made = call(x)
        (found,) = torch.autograd.grad(made.sum(), x)
        return found

    torch._dynamo.reset()
    compiled = torch.compile(rows, backend=BACKEND)
    torch.testing.assert_close(gradient(compiled), gradient(rows))


OVERLAPPING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda x: x[:4].expand(8, 4),
    "expanded and transposed": lambda x: x[:4, None].expand(4, 8).t(),
    "windows": lambda x: x.unfold(0, 4, 1),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_saved_tensors_may_have_lost_that_elements_share_memory(name: str) -> None:
    def gradient(call: Callable[..., torch.Tensor]) -> torch.Tensor:
        x, w = OVERLAPPING[name](values(11)), values(8, 4, seed=1).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(*HOOKS["contiguous"]):
            made = call(x, w)
        (found,) = torch.autograd.grad(made.sum(), w)
        return found

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x * w).sum(1)

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=BACKEND)
    torch.testing.assert_close(gradient(compiled), gradient(fn))


@pytest.mark.skipif(BACKEND != "fusec", reason="the message is fusec's")
@pytest.mark.parametrize("unpack", (lambda t: t[:2], lambda t: t.double()), ids=("shape", "type"))
def test_saved_tensors_of_another_shape_or_type_are_an_error(unpack: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=BACKEND)
    with pytest.raises(RuntimeError, match="a hook of saved tensors gave back"):
        gradients(compiled, (lambda t: t, unpack))


class _Given(torch.autograd.Function):
    """Gives what stands before it a gradient that has no values of its own in memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, make: Callable[..., Any]) -> torch.Tensor:
        ctx.make = make
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.make(gradients[0]), None


TANGENTS = {
    "negative": torch._neg_view,
    "negative and transposed": lambda g: torch._neg_view(g.t().contiguous().t()),
    "of zeros": lambda g: torch._efficientzerotensor(g.shape),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.complex64), ids=str)
@pytest.mark.parametrize("name", TANGENTS)
def test_tangents_may_have_no_values_in_memory(name: str, dtype: torch.dtype) -> None:
    def make(g: torch.Tensor) -> torch.Tensor:
        zeros = name == "of zeros"  # of the gradient's type
        return torch._efficientzerotensor(g.shape, dtype=g.dtype) if zeros else TANGENTS[name](g)

    def gradient(call: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = values(3, 4, dtype=dtype).requires_grad_()
        made = _Given.apply(call(x), make)
        (found,) = torch.autograd.grad((made * values(3, 4, seed=1)).abs().sum(), x)
        return found

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * x

    for _ in range(2):  # from AOTAutograd, and from the cache
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend=BACKEND)
        torch.testing.assert_close(gradient(compiled), gradient(fn))


def test_a_scalar_s_tangent_behind_a_conjugate_is_negative() -> None:
    def gradient(call: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = values(4).requires_grad_()
        number = torch.complex(torch.zeros(()), call(x))
        (found,) = torch.autograd.grad((number.conj() * (1 + 2j)).real, x)
        return found

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.sin().sum(), backend=BACKEND)
    torch.testing.assert_close(gradient(compiled), gradient(lambda x: x.sin().sum()))
