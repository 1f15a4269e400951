"""Torch's interior, as much of it as a compiled graph needs while it runs.

``fusec.torch_interior`` has what a compile takes, and imports Dynamo, AOTAutograd and sympy.
Nothing here does: a process that loads an archive has none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd import profiler

__all__ = [
    "OpOverload",
    "current_device_getter",
    "empty_on_cpu",
    "is_autocasting",
    "is_compiling",
    "is_profiling",
    "profiler_range",
    "reinterpret",
    "switch_gradients",
    "transforms",
    "untraced",
    "without_autocast",
]

reinterpret = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
"""A window of a tensor by sizes, strides and an offset from its first element, without a version
counter of the tensor's: for what is only read. Half the time of ``torch.as_strided``."""
empty_on_cpu = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
"""``torch.empty_strided`` of sizes, strides and a type, in a third of its time."""
profiler_range = torch._C._profiler._RecordFunctionFast
"""``torch.profiler.record_function`` of a name, in a tenth of its time."""
is_autocasting = torch._C._is_any_autocast_enabled
"""Return True if autocast is on for some device."""
without_autocast = torch._C._DisableAutocast
"""A context in which no device has autocast: a tenth of what ``torch.autocast`` costs."""
switch_gradients = torch._C._set_grad_enabled
"""``torch.set_grad_enabled`` without a context: 50 ns."""
transforms = torch._C._functorch.peek_interpreter_stack
"""Return the innermost transformation of ``torch.func`` that runs, or None."""


def is_profiling() -> bool:
    """Return True while a profiler of torch runs, or ``emit_nvtx``: 40 ns, as a flag of a module.

    ``torch.autograd._profiler_enabled`` asks for the thread's own state, which takes 140.
    """
    return profiler._is_profiler_enabled


def untraced(call: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Return ``call``, into which Dynamo does not look; itself, in a process that has no Dynamo."""
    if "torch._dynamo" not in sys.modules:
        return call  # torch.compiler.disable imports it, which takes a second
    disabled: Callable[..., Any] = torch.compiler.disable(call, reason=reason)
    return disabled


def current_device_getter(otherwise: Callable[[], int]) -> Callable[[], int]:
    """Return what asks for the current GPU's number; a build for CPUs alone has but ``otherwise``.

    Without the check for initialisation that ``torch.cuda.current_device`` makes each time.
    """
    found: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", otherwise)
    return found


def is_compiling() -> bool:
    """Return True while Dynamo, or what it calls, compiles in this thread."""
    guards = sys.modules.get("torch._guards")  # which nothing but a compile needs
    return guards is not None and guards.CompileContext.current_compile_id() is not None
