"""The reasons why calls run as eager kernels, as ``fusec explain`` shows them.

A call without a lowering is one ``Extern`` with the reason of its row here. For an operation in no
row, the reason names the operation. Here is also what else is asked of an eager kernel: whether it
writes, draws, sends or adds, and with which types it computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fusec.frontend.fx_passes.fx_nodes import aten
from fusec.frontend.ops.literals import LIFTS
from fusec.frontend.origin import op_name
from fusec.frontend.parts import CALLS_PARTS
from fusec.ir.dtype import F4X2, F8, DType
from fusec.torch_interior import (
    HigherOrderOperator,
    OpOverload,
    bound_arguments,
    tensors_in,
    written_arguments,
)

CONTRACTION = "contraction: runs in the library"
ATTENTION = "attention: runs in the library"

PADS = tuple(f"{kind}_pad{rank}d" for kind in ("reflection", "replication") for rank in (1, 2, 3))
"""Pads whose elements are copies of the tensor's own."""

_OPERATIONS = {
    CONTRACTION: """mm bmm addmm baddbmm addbmm addmv addr dot vdot mv matmul linear _int_mm
        _scaled_mm _scaled_mm_v2 _scaled_grouped_mm _scaled_grouped_mm_v2 _trilinear _grouped_mm
        _addmm_activation _weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int8pack_mm
        linear_backward matmul_backward""",
    "convolution: runs in the library": """convolution convolution_backward _convolution
        mkldnn_convolution _convolution_pointwise""",
    "padding by what is inside: the library copies rows": " ".join(
        f"{name} {name}_backward" for name in PADS
    ),
    "pooling: runs in the library": "fractional_max_pool2d fractional_max_pool3d",
    "sorting": """sort topk argsort kthvalue median nanmedian mode msort _unique2 searchsorted
        bucketize""",
    "a scan along an axis": """cumsum cumprod cummax cummin logcumsumexp _cummax_helper
        _cummin_helper""",
    "a scatter: elements may collide": """index_put _unsafe_index_put scatter scatter_add
        scatter_reduce index_add index_copy index_reduce masked_scatter put index_fill
        embedding_dense_backward as_strided_scatter _embedding_bag histc bincount""",
    "uninitialised memory": """empty empty_strided empty_like new_empty new_empty_strided
        empty_permuted""",
    "a result that depends on data": """nonzero _local_scalar_dense masked_select item
        repeat_interleave equal""",
    "copy into an input": "copy_",
}
"""Reason -> the operations of ATen that it holds for."""

_REASON_OF = {name: reason for reason, names in _OPERATIONS.items() for name in names.split()}

_COLLECTIVES = (
    "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor",
    "symm_mem",
)  # fmt: skip
_IMPURE_HIGHER_ORDER = (
    "with_effects", "print", "run_and_save_rng_state", "run_with_rng_state", "call_torchbind",
    "triton_kernel_wrapper_mutation", "auto_functionalized_v1_mutation",
)  # fmt: skip

_MOVES = {
    *(aten._to_copy.default, aten.to.dtype, torch.ops.prims.convert_element_type.default),
    *(aten.clone.default, aten.copy.default, aten.copy_.default, aten.cat.default),
    *(aten.where.self, aten.constant_pad_nd.default, aten.flip.default, aten.roll.default),
    *(aten.index.Tensor, aten.index_select.default, aten.embedding.default, aten.repeat.default),
    *(aten.slice_scatter.default, aten.select_scatter.default, aten.full.default),
}
"""Operations beside views that floats of 8 bits take part in: they make, convert or move them."""
_SCALED = tuple(f"aten.{name}.default" for name in ("_scaled_mm", "_scaled_mm_v2"))
_SCALED += tuple(f"aten._scaled_grouped_mm{form}.default" for form in ("", "_v2"))
"""Those that multiply them."""


def reason_for(node: fx.Node) -> str:
    """Return why a call is not lowered, in a few words."""
    if node.target is torch.ops.higher_order.with_effects:
        return f"{op_name(node.args[1])} acts beside its results: it runs once, in order"
    return reason_of(node.target)


def reason_of(target: Any) -> str:
    """Return why calls of an operator are not lowered, in a few words."""
    if talks_to_ranks(target):
        return "talks to other ranks"
    namespace = getattr(target, "namespace", "")
    packet = op_name(target).removeprefix("mkldnn.").partition(".")[0]
    if namespace in ("aten", "mkldnn") and packet in _REASON_OF:
        return _REASON_OF[packet]
    if namespace == "aten":
        if "scaled_dot_product" in packet or "_attention" in packet:
            return ATTENTION
        if draws_random_numbers(target):
            return "random numbers: eager's stream"
        return f"no lowering for {target}"
    if target is torch.ops.fusec.random_seeds.default:
        return "random numbers: a seed for each draw"
    if isinstance(target, HigherOrderOperator):
        return f"the higher-order operation {target.name()}"
    return f"the custom operation {op_name(target)}"


def is_product(target: Any) -> bool:
    """Return True for a product of matrices."""
    return reason_of(target) is CONTRACTION


def talks_to_ranks(target: Any) -> bool:
    """Return True for a collective: each call sends to other ranks, receives, or waits."""
    return getattr(target, "namespace", "") in _COLLECTIVES


def draws_random_numbers(target: Any) -> bool:
    """Return True if each call advances a generator's state."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by name, those left out at their defaults."""
    return bound_arguments(node.target, node.args, node.kwargs)


def is_written(node: fx.Node) -> bool:
    """Return True if a user of a node writes its tensor."""
    return any(node in written_arguments(user) for user in node.users)


def is_impure(node: fx.Node) -> bool:
    """Return True if a call must be kept, and kept in order: it writes, draws, asserts or sends."""
    target = node.target
    if isinstance(target, OpOverload):
        return (
            target._schema.is_mutable
            or draws_random_numbers(target)
            or talks_to_ranks(target)
            or not target._schema.returns
            or node.is_impure()
        )
    if isinstance(target, HigherOrderOperator):
        return target.name() in _IMPURE_HIGHER_ORDER
    return node.is_impure()


def computes_with(target: Any, dtype: DType) -> bool:
    """Return False for an operation that has no floats of 8 bits, or no pairs of 4 bits.

    Both have views and scaled products; those of 8 bits are made, converted and moved as well.
    """
    if dtype not in (*F8, F4X2):
        return True
    is_view = isinstance(target, OpOverload) and target.is_view
    moves = dtype is not F4X2 and (target in _MOVES or target in LIFTS)
    return is_view or moves or str(target) in _SCALED


# -- calls that add no floats ----------------------------------------------------------------------

_NAMES = """
    sort topk kthvalue median nanmedian mode msort cummax cummin
    index index_select gather take embedding masked_select repeat_interleave index_put
    _unsafe_index_put index_copy index_fill scatter masked_scatter put slice_scatter select_scatter
    diagonal_scatter as_strided_scatter cat stack clone copy copy_ fill roll flip tril triu
    constant_pad_nd max_pool2d_with_indices max_pool3d_with_indices fractional_max_pool2d
    fractional_max_pool3d adaptive_max_pool2d adaptive_max_pool3d max_unpool2d max_unpool3d
    empty empty_strided empty_like new_empty new_empty_strided empty_permuted
"""
_CHOOSES_OR_MOVES = frozenset((*_NAMES.split(), *PADS))
"""Operations of ATen without arithmetic, unless they accumulate or reduce."""


def is_exact(node: fx.Node) -> bool:
    """Return True if a call adds no floats, so that it has no order in which it does.

    An eager kernel chooses the order of its additions by sizes, strides and threads. Calls that
    choose or move elements, compute each by itself, draw, or make integers give the same bits in
    any order; an operation in no table adds. A higher-order one, whose branches or bodies are
    compiled like the rest, does not add itself.
    """
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return target.name() in CALLS_PARTS
    tensors = tensors_in(node.meta.get("val"))
    if not any(t.is_floating_point() or t.is_complex() for t in tensors):
        return True
    if not isinstance(target, OpOverload):
        return False
    if target.is_view or torch.Tag.pointwise in target.tags or draws_random_numbers(target):
        return True
    if target is torch.ops.fusec.random_seeds.default:
        return True
    adds = "reduce" in target._overloadname or named_arguments(node).get("accumulate", False)
    return op_name(target).partition(".")[0] in _CHOOSES_OR_MOVES and not adds
