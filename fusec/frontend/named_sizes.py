"""Sizes by name: compiled code serves all of their values, and nothing in it depends on one."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import torch

from fusec.errors import UsageError
from fusec.torch_interior import mark_unbacked

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)
_BOUNDED = "min" in inspect.signature(mark_unbacked).parameters
"""False in torch 2.11, where operations that ask whether a tensor is empty cannot be traced."""


def name_size(tensor: _Tensor, axis: int, name: str = "batch") -> _Tensor:
    """Name the size of an input along an axis, and return the input.

    A compiled call then takes any value of 1 or more, and 1 is not special; all sizes of one name
    are equal. With the option ``batch_invariant`` no result depends on them, but for sums along
    such an axis. It is ``torch._dynamo.decorators.mark_unbacked``, and names a size of this tensor
    object: call it for the inputs of each call.

    Args:
        tensor: an argument of a function that is compiled, before the call.
    Raises:
        UsageError: for an axis that the tensor does not have, or whose size is 0.
    """
    if not (isinstance(tensor, torch.Tensor) and type(axis) is int and isinstance(name, str)):
        raise UsageError(
            f"name_size takes a tensor, an axis and a name, not {tensor!r}, {axis!r}, {name!r}."
        )
    if not -tensor.dim() <= axis < tensor.dim():
        raise UsageError(f"name_size: a tensor of shape {list(tensor.shape)} has no axis {axis}.")
    if tensor.shape[axis] == 0:
        raise UsageError(f"name_size: the size along axis {axis} is 0; compiled calls take 1 on.")
    least: dict[str, Any] = {"min": 1} if _BOUNDED else {}
    mark_unbacked(tensor, axis % tensor.dim(), shape_id=name, **least)
    return tensor
