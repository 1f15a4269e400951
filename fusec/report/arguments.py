"""The arguments of a call, in the order of the signature: names are for people."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

_IN_ORDER = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def positional(fn: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Return ``fn(*args, **named)``'s arguments in order, with defaults between those given.

    Raises:
        TypeError: if they do not fit, or one can be given by its name alone.
    """
    parameters = signature_of(fn)
    if not parameters:
        if named:
            raise TypeError("its arguments have no names")
        return list(args)
    bound = inspect.Signature(list(parameters.values())).bind(*args, **named)
    fixed = [name for name in bound.arguments if parameters[name].kind not in _IN_ORDER]
    if not named:
        return list(args)
    if fixed:
        raise TypeError(
            f"{', '.join(map(repr, fixed))} can be given by name alone, "
            "which wants a function of yours that takes it in order and hands it on"
        )
    names = [name for name, parameter in parameters.items() if parameter.kind in _IN_ORDER]
    last = max(names.index(name) for name in bound.arguments)
    return [bound.arguments.get(name, parameters[name].default) for name in names[: last + 1]]


def signature_of(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return what a module's forward, or a function, takes; nothing where Python does not know."""
    try:
        return inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters
    except (TypeError, ValueError):
        return {}
