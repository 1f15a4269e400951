"""The custom operations of first-order linear recurrences and their gradient, and their lowerings.

``fusec::recurrence(a, b, start, dim, backwards)`` takes a step for each point t along a dimension,
from the first to the last, or backwards. Without ``start`` its first point is ``b[0]``::

    h[t] = a[t] * h[t-1] + b[t]         backwards:  h[t] = a[t] * h[t+1] + b[t]

``fusec::recurrence_backward(dh, a, h, start, dim, backwards)`` runs the other way: the gradient of
h[t] is what it brings about itself, and by the next one, whose factor it takes::

    db[t] = a[t+1] * db[t+1] + dh[t]    da[t] = db[t] * h[t-1]

``frontend/fx_passes/associative_scans.py`` and ``rolled_loops.py`` put the operation into graphs.
A product so far is the recurrence ``h[t] = x[t] * h[t-1]`` from 1, and has its gradient: eager's
divides by the factors, and takes four more scans where one may be 0.
On CPUs it is a scan by an ordered monoid (``ir/serial.py``); the eager kernels here are for graphs
that run eagerly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Body, Indices
from fusec.frontend.ops.arithmetic import like, select
from fusec.frontend.ops.domain import scanned
from fusec.frontend.ops.registry import LIBRARY, eager_kernel, lowers
from fusec.frontend.ops.views import replaced
from fusec.frontend.value import Value
from fusec.ir.dtype import F32, F64, DType, compute_type
from fusec.ir.expr import Expr, cast, in_range
from fusec.ir.index import Index
from fusec.ir.monoid import RECURRENCE

# -- eager kernels and gradient --------------------------------------------------------------------


@eager_kernel(
    "recurrence(Tensor a, Tensor b, Tensor? start, int dim, bool backwards) -> Tensor",
    lambda a, b, *_: torch.empty_like(b, memory_format=torch.contiguous_format),
)
def recurrence(
    a: torch.Tensor, b: torch.Tensor, start: torch.Tensor | None, dim: int, backwards: bool
) -> torch.Tensor:
    """Return h of factors and terms of one shape and type, contiguous."""
    if b.shape[dim] == 0:
        return b.clone(memory_format=torch.contiguous_format)
    factors, terms = (x.double().unbind(dim) for x in (a, b))
    steps = range(len(terms))
    found: list[torch.Tensor] = []
    for t in reversed(steps) if backwards else steps:
        before = found[-1] if found else start
        found.append(terms[t] if before is None else factors[t] * before + terms[t])
    return torch.stack(found[::-1] if backwards else found, dim).to(b.dtype)


@eager_kernel(
    "recurrence_backward(Tensor grad, Tensor a, Tensor h, Tensor? start, int dim, bool backwards)"
    " -> (Tensor, Tensor)",
    lambda grad, a, *_: (torch.empty_like(a), torch.empty_like(a)),
)
def recurrence_backward(
    grad: torch.Tensor,
    a: torch.Tensor,
    h: torch.Tensor,
    start: torch.Tensor | None,
    dim: int,
    backwards: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of factors and terms, laid out as the factors."""
    terms = recurrence(a.roll(1 if backwards else -1, dim), grad, None, dim, not backwards)
    steps = torch.arange(h.shape[dim]).view(-1, *(1,) * (h.dim() - 1 - dim % h.dim()))
    is_first = (steps == _first(h, dim, backwards)).to(h.device)
    own = h.new_zeros(()) if start is None else start.unsqueeze(dim)
    before = torch.where(is_first, own, h.roll(-1 if backwards else 1, dim))
    return torch.empty_like(a).copy_(terms * before), torch.empty_like(a).copy_(terms)


def _first(x: torch.Tensor, dim: int, backwards: bool) -> int:
    """Return the place of a run's first point."""
    return x.shape[dim] - 1 if backwards else 0


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, _, start, *ctx.how = inputs
    ctx.save_for_backward(a, output, start)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    a, h, start = ctx.saved_tensors
    factors, terms = torch.ops.fusec.recurrence_backward(grad, a, h, start, *ctx.how)
    own = None
    if ctx.needs_input_grad[2]:
        dim, place = ctx.how[0], _first(a, *ctx.how)
        own = a.select(dim, place) * terms.select(dim, place)
    return factors, terms, own, None, None


torch.library.register_autograd("fusec::recurrence", _gradient, setup_context=_keep, lib=LIBRARY)


class _Product(torch.autograd.Function):
    """``cumprod`` of floats along a dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim, result = dim, x.cumprod(dim)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, result = ctx.saved_tensors
        beside = [n for axis, n in enumerate(x.shape) if axis != ctx.dim]
        how = x.new_ones(beside), ctx.dim, False
        return torch.ops.fusec.recurrence_backward(grad, x, result, *how)[0], None


def product_so_far(
    input: torch.Tensor, dim: Any, *, dtype: torch.dtype | None = None, out: Any = None
) -> torch.Tensor:
    """Return the result of ``torch.cumprod``, with a gradient that is one operation."""
    x = input if dtype is None else input.to(dtype)
    whole = x.requires_grad and x.is_floating_point() and x.dim() > 0
    if not whole or out is not None or not isinstance(dim, int):
        return torch.cumprod(input, dim, dtype=dtype, out=out)
    result: torch.Tensor = _Product.apply(x, dim % x.dim())  # type: ignore[no-untyped-call]
    return result


# -- index notation --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """The points of a scan along an axis of a tensor.

    Attributes:
        step: from a point to the one before it in the scan: -1, or 1 if it runs backwards.
    """

    extent: Index
    axis: int
    step: int

    def before(self, x: Value, at: Indices, kind: DType) -> Expr:
        """Return the element before one, 0 before the first one."""
        place = at[self.axis] + self.step
        return cast(x.at(replaced(at, self.axis, place), self.is_later(at)), kind)

    def is_later(self, at: Indices) -> Expr | None:
        """Return the condition that a point is not the first one of the scan."""
        place = at[self.axis] + self.step
        return in_range(place, 0, None) if self.step < 0 else in_range(place, None, self.extent)

    def select(self, at: Indices, later: Expr, first: Expr) -> Expr:
        """Return one value at the first point, another one at those behind it."""
        condition = self.is_later(at)
        return later if condition is None else select(condition, later, first)

    def beside(self, at: Indices) -> Indices:
        """Return the indices without that along the axis."""
        return (*at[: self.axis], *at[self.axis + 1 :])

    def reduce(self, at: Indices, factor: Body, term: Body) -> Expr:
        """Return the recurrence's h at a point, of factors that are 0 at the first one."""
        points = scanned(self.extent, self.axis, at, backwards=self.step > 0)
        return points.reduce(RECURRENCE, factor(points.where), term(points.where))


def _run(call: AtenCall, x: Value, dim: int, backwards: bool) -> tuple[_Run, DType]:
    """Return a scan, and its accumulation type: f32 in f64, as long sums are.

    Raises:
        Unsupported: on a GPU.
    """
    if not call.is_cpu:
        raise Unsupported("a scan along an axis")
    axis, kind = dim % len(x.shape), compute_type(call.out.dtype)
    return _Run(x.shape[axis], axis, 1 if backwards else -1), F64 if kind is F32 else kind


@lowers(torch.ops.fusec.recurrence.default)
def lower_recurrence(
    call: AtenCall, a: Value, b: Value, start: Value | None, dim: int, backwards: bool
) -> Value:
    run, kind = _run(call, b, dim, backwards)

    def factor(at: Indices) -> Expr:
        return cast(a.at(at, run.is_later(at)), kind)

    def term(at: Indices) -> Expr:
        own = cast(b.at(at), kind)
        if start is None:
            return own
        begun = cast(a.at(at), kind) * cast(start.at(run.beside(at)), kind)
        return run.select(at, like(-0.0, begun), begun) + own

    return call.define(lambda at: run.reduce(at, factor, term))


@lowers(torch.ops.fusec.recurrence_backward.default)
def lower_gradient(
    call: AtenCall, grad: Value, a: Value, h: Value, start: Value | None, dim: int, backwards: bool
) -> tuple[Value, Value]:
    run, kind = _run(call, grad, dim, not backwards)
    forth = _Run(run.extent, run.axis, -run.step)

    def factor(at: Indices) -> Expr:
        return run.before(a, at, kind)

    terms = call.define(lambda at: run.reduce(at, factor, lambda at: cast(grad.at(at), kind)), 1)
    exact = compute_type(call.out.dtype)

    def slope(at: Indices) -> Expr:
        before = forth.before(h, at, exact)
        if start is not None:
            before = forth.select(at, before, cast(start.at(forth.beside(at)), exact))
        return cast(terms.at(at), exact) * before

    return call.define(slope, 0), terms
