"""The table of lowerings: an ATen operation -> the function that writes it in index notation.

A lowering is called as ``rule(call, *args, **kwargs)``: ``call`` knows what was traced and emits
definitions; tensors among the arguments are ``Value``, symbolic integers ``Index``, lists are
tuples, everything else is as in the FX node. It returns a ``Value``, or a tuple of them for
several results, or raises ``Unsupported``, upon which the node becomes an ``Extern``.

To add an operation, write one such function in the file it belongs to and name it here::

    @lowers(aten.addcmul.default)
    def addcmul(call, x, a, b, *, value=1): ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fusec.errors import InternalError

Lowering = Callable[..., Any]
_Rule = TypeVar("_Rule", bound=Lowering)

LOWERINGS: dict[Any, Lowering] = {}
BY_NAME: dict[str, Lowering] = {}
"""Lowerings of operations that torch registers only when it needs them, by their printed names."""


def find_lowering(target: Any) -> Lowering | None:
    """Return the lowering of an FX node's target, if there is one."""
    return LOWERINGS.get(target) or BY_NAME.get(str(target))


def lowers_named(name: str) -> Callable[[_Rule], _Rule]:
    """Register the decorated function as the lowering of an operation known by its name."""

    def register(rule: _Rule) -> _Rule:
        if name in BY_NAME:
            raise InternalError(f"two lowerings of {name}", stage="frontend")
        BY_NAME[name] = rule
        return rule

    return register


def lowers(*targets: Any) -> Callable[[_Rule], _Rule]:
    """Register the decorated function as the lowering of ``targets`` (operator overloads)."""

    def register(rule: _Rule) -> _Rule:
        for target in targets:
            if target in LOWERINGS:
                raise InternalError(f"two lowerings of {target}", stage="frontend")
            LOWERINGS[target] = rule
        return rule

    return register
