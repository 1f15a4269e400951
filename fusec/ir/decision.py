"""What a pass decided, and why: fields of the graph or the schedule that it decided about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decision:
    """One merge that was considered.

    Attributes:
        a, b: buffers of the two kernels, joined by ``+``.
        taken: merged or not.
        reason: the rule that allowed or forbade it.
        saved_us: modelled time saved; None where the merge was not legal.
    """

    a: str
    b: str
    taken: bool
    reason: str
    saved_us: float | None
