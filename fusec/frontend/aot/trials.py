"""Call an operation on zeros while a graph is traced: does eager compute it, and how does it lie?

No table lists which types eager's kernels refuse, or the order of axes in which they return their
results. So a call is run once on small tensors of the same types and layouts. ``outcome`` returns
the axis order of its results (``eager_strides.py``), ``has_kernel`` whether eager takes its types
(``refusals.py``). A trial is remembered by operation, types, numbers and, for orders, layouts.

Tried are operations of ATen on CPUs, without side effects or randomness, whose shapes do not depend
on data, and whose arguments are numbers: a kernel follows the addresses and lengths in a workspace
of another kernel without a check. Not on other devices: a kernel that fails there destroys the
context.

Assumes: the order of a result's axes depends on extents through their order alone. That does not
hold for convolutions, whose library is chosen by size; torch's meta function models the choice.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fusec.errors import Unsupported
from fusec.frontend.fx_passes.fx_nodes import aten, count_elements, hint_of
from fusec.torch_interior import FakeTensor, OpOverload, pytree, running_plainly

DimOrder: TypeAlias = tuple[int, ...]
"""A tensor's axes from the outermost in memory to the innermost."""

FEW, MANY = 1 << 12, 1 << 22
"""Calls of up to ``FEW`` elements are tried unchanged; up to ``MANY``, if the shrunk call fails."""
SMALL = 8
"""Extents up to this are not shrunk. A call with a larger number, which may be an extent, is tried
unchanged, up to ``MANY`` elements: a kernel may rely on arguments that fit together."""
_RECIPES = ("_scaled_mm_v2", "_scaled_grouped_mm_v2")
_NEVER_TRIED = {
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.segment_reduce.default,
    aten._segment_reduce_backward.default,
    aten._scaled_mm.default,
    aten._scaled_grouped_mm.default,
    *(getattr(aten, name).default for name in _RECIPES if hasattr(aten, name)),
}
"""Convolutions choose a library by size; segment kernels write by unchecked lengths; scales of
blocks GPUs take alone, of whose code a trial on a CPU says nothing."""
_NO_TRIES = (
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.nondeterministic_seeded,
)
LARGEST = 1 << 16
"""A call with a larger number, which may be an extent of a result, is not tried for its types."""


_OPAQUE = {"packed", "packed_weight", "packed_weights", "workspace"}
"""Parameters that take what another kernel wrote for itself. Zeros in the place of an LSTM's
workspace end the process (``mkldnn_rnn_layer_backward``, torch 2.13). BatchNorm's ``reserve`` is
not one of them: it is empty on CPUs."""


@functools.cache
def may_be_tried(func: Any) -> bool:
    """Return True for operations of ATen without side effects or randomness, except views."""
    return (
        isinstance(func, OpOverload)
        and func.namespace == "aten"
        and not func.is_view
        and not func._schema.is_mutable
        and func not in _NEVER_TRIED
        and not any(argument.name in _OPAQUE for argument in func._schema.arguments)
        and not any(tag in func.tags for tag in _NO_TRIES)
    )


# -- layouts ---------------------------------------------------------------------------------------


def is_plain(value: torch.Tensor) -> bool:
    """Return True for a strided fake tensor of a CPU whose extents and strides have hints."""
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return False
    if value.device.type != "cpu":
        return False
    if not value._has_symbolic_sizes_strides:
        return True
    numbers = (*value.shape, *value.stride())
    return all(isinstance(n, int) or n.node.has_hint() for n in numbers)


def layout_of(value: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(map(hint_of, value.shape)), tuple(map(hint_of, value.stride()))


def is_dense(shape: Sequence[int], strides: Sequence[int], order: DimOrder) -> bool:
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
    return order if is_dense(value.shape, strides, order) else None


# -- trials ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Zeros:
    """The shape, strides and type of a tensor that replaces an argument in a trial."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, value: torch.Tensor) -> _Zeros:
        return cls(*layout_of(value), value.dtype)

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


def outcome(func: OpOverload, leaves: list[Any], spec: Any, elements: int) -> Outcome:
    """Return the outcome of a call on zeros; ``_NOT_TRIED`` where it cannot be tried."""
    numbers = (hint_of(x) if isinstance(x, torch.SymInt) else x for x in leaves)
    whole = [_Zeros.like(x) if isinstance(x, torch.Tensor) else x for x in numbers]
    if elements > FEW and all(abs(n) <= SMALL for n in whole if isinstance(n, int)):
        fewer = _with_fewer_elements(whole)
        found = _NOT_TRIED if fewer is None else _tried(func, fewer, spec)
        if not isinstance(found, Exception):
            return found
    return _tried(func, whole, spec) if elements <= MANY else _NOT_TRIED


def _with_fewer_elements(leaves: list[Any]) -> list[Any] | None:
    """Return arguments with extents above ``SMALL`` replaced by the next integers, in order."""
    zeros = [leaf for leaf in leaves if isinstance(leaf, _Zeros)]
    large = sorted({n for leaf in zeros for n in leaf.shape if n > SMALL})
    extents = {n: k for k, n in enumerate(large, start=SMALL + 1)}
    fewer = [leaf.shrunk(extents) if isinstance(leaf, _Zeros) else leaf for leaf in leaves]
    lost = any(f is None and isinstance(w, _Zeros) for f, w in zip(fewer, leaves, strict=True))
    return None if lost else fewer


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


# -- types -----------------------------------------------------------------------------------------

_SYMBOLS = {torch.SymInt: 2, torch.SymFloat: 1.0, torch.SymBool: True}
_kernels: set[Any] = set()
"""Those that eager took once. A refusal may be of the shapes, whose trials are remembered too."""


def has_kernel(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return False if eager's kernel for CPUs refuses a call's types."""
    key = target, *map(_kind, args), *kwargs, *map(_kind, kwargs.values())
    try:
        if key in _kernels:
            return True
    except TypeError:  # an unhashable argument
        return True
    found = not may_be_tried(target) or _computes(target, args, kwargs)
    if found:
        _kernels.add(key)
    return found


def _kind(arg: Any) -> Any:
    """Return an argument's part of a key: types of tensors and symbols, and other arguments."""
    if isinstance(arg, torch.fx.Node):
        arg = arg.meta.get("val")
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.device.type
    if isinstance(arg, list | tuple):
        return tuple(map(_kind, arg))
    return type(arg) if type(arg) in _SYMBOLS else (type(arg), arg)


def _computes(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return False if eager has no kernel for a call: tried on two zeros per axis, then on all.

    For a backward operation only ``not implemented`` counts: its types follow from the forward's,
    and the trace may have another type than eager (the mean of a bf16 norm with f32 weights).
    """
    leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
    values = [x.meta.get("val") if isinstance(x, torch.fx.Node) else x for x in leaves]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    devices = {x.device.type for x in tensors}
    devices |= {value.type for value in values if isinstance(value, torch.device)}
    if devices != {"cpu"} or any(x.layout is not torch.strided for x in tensors):
        return True
    if any(isinstance(n, int) and abs(n) > LARGEST for n in values):
        return True
    fits = all(n in (-1, 0, 1, 2) for n in values if isinstance(n, int))
    error = _raised(_tried(target, list(map(_two_zeros, values)), spec)) if fits else None
    if not fits or (error is not None and not isinstance(error, NotImplementedError)):
        error = None
        if all(map(is_plain, tensors)):
            error = _raised(outcome(target, values, spec, sum(map(count_elements, tensors))))
    lacks = isinstance(error, NotImplementedError) or "backward" not in str(target)
    return error is None or not lacks


def _two_zeros(value: Any) -> Any:
    """Return an argument with two elements along each axis, or a number for a symbol."""
    if not isinstance(value, torch.Tensor):
        return _SYMBOLS.get(type(value), value)
    strides = tuple(1 << axis for axis in reversed(range(value.dim())))
    return _Zeros((2,) * value.dim(), strides, value.dtype)


def _raised(found: Outcome) -> Exception | None:
    return found if isinstance(found, Exception) and found is not _NOT_TRIED else None
