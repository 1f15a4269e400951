"""Torch's private interfaces that a compiled graph needs at run time.

``fusec.torch_interior`` has those of the compiler, and imports Dynamo, AOTAutograd and sympy. This
module imports none of them: a process that loads an archive does without.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd import profiler

reinterpret = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
"""A window of a tensor by sizes, strides and an offset from its first element, which does not share
the tensor's version counter: for reads alone. Half the time of ``torch.as_strided``."""
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
top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""Return the innermost hooks of ``saved_tensors_hooks``, or None; 60 ns."""
internal_overlap = torch._debug_has_internal_overlap
"""Return 0 for a tensor whose elements have places of their own, 1 or 2 if some may share one."""
transforms = torch._C._functorch.peek_interpreter_stack
"""Return the innermost transformation of ``torch.func`` that runs, or None."""


def is_profiling() -> bool:
    """Return True while a profiler of torch runs, or ``emit_nvtx``: 40 ns, as a flag of a module.

    ``torch.autograd._profiler_enabled`` reads the thread's own state, which takes 140.
    """
    return profiler._is_profiler_enabled


def untraced(call: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Return ``call`` such that Dynamo does not trace it; unchanged in a process without Dynamo."""
    if "torch._dynamo" not in sys.modules:
        return call  # torch.compiler.disable imports it, which takes a second
    disabled: Callable[..., Any] = torch.compiler.disable(call, reason=reason)
    return disabled


def current_device_getter(otherwise: Callable[[], int]) -> Callable[[], int]:
    """Return a function for the current GPU's number: ``otherwise``, or a faster one.

    Without the check for initialisation that ``torch.cuda.current_device`` makes each time.
    """
    if otherwise is not torch.cuda.current_device:
        return otherwise
    found: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", otherwise)
    return found


def is_compiling() -> bool:
    """Return True while Dynamo, or what it calls, compiles in this thread."""
    guards = sys.modules.get("torch._guards")  # imported by compiles alone
    return guards is not None and guards.CompileContext.current_compile_id() is not None


def mutate_copies(operator: OpOverload) -> Callable[..., tuple[Any, ...]]:
    """Return a faster ``auto_functionalized_v2`` of an operator that mutates its arguments.

    It calls the operator on copies, and returns its results and the copies. Torch's own inspects
    the operator's schema in each call, twice: half of a wrapper's time, by a profile (2026-11).

    The function takes the operator, its other arguments by name, ``_all_bases`` to copy, and how
    each mutated argument is a view of a base (``_x_base_index`` and others).
    """
    from torch._higher_order_ops import auto_functionalize as torch_s  # local: a second to import
    from torch._prims_common import clone_preserve_strides

    names, types = torch_s.get_mutable_args(operator)

    def copy(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None or (x.is_contiguous() and x.storage_offset() == 0):
            return x if x is None else x.clone()
        copied: torch.Tensor = clone_preserve_strides(x)
        return copied

    def call(_: OpOverload, *, _all_bases: list[Any], **given: Any) -> tuple[Any, ...]:
        views = torch_s.read_view_information_from_args(names, types, given, _all_bases)
        bases = [copy(x) for x in _all_bases]
        for name, view in views.items():
            if isinstance(view, list):
                given[name] = [None if v is None else v.regenerate_view(bases) for v in view]
            else:
                given[name] = None if view is None else view.regenerate_view(bases)
        made = operator(**given)
        return (*made, *bases) if isinstance(made, tuple) else (made, *bases)

    return call
