"""Interpolation whose gradient stays one operation.

PyTorch decomposes ``interpolate`` before it is differentiated. The forward's parts, a few gathers
and a weighted sum, fuse; their gradients are as many scatters of colliding elements, 50 times
slower than eager's one kernel (bilinear, channels last, one core, 2026-11). So each call of a
Dynamo graph becomes an ``autograd.Function`` whose backward is eager's operation. The gradient of
nearest neighbours, enlarged by an integer factor, is lowered: it is a sum over windows.

Worked example, the gradient of ``F.interpolate(x, scale_factor=2)``::

    dx[n, c, h, w] = sum(k0, k1: dy[n, c, 2*h + k0, 2*w + k1])
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall
from fusec.frontend.fx_passes.dynamo_graph import call_instead, plain_parts
from fusec.frontend.ops.pooling import Affine, over_places
from fusec.frontend.ops.registry import aten, lowers
from fusec.frontend.value import ZERO, Value
from fusec.ir.dtype import compute_type
from fusec.ir.index import Index
from fusec.torch_interior import running_plainly

_ALIGNED = {"linear", "bilinear", "trilinear", "bicubic"}
_KERNELS = {mode: f"upsample_{mode}" for mode in ("nearest", *_ALIGNED)} | {
    "nearest-exact": "_upsample_nearest_exact"
}


def _gradient(mode: str, rank: int) -> Any:
    """Return eager's operation for the gradient of an interpolation, None where it has none."""
    return getattr(aten, f"{_KERNELS.get(mode)}{rank}d_backward", None)


def keep_gradients_whole(gm: fx.GraphModule) -> None:
    """Replace each ``F.interpolate`` of a Dynamo graph by ``interpolate``, in place."""
    instead: dict[Any, Callable[..., Any]] = {F.interpolate: interpolate}
    call_instead(plain_parts(gm), lambda node: instead.get(node.target))


def interpolate(
    input: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> torch.Tensor:
    """Return the result of ``F.interpolate``, with a gradient that is one operation."""
    arguments = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    gradient = _gradient(mode, input.dim() - 2)
    varies = any(isinstance(n, torch.SymInt) for n in input.shape)
    if gradient is None or antialias or not input.requires_grad or (varies and mode in _ALIGNED):
        return F.interpolate(input, *arguments)  # torch infers no symbolic shapes for _ALIGNED
    scales = [None] * (input.dim() - 2)
    if size is None and not recompute_scale_factor:
        one = not isinstance(scale_factor, tuple | list)
        scales = [scale_factor] * len(scales) if one else list(scale_factor)
    aligned = (bool(align_corners),) if mode in _ALIGNED else ()
    settings = (*aligned, *scales)
    result: torch.Tensor = _Interpolation.apply(input, arguments, gradient, settings)  # type: ignore[no-untyped-call]
    return result


class _Interpolation(torch.autograd.Function):
    """Forward as torch traces it, backward as ``gradient(grad, size, input's size, *settings)``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, arguments: tuple[Any, ...], gradient: Any, settings: Any
    ) -> torch.Tensor:
        ctx.shape, ctx.gradient, ctx.settings = x.shape, gradient, settings
        return F.interpolate(x, *arguments)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        result = ctx.gradient(grad, grad.shape[2:], ctx.shape, *ctx.settings)
        return result, None, None, None


def _nearest_gradient(*, center: float) -> Callable[..., Value]:
    """Return the gradient's lowering where output i is element ``floor((i + center) / factor)``."""

    def rule(call: AtenCall, grad: Value, _: Any, __: Any, *scales: float | None) -> Value:
        kind = compute_type(call.out.dtype)
        windows = []
        for large, small, scale in zip_longest(grad.shape[2:], call.out.shape[2:], scales):
            factor = _factor(large, small, scale, center)
            windows.append(Affine(large, small, factor, factor, 0))

        return call.define(lambda at: over_places(windows, at).total(grad, kind))

    return rule


def _factor(large: Index, small: Index, scale: float | None, center: float) -> int:
    """Return the integer factor by which an axis is enlarged.

    Raises:
        Unsupported: if it is no integer or not ``scale``, or if f32 rounding changes an index.
    """
    factor = large // small
    if (large % small) is not ZERO or not factor.is_constant or factor is ZERO:
        raise Unsupported("an interpolation's gradient, not enlarged by a whole number")
    if scale is not None and scale != factor.const:
        raise Unsupported("an interpolation's gradient, of another scale than its sizes have")
    if factor.const & (factor.const - 1):  # powers of two are exact
        with running_plainly():
            places = torch.arange(large.const, dtype=torch.float32)
            found = ((places + center) * (1.0 / factor.const)).to(torch.int64)
            exact = torch.equal(found, places.long() // factor.const)
        if not large.is_constant or not exact:
            raise Unsupported("an interpolation's gradient, whose places are rounded")
    return factor.const


for _rank in (1, 2, 3):
    lowers(_gradient("nearest", _rank).default)(_nearest_gradient(center=0.0))
    lowers(_gradient("nearest-exact", _rank).default)(_nearest_gradient(center=0.5))
