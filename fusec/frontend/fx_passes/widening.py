"""Multiply in f32 where the CPU's library has no instructions for a type of 16 or 8 bits.

Runs on graphs of ATen, inference or joint. Without such instructions oneDNN's and ATen's products
and convolutions of 16-bit floats take their terms one by one. So operands are widened before, and
results rounded behind, which is what these calls do with each term and each sum::

    y = mm(a, b)    becomes    y = bf16(mm(f32(a), f32(b)))

A core with AVX2 then takes a sixth of the time for a linear of 128 rows (2048 x 2048, ``bf16``), a
fiftieth for a ``bmm`` of 8 matrices of 256 x 256, a seventieth for a convolution (64 channels, 3 x
3), a ninth for it channels-last (2026-11-27). Conversions are kernels, which fuse with what stands
beside them; up to some 256 rows kernels of fusec's own multiply, and convert weights as they read
them (``ir/streamed.py``). One row stays as it is beside weights that lie along their terms, and few
beside weights that will lie in panels: such kernels, too, widen each weight as they read it. So do
products around expansions (logits of a loss), which run in chunks of rows:
``passes/graph/chunk.py``.

Products of scaled floats of 8 bits eager computes in f32, too, with operands that it makes in each
call. Here the scales stand behind the product, where they fuse with what follows; a kernel of few
rows converts each weight as it reads it::

    y = _scaled_mm(a, b, sa, sb, bias)    becomes    y = bf16(mm(f32(a), f32(b)) * (sa * sb) + bias)
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusec.frontend.fallbacks import named_arguments
from fusec.frontend.fx_passes.fx_nodes import (
    call_like,
    cast_like,
    count_elements,
    decide,
    fakes_of,
    hint_of,
    tensor_of,
)
from fusec.frontend.shapes import from_torch_dtype, to_torch_dtype
from fusec.ir.decision import Decision
from fusec.ir.expr import reach
from fusec.ir.machine import Machine
from fusec.torch_interior import running_plainly

aten = torch.ops.aten

NARROWEST = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types of which eager scales results, where they are asked for."""
SCALED = aten._scaled_mm.default
_REASON = "by rule: the library has no instructions for {} here, and takes terms one by one"
_AS_EAGER = "by rule: eager multiplies in f32, too, with operands that it makes in each call"
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def widen_operands(
    gm: fx.GraphModule,
    targets: tuple[Any, ...],
    machine: Machine,
    keep: Collection[fx.Node],
    *,
    packed: bool,
) -> None:
    """Compute some operations in f32 whose types the library is slow with, in place.

    Args:
        targets: PRODUCTS or CONVOLUTIONS.
        keep: nodes that are left as they are.
        packed: weights of few rows will be packed in panels.
    """
    slow = {to_torch_dtype(kind) for kind in machine.slow_types}
    few = machine.loops.always if packed else 1
    found = [
        node
        for target in targets
        for node in gm.graph.find_nodes(op="call_function", target=target)
        if node not in keep and _type_of(node) in slow and not _streams(node, few)
    ]
    for node in found:
        _widen(node, slow)
    if found:
        gm.recompile()


def widen_scaled(gm: fx.GraphModule) -> None:
    """Compute products of scaled floats of 8 bits in f32, in place."""
    for node in gm.graph.find_nodes(op="call_function", target=SCALED):
        named = named_arguments(node)
        if not _is_taken(named):
            continue
        with node.graph.inserting_before(node):
            node.replace_all_uses_with(_scaled_in_f32(node, named))
        node.graph.erase_node(node)
    gm.recompile()


def _is_taken(named: dict[str, Any]) -> bool:
    """Return True for scales and a bias that eager takes on CPUs, where it checks as it runs."""
    names = ("self", "mat2", "scale_a", "scale_b", "bias")
    a, b, rows, columns, bias = (tensor_of(named[name]) for name in names)
    assert a is not None and b is not None and rows is not None and columns is not None
    m, n = a.shape[0], b.shape[1]

    def agree(shape: torch.Size, *wanted: int | torch.SymInt) -> bool:
        pairs = zip(shape, wanted, strict=False)
        return len(shape) == len(wanted) and all(statically_known_true(x == y) for x, y in pairs)

    one = all(agree(scale.shape, *(1,) * min(scale.dim(), 2)) for scale in (rows, columns))
    each = agree(rows.shape, m, 1) and agree(columns.shape, 1, n)
    added = bias is None or agree(bias.shape, n)
    result = tensor_of(named["scale_result"])
    scales = [rows, columns] if result is None else [rows, columns, result]
    divided = result is None or agree(result.shape, *(1,) * min(result.dim(), 2))
    return added and divided and (one or each) and {s.dtype for s in scales} == {torch.float32}


def _scaled_in_f32(node: fx.Node, named: dict[str, Any]) -> fx.Node:
    a, b = (cast_like(node, named[name], torch.float32) for name in ("self", "mat2"))
    made = call_like(node, aten.mm.default, a, b)
    decide(made, Decision(node.name, "f32", True, _AS_EAGER, None, "f8"))
    scale = call_like(node, aten.mul.Tensor, named["scale_a"], named["scale_b"])
    made = call_like(node, aten.mul.Tensor, made, scale)
    if (bias := named["bias"]) is not None:
        made = call_like(node, aten.add.Tensor, made, cast_like(node, bias, torch.float32))
    if (scale := named["scale_result"]) is not None and named["out_dtype"] in NARROWEST:
        made = call_like(
            node, aten.mul.Tensor, made, call_like(node, aten.reciprocal.default, scale)
        )
    kinds = (n.meta["val"].dtype for n in (named["self"], named["mat2"], node))
    if not product_saturates(*kinds):  # NaN for what is nearer to 480, whose code is NaN's
        large = call_like(node, aten.gt.Scalar, call_like(node, aten.abs.default, made), 464.0)
        nan = call_like(node, aten.full_like.default, made, math.nan)
        made = call_like(node, aten.where.self, large, nan, made)
    return cast_like(node, made, node.meta["val"].dtype)


@functools.cache
def product_saturates(left: torch.dtype, right: torch.dtype, result: torch.dtype) -> bool:
    """Return False if eager's product of floats of 8 bits on CPUs is NaN where it is too large.

    Results of ``float8_e4m3fn``, without infinities, are its largest number there; but on CPUs with
    AMX oneDNN multiplies two matrices of one type, and has NaN (torch 2.13).
    """
    if result is not torch.float8_e4m3fn:
        return True
    with running_plainly():
        ones, scale = torch.ones(16, 16), torch.tensor(1e9)
        try:
            made = SCALED(ones.to(left), ones.to(right).t(), scale, scale, out_dtype=result)
        except RuntimeError:  # no kernel for these types: nothing to agree with
            return True
        return not bool(made.float().isnan().any())


def _type_of(node: fx.Node) -> torch.dtype | None:
    """Return the type of a call's operands; None for a mixture, which eager refuses as it runs."""
    found = {tensor.dtype for n in node.all_input_nodes if (tensor := tensor_of(n)) is not None}
    return found.pop() if len(found) == 1 else None


def _streams(node: fx.Node, few: int) -> bool:
    """Return True for a product of few rows that a kernel of fusec's own may compute."""
    if node.target in CONVOLUTIONS:
        return False
    a, b = (tensor_of(arg) for arg in node.args[-2:])
    assert a is not None and b is not None
    rows, columns = hint_of(a.shape[-2]), hint_of(b.shape[-1])
    if a.dim() == 3:  # a matrix for each row, perhaps gathered from a table
        return rows == 1 or columns == 1
    return rows <= few and b.stride(0) == 1 and not _is_of_integers(node)


def _is_of_integers(node: fx.Node) -> bool:
    """Return True if a product's weights are computed from integers, perhaps two in a byte."""
    elements = count_elements(fakes_of(node.all_input_nodes[-1].meta["val"])[0])

    def sources(made: fx.Node) -> list[fx.Node]:
        tensors = ((n, tensor_of(n)) for n in made.all_input_nodes)
        return [n for n, t in tensors if t is not None and count_elements(t) * 8 > elements]

    found = reach([node.all_input_nodes[-1]], sources)
    return any(from_torch_dtype(n.meta["val"].dtype).is_integer for n in found)


def _widen(node: fx.Node, slow: Collection[torch.dtype]) -> None:
    """Replace a call by one on f32, whose results are rounded to the call's types."""

    def wide(argument: Any) -> Any:
        value = tensor_of(argument)
        if value is None or value.dtype not in slow:
            return argument
        return cast_like(node, argument, torch.float32)

    with node.graph.inserting_before(node):
        args = fx.map_arg(node.args, wide)
        kwargs = fx.map_arg(node.kwargs, wide)
        made = call_like(node, node.target, *args, **kwargs)
        kind = from_torch_dtype(fakes_of(node.meta["val"])[0].dtype)
        decide(made, Decision(node.name, "f32", True, _REASON.format(kind), None, str(kind)))
        if isinstance(node.meta["val"], torch.Tensor):
            node.replace_all_uses_with(cast_like(node, made, node.meta["val"].dtype))
    for user in list(node.users):  # one of several gradients
        with node.graph.inserting_before(user):
            part = call_like(user, operator.getitem, made, user.args[1])
            user.replace_all_uses_with(cast_like(user, part, user.meta["val"].dtype))
        node.graph.erase_node(user)
    node.graph.erase_node(node)
