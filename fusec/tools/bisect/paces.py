"""Time a whole program under other options, so that only options that help it are reported.

A kernel, or a graph, that is faster by itself need not make the program faster: another library may
be slower elsewhere, and gradients in another memory format cost time in the optimizer. So the
program runs once more for each option, silently, and its step times are compared; for a program of
few steps, the times of its graphs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusec.errors import FusecError
from fusec.tools.bisect.recorder import Event, Stepped, Timing, pace, read_events
from fusec.tools.bisect.trial import Died

if TYPE_CHECKING:
    from fusec.tools.bisect.hunt import Hunt, Runner

_SLOWER_BY = 1.1
"""The ratio to eager's time above which a program counts as slower."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Microseconds of a step of a program, and of its graphs; 0 where they are not known."""

    step_us: float
    graphs_us: float
    eager_graphs_us: float

    @classmethod
    def of(cls, events: Sequence[Event]) -> Pace:
        """Return the times among a run's events."""
        graphs = [event for event in events if isinstance(event, Timing) and not event.kernel]
        return cls(
            next((event.us for event in events if isinstance(event, Stepped)), 0.0),
            sum(graph.fusec_us for graph in graphs),
            sum(graph.eager_us for graph in graphs),
        )


@dataclass(slots=True)
class Paces:
    """The paces of one program under several options, each measured on first use."""

    hunt: Hunt
    program: Runner
    _known: dict[str, Pace | None] = field(default_factory=dict)

    def under(self, more: Mapping[str, Any] | None) -> Pace | None:
        """Return the pace with ``more`` over the user's options (None: eager), None on error."""
        key = repr(more)
        if key not in self._known:
            self.hunt.say(f"timing the program {_under(more)}")
            self._known[key] = self._measured(more)
        return self._known[key]

    def _measured(self, more: Mapping[str, Any] | None) -> Pace | None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "events"
            file.touch()
            try:
                self.hunt.apart(pace, self.program, file, more, seconds=self.hunt.timeout)
            except (Died, FusecError, RuntimeError):
                return None
            return Pace.of(read_events(file))

    def both(self) -> tuple[float, float]:
        """Return the microseconds of fusec and of eager: of a step if known, else of the graphs."""
        ours, theirs = self.under({}), self.under(None)
        if ours is None:
            return 0.0, 0.0
        if theirs is not None and ours.step_us and theirs.step_us:
            return ours.step_us, theirs.step_us
        return ours.graphs_us, ours.eager_graphs_us

    def is_slower(self) -> bool:
        """Return True if the program is slower than it is eagerly."""
        ours, theirs = self.both()
        return ours > _SLOWER_BY * theirs > 0

    def helps(self, more: Mapping[str, Any], lost_us: float) -> bool:
        """Return True if options win back more than half of the time that the program loses.

        Args:
            lost_us: by the culprit, used where the program as a whole is not slower than eager.
        """
        ours, theirs = self.both()
        then = self.under(more)
        if then is None or not ours:
            return False
        now = then.step_us if then.step_us and self._has_steps() else then.graphs_us
        lost = ours - theirs if self.is_slower() else lost_us
        return ours - now > lost / 2

    def _has_steps(self) -> bool:
        own, eager = self.under({}), self.under(None)
        return bool(own and eager and own.step_us and eager.step_us)


def _under(more: Mapping[str, Any] | None) -> str:
    if more is None:
        return "eagerly"
    return "with " + (", ".join(f"{k}={v!r}" for k, v in more.items()) or "fusec")
