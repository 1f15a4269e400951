"""The walk over what nodes of any kind lead to: expressions, definitions, calls of an FX graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")
_BELOW_DONE = object()
"""Lies above a node on the stack of ``reach``: popped once all nodes below it are in order."""


def reach(roots: Iterable[_T], below: Callable[[_T], Iterable[_T]]) -> list[_T]:
    """Return the distinct nodes that are reachable from ``roots``, and these, in post-order."""
    seen: set[_T] = set()
    order: list[_T] = []
    stack: list[Any] = [*roots][::-1]
    while stack:
        node = stack.pop()
        if node is _BELOW_DONE:
            order.append(stack.pop())
        elif node not in seen:
            seen.add(node)
            further = below(node)
            if further:
                stack += (node, _BELOW_DONE, *further)
            else:
                order.append(node)
    return order
