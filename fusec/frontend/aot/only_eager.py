"""Dynamo graphs that must run uncompiled, since AOTAutograd would hide or lose an effect.

And frames that must run in plain Python, since Dynamo itself would lose one.
"""

from __future__ import annotations

from torch import fx

from fusec.frontend.aliasing.overlap import reaches_beyond_memory
from fusec.frontend.aliasing.regenerated_views import hooks_what_it_writes, loses_gradients
from fusec.frontend.aliasing.saved_changes import (
    modifies_function_saved_tensor,
    modifies_saved_tensor,
)

_REASONS = (
    (reaches_beyond_memory, "it has a window into memory that reaches beyond it"),
    (loses_gradients, "AOTAutograd loses what it does to gradients"),
    (modifies_saved_tensor, "its backward raises, as it does in eager"),
)


def only_for_eager(gm: fx.GraphModule) -> str | None:
    """Return why a Dynamo graph must run uncompiled, or None if it may be compiled."""
    return next((reason for holds, reason in _REASONS if holds(gm)), None)


def only_for_python(gm: fx.GraphModule) -> str | None:
    """Return why a frame that Dynamo has captured must run in plain Python, or None."""
    if modifies_function_saved_tensor(gm):
        return "it changes what an autograd.Function has saved: eager's backward raises"
    if hooks_what_it_writes():
        return "it puts a hook on an input that it writes: the hook would see another gradient"
    return None
