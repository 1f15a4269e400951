"""The effects of eager kernels, as passes see them: products, copies, scatters, views.

Only ``effect_of`` derives an ``Effect`` from an operation's name and signature. A row in a table
below lets the passes handle one more operation; a call that no table lists is ``Unknown``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from fusec.frontend.fx_passes.packing import PANELS
from fusec.frontend.linears import linears
from fusec.frontend.origin import extern_name
from fusec.ir.argument import Argument, SizeValue, View, argument_views
from fusec.ir.dtype import NumberForm
from fusec.ir.extern import (
    Alias,
    Constant,
    Convolution,
    CopyInto,
    Effect,
    Fresh,
    Pending,
    Product,
    Scatter,
    Unknown,
    Window,
    WindowUpdate,
)
from fusec.ir.index import Index, index, product
from fusec.torch_interior import OpOverload

aten = torch.ops.aten

_FRESH = {
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution, aten.convolution_backward,
    aten._fft_r2c, aten._fft_c2c, aten._fft_c2r,
}  # fmt: skip
"""Operations whose results never share memory with their arguments."""
WINDOW_UPDATES = {aten.slice_scatter.default, aten.select_scatter.default}
UPDATES = {
    aten.index_put.default: aten.index_put_.default,
    aten._unsafe_index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.embedding_renorm.default: aten.embedding_renorm_.default,
}
"""Functional updates of elements of their first argument -> the in-place overloads."""
CONVOLUTION = "mkldnn._convolution_pointwise.default"
_ACTIVATIONS: tuple[tuple[str, tuple[Argument, ...]], ...] = (
    ("silu", ("swish", (), "")),
    ("sigmoid", ("sigmoid", (), "")),
    ("hardswish", ("hardswish", (), "")),
)
"""Activations that oneDNN fuses into a convolution: name, and the call's last arguments for it.

Only those that agree with eager on NaN and infinities: oneDNN's ReLU and hardsigmoid turn a NaN
into a number, and its GELU turns an infinity into NaN.
"""
_COLLECTIVES, _WAIT = "_c10d_functional", "_c10d_functional.wait_tensor.default"
"""A collective's result holds what other ranks send only after ``wait_tensor``."""

Args = tuple[Argument, ...]


def effect_of(
    target: Any,
    args: Args,
    kwargs: tuple[tuple[str, Argument], ...],
    packed: Mapping[str, Constant] = MappingProxyType({}),
) -> Effect:
    """Return the effect of a call of ``target`` with these arguments.

    Args:
        packed: library -> the second operand of a product, transposed and packed for that library.
    """
    forms = {view.form for view in argument_views(args)}
    if target is aten.copy_.default and _are_views(args[:2], 2):
        return CopyInto()
    if any(form.has_bit for form in forms):
        return _of_whole_call(target)
    if target in UPDATES and args and isinstance(args[0], View):
        return Scatter(extern_name(UPDATES[target]), _moved(target, args, dict(kwargs)))
    if target in WINDOW_UPDATES and _are_views(args[:2], 2) and len(forms) == 1:
        return WindowUpdate(_window(target, args, dict(kwargs)), extern_name(aten.copy_.default))
    if NumberForm.COMPLEX in forms:
        return _of_whole_call(target)
    if target is aten.mm.default and _are_views(args, 2):
        a, w = args
        assert isinstance(a, View) and isinstance(w, View)
        return Product(
            extern_name(aten.addmm.default),
            extern_name(aten.addmm_.default),
            linears(a, w, packed),
            packed.get(PANELS),
        )
    if extern_name(target) == CONVOLUTION:
        return Convolution(_ACTIVATIONS, "mkldnn._convolution_pointwise.binary")
    return _of_whole_call(target)


def _of_whole_call(target: Any) -> Effect:
    """Return what is known of a call that no pass rewrites."""
    if getattr(target, "overloadpacket", None) in _FRESH:
        return Fresh()
    if isinstance(target, OpOverload) and target.is_view:
        return Alias()
    is_collective = getattr(target, "namespace", "") == _COLLECTIVES
    return Pending() if is_collective and extern_name(target) != _WAIT else Unknown()


def _are_views(args: Args, count: int) -> bool:
    return len(args) == count and all(isinstance(arg, View) for arg in args)


def _window(target: Any, args: Args, named: dict[str, Argument]) -> Window:
    """Return the window that a ``slice_scatter`` or ``select_scatter`` replaces."""
    is_slice = target is aten.slice_scatter.default
    axis, start, _, step = (
        args[k] if k < len(args) else named.get(name)
        for k, name in enumerate(("dim", "start" if is_slice else "index", "end", "step"), 2)
    )
    whole = args[0]
    assert isinstance(whole, View)
    k = axis if isinstance(axis, int) else 0
    k = k % whole.rank
    first = _integer(start, 0)
    first = first + whole.shape[k] if first.hint() < 0 else first
    return Window(k, first, _integer(step, 1) if is_slice else None)


def _integer(arg: Argument, default: int) -> Index:
    if isinstance(arg, SizeValue):
        return arg.index
    return index(arg if isinstance(arg, int) else default)


def _moved(target: Any, args: Args, named: dict[str, Argument]) -> Index:
    """Return how many elements of its first argument a call writes, plus those it loads first."""
    name = extern_name(UPDATES[target]).split(".")[1].rstrip("_")
    whole = args[0]
    assert isinstance(whole, View)
    if name == "embedding_renorm":  # loads each row for its norm, and writes it
        rows = args[1].shape if isinstance(args[1], View) else whole.shape[:1]
        return product((*rows, *whole.shape[1:])) * 2
    if name != "index_put":
        source = args[3 if name in ("index_copy", "index_add") else 2]
        count = product(source.shape if isinstance(source, View) else whole.shape)
        return count * 2 if name.endswith("_add") else count
    chosen = args[1] if isinstance(args[1], tuple) else ()
    picked = [view for view in chosen if isinstance(view, View)]
    if any(len(view.shape) == 0 or view.buffer.dtype.name == "bool" for view in picked):
        return product(whole.shape)
    rank = max((len(view.shape) for view in picked), default=0)
    places = index(1)
    for k in range(1, rank + 1):
        extents = [view.shape[-k] for view in picked if len(view.shape) >= k]
        places = places * max(extents, key=lambda extent: extent.hint())
    rest = [e for k, e in enumerate(whole.shape) if k >= len(chosen) or chosen[k] is None]
    accumulates = args[3] if len(args) > 3 else named.get("accumulate")
    return product((places, *rest)) * (2 if accumulates else 1)
