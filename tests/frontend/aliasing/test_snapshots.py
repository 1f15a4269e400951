"""Gradients of what the forward overwrites: those of the values that the forward read.

A `State` is a tensor that a model reads and writes. The reference reads a copy of it, as eager's
gradient does where eager has one, and so never refuses a write that comes before the gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

from fusec.driver.backend import compile_with, context_of
from fusec.driver.compiler import run_eagerly
from fusec.frontend.aliasing.saved_changes import (
    modifies_function_saved_tensor,
    modifies_saved_tensor,
)
from fusec.options import Options
from fusec.runtime.calls.fake import with_memory_only
from fusec.torch_interior import SkipFrame
from tests.support import BACKEND

N = 4
REFUSED = "modified by an inplace operation"
NOT_TRACED = "A view was created in no_grad mode"
"""What AOTAutograd says of a few writes whose gradients eager refuses, too."""


def cut_alone(gm: Any, inputs: Any) -> Any:
    """Compile nothing: run forward and backward, as fusec cuts them, by eager kernels."""

    def compile_one(graph: Any, _: Any, *, name: str) -> Any:
        call = run_eagerly(graph)
        return with_memory_only(call, call)

    options = Options(strict=True, fallback_random=True)
    if modifies_function_saved_tensor(gm):
        raise SkipFrame(REFUSED)
    if modifies_saved_tensor(gm):
        return gm.forward
    return compile_with(gm, inputs, compile_one, context_of(inputs, options))


# -- what is written, and how ----------------------------------------------------------------------

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda t: t.mul_(0.5),
    "add_": lambda t: t.add_(1.0),
    "zero_": lambda t: t.zero_(),
    "copy_": lambda t: t.copy_(t.flip(0)),
    "lerp_": lambda t: t.lerp_(t.mean(0, keepdim=True).expand_as(t), 0.3),
    "index_put_": lambda t: t.index_put_((torch.tensor([1, 3]),), torch.ones(2, N)),
    "slice": lambda t: t[1:3].copy_(t[2:4] * 2),
    "column": lambda t: t[:, 1].mul_(3.0),
    "view": lambda t: t.view(-1)[3:9].add_(2.0),
    "transposed": lambda t: t.t().mul_(torch.arange(4.0)),
    "element": lambda t: t[2, 3].fill_(7.0),
    "setitem": lambda t: t.__setitem__((slice(None), 2), 5.0),
    "data": lambda t: t.data.mul_(0.25),
    "detached": lambda t: t.detach().add_(3.0),
    "foreach": lambda t: torch._foreach_mul_([t], 0.5),
    "scatter_": lambda t: t.scatter_(1, torch.tensor([[0], [1], [2], [3]]), 9.0),
}

READS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "product": lambda t, x, i: t * x,
    "square": lambda t, x, i: (t - x) ** 2,
    "gathered": lambda t, x, i: (t[i] - x) ** 2,
    "embedding": lambda t, x, i: F.embedding(i, t) * x,
    "gather": lambda t, x, i: torch.gather(t, 1, i[:, None].expand(4, N)).exp() * x,
    "linear": lambda t, x, i: F.linear(x, t).relu(),
    "matmul": lambda t, x, i: (x @ t).tanh() @ t.t(),
    "chain": lambda t, x, i: (t.sin().exp() * x).sigmoid() * t,
    "viewed": lambda t, x, i: t.view(2, 2, N).transpose(0, 1).reshape(4, N) * x,
    "strided": lambda t, x, i: t.as_strided((4, N), (1, N)) * x,
    "window": lambda t, x, i: t.as_strided((3, N), (N, 1), N) * x[1:],
    "sliced": lambda t, x, i: (t[1:] * x[:3]).sin() + t[0],
    "norm": lambda t, x, i: F.layer_norm(x * t, (N,), t[0], t[1]),
    "batch norm": lambda t, x, i: F.batch_norm(x, None, None, t[0], t[1], True) * t,
    "conv": lambda t, x, i: F.conv1d(x[None], t[:, :, None]).relu()[0],
    "softmax": lambda t, x, i: F.softmax(t, -1) * x,
    "dropout": lambda t, x, i: F.dropout(t * x, 0.0) * t,
    "loss": lambda t, x, i: F.cross_entropy(x @ t, i),
    "detached loss": lambda t, x, i: F.mse_loss(t[i].detach(), x),
    "maximum": lambda t, x, i: (t * x).amax(1),
    "where": lambda t, x, i: torch.where(t > 0, x, x * 2),
    "only in the gradient": lambda t, x, i: Scaled.apply(x, t),
    "norm of rows": lambda t, x, i: x / torch.linalg.vector_norm(t, dim=-1, keepdim=True),
}


class Scaled(torch.autograd.Function):
    """What only the gradient reads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(t)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (t,) = ctx.saved_tensors
        return gradient * t, None


# -- when ------------------------------------------------------------------------------------------

Read = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Write = Callable[[torch.Tensor], Any]


def once(see: Any, read: Read, write: Write, t: torch.Tensor, x: Any, i: Any) -> torch.Tensor:
    y = read(see(t), x, i)
    with torch.no_grad():
        write(t)
    return y.sum()


def before(see: Any, read: Read, write: Write, t: torch.Tensor, x: Any, i: Any) -> torch.Tensor:
    with torch.no_grad():
        write(t)
    return read(see(t), x, i).sum()


def between(see: Any, read: Read, write: Write, t: torch.Tensor, x: Any, i: Any) -> torch.Tensor:
    y = read(see(t), x, i)
    with torch.no_grad():
        write(t)
    return (read(see(t), x.sin(), i) * 3).sum() + y.sum()


def twice(see: Any, read: Read, write: Write, t: torch.Tensor, x: Any, i: Any) -> torch.Tensor:
    y = read(see(t), x, i)
    with torch.no_grad():
        write(t)
    y = read(see(t), x * 2, i).square().sum() + y.sum()
    with torch.no_grad():
        write(t)
    return y


def checkpointed(see: Any, read: Read, write: Write, t: Any, x: Any, i: Any) -> torch.Tensor:
    y = checkpoint(read, see(t), x, i, use_reentrant=False)
    with torch.no_grad():
        write(t)
    return (y * x.mean()).sum()


def autocast(see: Any, read: Read, write: Write, t: Any, x: Any, i: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = read(see(t), x, i)
    with torch.no_grad():
        write(t)
    return y.float().sum()


ORDERS = {f.__name__: f for f in (once, before, between, twice, checkpointed, autocast)}


# -- of what ---------------------------------------------------------------------------------------


class State(nn.Module):
    """A parameter or a buffer that is read and written, or neither: then it is an input."""

    def __init__(self, kind: str, step: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        held = torch.linspace(-1.5, 2.0, 16).reshape(4, N).sin()
        if kind == "parameter":
            self.t = nn.Parameter(held)
        elif kind == "buffer":
            self.register_buffer("t", held)
        self.kind, self.step = kind, step

    def forward(self, x: torch.Tensor, i: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case "input":
                t = given
            case "view of an input":
                t = given.view(4, N)
            case _:
                t = self.t
        return self.step(t, x, i)


KINDS = ("parameter", "buffer", "input", "view of an input", "input with a gradient")


def run(kind: str, step: Callable[..., torch.Tensor], compiled: Any = None) -> list[Any]:
    """Return the loss, gradients, and what of memory is left after a call."""
    torch._dynamo.reset()
    model = State("input" if kind.startswith("input") else kind, step)
    call = model if compiled is None else torch.compile(model, backend=compiled)
    x = torch.linspace(-2.0, 2.0, 16).reshape(4, N).requires_grad_()
    given = torch.linspace(0.5, -3.0, 16).reshape((16,) if "view" in kind else (4, N)).cos()
    given.requires_grad_(kind.endswith("gradient"))
    loss = call(x, torch.tensor([0, 2, 2, 3]), given)
    loss.backward()
    held = [*model.parameters(), *model.buffers(), given]
    return [loss, x.grad, *(t.grad for t in held), *(t.detach() for t in held)]


def assert_agree(kind: str, order: str, read: str, write: str, compiled: Any) -> bool:
    """Compare with the reference; return False where autograd refuses, as eager's must then.

    What ``UNSEEN`` writes change, eager's gradient reads as it is by then: that is the reference.
    """
    step = partial(ORDERS[order], read=READS[read], write=WRITES[write])
    plain = lambda t, x, i: step(lambda t: t, t=t, x=x, i=i)  # noqa: E731
    copied = lambda t, x, i: step(torch.clone, t=t, x=x, i=i)  # noqa: E731
    try:
        got = run(kind, plain, compiled)
    except (RuntimeError, BackendCompilerFailed) as error:
        assert REFUSED in str(error) or NOT_TRACED in str(error)
        if write not in UNSEEN:
            with pytest.raises(RuntimeError, match=REFUSED):
                run(kind, plain)
        return False
    expected = run(kind, plain if write in UNSEEN else copied)
    close: Any = {"rtol": 2e-2, "atol": 2e-2} if order == "autocast" else {}
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, equal_nan=True, **close)
    return True


UNSEEN = ("data",)
"""Writes that no version counts: eager neither refuses them nor keeps what they overwrite."""

ALL = [
    pytest.param(*case, id="-".join(case))
    for case in itertools.product(KINDS, ORDERS, READS, WRITES)
]
"""Some ten thousand: each test takes a diagonal."""


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("kind", "order", "read", "write"), ALL[::37])
def test_gradients_are_of_what_the_forward_read(kind, order, read, write):
    assert_agree(kind, order, read, write, cut_alone)


def test_what_the_forward_read_is_what_kernels_of_the_backward_read() -> None:
    """A codebook with a moving average, by fusec's kernels."""
    assert assert_agree("parameter", "once", "gathered", "mul_", BACKEND)
    assert assert_agree("buffer", "once", "detached loss", "mul_", BACKEND)
    assert_agree("parameter", "once", "linear", "mul_", BACKEND)  # eager refuses it


def test_a_write_to_what_a_function_saved_raises_as_in_eager() -> None:
    for kind in ("buffer", "input"):
        assert not assert_agree(kind, "once", "only in the gradient", "mul_", BACKEND)
