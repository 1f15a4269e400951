"""The hunt: run the program, find the culprit, make it small, ask what makes the difference."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusec.bisect import questions
from fusec.bisect.excerpt import Excerpt, TensorType
from fusec.bisect.finding import Finding
from fusec.bisect.recorder import (
    Begun,
    Called,
    Culprit,
    Event,
    Failed,
    Timing,
    drawn_below,
    read_events,
)
from fusec.bisect.recorder import record as record_program
from fusec.bisect.shrink import shrink
from fusec.bisect.smaller import simpler
from fusec.bisect.source import CRASH, SLOWER, WRONG, Fault, as_file
from fusec.bisect.trial import HANGS, Apart, Died, Outcome, run_apart, try_file
from fusec.errors import FusecError, ModelError

SECONDS = 100.0
"""What making a program smaller may take."""
_TRIALS = 300
_SUSPECTS = 3
"""Kernels, and graphs, that are timed again by themselves."""
_SLOWER_BY = 1.1
"""From which share of eager's time on fusec counts as slower."""
_SAMPLE_US = 2000.0
_ENDED = "exit 0"
"""How a process ends that calls ``os._exit`` when all is done."""

Runner = Callable[[Any], Any]
"""Runs the user's program, given the backend that takes fusec's place."""


@dataclass(frozen=True, slots=True)
class Hunt:
    """What is looked for, and how.

    Attributes:
        kind: WRONG, CRASH or SLOWER.
        say: is told what is being done.
        apart: calls a function in a process of its own.
        seconds: that making the program smaller may take.
    """

    kind: str
    say: Callable[[str], None]
    apart: Apart = run_apart
    seconds: float = SECONDS

    def run(self, program: Runner) -> Finding | None:
        """Return what is at fault in a program; None if nothing is.

        Raises:
            ModelError: if the program itself fails.
        """
        events, death = observe(program, self.kind, self.apart)
        culprit = self._culprit(events, death)
        if culprit is None:
            return None
        return self._explain(culprit)

    def attempt(self, text: str) -> Outcome:
        """Return what a file's text comes to."""
        return try_file(text, self.apart)

    def _culprit(self, events: list[Event], death: str) -> Culprit | None:
        found = [event for event in events if isinstance(event, Culprit)]
        most = {e.number: e.most for e in events if isinstance(e, Called)}
        top = max(most.values(), default=2)
        if found:
            return replace(found[0], excerpts=tuple(drawn_below(p, top) for p in found[0].excerpts))
        if death and self.kind == CRASH:
            return _died(events, death, top)
        failed = [event.said for event in events if isinstance(event, Failed)]
        if death or failed:
            seen = failed[0] if failed else f"the process ended by {death}"
            raise FusecError(f"{seen}\nThat is a question for fusec bisect --crash.")
        if self.kind == SLOWER:
            return self._slowest([event for event in events if isinstance(event, Timing)])
        if self.kind == WRONG:
            return self._graph_that_differs(events, top)
        return None

    def _graph_that_differs(self, events: list[Event], most: int) -> Culprit | None:
        """Return a graph of Dynamo that differs, backward included, though none of its kernels do.

        What is wrong then is a rewrite before graphs are captured.
        """
        for event in events:
            if isinstance(event, Begun) and event.name == "Dynamo" and event.excerpt is not None:
                excerpt = drawn_below(event.excerpt, most)
                options = {"fallback_random": True, **event.options}
                outcome = self.attempt(as_file(excerpt, Fault(WRONG, options=options)))
                if outcome.kind == WRONG:
                    return Culprit("Dynamo", outcome, (excerpt,), options, said=outcome.said)
        return None

    def _slowest(self, timings: Iterable[Timing]) -> Culprit | None:
        """Return the kernel that loses most to eager, by itself, or else the graph that does."""
        rows = [t for t in timings if t.fusec_us > _SLOWER_BY * t.eager_us and t.excerpts]
        rows.sort(key=lambda t: -t.lost_us)
        kernels = [row for row in rows if row.kernel][:_SUSPECTS]
        graphs = [row for row in rows if not row.kernel][:_SUSPECTS]
        for row in (*kernels, *graphs):
            what = f"kernel {row.kernel}" if row.kernel else "the graph"
            said = f"{what} takes {row.fusec_us:.1f} us, eager {row.eager_us:.1f} us"
            self.say(f"{said}: timing it by itself")
            calls, lost = _calls(row), row.lost_us
            fault = Fault(SLOWER, options=row.options, calls=calls, lost_us=lost)
            outcome = Outcome(SLOWER)
            for excerpt in row.excerpts:
                if self.attempt(as_file(excerpt, fault)).shows(outcome):
                    return Culprit(
                        row.graph,
                        outcome,
                        (excerpt,),
                        row.options,
                        row.kernel,
                        said=said,
                        calls=calls,
                        lost_us=lost,
                    )
        return None

    # -- from a culprit to a finding ---------------------------------------------------------------

    def _explain(self, culprit: Culprit) -> Finding:
        where = f" (stage {culprit.stage!r})" if culprit.stage else ""
        what = f"kernel {culprit.kernel} of " if culprit.kernel else ""
        self.say(f"{what}graph {culprit.graph!r}{where}: {culprit.said}")
        finding = Finding.of(self.kind, culprit)
        for excerpt in culprit.excerpts:
            options, calls, lost = culprit.options, culprit.calls, culprit.lost_us
            fault = Fault(self.kind, finding.title, options, calls, lost)
            if self.attempt(as_file(excerpt, fault)).shows(culprit.outcome):
                break
        else:
            return replace(finding, unshown=True)
        small = self._shrunk(excerpt, fault, culprit.outcome)
        self.say("asking which options, which merge and which stage make the difference")
        return questions.answer(self, finding, small, fault)

    def _shrunk(self, excerpt: Excerpt, fault: Fault, wanted: Outcome) -> Excerpt:
        end = time.monotonic() + self.seconds
        tried: dict[str, bool] = {}

        def fails(candidate: Excerpt) -> bool:
            if time.monotonic() > end:
                return False
            text = as_file(candidate, fault)
            if text not in tried:
                tried[text] = self.attempt(text).shows(wanted)
            return tried[text]

        def smaller(found: Excerpt) -> Iterable[Excerpt]:
            self.say(f"shown by a program of {_counted(found)}")
            return simpler(found) if time.monotonic() < end else ()

        return shrink(excerpt, smaller, fails, _TRIALS)


def observe(program: Runner, kind: str, apart: Apart) -> tuple[list[Event], str]:
    """Return what happened while a program ran in a process of its own, and how that died, or "".

    Raises:
        ModelError: if the program raised what is no fault of fusec's, or died before a compile.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "events"
        file.touch()
        death = ""
        try:
            apart(record_program, program, kind, file, seconds=None)
        except Died as ended:
            death = "" if ended.how == _ENDED else ended.how
        except RuntimeError as error:
            raise ModelError(str(error)) from error
        events = read_events(file)
    if death and not any(isinstance(event, Begun) for event in events):
        raise ModelError(f"the process ended by {death} before anything was compiled")
    return events, death


def _died(events: list[Event], death: str, most: int) -> Culprit | None:
    """Return the graph at which a process died: the last one that was compiled or called."""
    graphs = {event.number: event for event in events if isinstance(event, Begun)}
    if not graphs:
        return None
    last = events[-1]
    called = isinstance(last, Called)
    graph = graphs[last.number] if isinstance(last, Called) else list(graphs.values())[-1]
    stage = "launch" if called else ""
    excerpts = tuple(drawn_below(p, most) for p in (graph.excerpt,) if p is not None)
    said = f"the process ended by {death} when {'it ran' if called else 'it was compiled'}"
    outcome = Outcome(HANGS if death == HANGS else CRASH, death)
    return Culprit(graph.name, outcome, excerpts, graph.options, stage=stage, said=said)


def _counted(excerpt: Excerpt) -> str:
    lines, sizes = len(excerpt.lines), [_elements(one.type) for one in excerpt.inputs]
    return (
        f"{lines} operation{'s' * (lines != 1)} and {sum(sizes)} element{'s' * (sum(sizes) != 1)}"
    )


def _elements(kind: TensorType | int) -> int:
    return math.prod(kind.shape) if isinstance(kind, TensorType) else 1


def _calls(row: Timing) -> int:
    return max(1, int(_SAMPLE_US / max(row.fusec_us, 1.0)))
