"""Lower short tensors of literal numbers to expressions of their index.

``torch.tensor([0.5, 0.25])`` in a forward is created once, by tracing, and copied at each call. Its
numbers are part of the program, like that of ``x * 0.5``: they are constants of the kernels that
read them, so that neither an archive nor a program in C has to store the tensor. Where an eager
kernel is the consumer, a kernel writes the tensor first. Types that kernels do not compute with
(``uint16``) stay tensors.

Worked example: ``m = torch.tensor([0.5, 0.25, 0.25])`` is ``m[i0] = where(i0 < 1, 0.5, 0.25)``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from fusec.frontend.ops.registry import aten
from fusec.frontend.shapes import TensorType, from_torch_dtype
from fusec.frontend.value import ComplexValue, TensorValue, Value, make_axes, positions
from fusec.ir.dtype import PART, DType, compute_type
from fusec.ir.expr import Const, Expr, IndexValue, cast, op, select
from fusec.ir.index import Index, index
from fusec.ir.strides import contiguous_strides
from fusec.torch_interior import unset_fake_temporarily

LIFTS = (aten.lift_fresh_copy.default, aten.lift_fresh.default)
"""Calls that copy such a tensor. Any other call would read the tensor itself, which may belong to
the user and may have changed since the trace."""
LONGEST = 16
"""Largest number of elements; each that differs from the one before costs reads a comparison."""


Literal: TypeAlias = "complex | float | int | bool"


def numbers_of(node: fx.Node, gm: fx.GraphModule) -> tuple[Literal, ...] | None:
    """Return the row-major elements of a node that is a short literal tensor, or None."""
    readers = {user.target for user in node.users}
    if node.op != "get_attr" or not readers or not readers.issubset(LIFTS):
        return None
    value = operator.attrgetter(str(node.target))(gm)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    kind = from_torch_dtype(value.dtype)
    if not 0 < value.numel() <= LONGEST or PART.get(kind, kind).is_opaque:
        return None
    with unset_fake_temporarily():
        return tuple(value.flatten().tolist())


def literal(kind: TensorType, numbers: Sequence[Literal]) -> TensorValue:
    """Return a tensor with the given row-major elements, as expressions without a buffer."""
    if kind.part is kind:
        return _part(kind, numbers)
    parts = ([complex(n).real for n in numbers], [complex(n).imag for n in numbers])
    return ComplexValue(*(_part(kind.part, part) for part in parts))


def _part(kind: TensorType, numbers: Sequence[Any]) -> Value:
    axes, steps = make_axes(kind.shape), contiguous_strides(kind.shape)
    at = sum((i * s for i, s in zip(positions(axes), steps, strict=True)), index(0))
    element = element_of(numbers, at, compute_type(kind.dtype))
    return Value(kind.shape, kind.dtype, axes, cast(element, kind.dtype))


def element_of(numbers: Sequence[Any], at: Index, kind: DType) -> Expr:
    """Return one of some numbers by its place, as a selection among those that differ."""
    made: Expr = (constant := Const(numbers[-1], kind))
    for k in reversed(range(len(numbers) - 1)):
        before = Const(numbers[k], kind)
        if before is not constant:
            made = select(op("lt", IndexValue(at), IndexValue(index(k + 1))), before, made)
        constant = before
    return made
