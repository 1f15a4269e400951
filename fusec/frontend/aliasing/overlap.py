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

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import guard_or_true

from fusec.torch_interior import pytree

ASSIGNMENTS = {
    "setitem", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand",
    "ior", "ixor", "ilshift", "irshift",
}  # fmt: skip
"""The functions of ``operator`` that write, which are methods of tensors, too: ``__imul__``."""
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
    """Return the arguments that a call writes, by torch's names: ``add_``, ``inplace``, ``out``.

    An embedding with a ``max_norm`` writes the rows of its weight that are longer.
    """
    if node.op not in ("call_function", "call_method"):
        return []
    by_name = is_in_place(node) and called_name(node) not in _WRITE_NOTHING
    if by_name or called_name(node).strip("_") in ASSIGNMENTS:
        return list(node.args[:1]) or [node.kwargs.get("input")]
    parameters = _parameters(node.target)
    named = {**dict(zip(parameters, node.args, strict=False)), **node.kwargs}
    if named.get("inplace") is True:
        return [named[parameters[0]] if parameters else node.args[0]]
    if named.get("max_norm") is not None and "weight" in named:
        return [named["weight"]]
    out = node.kwargs.get("out")
    return list(out) if isinstance(out, tuple | list) else [out]


@functools.cache
def _parameters(target: Any) -> tuple[str, ...]:
    """Return the names of a Python function's parameters; none for other targets."""
    return tuple(inspect.signature(target).parameters) if inspect.isfunction(target) else ()


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


def relies_on_its_place(gm: fx.GraphModule) -> bool:
    """Return True if memory of an input that a window is cut from is written, or has a gradient.

    That is a window with an offset of its own, from the memory's first element. What AOTAutograd
    traces of both is for the place in memory where the input begins at that time, and no guard
    covers it. Within a transformation of ``torch.func`` any such window counts: what it is cut from
    is not known.
    """
    parts = (part for part in gm.modules() if isinstance(part, fx.GraphModule))
    nodes = [node for part in parts for node in part.graph.nodes]
    given = _memories(gm.graph.find_nodes(op="placeholder"))
    written = _memories(place for node in nodes for place in written_by(node))

    def relies(window: fx.Node) -> bool:
        source, made = tensor_of(window.all_input_nodes[0]), tensor_of(window)
        if source is None or made is None:
            return False
        memory = memory_of(source)
        return memory == id(source) or (
            memory in given and (made.requires_grad or memory in written)
        )

    return any(relies(node) for node in nodes if _has_own_offset(node))


def _memories(nodes: Iterable[Any]) -> set[int]:
    return {memory_of(tensor) for tensor in map(tensor_of, nodes) if tensor is not None}


def _has_own_offset(node: fx.Node) -> bool:
    """Return True for a window whose offset is given, in any of its forms."""
    position = {**dict.fromkeys(_WINDOWS, 3), "as_strided_scatter": 4}.get(called_name(node))
    if position is None:
        return False
    return (*node.args[position:], node.kwargs.get("storage_offset"))[0] is not None


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
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.partition(".")[0]  # of an overload: "mul_.Tensor"


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


def returns_shared_memory(gm: fx.GraphModule) -> bool:
    """Return True if elements of a result may share memory, as those of ``x.unfold(0, 3, 1)`` do.

    AOTAutograd copies a gradient to the strides of its result, where only a stride of zero tells
    it that there is no room for all of its elements. Symbolic sizes have no such strides.
    """
    (output,) = gm.graph.find_nodes(op="output")
    tensors = map(tensor_of, output.all_input_nodes)
    return any(t is not None and _may_overlap(t) for t in tensors)


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Return True if the elements along an axis may reach beyond one step of a longer stride."""
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    steps = [(stride, size) for stride, size in axes if type(size) is int and size > 1]
    end = 1
    for stride, size in sorted(steps) if all(type(stride) is int for stride, _ in steps) else ():
        if stride < end:
            return True
        end += (size - 1) * stride
    return False


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return True for a stride of zero along a size above 1; symbolic sizes are assumed so."""
    return any(
        type(stride) is int and stride == 0 and not (type(size) is int and size < 2)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
