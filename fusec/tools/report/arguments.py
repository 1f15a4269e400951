"""The arguments of one call, in order and by name, and copies of modules and inputs.

Tensor subclasses that override only ``__torch_function__`` are plain tensors below Python. Torch
makes no fake tensor of such a class, and copies one only if the class defines how. A report needs
both: an input counts as a plain tensor, a module's own tensors are copied with their class.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fusec.errors import nearest
from fusec.torch_interior import DisableTorchFunctionSubclass, pytree


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call: ``fn(*args, **named)``."""

    args: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Given) -> Arguments:
        """Return the arguments of a call; a sequence has all of them in order."""
        return given if isinstance(given, Arguments) else cls(tuple(given))

    def call(self, fn: Callable[..., Any]) -> Any:
        """Call ``fn`` with these arguments."""
        return fn(*self.args, **self.named)

    def mapped(self, change: Callable[[Any], Any]) -> Arguments:
        """Return the arguments with ``change`` applied to each leaf."""
        args, named = pytree.tree_map(change, (self.args, dict(self.named)))
        return Arguments(args, named)

    def __iter__(self) -> Iterator[Any]:
        return iter((*self.args, *self.named.values()))

    def labelled(self) -> Iterator[tuple[str, Any]]:
        """Yield each argument with its label: its number, or its name."""
        yield from ((str(number), arg) for number, arg in enumerate(self.args))
        yield from self.named.items()


def leaf_of(value: Any, *, train: bool, dtype: torch.dtype | None = None) -> Any:
    """Return a copy of a tensor, floats of another type if given, that gradients may end at."""
    if not isinstance(value, torch.Tensor):
        return value
    own = plain(value).detach().clone()
    return own.to(dtype or own.dtype).requires_grad_(train) if own.is_floating_point() else own


Given: TypeAlias = "Sequence[Any] | Arguments"


def fitting(
    fn: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
    options: Sequence[str] = (),
) -> Arguments:
    """Return the arguments of ``fn(*args, **named)``.

    Args:
        options: names beside the function's own that the caller may have meant.
    Raises:
        TypeError: if they do not fit its signature.
    """
    parameters = signature_of(fn)
    if parameters:
        any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        unknown = [name for name in named if name not in parameters]
        if unknown and not any_name:  # before a missing argument: it may be that one, misspelt
            near = nearest(unknown[0], (*parameters, *options))
            hint = f"; did you mean {near}=?" if near else ""
            raise TypeError(f"it has no argument {unknown[0]!r}{hint}")
        inspect.Signature(list(parameters.values())).bind(*args, **named)
    elif named:
        raise TypeError("its arguments have no names")
    return Arguments(tuple(args), dict(named))


def described(fn: Callable[..., Any]) -> str:
    """Return a signature as text, "x, scale=, **more", with "=" after keyword-only arguments."""
    form: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*{}",
        inspect.Parameter.VAR_KEYWORD: "**{}",
        inspect.Parameter.KEYWORD_ONLY: "{}=",
    }
    return ", ".join(form.get(p.kind, "{}").format(p.name) for p in signature_of(fn).values())


def signature_of(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a module's forward, or of a function; {} if Python knows none."""
    try:
        return inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters
    except (TypeError, ValueError):
        return {}


# -- copies ----------------------------------------------------------------------------------------


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
