"""Writes that eager refuses, or that only eager can order: into memory that elements share.

``x.expand(4, 4).add_(1)`` is an error in eager, whose message says what to do. AOTAutograd makes
such a write functional, which hides the error, or fails where the tensor is an input. So graphs of
Dynamo are looked through before: what they write to has a place in memory for each element.

Assumes: nodes carry ``meta["example_value"]``, in which views share their base's storage. Overlap
other than by a stride of zero, which eager does not notice either, is not looked for.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_ASSIGNMENTS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.imatmul,
    operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow, operator.iand,
    operator.ior, operator.ixor, operator.ilshift, operator.irshift,
}  # fmt: skip
_WRITE_NOTHING = {"detach_", "requires_grad_"}


def writes_shared_memory(gm: fx.GraphModule) -> bool:
    """Return True if a graph of Dynamo writes to a tensor of which elements share memory.

    The tensor itself, or an input that it is a view of.
    """
    inputs = [_tensor(node) for node in gm.graph.nodes if node.op == "placeholder"]
    shared = {memory_of(t) for t in inputs if t is not None and _overlaps(t)}
    for node in gm.graph.nodes:
        for written in _written(node):
            tensor = _tensor(written)
            if tensor is not None and (_overlaps(tensor) or memory_of(tensor) in shared):
                return True
    return False


def _written(node: fx.Node) -> list[Any]:
    """Return what a call writes to, by the conventions of torch's names."""
    if node.op not in ("call_function", "call_method"):
        return []
    by_name = is_in_place(node) and called_name(node) not in _WRITE_NOTHING
    if by_name or node.target in _ASSIGNMENTS or node.kwargs.get("inplace") is True:
        return list(node.args[:1])
    out = node.kwargs.get("out")
    return list(out) if isinstance(out, tuple | list) else [out]


def is_in_place(node: fx.Node) -> bool:
    """Return True for a call whose name says that it changes what it is given: ``mul_``."""
    name = called_name(node)
    return name.endswith("_") and not name.endswith("__")


def called_name(node: fx.Node) -> str:
    """Return the name of a function or method that a node of Dynamo calls; "" if it has none."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _tensor(node: Any) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value if strided else None


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that names the memory that a tensor looks at."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # a tensor that a transform of torch.func wraps: it shares none
        return id(tensor)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return True for a stride of zero along more than one element; sizes that vary are above."""
    return any(
        type(stride) is int and stride == 0 and not (type(size) is int and size < 2)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
