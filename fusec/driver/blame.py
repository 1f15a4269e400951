"""Find where an exception of a compile comes from: the stage, the operation, the user's line.

The runner of a stage attaches its name to the exception (``errors.note_stage``). The operation need
not be attached: the traceback's frames hold the FX node, definition, kernel or call that a pass was
processing. The innermost frame that holds one is the most precise.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import fx

from fusec.errors import stage_of
from fusec.frontend.origin import origin_of
from fusec.ir.definition import NOWHERE, Origin


@dataclass(frozen=True, slots=True)
class Blame:
    """A stage, an operation and the user's line; each is "" where it is not known."""

    stage: str
    op: str
    line: str

    def __str__(self) -> str:
        op, line = self.op and f"at {self.op}", self.line and f"({self.line})"
        return " ".join(filter(None, (self.stage and f"in stage {self.stage!r}", op, line)))


def blame(error: BaseException) -> Blame:
    """Return where an exception comes from, as far as it is known."""
    inner: BaseException = getattr(error, "inner_exception", None) or error
    frames = [frame for frame, _ in traceback.walk_tb(inner.__traceback__)]
    found = next((origin for frame in reversed(frames) for origin in _held(frame)), NOWHERE)
    op, line = ", ".join(found.ops[:2]), next(iter(found.source), "")
    return Blame(stage_of(inner), op, line)


def _held(frame: FrameType) -> Iterator[Origin]:
    """Yield the origins of the nodes and values among a frame's variables."""
    for value in list(frame.f_locals.values()):
        if isinstance(value, fx.Node):
            if value.op == "call_function" or value.op == "call_method":
                yield origin_of(value)
        else:
            own: Any = getattr(type(value), "origin", None) and value.origin
            if isinstance(own, Origin) and own is not NOWHERE:
                yield own
