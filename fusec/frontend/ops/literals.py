"""Short tensors that a program makes of numbers, as expressions of their index.

``torch.tensor([0.5, 0.25])`` in a forward is a tensor that tracing has made once, of which each
call gets a copy. Its numbers are the program's own, like those of ``x * 0.5``: they stand in the
kernels that read them, so that neither an archive nor a program in C has to hold a tensor. Where an
eager kernel takes it, a kernel writes it first. Types that kernels do not compute with (complex,
``float8``, ``uint16``) stay tensors.

Worked example: ``m = torch.tensor([0.5, 0.25, 0.25])`` is ``m[i0] = where(i0 < 1, 0.5, 0.25)``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from fusec.frontend.ops.arithmetic import select
from fusec.frontend.shapes import TensorType, from_torch_dtype
from fusec.frontend.value import Value, make_axes, positions
from fusec.ir.dtype import compute_type
from fusec.ir.expr import Const, Expr, IndexValue, cast, op
from fusec.ir.index import index
from fusec.ir.strides import contiguous_strides
from fusec.torch_interior import unset_fake_temporarily

aten = torch.ops.aten

LIFTS = (aten.lift_fresh_copy.default, aten.lift_fresh.default)
"""Calls that copy such a tensor. Another one would read the tensor itself, which may be one of the
user's that has changed since it was traced."""
LONGEST = 16
"""Elements: each that differs from the one before it is a comparison where it is read."""


def numbers_of(node: fx.Node, gm: fx.GraphModule) -> tuple[float | int | bool, ...] | None:
    """Return the elements, in the order of their indices, of a node that is such a tensor."""
    readers = {user.target for user in node.users}
    if node.op != "get_attr" or not readers or not readers.issubset(LIFTS):
        return None
    value = operator.attrgetter(str(node.target))(gm)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    if not 0 < value.numel() <= LONGEST or from_torch_dtype(value.dtype).is_opaque:
        return None
    with unset_fake_temporarily():
        return tuple(value.flatten().tolist())


def literal(kind: TensorType, numbers: Sequence[float | int | bool]) -> Value:
    """Return a tensor of numbers, without a buffer."""
    axes, wide = make_axes(kind.shape), compute_type(kind.dtype)
    steps = contiguous_strides(kind.shape)
    at = sum((i * s for i, s in zip(positions(axes), steps, strict=True)), index(0))
    made: Expr = (constant := Const(numbers[-1], wide))
    for k in reversed(range(len(numbers) - 1)):
        before = Const(numbers[k], wide)
        if before is not constant:
            made = select(op("lt", IndexValue(at), IndexValue(index(k + 1))), before, made)
        constant = before
    return Value(kind.shape, kind.dtype, axes, cast(made, kind.dtype))
