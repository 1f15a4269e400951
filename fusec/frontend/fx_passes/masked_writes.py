"""Replace masked writes of values that need a gradient by ``where``.

The gradient of ``h[mask] = token`` gathers those of all selected elements, and their number depends
on data, which AOTAutograd does not trace by default. Where the value does not vary along the
selected elements, the write is a ``where`` of it and the old elements, and so are gradients::

    h[b, t, c] = mask[b, t] ? token[c] : h[b, t, c]
    dtoken[c] = sum(b, t: mask[b, t] ? dh[b, t, c] : 0)

So in Dynamo graphs such writes call the functions below. Writes of other values stay.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fusec.frontend.fx_passes.dynamo_graph import call_instead, plain_parts


def write_by_masks(gm: fx.GraphModule) -> None:
    """Let indexed writes of a Dynamo graph use ``where`` if a mask selects elements, in place."""
    call_instead(plain_parts(gm), lambda node: _WRITES.get(node.target))


def assign(x: torch.Tensor, indices: Any, value: Any) -> None:
    """Do ``x[indices] = value``."""
    aligned = _aligned(x, indices if isinstance(indices, tuple) else (indices,), value)
    if aligned is None:
        x[indices] = value
    else:
        x.copy_(torch.where(*aligned, x))


def index_put_(
    x: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """Write as ``Tensor.index_put_`` does, by ``where`` if possible."""
    chosen = _written(x, indices, values, accumulate)
    return x.index_put_(tuple(indices), values, accumulate) if chosen is None else x.copy_(chosen)


def index_put(
    x: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """Return the result of ``Tensor.index_put``, by ``where`` if possible."""
    chosen = _written(x, indices, values, accumulate)
    return x.index_put(tuple(indices), values, accumulate) if chosen is None else chosen


_WRITES: Mapping[Any, Callable[..., Any]] = {
    operator.setitem: assign,
    "index_put_": index_put_,
    torch.index_put_: index_put_,
    "index_put": index_put,
    torch.index_put: index_put,
}


def _written(
    x: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool
) -> torch.Tensor | None:
    """Return the result of ``index_put`` as a ``where``, None if it cannot be one."""
    aligned = _aligned(x, tuple(indices), values)
    if aligned is None:
        return None
    mask, value = aligned
    return torch.where(mask, x + value if accumulate else value, x)


def _aligned(
    x: torch.Tensor, indices: tuple[Any, ...], value: Any
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return mask and value shaped to broadcast with ``x``; None if the write is not a ``where``.

    The mask may have whole axes before and after it: ``x[:, mask]``.
    """
    if not (isinstance(value, torch.Tensor) and value.requires_grad and value.dtype is x.dtype):
        return None
    masks = [k for k, item in enumerate(indices) if not _is_whole(item)]
    mask = indices[masks[0]] if len(masks) == 1 else None
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool or mask.dim() == 0:
        return None
    ahead, rest = indices[: masks[0]], indices[masks[0] + 1 :]
    from_end = any(item is Ellipsis for item in ahead)
    before = x.dim() - mask.dim() - len(rest) if from_end else len(ahead)
    behind = x.dim() - before - mask.dim()
    if min(before, behind) < 0 or value.dim() > before + 1 + behind:
        return None
    if {mask.device, value.device if value.dim() else x.device} != {x.device}:
        return None
    covered = x.shape[before : before + mask.dim()]
    if not all(guard_or_false(a == b) for a, b in zip(covered, mask.shape, strict=True)):
        return None
    if value.dim() > behind:
        along = value.dim() - behind - 1
        if not guard_or_false(value.shape[along] == 1):
            return None  # a value of its own for each selected element
        value = value.unflatten(along, (1,) * mask.dim())
    ends = zip(reversed(value.shape), reversed(x.shape), strict=False)
    if not all(guard_or_false(n == 1) or guard_or_false(n == m) for n, m in ends):
        return None  # an error, which eager raises
    return mask[(..., *(None,) * behind)], value


def _is_whole(item: Any) -> bool:
    """Return True for an index that selects all of an axis, or of several."""
    return item is Ellipsis or (isinstance(item, slice) and item == slice(None))
