"""The effects of eager kernels, as passes see them: products, copies, scatters, views.

Only ``effect_of`` derives an ``Effect`` from an operation's name and signature. A row in a table
below lets the passes handle one more operation; a call that no table lists is ``Unknown``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import fx

from fusec.frontend.fx_passes.fx_nodes import aten, count_elements, tensor_of
from fusec.frontend.fx_passes.packing import PANELS
from fusec.frontend.linears import linears
from fusec.frontend.origin import extern_name
from fusec.frontend.shapes import SizeMap, from_end
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
from fusec.torch_interior import OpOverload, bound_arguments

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
_ADDITIONS = (aten.index_add_, aten.scatter_add_)
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
Kwargs = tuple[tuple[str, Argument], ...]


def effect_of(
    target: Any,
    args: Args,
    kwargs: Kwargs,
    sizes: SizeMap,
    packed: Mapping[str, Constant] = MappingProxyType({}),
) -> Effect:
    """Return the effect of a call of ``target`` with these arguments.

    Args:
        sizes: the graph's, for where a slice begins.
        packed: library -> the second operand of a product, transposed and packed for that library.
    """
    forms = {view.form for view in argument_views(args)}
    if target is aten.copy_.default and _are_views(args[:2]):
        return CopyInto()
    if any(form.has_bit for form in forms):
        return _of_whole_call(target)
    if target in UPDATES and args and isinstance(args[0], View):
        moved = _moved(target, bound_arguments(target, args, dict(kwargs)))
        return Scatter(extern_name(UPDATES[target]), moved)
    if target in WINDOW_UPDATES and _are_views(args[:2]) and len(forms) == 1:
        window = _window(bound_arguments(target, args, dict(kwargs)), sizes)
        return WindowUpdate(window, extern_name(aten.copy_.default))
    if NumberForm.COMPLEX in forms:
        return _of_whole_call(target)
    if target is aten.mm.default and _are_views(args):
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
    """Return the effect of a call that no pass rewrites: fresh, an alias, pending or unknown."""
    if getattr(target, "overloadpacket", None) in _FRESH:
        return Fresh()
    if isinstance(target, OpOverload) and target.is_view:
        return Alias()
    is_collective = getattr(target, "namespace", "") == _COLLECTIVES
    return Pending() if is_collective and extern_name(target) != _WAIT else Unknown()


def _are_views(args: Args) -> bool:
    return len(args) == 2 and all(isinstance(arg, View) for arg in args)


def _window(named: dict[str, Any], sizes: SizeMap) -> Window:
    """Return the window that a ``slice_scatter`` or ``select_scatter`` replaces."""
    whole, chosen = named["self"], named.get("index")
    k = named["dim"] % whole.rank
    if chosen is not None:
        return Window(k, from_end(_integer(chosen, 0), whole.shape[k]), None)
    first = sizes.slice_start(_integer(named["start"], 0), whole.shape[k])
    return Window(k, first, _integer(named["step"], 1))


def _integer(arg: Argument, default: int) -> Index:
    if isinstance(arg, SizeValue):
        return arg.index
    return index(arg if isinstance(arg, int) else default)


def _moved(target: Any, named: dict[str, Any]) -> Index:
    """Return how many elements of its first argument a call writes, plus those it loads first."""
    whole, places = named["self"], named.get("indices")
    if target is aten.embedding_renorm.default:  # loads each row for its norm, and writes it
        rows = places.shape if isinstance(places, View) else whole.shape[:1]
        return product((*rows, *whole.shape[1:])) * 2
    if "index" in named:
        source = named.get("source", named.get("src"))
        count = product(source.shape if isinstance(source, View) else whole.shape)
        return count * 2 if UPDATES[target].overloadpacket in _ADDITIONS else count
    chosen = places if isinstance(places, tuple) else ()
    picked = [view for view in chosen if isinstance(view, View)]
    if any(len(view.shape) == 0 or view.buffer.dtype.name == "bool" for view in picked):
        return product(whole.shape)
    rank = max((len(view.shape) for view in picked), default=0)
    each = index(1)
    for k in range(1, rank + 1):
        extents = [view.shape[-k] for view in picked if len(view.shape) >= k]
        each = each * max(extents, key=lambda extent: extent.hint())
    rest = [e for k, e in enumerate(whole.shape) if k >= len(chosen) or chosen[k] is None]
    return product((each, *rest)) * (2 if named.get("accumulate") else 1)


# -- parts of inputs -------------------------------------------------------------------------------


def parts_of_inputs(gm: fx.GraphModule, ratio: int) -> frozenset[fx.Node]:
    """Return the calls between an input and the ``copy_`` into it, if all of them replace parts.

    AOTAutograd turns ``x[:, p] = k`` into a ``select_scatter`` of all of x, and copies the result
    into x at the end. As a definition it would be computed for every element. Where the part is far
    smaller it stays a call, which ``passes/memory/in_place.py`` turns into a write in place.

    Args:
        ratio: least ratio of a tensor's elements to those of a part.

    Assumes: nodes carry ``meta["val"]``.
    """
    found: set[fx.Node] = set()
    for copy in gm.graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, node = copy.args[:2]
        chain = []
        while isinstance(node, fx.Node) and _is_small_part(node, ratio):
            chain.append(node)
            node = node.args[0]
        if node is target and target.op == "placeholder":
            found.update(chain)
    return frozenset(found)


def _is_small_part(call: fx.Node, ratio: int) -> bool:
    """Return True for a small window that is replaced, and any part that index tensors select."""
    if call.target not in WINDOW_UPDATES:
        return call.target in UPDATES
    part = tensor_of(call.args[1])
    return part is not None and count_elements(part) * ratio <= count_elements(call.meta["val"])
