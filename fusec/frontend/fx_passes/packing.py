"""Pack weights into the layout that a library reads: once, not in each call.

oneDNN multiplies contiguous blocks of a weight, and reorders a plain weight into these at each
call. Under ``freeze`` (``freezing.py``), where a weight is known before the call, it is reordered
once::

    convolution(x, w, b, ...)    becomes    p = mkldnn._reorder_convolution_weight(w, ...)
                                            mkldnn._convolution_pointwise(x, p, b, ...)

for channels-last images, and the result is channels-last. A product of two matrices is kept, and
its packed weights make further candidates (``Linear.packed``): oneDNN's, and MKL's, which is packed
for one number of rows.

A product whose rows fit one tile, or that has few, reads its weights once, and can read them in
panels of some columns, ``w[n//32, k, n%32]``: columns are adjacent, and one sweep over a panel
loads contiguous memory. That is no library's layout: fusec's own kernel of the product reads it
(``ir/streamed.py``). Of few rows, weights of 16 bits have panels, and those in f32 where the graph
reads them again from a core's cache, as the steps of a recurrence do; of more rows, those in f32.

A library's packed weight is opaque. Its traced value has the plain weight's shape and type; only
the call that it was packed for reads it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fusec.frontend.fx_passes.channels_last import is_last
from fusec.frontend.fx_passes.fx_nodes import aten, call_like, call_of_value, hint_of, replace
from fusec.frontend.fx_passes.short_convolutions import is_laid_out
from fusec.frontend.fx_passes.weights import fixed_values
from fusec.ir.machine import Machine

mkl, mkldnn = torch.ops.mkl, torch.ops.mkldnn

PACKED = "fusec_packed"
"""Key of a product's ``meta``: library -> the node that holds its packed weight."""
PACKED_ONEDNN, PACKED_MKL = "packed oneDNN", "packed MKL"
"""Libraries that multiply packed weights."""
PANELS = "panels"
"""Key beside the libraries: the weight in panels, which fusec's own kernel reads."""


PACKS = "fusec_packs"
"""Key of a convolution's ``meta``: its weight is packed if its images become channels-last."""


def mark_packed(gm: fx.GraphModule) -> None:
    """Set ``PACKS`` of the convolutions of a graph that is to be frozen."""
    known = fixed_values(gm)
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        node.meta[PACKS] = node.args[1] in known and _may_pack(node)


def pack_convolutions(gm: fx.GraphModule, known: dict[fx.Node, int]) -> None:
    """Replace convolutions whose weights are known by calls with packed weights, in place.

    Args:
        known: node -> bytes of weights, for nodes computed from these; packed ones are added.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        x, weight, bias, *settings = node.args
        images = x.meta["val"], node.meta["val"]
        if weight not in known or not (_may_pack(node) and all(map(is_last, images))):
            continue
        if is_laid_out(weight.meta["val"]):
            continue  # computed by a kernel of fusec's own
        with gm.graph.inserting_before(node):
            sizes = [hint_of(extent) for extent in images[0].shape]
            order = _order(*settings)
            pack = mkldnn._reorder_convolution_weight.default
            packed = call_of_value(node, weight.meta["val"], pack, weight, *order, sizes)
            call = mkldnn._convolution_pointwise.default
            made = call_of_value(node, images[1], call, x, packed, bias, *order, "none", [], "")
        known[packed] = known[weight]
        made.meta = {**node.meta}
        replace(node, made)


def _may_pack(node: fx.Node) -> bool:
    """Return True for a convolution that oneDNN computes correctly with a packed weight.

    It does not for one output channel and a kernel that covers the image (torch 2.13, 2026-11).
    """
    x, weight, *_, transposed, _, _ = node.args
    if transposed or not has_packing(x.meta["val"]):  # type: ignore[union-attr]
        return False
    if hint_of(weight.meta["val"].shape[0]) == 1:  # type: ignore[union-attr]
        return False
    return all(isinstance(n, int) for sizes in node.args[3:6] for n in sizes)  # type: ignore[union-attr]


def convolve_packed(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, *settings: Any
) -> torch.Tensor:
    """Return ``aten.convolution`` of channels-last images with a packed weight.

    Args:
        settings: the arguments of ``aten.convolution`` after the bias.
    """
    call = mkldnn._convolution_pointwise
    made: torch.Tensor = call(x, packed, bias, *_order(*settings), "none", [], "")
    return made


def packed_weight(weight: torch.Tensor, sizes: list[int], *settings: Any) -> torch.Tensor:
    """Return a convolution's weight packed for images of some sizes.

    Args:
        settings: the arguments of ``aten.convolution`` after the bias.
    """
    packed: torch.Tensor = mkldnn._reorder_convolution_weight(weight, *_order(*settings), sizes)
    return packed


def _order(
    stride: Any, padding: Any, dilation: Any, transposed: Any, output_padding: Any, groups: Any
) -> tuple[Any, ...]:
    """Return a convolution's settings in the order of oneDNN's call; it is not transposed."""
    return padding, stride, dilation, groups


def pack_products(gm: fx.GraphModule, known: dict[fx.Node, int], machine: Machine | None) -> None:
    """Pack the known weights of products, as operands of candidates: ``meta[PACKED]``.

    Args:
        machine: whose skinny products read panels, too; None: no product does.
    """
    made: dict[tuple[fx.Node, bool, bool, int], dict[str, fx.Node]] = {}
    products = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
    reads = Counter(_transposed(node.args[1]) or node.args[1] for node in products)
    for node in products:
        a, b = node.args
        extent = a.meta["val"].shape[0]
        packs = linear_packs(b.meta["val"], sized=isinstance(extent, int)) if b in known else {}
        if not packs:
            continue
        rows, weight = hint_of(extent), _transposed(b)
        again = reads[weight or b] > 1
        # One weight may be used plain and transposed: each use has its own packed weight.
        key = (weight or b, weight is None, isinstance(extent, int), rows)
        if key not in made:
            with gm.graph.inserting_before(node):
                if weight is None:
                    weight = call_like(node, aten.permute.default, b, [1, 0])
                    known[weight] = known[b]
                value = torch.empty_like(weight.meta["val"], memory_format=torch.contiguous_format)
                made[key] = {
                    library: call_of_value(node, value, pack, weight, rows)
                    for library, pack in packs.items()
                }
                if machine and has_panels(value, extent, machine, again=again):
                    made[key][PANELS] = _panels(node, weight, machine.loops.panel)
            known.update(dict.fromkeys(made[key].values(), known[b]))
        node.meta[PACKED] = made[key]


def has_panels(
    weight: torch.Tensor, rows: int | torch.SymInt, machine: Machine, *, again: bool
) -> bool:
    """Return True for a weight [outputs, inputs] that fills two or more panels and gains by them.

    Args:
        again: several products of the graph read the weight.
    """
    outputs, tuning = weight.shape[0], machine.loops
    if not (isinstance(rows, int) and isinstance(outputs, int)):
        return False
    if outputs <= tuning.panel:
        return False
    if rows > machine.skinny_rows:
        fits = rows <= machine.cached.streamed_rows and tuning.panel <= 4 * machine.vector
        return fits and weight.dtype is torch.float32
    is_cached = again and weight.nbytes <= tuning.cached_bytes
    return outputs % tuning.panel == 0 and (weight.dtype.itemsize == 2 or is_cached)


def panels_of(weight: torch.Tensor, panel: int) -> torch.Tensor:
    """Return a weight [outputs, inputs] in panels [count, inputs, panel], the last one padded."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % panel))
    return padded.reshape(-1, panel, inputs).transpose(1, 2).contiguous()


def _panels(node: fx.Node, weight: fx.Node, panel: int) -> fx.Node:
    """Insert the calls of ``panels_of``."""
    outputs, inputs = weight.meta["val"].shape
    count = -(-outputs // panel)
    if outputs % panel:
        rest = [0, 0, 0, count * panel - outputs]
        weight = call_like(node, aten.constant_pad_nd.default, weight, rest)
    cut = call_like(node, aten.reshape.default, weight, [count, panel, inputs])
    turned = call_like(node, aten.permute.default, cut, [0, 2, 1])
    return call_like(node, aten.clone.default, turned, memory_format=torch.contiguous_format)


def _transposed(matrix: fx.Node) -> fx.Node | None:
    """Return the node that a matrix is a transposed view of, or None."""
    turned = matrix.target is aten.permute.default and matrix.args[1] == [1, 0]
    return matrix.args[0] if turned else None  # type: ignore[return-value]


def linear_packs(
    weight: torch.Tensor, *, sized: bool = True
) -> Mapping[str, Callable[[torch.Tensor, int], torch.Tensor]]:
    """Return library -> function that packs a weight [outputs, inputs] for a number of rows.

    Args:
        sized: the number of rows is static; MKL packs for one number.
    """
    if not has_packing(weight):
        return {}
    packs = {PACKED_ONEDNN: mkldnn._reorder_linear_weight.default}
    has_mkl = torch.backends.mkl.is_available() and hasattr(mkl, "_mkl_linear")
    if sized and weight.dtype is torch.float32 and has_mkl:
        packs[PACKED_MKL] = mkl._mkl_reorder_linear_weight.default
    return packs


def has_onednn() -> bool:
    """Return True if torch has oneDNN's calls here, under the library's former name."""
    return torch.backends.mkldnn.is_available() and hasattr(mkldnn, "_reorder_linear_weight")


def has_packing(value: torch.Tensor) -> bool:
    """Return True for a tensor whose type and device oneDNN packs weights for here."""
    return value.device.type == "cpu" and value.dtype in _types()


@functools.cache
def _types() -> frozenset[torch.dtype]:
    if not has_onednn():
        return frozenset()
    half = {
        torch.bfloat16: mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: mkldnn._is_mkldnn_fp16_supported(),
    }
    return frozenset({torch.float32, *(kind for kind, has in half.items() if has)})
