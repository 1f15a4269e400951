"""What a pass decided, and why: fields of the graph or the schedule that it decided about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decision:
    """One merge that was considered, or one way to run something.

    Attributes:
        a: buffers of a kernel, joined by ``+``; of a way, what runs.
        b: those of the other kernel; of a way, where: "oneDNN", "channels-last", a kernel.
        taken: merged or not; run so or not.
        reason: the rule that allowed or forbade it, or what was modelled or measured.
        saved_us: time saved; None where the merge was not legal, or nothing is known.
        against: the way that ``b`` is chosen against: "ATen"; "" for a merge.
    """

    a: str
    b: str
    taken: bool
    reason: str
    saved_us: float | None
    against: str = ""

    @property
    def is_merge(self) -> bool:
        """Whether it is about two kernels."""
        return not self.against
