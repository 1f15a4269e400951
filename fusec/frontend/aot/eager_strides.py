"""Give traced tensors the strides that eager's kernels would give them.

What AOTAutograd traces has the strides of torch's meta functions and decompositions. For arguments
that are not row-major these are not always eager's: the trace of ``roll`` of channels-last images
is row-major, eager's result is channels-last. All later uses rely on the traced strides: views and
copies, ``as_strided``, the graph's outputs. So results are corrected while AOTAutograd traces::

    y = roll(x, -1, 0)    # x: strides (60, 1, 15, 3); traced: (60, 20, 5, 1)
                          # y has (60, 1, 15, 3), as the same call has for zeros with x's strides

Eager's strides are not in a table: each call runs once on zeros with the strides of its arguments,
with fewer elements where these have many. The run gives the *order* of a result's axes in memory,
and a result that was traced in another order is corrected.

Traced strides are kept for views, and results whose shape depends on data, for which torch's rules
are exact; for operations that are not ATen's, whose authors declare what they return, and which may
have side effects; for random draws; for tensors on other devices, since a kernel that fails there
destroys the context; for calls that cannot be tried; and for calls of row-major tensors with
row-major results, so that these cost nothing.

Assumes: the order of a result's axes depends on extents through their order alone. That does not
hold for convolutions, whose library is chosen by size; torch's meta function models the choice.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fusec.errors import Unsupported
from fusec.frontend.fx_passes.fx_nodes import hint_of
from fusec.torch_interior import FakeTensor, FakeTensorMode, OpOverload, pytree, running_plainly

aten = torch.ops.aten

FEW, MANY = 1 << 12, 1 << 22
"""Calls of up to ``FEW`` elements are tried unchanged; up to ``MANY``, if the shrunk call fails."""
SMALL = 8
"""Extents up to this are not shrunk. A call with a larger number, which may be an extent, is tried
unchanged: a kernel may rely on arguments that fit together."""
_NEVER_TRIED = {
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.segment_reduce.default,
    aten._segment_reduce_backward.default,
}
"""Convolutions choose a library by size; segment kernels write by unchecked lengths."""
_NO_TRIES = (
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.nondeterministic_seeded,
)

DimOrder: TypeAlias = tuple[int, ...]
"""A tensor's axes from the outermost in memory to the innermost."""


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
        made = rule(*args, **kwargs)
        return made if made is NotImplemented else _corrected(target, args, kwargs, made, _copied)

    return as_eager


def _moved(mode: FakeTensorMode, value: FakeTensor, order: DimOrder) -> torch.Tensor:
    strides: list[Any] = [1] * len(order)
    step: Any = 1
    for axis in reversed(order):
        strides[axis] = step
        step = step * value.shape[axis]
    with mode:
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def _copied(value: torch.Tensor, order: DimOrder) -> torch.Tensor:
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
    if not given or not tensors or not all(map(_is_plain, (*given, *tensors))):
        return made
    if all(map(_is_row_major, given)) and all(map(_is_row_major, tensors)):
        return made
    orders = _outcome(func, leaves, spec, sum(map(_count, (*given, *tensors))))
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


@functools.cache
def may_be_tried(func: Any) -> bool:
    """Return True for operations of ATen without side effects or randomness, except views."""
    return (
        isinstance(func, OpOverload)
        and func.namespace == "aten"
        and not func.is_view
        and not func._schema.is_mutable
        and func not in _NEVER_TRIED
        and not any(tag in func.tags for tag in _NO_TRIES)
    )


# -- layouts ---------------------------------------------------------------------------------------


def _is_plain(value: torch.Tensor) -> bool:
    """Return True for a strided fake tensor of a CPU whose extents and strides have hints."""
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return False
    if value.device.type != "cpu":
        return False
    if not value._has_symbolic_sizes_strides:
        return True
    numbers = (*value.shape, *value.stride())
    return all(isinstance(n, int) or n.node.has_hint() for n in numbers)


def _layout(value: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(map(hint_of, value.shape)), tuple(map(hint_of, value.stride()))


def _count(value: torch.Tensor) -> int:
    return math.prod(map(hint_of, value.shape))


def _is_row_major(value: torch.Tensor) -> bool:
    if not value._has_symbolic_sizes_strides:
        return value.is_contiguous()
    return _lies_in(value, tuple(range(value.dim())))


def _lies_in(value: torch.Tensor, order: DimOrder) -> bool:
    """Return True if a tensor is dense in this order, or has no elements."""
    return _is_dense(*_layout(value), order)


def _is_dense(shape: Sequence[int], strides: Sequence[int], order: DimOrder) -> bool:
    step = 1
    for axis in reversed(order):
        if shape[axis] != 1 and strides[axis] != step:
            return 0 in shape
        step *= shape[axis]
    return True


def _order_of(value: torch.Tensor) -> DimOrder | None:
    """Return the order of a tensor's axes, or None where it has no elements, or gaps."""
    if value.layout is not torch.strided or value.numel() == 0:
        return None
    strides = value.stride()
    order = tuple(sorted(range(value.dim()), key=lambda axis: (-strides[axis], axis)))
    return order if _is_dense(value.shape, strides, order) else None


# -- trying ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Zeros:
    """The shape, strides and type of a tensor that replaces an argument in a trial."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, value: torch.Tensor) -> _Zeros:
        return cls(*_layout(value), value.dtype)

    def shrunk(self, extents: dict[int, int]) -> _Zeros | None:
        """Return the tensor with other extents, with the same axis order and gaps at the same axes.

        None where elements share memory other than by strides of zero.
        """
        shape = tuple(extents.get(n, n) for n in self.shape)
        steps = {0: 0}
        dense, step = 1, 1
        for axis in sorted(range(len(shape)), key=lambda a: (self.strides[a], -self.shape[a])):
            extent, stride = self.shape[axis], self.strides[axis]
            if extent > 1 and stride > 0:
                if stride < dense:
                    return None
                step *= 2 if stride > dense else 1
                steps[stride] = step
                dense, step = stride * extent, step * shape[axis]
            steps.setdefault(stride, step)
        strides = (steps[stride] for stride in self.strides)
        return _Zeros(shape, tuple(strides), self.dtype)

    def make(self, value: int) -> torch.Tensor:
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        memory = torch.full((max(last, 0) + 1,), value, dtype=self.dtype)
        return memory.as_strided(self.shape, self.strides)


Key: TypeAlias = tuple[Any, ...]
Outcome: TypeAlias = tuple[DimOrder | None, ...] | Exception
"""The axis order of each tensor that a call returns, or the exception that it raises."""
_known: dict[Key, Outcome] = {}


def _outcome(func: OpOverload, leaves: list[Any], spec: Any, elements: int) -> Outcome:
    """Return the outcome of a call on zeros; ``_NOT_TRIED`` where it cannot be tried."""
    whole = [_Zeros.like(x) if isinstance(x, torch.Tensor) else _plain_number(x) for x in leaves]
    if elements > FEW and all(n in range(-SMALL, SMALL + 1) for n in map(_as_integer, whole)):
        fewer = _with_fewer_elements(whole)
        found = _NOT_TRIED if fewer is None else _tried(func, fewer, spec)
        if not isinstance(found, Exception):
            return found
    return _tried(func, whole, spec) if elements <= MANY else _NOT_TRIED


def error_of_zeros(func: OpOverload, values: list[Any], spec: Any) -> Exception | None:
    """Return what eager raises for zeros with these shapes; None also if the call is not tried."""
    given = [value for value in values if isinstance(value, torch.Tensor)]
    if not all(map(_is_plain, given)):
        return None
    found = _outcome(func, values, spec, sum(map(_count, given)))
    return found if isinstance(found, Exception) and found is not _NOT_TRIED else None


def _with_fewer_elements(leaves: list[Any]) -> list[Any] | None:
    """Return arguments with extents above ``SMALL`` replaced by the next integers, in order."""
    zeros = [leaf for leaf in leaves if isinstance(leaf, _Zeros)]
    large = sorted({n for leaf in zeros for n in leaf.shape if n > SMALL})
    extents = {n: k for k, n in enumerate(large, start=SMALL + 1)}
    fewer = [leaf.shrunk(extents) if isinstance(leaf, _Zeros) else leaf for leaf in leaves]
    lost = any(f is None and isinstance(w, _Zeros) for f, w in zip(fewer, leaves, strict=True))
    return None if lost else fewer


def _as_integer(leaf: Any) -> int:
    return leaf if isinstance(leaf, int) else 0


def _plain_number(leaf: Any) -> Any:
    return hint_of(leaf) if isinstance(leaf, torch.SymInt) else leaf


_NOT_TRIED = Unsupported("a call that is not tried")


def _tried(func: OpOverload, leaves: list[Any], spec: Any) -> Outcome:
    key = (func, spec, *((type(leaf), leaf) for leaf in leaves))
    try:
        return _known[key]
    except KeyError:
        found = _known[key] = _try(func, leaves, spec)
        return found
    except TypeError:  # an unhashable argument
        return _NOT_TRIED


def _try(func: OpOverload, leaves: list[Any], spec: Any) -> Outcome:
    """Call an operation on tensors of zeros, or of ones where it refuses zeros."""
    with running_plainly(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in (0, 1):
            try:
                made = [x.make(value) if isinstance(x, _Zeros) else x for x in leaves]
                args, kwargs = pytree.tree_unflatten(made, spec)
                results = pytree.tree_leaves(func(*args, **kwargs))
            except Exception as error:  # kernels raise any type for arguments they refuse
                raised = error.with_traceback(None)
                continue
            return tuple(_order_of(r) for r in results if isinstance(r, torch.Tensor))
    return raised
