"""The composite operations that AOTAutograd decomposes before fusec sees the graph.

PyTorch's core set, with some changes. Attention stays whole, forward and backward: the core set
decomposes only its forward, after which gradients are wrong. The composites whose parts fuse well
(norms, softmax, embedding) are decomposed as well; ``var_mean`` and ``sigmoid`` are not, since
their parts are primitives below ATen. Biased products are decomposed in the operands' type:
PyTorch's rule multiplies 16-bit matrices in f32, with twice the traffic and no tensor cores.
Operations whose lowering knows more than their parts do, or needs fewer nodes, are kept: tracing
dominates compile time. Dropout and Bernoulli draws are whole for ``draws.py``, which compares
probabilities with numbers of 24 bits: PyTorch's rules draw in the tensor's type. Pads by reflection
and replication are decomposed for GPUs, and for CPUs where channels are last.

Operations on lists of tensors (``aten._foreach_*``), with which optimizers are written, become
operations on one tensor, as if the program had been a loop. Kernels of equal form become one launch
(``passes/fusion/horizontal.py``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fusec.frontend.aot.custom_operations import custom_decompositions
from fusec.frontend.aot.eager_strides import with_eager_strides
from fusec.frontend.aot.lstm_layers import keeping_its_workspace
from fusec.frontend.aot.quantization import (
    product_of_int4,
    product_of_int8,
    quantized_decompositions,
)
from fusec.frontend.aot.refusals import keep_where, keeping_refused, of_probabilities
from fusec.frontend.fallbacks import PADS
from fusec.frontend.fx_passes.fx_nodes import aten
from fusec.torch_interior import (
    OpOverload,
    composite_kernel,
    core_decompositions,
    get_decompositions,
)

_ALSO = (
    *("native_layer_norm", "native_group_norm", "_softmax", "_log_softmax", "embedding"),
    *("_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
    "_native_batch_norm_legit_no_training",
    *("addmv", "dist", "elu", "ldexp", "grid_sampler_2d"),
    *("view_copy", "narrow_copy", "permute_copy", "as_strided_copy", "unbind_copy"),
)

_WHOLE = (
    *("roll", "isin", "take"),
    *("select_scatter", "index_add", "index_copy", "max_unpool2d", "max_unpool3d"),
    "embedding_dense_backward",
    *("std", "std_mean"),
    *("gelu", "gelu_backward", "silu", "silu_backward", "threshold_backward", "addcmul"),
)
"""Operations that are not decomposed; the partitioner may recompute all but the first nine.

Decomposed, ``roll`` is a remainder and a gather; ``take`` reads the value of a 0-dimensional index;
an embedding's gradient, which is one eager kernel, is a fill, a scatter and masks; ``index_add``
and ``max_unpool2d`` accept negative indices, which eager refuses.
"""


def _biased_product(multiply: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule ``beta*bias + alpha*multiply(a, b)``, all in the operands' type."""

    def rule(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if not (bias.is_floating_point() or bias.is_complex()):  # as eager converts them
            beta, alpha = int(beta), int(alpha)
        product = multiply(a, b)
        product = product if alpha == 1 else product * alpha
        if beta == 0:  # a NaN in the bias is ignored then
            return product
        return product + (bias if beta == 1 else bias * beta)

    return rule


def _copies_rows(x: Any, *_: Any) -> bool:
    """Return True for a pad on a CPU whose rows are contiguous, which the library copies.

    Decomposed, each element is a gather along the lanes. A gradient is a scatter for any strides.
    """
    step = x.stride(-1)
    return x.device.type == "cpu" and isinstance(step, int) and step == 1  # a symbol adds a guard


def _is_on_cpu(x: Any, *_: Any) -> bool:
    return bool(x.device.type == "cpu")


def _soft_margin_loss_backward(grad: Any, x: Any, target: Any, reduction: int) -> Any:
    """Return -t * sigmoid(-t * x) times ``grad``; PyTorch's ``sigmoid(t * x) - 1`` cancels."""
    slope = grad * -target * torch.sigmoid(-target * x)
    return slope / x.numel() if reduction == _MEAN else slope


def _nll_loss_backward(
    grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int, total: Any
) -> Any:
    """Return ``-grad * weight`` at targets; PyTorch's rule multiplies ``grad`` by 0 elsewhere."""
    axis = 0 if x.ndim < 2 else 1
    if reduction == _MEAN:
        grad = grad / total
    if x.ndim == 1 and target.ndim > 0:
        target = target[0]
    target = target.unsqueeze(axis)
    if x.ndim > grad.ndim > 0:
        grad = grad.unsqueeze(axis)
    along = [-1 if k == axis else 1 for k in range(x.ndim)]
    if weight is not None:
        grad = grad * weight.view(along)
    classes = torch.arange(x.shape[axis], device=x.device).view(along)
    return torch.where(classes == target, torch.where(target != ignored, -grad, 0), 0)


def _index_fill(x: Any, dim: int, index: Any, value: Any) -> Any:
    """Return ``x`` with some slices set to one value; PyTorch's rule refuses negative indices."""
    if x.ndim == 0:
        return _index_fill(x.view(1), 0, index, value).view(())
    if not isinstance(value, torch.Tensor):
        value = torch.scalar_tensor(value, dtype=x.dtype, device=x.device)
    value = value.to(x.dtype)
    places = [None] * (dim % x.ndim) + [index]
    return aten.index_put.default(x, places, value)


def _eye(
    n: Any,
    m: Any = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Any = None,
    pin_memory: bool | None = None,
) -> Any:
    """Return ones on the diagonal; PyTorch's rule counts in uint16, of which eager has no range."""
    if layout not in (None, torch.strided) or pin_memory:
        return NotImplemented
    rows, columns = (torch.arange(k, device=device) for k in (n, n if m is None else m))
    return (rows[:, None] == columns).to(dtype or torch.get_default_dtype())


def _of_rows_that_may_be_empty(rule: Callable[..., Any], *, logarithm: bool) -> Callable[..., Any]:
    """Return PyTorch's rule for a softmax, with another one for rows that may be empty.

    A maximum has no identity, so torch 2.11 traces such rows as if they had an element. With -inf
    appended, each row has a maximum.
    """

    def softmax(x: Any, axis: int, half_to_float: bool) -> Any:
        if x.ndim == 0 or guard_or_false(x.shape[axis] > 0):
            return rule(x, axis, half_to_float)
        wide = x.contiguous().to(torch.promote_types(x.dtype, torch.float32))
        lowest = wide.new_full(
            [1 if k == axis % x.ndim else n for k, n in enumerate(x.shape)], -math.inf
        )
        shifted = wide - torch.cat((wide, lowest), axis).amax(axis, keepdim=True)
        terms = shifted.exp()
        total = terms.sum(axis, keepdim=True)
        result = shifted - total.log() if logarithm else terms / total
        return result if half_to_float else result.to(x.dtype)

    return softmax


def _asserts_an_element(x: Any, dim: int | None = None, *_: Any) -> Any:
    """Assert of a maximum or minimum that there is an element, where data say how many there are.

    PyTorch traces such an assertion for ``amax`` and ``argmax`` alone.
    """
    count = x.numel() if dim is None or x.ndim == 0 else x.shape[dim]
    if isinstance(count, torch.SymInt) and not guard_or_false(count > 0):
        aten._assert_scalar(count > 0, "max or min of no element: the operation has no identity")
    return NotImplemented


def _overloads(names: Iterable[str]) -> list[OpOverload]:
    """Return all overloads of some operations of ATen."""
    packets = [getattr(aten, name) for name in names]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def _of_lists() -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Yield the rules for lists of tensors: torch's own loops, but for writes."""
    for target in _overloads(name for name in dir(torch) if name.startswith("_foreach_")):
        loop = None if target._schema.is_mutable else composite_kernel(target)
        # Two loops read the numbers of a tensor, which a trace does not know.
        if loop is not None and "Tensor scalars" not in str(target._schema):
            yield target, loop
    yield aten._foreach_copy.default, lambda xs, given, *_: list(map(aten.copy.default, xs, given))
    yield aten._foreach_zero.default, lambda xs: list(map(aten.zeros_like.default, xs))


_MEAN = 1  # at::Reduction


def decompositions(
    *, eager_draws: bool = False, eager_sums: bool = False
) -> dict[Any, Callable[..., Any]]:
    """Return the decomposition table for AOTAutograd; a new dict of cached contents.

    Args:
        eager_sums: keep biased products of 16-bit matrices whole, since eager rounds them once.
        eager_draws: keep random draws as eager's own calls, so that they follow eager's stream:
            PyTorch's rules compare a uniform number where eager draws a Bernoulli one.
    """
    table = {**_table(), **dict(quantized_decompositions()), **dict(custom_decompositions())}
    for target in _overloads(_DRAWS):
        table.pop(target, None)
    if eager_sums:
        for target in _BIASED:
            table[target] = keep_where(lambda x, *_, **__: x.dtype in _HALF, table[target])
    if eager_draws:
        table[aten.native_dropout.default] = _whole_if_drawn
    return table


def _whole_if_drawn(x: Any, p: float, train: bool | None) -> Any:
    """Decompose a dropout only where it draws nothing, as eager does."""
    if train is not False and 0 < p < 1:
        return NotImplemented
    if train is not False and p == 1:
        return x * 0, torch.zeros_like(x, dtype=torch.bool)
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


_BIASED = (aten.addmm.default, aten.baddbmm.default)
_HALF = (torch.float16, torch.bfloat16)
_SOFTMAX = {aten._softmax.default: False, aten._log_softmax.default: True}
_DRAWS = ("native_dropout", "bernoulli")


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = {
        target: rule
        for target, rule in core_decompositions().items()
        if "scaled_dot_product" not in str(target)
    }
    table.update(get_decompositions(_overloads(_ALSO)))
    table.update(_of_lists())
    table[aten.addmm.default] = _biased_product(aten.mm.default)
    table[aten.baddbmm.default] = _biased_product(aten.bmm.default)
    table[aten.soft_margin_loss_backward.default] = _soft_margin_loss_backward
    for backward in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default):
        table[backward] = _nll_loss_backward
    for overload in ("int_Scalar", "int_Tensor"):
        table[getattr(aten.index_fill, overload)] = _index_fill
    table[aten.eye.default] = table[aten.eye.m] = _eye
    cross_entropy = aten.binary_cross_entropy.default
    table[cross_entropy] = of_probabilities(table[cross_entropy])
    for target, logarithm in _SOFTMAX.items():
        table[target] = _of_rows_that_may_be_empty(table[target], logarithm=logarithm)
    for extreme in (aten.max, aten.min):
        table[extreme.default] = table[extreme.dim] = _asserts_an_element
    table[aten._weight_int4pack_mm_for_cpu.default] = product_of_int4
    table[aten._weight_int8pack_mm.default] = product_of_int8
    for name in PADS:
        for suffix, kept in (("", _copies_rows), ("_backward", _is_on_cpu)):
            target = getattr(aten, f"{name}{suffix}").default
            if target in table:
                table[target] = keep_where(kept, table[target])
    for target in _overloads(_WHOLE):
        table.pop(target, None)
    as_eager = {
        target: with_eager_strides(target, keeping_refused(target, rule))
        for target, rule in table.items()
    }
    return as_eager | {aten.mkldnn_rnn_layer.default: keeping_its_workspace}
