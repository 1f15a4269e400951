"""Calls with tensors that have no memory: they run eager kernels, never compiled ones.

User code meets fake ones under a ``FakeTensorMode``, when a model is built or traced without its
weights, and ``ZeroTensor``s as gradients of what has none. Dynamo guards on the class and the
dispatch keys of each input, so whether a compiled graph's inputs are such is the same at each call,
and is checked once. A mode is not guarded, so each call checks for one: 0.1 us (measured 2026-11).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusec.runtime.calls.executable import BoxedCall
from fusec.torch_interior import FakeTensor, fake_mode


def with_memory_only(call: BoxedCall, instead: BoxedCall) -> BoxedCall:
    """Return a boxed callable: ``call``, or ``instead`` where tensors have no memory.

    Args:
        instead: computes the same, with operations that support fake tensors.
    """
    chosen: BoxedCall | None = None

    def boxed(args: list[Any]) -> Any:
        nonlocal chosen
        if fake_mode() is not None:
            return instead(args)
        if chosen is None:
            chosen = instead if any(map(_has_no_memory, args)) else call
        return chosen(args)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    boxed._unchecked = call  # type: ignore[attr-defined]
    return boxed


def _has_no_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (
        isinstance(value, FakeTensor) or value._is_zerotensor()
    )


def unchecked(call: BoxedCall) -> BoxedCall:
    """Return the callable that ``with_memory_only`` wrapped, for callers with their own check."""
    inner: BoxedCall = getattr(call, "_unchecked", call)
    return inner


def called_with_memory_only(
    call: Callable[..., Any], instead: Callable[..., Any]
) -> Callable[..., Any]:
    """Do what ``with_memory_only`` does for callables that take separate arguments."""
    chosen: Callable[..., Any] | None = None

    def called(*args: Any) -> Any:
        nonlocal chosen
        if fake_mode() is not None:
            return instead(*args)
        if chosen is None:
            chosen = instead if any(map(_has_no_memory, args)) else call
        return chosen(*args)

    return called
