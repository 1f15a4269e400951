"""Detect writes to overlapping memory, and windows that leave it: such graphs run eagerly.

``x.expand(4, 4).add_(1)`` is an error in eager, whose message says what to do. AOTAutograd makes
such a write functional, which hides the error, or fails where the tensor is an input. Also, a
window of ``as_strided`` may end beyond the memory of its tensor: the trace does not notice, eager
raises. So Dynamo's graphs are checked before compilation: whether each element of a written tensor
has memory of its own, and whether windows lie within the memory of their tensors.

Assumes: nodes carry ``meta["example_value"]``, in which views share their base's storage. Only
overlap by a stride of zero is detected; eager does not detect any other either. Comparisons of
symbolic sizes add guards.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import guard_or_true

from fusec.torch_interior import pytree

_ASSIGNMENTS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.imatmul,
    operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow, operator.iand,
    operator.ior, operator.ixor, operator.ilshift, operator.irshift,
}  # fmt: skip
_WINDOWS = {"as_strided", "as_strided_", "as_strided_copy"}
_WRITE_NOTHING = {"detach_", "requires_grad_"}


def writes_to_shared_memory(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the calls of a Dynamo graph that write to a tensor whose elements share memory.

    The elements of the tensor itself, or those of an input that it is a view of.
    """
    inputs = [tensor_of(node) for node in gm.graph.nodes if node.op == "placeholder"]
    shared = {memory_of(t) for t in inputs if t is not None and _overlaps(t)}

    def is_shared(tensor: torch.Tensor | None) -> bool:
        return tensor is not None and (_overlaps(tensor) or memory_of(tensor) in shared)

    return [n for n in gm.graph.nodes if any(is_shared(tensor_of(w)) for w in written_by(n))]


def written_by(node: fx.Node) -> list[Any]:
    """Return the arguments that a call writes, by torch's names: ``add_``, ``inplace``, ``out``."""
    if node.op not in ("call_function", "call_method"):
        return []
    by_name = is_in_place(node) and called_name(node) not in _WRITE_NOTHING
    if by_name or node.target in _ASSIGNMENTS or node.kwargs.get("inplace") is True:
        return list(node.args[:1])
    out = node.kwargs.get("out")
    return list(out) if isinstance(out, tuple | list) else [out]


def reaches_beyond_memory(gm: fx.GraphModule) -> bool:
    """Return True if an ``as_strided`` in a graph has a window that ends beyond its memory.

    The length of memory is that of the first tensor in it, or of the base of that tensor: tracing
    a window extends the trace's own storage.
    """
    ends: dict[int, Any] = {}
    for node in gm.graph.nodes:
        if called_name(node) in _WINDOWS:
            given = (node.args, node.kwargs)
            args, kwargs = fx.map_arg(given, lambda n: n.meta.get("example_value"))
            tensor, *window = _window(*args, **kwargs)
            end = _end(*pytree.tree_map(_number, window)) * tensor.element_size()
            if memory_of(tensor) in ends and guard_or_true(end > ends[memory_of(tensor)]):
                return True
        tensor = tensor_of(node)
        if tensor is not None:
            whole = tensor if tensor._base is None else tensor._base
            end = _end(whole.shape, whole.stride(), whole.storage_offset())
            ends.setdefault(memory_of(tensor), end * whole.element_size())
    return False


def _window(input: torch.Tensor, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Return the tensor, size, stride and offset of an ``as_strided`` call, defaults filled in."""
    return input, size, stride, input.storage_offset() if storage_offset is None else storage_offset


def _number(value: Any) -> Any:
    """Return a size that is a tensor as its number; 0 if it depends on data (see ``capture``)."""
    if not isinstance(value, torch.Tensor):
        return value
    constant = getattr(value, "constant", None)
    return 0 if constant is None else constant.item()


def _end(shape: Any, strides: Any, offset: Any) -> Any:
    """Return the offset, in elements, after the last one of a window; 0 if it is empty."""
    if any(isinstance(extent, int) and extent == 0 for extent in shape):
        return 0
    return offset + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def is_in_place(node: fx.Node) -> bool:
    """Return True for a call whose name marks it as in-place: ``mul_``."""
    name = called_name(node)
    return name.endswith("_") and not name.endswith("__")


def called_name(node: fx.Node) -> str:
    """Return the name of the function or method that a Dynamo node calls; "" if it has none."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def tensor_of(node: Any) -> torch.Tensor | None:
    """Return the strided tensor that Dynamo traced for a node; None for anything else."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value if strided else None


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # a tensor wrapped by a torch.func transform: it has no storage
        return id(tensor)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return True for a stride of zero along a size above 1; symbolic sizes are assumed so."""
    return any(
        type(stride) is int and stride == 0 and not (type(size) is int and size < 2)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
