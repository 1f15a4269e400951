"""Give traced tensors the strides that eager's kernels would give them.

What AOTAutograd traces has the strides of torch's meta functions and decompositions. For arguments
that are not row-major these are not always eager's: the trace of ``roll`` of channels-last images
is row-major, eager's result is channels-last. All later uses rely on the traced strides: views and
copies, ``as_strided``, the graph's outputs. So results are corrected while AOTAutograd traces::

    y = roll(x, -1, 0)    # x: strides (60, 1, 15, 3); traced: (60, 20, 5, 1)
                          # y has (60, 1, 15, 3), as the same call has for zeros with x's strides

Eager's strides are not in a table: each call is tried once on zeros with the strides of its
arguments (``trials.py``). The trial gives the *order* of a result's axes in memory, and a result
that was traced in another order is corrected.

Traced strides are kept for views, and results whose shape depends on data, for which torch's rules
are exact; for operations that are not ATen's, whose authors declare what they return, and which may
have side effects; for random draws; for tensors on other devices, since a kernel that fails there
destroys the context; for calls that cannot be tried; and for calls of row-major tensors with
row-major results, so that these cost nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fusec.frontend.aot.trials import DimOrder, is_dense, is_plain, layout_of, may_be_tried, outcome
from fusec.frontend.fx_passes.fx_nodes import aten, count_elements
from fusec.torch_interior import FakeTensor, FakeTensorMode, pytree


@contextmanager
def tracing_as_eager(mode: FakeTensorMode | None) -> Iterator[None]:
    """Let tensors that a fake mode traces in this block have eager's strides."""
    if mode is None or "dispatch" in vars(mode):
        yield
        return
    plainly = mode.dispatch

    def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = plainly(func, types, args, kwargs or {})
        return _corrected(func, args, kwargs or {}, made, functools.partial(_moved, mode))

    mode.dispatch = dispatch  # type: ignore[method-assign]
    try:
        yield
    finally:
        del mode.dispatch


def with_eager_strides(target: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a decomposition so that its results have the strides of the eager operation."""
    if not may_be_tried(target):
        return rule

    @functools.wraps(rule)
    def as_eager(*args: Any, **kwargs: Any) -> Any:
        return _corrected(target, args, kwargs, rule(*args, **kwargs), copied_in_order)

    return as_eager


def _moved(mode: FakeTensorMode, value: FakeTensor, order: DimOrder) -> torch.Tensor:
    strides: list[Any] = [1] * len(order)
    step: Any = 1
    for axis in reversed(order):
        strides[axis] = step
        step = step * value.shape[axis]
    with mode:
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def copied_in_order(value: torch.Tensor, order: DimOrder) -> torch.Tensor:
    """Return a dense copy of a tensor whose axes lie in an order in memory."""
    back = [order.index(axis) for axis in range(len(order))]
    dense = aten.clone.default(value.permute(order), memory_format=torch.contiguous_format)
    laid_out: torch.Tensor = dense.permute(back)
    return laid_out


def _corrected(
    func: Any,
    args: Any,
    kwargs: Any,
    made: Any,
    relaid: Callable[[FakeTensor, DimOrder], torch.Tensor],
) -> Any:
    """Return a call's results, each converted to eager's axis order where it has another one."""
    if made is NotImplemented or not may_be_tried(func):
        return made
    leaves, spec = pytree.tree_flatten((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    results, result_spec = pytree.tree_flatten(made)
    tensors = [leaf for leaf in results if isinstance(leaf, torch.Tensor)]
    if not given or not tensors or not all(map(is_plain, (*given, *tensors))):
        return made
    if all(map(_is_row_major, given)) and all(map(_is_row_major, tensors)):
        return made
    orders = outcome(func, leaves, spec, sum(map(count_elements, (*given, *tensors))))
    if isinstance(orders, Exception) or len(orders) != len(tensors):
        return made
    held = {leaf.untyped_storage()._cdata for leaf in given}
    changed = False
    expected = iter(orders)
    for k, value in enumerate(results):
        if not isinstance(value, FakeTensor):
            continue
        order = next(expected)
        if order is None or len(order) != value.dim() or _lies_in(value, order):
            continue
        if value.constant is None and value.untyped_storage()._cdata not in held:
            results[k] = relaid(value, order)
            changed = True
    return pytree.tree_unflatten(results, result_spec) if changed else made


# -- layouts ---------------------------------------------------------------------------------------


def _is_row_major(value: torch.Tensor) -> bool:
    if not value._has_symbolic_sizes_strides:
        return value.is_contiguous()
    return _lies_in(value, tuple(range(value.dim())))


def _lies_in(value: torch.Tensor, order: DimOrder) -> bool:
    """Return True if a tensor is dense in this order, or has no elements."""
    return is_dense(*layout_of(value), order)
