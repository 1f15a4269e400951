"""Decisions of passes and their reasons, kept in the graph or schedule that they are about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decision:
    """One merge, or one candidate, that was considered.

    Attributes:
        a: buffers of a kernel, joined by ``+``; for a candidate, the call or value.
        b: buffers of the other kernel; or the candidate: "oneDNN", "channels-last", a kernel.
        taken: whether it was merged; whether the candidate runs.
        reason: the rule that allowed or forbade it, or what was modelled or measured.
        saved_us: time saved; None where the merge was not legal, or nothing is known.
        against: the candidate that ``b`` is compared with: "ATen"; "" for a merge.
    """

    a: str
    b: str
    taken: bool
    reason: str
    saved_us: float | None
    against: str = ""

    @property
    def is_merge(self) -> bool:
        """Whether it is about merging two kernels."""
        return not self.against
