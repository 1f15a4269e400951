"""Drive a bisection: run the program, find the culprit, reduce it, find what affects the fault.

What is slower is timed in the whole program, under other options, so that only options that help it
are reported: a kernel, or a graph, that is faster by itself need not make the program faster.
Another library may be slower elsewhere, and gradients in another memory format cost time in the
optimizer. So the program runs once more for each option, silently, and its step times are compared;
for a program of few steps, the times of its graphs.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fusec.errors import FusecError, ModelError
from fusec.tools.bisect import questions
from fusec.tools.bisect.excerpt import Excerpt, TensorType
from fusec.tools.bisect.questions import WITHOUT_PASSES
from fusec.tools.bisect.recorder import (
    Begun,
    Called,
    Culprit,
    Ended,
    Event,
    Failed,
    Stepped,
    Timing,
    drawn_below,
    pace,
    read_events,
)
from fusec.tools.bisect.recorder import record as record_program
from fusec.tools.bisect.smaller import shrink, simpler
from fusec.tools.bisect.source import CRASH, SLOWER, WRONG, Fault, Finding, as_file
from fusec.tools.bisect.trial import AGREES, HANGS, Apart, Died, Outcome, run_apart, try_file
from fusec.tools.terminal import format_us

# -- the pace of a program -------------------------------------------------------------------------


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


# -- the hunt --------------------------------------------------------------------------------------


SECONDS = 100.0
"""Seconds that reducing a program may take."""
TIMEOUT = 1800.0
"""Seconds that the user's program may run."""
_LESS = "Give it less to do (fewer steps), or more time: --timeout SECONDS."
_TRIALS = 300
_SUSPECTS = 3
"""The most kernels, and the most graphs, that are timed again by themselves."""
_SUSPECT_SHARE = 0.25
"""The share of a graph's lost time above which one of its kernels is a suspect."""
_SLOWER_BY = 1.1
"""The ratio to eager's time above which fusec counts as slower."""
_SAMPLE_US = 2000.0
_ENDED = "exit 0"
"""The status of a process that calls ``os._exit`` after its work is done."""

_AS_GIVEN, _FORMATS = "channels_last=False", "memory_formats"
"""An option that helps, and the stage that it leaves out."""
_ASKED = {True: ("fusion", "race"), False: ("channels_last", "autotune", "fusion")}
"""Options that may help: for a kernel (True), for a graph (False)."""

Runner = Callable[[Any], Any]
"""Runs the user's program, given the backend that takes fusec's place."""


@dataclass(frozen=True, slots=True)
class Hunt:
    """A search for one kind of fault, and its limits.

    Attributes:
        kind: WRONG, CRASH or SLOWER.
        say: receives progress messages.
        apart: calls a function in a separate process.
        seconds: that reducing the program may take.
        timeout: seconds that the program may run.
        file: the path that a trial's program has as its own (``__file__``).
    """

    kind: str
    say: Callable[[str], None]
    apart: Apart = run_apart
    seconds: float = SECONDS
    timeout: float = TIMEOUT
    file: str = "<bisect>"

    def run(self, program: Runner) -> Finding | None:
        """Return the fault of a program, or None if none is found.

        Raises:
            ModelError: if the program itself fails.
        """
        events, death = observe(program, self.kind, self.apart, self.timeout)
        culprit = self._culprit(events, death)
        paces = Paces(self, program) if self.kind == SLOWER else None
        if culprit is None and paces is not None and paces.is_slower():
            culprit = _whole_program(events, paces)
        return None if culprit is None else self._explain(culprit, paces)

    def attempt(self, text: str) -> Outcome:
        """Run a file's text and return its outcome."""
        return try_file(text, self.apart, self.file)

    def _culprit(self, events: list[Event], death: str) -> Culprit | None:
        found = [event for event in events if isinstance(event, Culprit)]
        most = {e.number: e.most for e in events if isinstance(e, Called)}
        top = max(most.values(), default=2)
        if found:
            return replace(found[0], excerpts=tuple(drawn_below(p, top) for p in found[0].excerpts))
        if death == HANGS and (self.kind != CRASH or waiting(events) is None):
            raise FusecError(f"{self._still(events)}\n{_LESS}")
        if death and self.kind == CRASH:
            return died(events, death, top)
        failed = [event.said for event in events if isinstance(event, Failed)]
        if death or failed:
            seen = failed[0] if failed else f"the process ended by {death}"
            raise FusecError(f"{seen}\nThat is a question for fusec bisect --crash.")
        if self.kind == SLOWER:
            return self._slowest([event for event in events if isinstance(event, Timing)])
        if self.kind == WRONG:
            return self._graph_that_differs(events, top)
        return None

    def _still(self, events: list[Event]) -> str:
        """Describe where a program was when its time ran out."""
        graph = waiting(events)
        said = f"the program was still running after {self.timeout:g} s, with nothing found"
        if graph is None:
            return said
        return f"{said}, in graph {graph.name!r}: fusec bisect --crash looks into that"

    def _graph_that_differs(self, events: list[Event], most: int) -> Culprit | None:
        """Return a Dynamo graph that differs, backward included, though none of its kernels do.

        The fault is then in a rewrite before graphs are captured.
        """
        for event in events:
            if isinstance(event, Begun) and event.name == "Dynamo" and event.excerpt is not None:
                excerpt = drawn_below(event.excerpt, most)
                options = {"fallback_random": True, **event.options}
                fault = Fault(WRONG, options=options)
                outcome = self.attempt(as_file(excerpt, fault))
                if outcome.kind == WRONG:
                    known = Finding(WRONG, "Dynamo", said=outcome.said)
                    return Culprit(known, outcome, (excerpt,), fault)
        return None

    def _slowest(self, timings: Iterable[Timing]) -> Culprit | None:
        """Return the kernel, or else the graph, that loses the most time to eager by itself."""
        rows = [t for t in timings if t.fusec_us > _SLOWER_BY * t.eager_us and t.excerpts]
        rows.sort(key=lambda t: -t.lost_us)
        graphs = [row for row in rows if not row.kernel][:_SUSPECTS]
        least = _SUSPECT_SHARE * max((graph.lost_us for graph in graphs), default=0.0)
        kernels = [row for row in rows if row.kernel and row.lost_us > least][:_SUSPECTS]
        for row in (*kernels, *graphs):
            what = f"{row.library or 'kernel'} {row.kernel}" if row.kernel else "the graph"
            said = f"{what} takes {format_us(row.fusec_us)}, eager {format_us(row.eager_us)}"
            self.say(f"{said}: timing it by itself")
            outcome, ratio = Outcome(SLOWER), row.fusec_us / max(row.eager_us, 1e-3)
            calls, lost = max(1, int(_SAMPLE_US / max(row.fusec_us, 1.0))), row.lost_us
            fault = Fault(SLOWER, options=row.options, calls=calls, lost_us=lost, ratio=ratio)
            known = Finding(SLOWER, row.graph, row.kernel, said=said, library=row.library)
            culprit = Culprit(known, outcome, row.excerpts, fault)
            for excerpt in row.excerpts:
                text = as_file(excerpt, fault)  # twice, against noise
                if all(self.attempt(text).shows(outcome) for _ in range(2)):
                    return culprit
            if row.library and graphs and lost > graphs[0].lost_us / 2:
                # By itself the excerpt may call another library: take the whole graph.
                return replace(culprit, excerpts=graphs[0].excerpts)
        return None

    # -- from a culprit to a finding ---------------------------------------------------------------

    def _explain(self, culprit: Culprit, paces: Paces | None) -> Finding:
        known = culprit.finding
        where = f" (stage {known.stage!r})" if known.stage else ""
        what = f"kernel {known.kernel} of " if known.kernel else ""
        self.say(f"{what}graph {known.graph!r}{where}: {known.said}")
        fault = replace(culprit.fault, title=known.title)
        if paces is not None:
            known = self._helped(known, culprit, paces)
        found = self._shown(replace(culprit, values={}), fault, known)
        if found is not None or not culprit.values:
            return found or self._unshown(known, culprit, fault)
        self.say("random inputs do not show it: trying the program's own")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "repro.py"
            torch.save(dict(culprit.values), file.with_suffix(".pt"))
            found = replace(self, file=str(file))._shown(culprit, replace(fault, saved=True), known)
        return found or self._unshown(known, culprit, fault)

    def _unshown(self, known: Finding, culprit: Culprit, fault: Fault) -> Finding:
        """Complete a finding that no file shows: no file has the user's passes."""
        texts = [as_file(excerpt, fault) for excerpt in culprit.excerpts if culprit.passes]
        if any(self.attempt(text).kind == AGREES for text in texts):
            stage = known.stage or ", ".join(culprit.passes)
            known = replace(known, stage=stage, helps=(WITHOUT_PASSES,))
        return replace(known, unshown=True)

    def _helped(self, known: Finding, culprit: Culprit, paces: Paces) -> Finding:
        """Add to a finding the first option that makes the program faster, and its stage."""
        excerpt = next(iter(culprit.asked or culprit.excerpts), None)
        if excerpt is None:
            return known
        wanted = ("race", "autotune") if known.library else _ASKED[bool(known.kernel)]
        options = questions.candidates(excerpt, culprit.fault.options)
        asked = [(name, options[name]) for name in wanted if name in options]
        found = (f"{n}={v!r}" for n, v in asked if paces.helps({n: v}, culprit.fault.lost_us))
        helps = tuple(itertools.islice(found, 1))  # one will do: each trial runs the program
        known = replace(known, helps=helps, stage=_FORMATS * (helps == (_AS_GIVEN,)))
        if not culprit.excerpts:
            return known
        ours, theirs = paces.both()
        said = f"a step of the program takes {format_us(ours)}, {format_us(theirs)} eagerly"
        return replace(known, said=f"{known.said}; {said}")

    def _shown(self, culprit: Culprit, fault: Fault, known: Finding) -> Finding | None:
        """Return the finding with the smallest file that shows it, or None if none does."""
        values = culprit.values
        for excerpt in culprit.excerpts:
            if fault.saved and not _is_of(excerpt, values):
                continue
            if self.attempt(as_file(excerpt, fault)).shows(culprit.outcome):
                break
        else:
            return None
        small = self._shrunk(excerpt, fault, culprit.outcome, values)
        self.say("asking which options, which merge and which stage make the difference")
        helps = known.helps if self.kind == SLOWER else None
        found = questions.answer(self, known, small, fault, helps)
        read = {one.name: values[one.name] for one in small.inputs if one.name in values}
        return replace(found, values=read)

    def _shrunk(
        self, excerpt: Excerpt, fault: Fault, wanted: Outcome, values: Mapping[str, torch.Tensor]
    ) -> Excerpt:
        half = self.kind == SLOWER  # the program itself runs several times, too
        end = time.monotonic() + self.seconds / (1 + half)
        tried: dict[str, bool] = {}
        told = [2 * len(excerpt.lines)]

        def fails(candidate: Excerpt) -> bool:
            if time.monotonic() > end or (fault.saved and not _is_of(candidate, values)):
                return False
            text = as_file(candidate, fault)
            if text not in tried:
                tried[text] = self.attempt(text).shows(wanted)
            return tried[text]

        def smaller(found: Excerpt) -> Iterable[Excerpt]:
            if len(found.lines) <= told[0] / 2:  # report only each halving
                told[0] = len(found.lines)
                self.say(f"shown by a program of {_counted(found)}")
            return simpler(found) if time.monotonic() < end else ()

        return shrink(excerpt, smaller, fails, _TRIALS)


def _whole_program(events: list[Event], paces: Paces) -> Culprit:
    """Return a culprit for a program that is slower though none of its graphs is by itself."""
    ours, theirs = paces.both()
    graphs = tuple(e.excerpt for e in events if isinstance(e, Begun) and e.name == "Dynamo")
    said = f"a step takes {format_us(ours)}, eagerly {format_us(theirs)}"
    asked = tuple(graph for graph in graphs if graph is not None)
    fault = Fault(SLOWER, lost_us=ours - theirs)
    known = Finding(SLOWER, "the program", said=said)
    return Culprit(known, Outcome(SLOWER), (), fault, asked=asked)


def _is_of(excerpt: Excerpt, values: Mapping[str, torch.Tensor]) -> bool:
    """Return True if ``values`` has a tensor for each input of an excerpt, by name and shape."""
    shapes = {one.name: one.type.shape for one in excerpt.inputs if not isinstance(one.type, int)}
    known = {name: tuple(tensor.shape) for name, tensor in values.items()}
    return all(known.get(name) == shape for name, shape in shapes.items())


def waiting(events: Iterable[Event]) -> Begun | None:
    """Return the graph whose compile, or call, began last and has not ended."""
    begun: dict[int, Begun] = {}
    going: dict[int, None] = {}
    for event in events:
        match event:
            case Begun():
                begun[event.number] = event
                going[event.number] = None
            case Called():
                going[event.number] = None
            case Ended():
                going.pop(event.number, None)
    return begun[[*going][-1]] if going else None


def observe(
    program: Runner, kind: str, apart: Apart, seconds: float = TIMEOUT
) -> tuple[list[Event], str]:
    """Run a program in a separate process; return its events, and how the process died, or "".

    Args:
        seconds: that it may run.
    Raises:
        ModelError: if the program itself raised an error, or died before a compile.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "events"
        file.touch()
        death = ""
        try:
            apart(record_program, program, kind, file, seconds=seconds)
        except Died as ended:
            death = "" if ended.how == _ENDED else ended.how
        except RuntimeError as error:
            raise ModelError(str(error)) from error
        events = read_events(file)
    if death == HANGS and not any(isinstance(event, Begun) for event in events):
        raise ModelError(f"nothing was compiled in the {seconds:g} s that it ran (--timeout)")
    if death and not any(isinstance(event, Begun) for event in events):
        raise ModelError(f"the process ended by {death} before anything was compiled")
    return events, death


def died(events: list[Event], death: str, most: int) -> Culprit | None:
    """Return the graph at which a process died: the last one that was compiled or called."""
    graphs = {event.number: event for event in events if isinstance(event, Begun)}
    if not graphs:
        return None
    last = next(e for e in reversed(events) if isinstance(e, Begun | Called))
    called = isinstance(last, Called)
    graph = graphs[last.number]
    stage = "launch" if called else ""
    excerpts = tuple(drawn_below(p, most) for p in (graph.excerpt,) if p is not None)
    when = "after" if isinstance(events[-1], Ended) else "when"
    said = f"the process ended by {death} {when} {'it ran' if called else 'it was compiled'}"
    outcome = Outcome(HANGS if death == HANGS else CRASH, death)
    values = last.values if isinstance(last, Called) else {}
    fault = Fault(CRASH, options=graph.options)
    known = Finding(CRASH, graph.name, stage=stage, said=said)
    return Culprit(known, outcome, excerpts, fault, values)


def _counted(excerpt: Excerpt) -> str:
    lines, kinds = len(excerpt.lines), [one.type for one in excerpt.inputs]
    size = sum(math.prod(kind.shape) if isinstance(kind, TensorType) else 1 for kind in kinds)
    return f"{lines} operation{'s' * (lines != 1)} and {size} element{'s' * (size != 1)}"
