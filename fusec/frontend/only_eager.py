"""Graphs of Dynamo that run as they are: what AOTAutograd would hide of them, or lose."""

from __future__ import annotations

from torch import fx

from fusec.frontend.made_again import loses_gradients
from fusec.frontend.overlap import reaches_beyond_memory, writes_shared_memory
from fusec.frontend.saved_changes import changes_what_is_saved

_REASONS = (
    (writes_shared_memory, "it writes to memory that elements share"),
    (reaches_beyond_memory, "it has a window into memory that reaches beyond it"),
    (loses_gradients, "AOTAutograd loses what it does to gradients"),
    (changes_what_is_saved, "its backward raises, as it does in eager"),
)


def only_for_eager(gm: fx.GraphModule) -> str | None:
    """Return why a graph of Dynamo runs as it is, or None if it may be compiled."""
    return next((reason for holds, reason in _REASONS if holds(gm)), None)
