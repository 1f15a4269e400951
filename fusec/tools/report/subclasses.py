"""Handle tensor subclasses that override only ``__torch_function__``: plain tensors below Python.

Torch makes no fake tensor of such a class, and copies one only if the class defines how. A report
needs both: an input counts as a plain tensor, a module's own tensors are copied with their class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fusec.torch_interior import DisableTorchFunctionSubclass

_Module = TypeVar("_Module", bound=nn.Module)
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its subclass, if that overrides only ``__torch_function__``."""
    if not _overrides_functions_alone(tensor):
        return tensor
    with DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def copied(module: _Module) -> _Module:
    """Return a deep copy of a module."""
    with _Copies():
        return copy.deepcopy(module)


def _overrides_functions_alone(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    return kind not in _PLAIN and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


class _Copies(TorchFunctionMode):
    """Copies such tensors as plain ones, and restores the class of the copies."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not torch.Tensor.__deepcopy__ or not _overrides_functions_alone(args[0]):
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            with DisableTorchFunctionSubclass():
                made = tensor.detach().clone().as_subclass(type(tensor))
                made.requires_grad_(tensor.requires_grad)
                made.__dict__.update(copy.deepcopy(tensor.__dict__, memo))
            memo[id(tensor)] = made
        return memo[id(tensor)]
