"""First-order linear recurrences, and scans whose gradient is one.

``fusec::recurrence(a, b, start, dim, backwards)`` takes a step for each point t along a dimension,
from the first to the last, or backwards. Without ``start`` its first point is ``b[0]``::

    h[t] = a[t] * h[t-1] + b[t]         backwards:  h[t] = a[t] * h[t+1] + b[t]

Integer factors name runs: a step takes h[t-1] where a[t] is a[t-1], else nothing, not even 0 * inf.
The gradient runs the other way: that of h[t] is what it brings about itself, and by the next one,
whose factor it takes (``shifted``)::

    db[t] = a[t+1] * db[t+1] + dh[t]    da[t] = db[t] * h[t-1]

A product so far is the recurrence ``h[t] = x[t] * h[t-1]`` from 1, and has its gradient: eager's
divides by the factors, and takes four more scans where one may be 0. An extreme so far is that of a
run of points that have the same place, where the gradients of the run are summed from its end;
eager scatters them::

    s[t] = dh[t] + (s[t+1] if place[t+1] == place[t])    dx[t] = s[t] if place[t] == t

``frontend/fx_passes/associative_scans.py`` and ``rolled_loops.py`` put all of these into graphs.
On CPUs a recurrence is a scan by an ordered monoid (``ir/serial.py``); its eager kernel is for
graphs that run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Indices
from fusec.frontend.ops.arithmetic import equal, like, select
from fusec.frontend.ops.domain import scanned
from fusec.frontend.ops.registry import LIBRARY, eager_kernel, lowers
from fusec.frontend.ops.views import replaced
from fusec.frontend.value import Value
from fusec.ir.dtype import F32, F64, compute_type
from fusec.ir.expr import Expr, cast, in_range
from fusec.ir.monoid import RECURRENCE

# -- the operation ---------------------------------------------------------------------------------


@eager_kernel(
    "recurrence(Tensor a, Tensor b, Tensor? start, int dim, bool backwards, bool shifted=False)"
    " -> Tensor",
    lambda a, b, *_: torch.empty_like(b, memory_format=torch.contiguous_format),
)
def recurrence(
    a: torch.Tensor,
    b: torch.Tensor,
    start: torch.Tensor | None,
    dim: int,
    backwards: bool,
    shifted: bool = False,
) -> torch.Tensor:
    """Return h of factors and terms of one shape, contiguous."""
    if b.shape[dim] == 0:
        return b.clone(memory_format=torch.contiguous_format)
    runs = not a.is_floating_point()
    if runs or shifted:
        before = a.roll(-1 if backwards else 1, dim)
        a = (a == before) if runs else before
    factors, terms = a.unbind(dim), b.double().unbind(dim)
    steps = range(len(terms))
    found: list[torch.Tensor] = []
    for t in reversed(steps) if backwards else steps:
        state = found[-1] if found else start
        if state is None:
            found.append(terms[t])
            continue
        kept = torch.where(factors[t], state, 0) if runs else factors[t].double() * state
        found.append(kept + terms[t])
    return torch.stack(found[::-1] if backwards else found, dim).to(b.dtype)


def _before(x: torch.Tensor, dim: int, backwards: bool) -> torch.Tensor:
    """Shift a tensor by one step along a dimension, from before each point; 0 at the first."""
    here = (-1, 1) if backwards else (1, -1)
    if x.shape[dim] == 0:
        return x
    return torch.constant_pad_nd(x, (*(0, 0) * (x.dim() - 1 - dim % x.dim()), *here))


def _slopes(
    terms: torch.Tensor, h: torch.Tensor, start: Any, dim: int, backwards: bool
) -> torch.Tensor:
    """Return the gradient of factors from that of terms; with a start, or 1, before the first h.

    States are read where they are, so that the forward saves them, and nothing made of them.
    """
    slopes = _before(_before(terms, dim, not backwards) * h, dim, backwards)
    if start is None:
        return slopes
    first = _steps(h, dim) == (h.shape[dim] - 1 if backwards else 0)
    return torch.where(first, terms * start, slopes)


def _steps(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the numbers of points along a dimension."""
    return torch.arange(x.shape[dim], device=x.device).view(
        -1, *(1,) * (x.dim() - 1 - dim % x.dim())
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, _, start, *ctx.how = inputs
    ctx.save_for_backward(a, output, start)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (a, h, start), (dim, backwards, shifted) = ctx.saved_tensors, ctx.how
    if shifted:
        raise NotImplementedError("the gradient of a recurrence's gradient")
    terms = torch.ops.fusec.recurrence(a, grad, None, dim, not backwards, True)
    own = None
    if ctx.needs_input_grad[2]:
        place = a.shape[dim] - 1 if backwards else 0
        own = a.select(dim, place) * terms.select(dim, place)
    begun = None if start is None else start.unsqueeze(dim)
    return _slopes(terms, h, begun, dim, backwards), terms, own, None, None, None


torch.library.register_autograd("fusec::recurrence", _gradient, setup_context=_keep, lib=LIBRARY)


@lowers(torch.ops.fusec.recurrence.default)
def lower_recurrence(
    call: AtenCall,
    a: Value,
    b: Value,
    start: Value | None,
    dim: int,
    backwards: bool,
    shifted: bool = False,
) -> Value:
    """Emit h, of f32 in f64, as long sums are.

    Raises:
        Unsupported: on a GPU.
    """
    if not call.is_cpu:
        raise Unsupported("a scan along an axis")
    axis, kind = dim % len(b.shape), compute_type(call.out.dtype)
    kind = F64 if kind is F32 else kind
    extent = b.shape[axis]

    def body(at: Indices) -> Expr:
        points = scanned(extent, axis, at, backwards=backwards)
        where = points.where
        place = where[axis] + (1 if backwards else -1)
        later = in_range(place, None, extent) if backwards else in_range(place, 0, None)
        before = a.at(replaced(where, axis, place), later)
        if a.dtype.is_float:
            factor = cast(before if shifted else a.at(where, later), kind)
        else:
            factor = equal(a.at(where), before)
        term = cast(b.at(where), kind)
        if start is not None:
            first = start.at((*where[:axis], *where[axis + 1 :]))
            begun = cast(a.at(where), kind) * cast(first, kind)
            term = term + (begun if later is None else select(later, like(-0.0, begun), begun))
        return points.reduce(RECURRENCE, factor, term)

    return call.define(body)


# -- scans whose gradient is a recurrence ----------------------------------------------------------


class _Product(torch.autograd.Function):
    """``cumprod`` of floats along a dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim, result = dim, x.cumprod(dim)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x, result), dim = ctx.saved_tensors, ctx.dim
        terms = torch.ops.fusec.recurrence(x, grad, None, dim, True, True)
        return _slopes(terms, result, 1, dim, False), None


class _Extreme(torch.autograd.Function):
    """``cummax`` or ``cummin`` of floats along a dimension."""

    @staticmethod
    def forward(
        ctx: Any, scan: Callable[..., Any], x: torch.Tensor, dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result, places = scan(x, dim)
        ctx.dim = dim
        ctx.save_for_backward(places)
        ctx.mark_non_differentiable(places)
        return result, places

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[None, torch.Tensor, None]:
        (places,), dim = ctx.saved_tensors, ctx.dim
        sums = torch.ops.fusec.recurrence(places, grad, None, dim, True)
        return None, torch.where(places == _steps(places, dim), sums, 0), None


def _has_gradient(x: torch.Tensor, dim: Any, out: Any) -> bool:
    """Return True for a call of a scan that is differentiated."""
    wanted = x.requires_grad and x.is_floating_point() and x.dim() > 0
    return wanted and out is None and isinstance(dim, int)


def product_so_far(
    input: torch.Tensor, dim: Any, *, dtype: torch.dtype | None = None, out: Any = None
) -> torch.Tensor:
    """Return the result of ``torch.cumprod``, with a gradient that is one operation."""
    x = input if dtype is None else input.to(dtype)
    if not _has_gradient(x, dim, out):
        return torch.cumprod(input, dim, dtype=dtype, out=out)
    result: torch.Tensor = _Product.apply(x, dim % x.dim())  # type: ignore[no-untyped-call]
    return result


def greatest_so_far(input: torch.Tensor, dim: Any, *, out: Any = None) -> Any:
    """Return the results of ``torch.cummax``, with a gradient that is one scan."""
    return _extreme(torch.cummax, input, dim, out)


def least_so_far(input: torch.Tensor, dim: Any, *, out: Any = None) -> Any:
    """Return the results of ``torch.cummin``, with a gradient that is one scan."""
    return _extreme(torch.cummin, input, dim, out)


def _extreme(scan: Callable[..., Any], x: torch.Tensor, dim: Any, out: Any) -> Any:
    if not _has_gradient(x, dim, out):
        return scan(x, dim, out=out)
    return _Extreme.apply(scan, x, dim % x.dim())  # type: ignore[no-untyped-call]
