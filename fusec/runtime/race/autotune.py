"""The race: candidates that compute the same tensors are timed on the device.

    verdict = race(
        [Candidate("library", bind_library), Candidate("fused 128x128x64 w8 s3", bind_fused)],
        make_inputs, reference="library", budget_s=20.0, device=torch.device("cuda", 0),
    )
    verdict.winner                      # "fused 128x128x64 w8 s3"

A race does no harm:

- A candidate may win only if its outputs agree with the reference's (`agreement.py`) and it leaves
  its inputs unchanged. A wrong one is dropped with a warning.
- It has to beat the reference by `MARGIN`, and in `STEADY` of the rounds that both ran, so that
  noise decides nothing. Where it does not, the reference wins.
- A candidate that fails to build is dropped with a warning, since it should not have been offered;
  one that fails to run with an info line: the device may be out of memory. No exception of one
  leaves the race. On a GPU, what is no exception (an access out of bounds, a hang) does not reach
  this process: kernels that it has not seen run first in another one (`rehearsal.py`).
- Random numbers, autocast and grad mode are after it as they were before, and it may run inside of
  a compile, where tensors are fake.

Rounds are interleaved (A B C, B C A, ...): a slow second of the machine affects all candidates.
After each of `STAGES` those clearly behind leave, and at most half of many stay; where the winner
is `CLOSE` to the reference, more rounds are run; where samples are long, fewer. What one call takes
is for `stopwatch.py` to say. When the time budget is spent, the best so far wins. It is there for
machines that are busy: what is measured should be a matter of counts, so that equal graphs get
equal verdicts.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusec.errors import InternalError
from fusec.runtime.progress import race_line
from fusec.runtime.race.agreement import disagreement
from fusec.runtime.race.stopwatch import Stopwatch, sets_of_inputs, stopwatch
from fusec.runtime.race.verdicts import NO_TIME, CandidateTime, Verdict, duration
from fusec.torch_interior import disable_modes

__all__ = ["Candidate", "CandidateTime", "Verdict", "race"]

logger = logging.getLogger("fusec.race")

MARGIN = 1.03
"""How many times faster than the reference a candidate must be."""

SAMPLE_US = 1000.0
"""What the calls of one sample should take together; short ones run on several sets of inputs."""

STEADY = 0.8
"""In which share of the rounds it must be the faster one, unless it is so clearly."""

CLEARLY = 1.3
"""How many times slower than the best a candidate may be after the first stage, the reference after
any; also the margin where time ran out before a stage was complete."""

STAGES = ((3, CLEARLY), (7, 1.1))
"""Rounds run by the end of each stage, and how far behind the best a candidate may then be."""

ROUNDS = 15
"""Rounds of those that stay to the end, which comes sooner where the reference leads."""

CLOSE, CLOSE_ROUNDS = 1.08, 31
"""How many times faster than the reference the best may be to have so many rounds."""

LONG_US, LONG_SHARE = 5000.0, 1 / 3
"""Samples as long as this average their noise themselves: this share of the rounds is run."""

KEPT = 4
"""A stage that ends keeps half of the candidates, or this many."""

BUILD_SHARE = 0.7
"""Share of the budget after which no further candidate is built, so that the others are timed."""

BEHIND = "behind after {} rounds"

Runnable = Callable[[list[Any]], Sequence[Tensor]]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation, with how it is built.

    Attributes:
        name: what reports call it: "fused 128x128x64 w8 s3", "library", "separate".
        prepare: builds and loads it. What it returns takes a list of inputs, which it may empty,
            and returns the outputs.
    """

    name: str
    prepare: Callable[[], Runnable]


def race(
    candidates: Sequence[Candidate],
    inputs: Callable[[], list[Any]],
    *,
    reference: str,
    budget_s: float,
    device: torch.device,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
    timer: Stopwatch | None = None,
    quiet: bool = False,
    rounds: int | None = None,
) -> Verdict:
    """Time the candidates; return the winner, and the measurements in the order given.

    Args:
        inputs: makes one set of inputs, of other values each time.
        reference: name of the candidate that is correct, and that wins if none is better.
        budget_s: seconds for all of it, building included; one build or call may exceed it.
        progress: gets each step as a line; default: a line on stderr if that is a terminal.
        clock, timer: in place of the real ones.
        quiet: a race that runs out of time says so in the log alone.
        rounds: run so many, and drop no candidate early: the times count, not the winner.
    """
    names = [candidate.name for candidate in candidates]
    if reference not in names or len(set(names)) < len(names):
        raise InternalError(f"a race of {names} with the reference {reference!r}")
    entrants = [_Entrant(candidate) for candidate in candidates]
    first = entrants[names.index(reference)]
    started = clock()
    line = race_line() if progress is None else contextlib.nullcontext(progress)
    with _one_at_a_time, line as say, _apart_from_the_model(device):
        course = _Course(first, entrants, device, started + budget_s, clock, timer, say)
        course.check(inputs, started + BUILD_SHARE * budget_s)
        course.run(inputs, rounds)
    verdict = course.verdict()
    _report(verdict, quiet=quiet or budget_s <= 0)
    return verdict


_one_at_a_time = threading.RLock()
"""Two races at once would measure each other."""


@dataclass(slots=True)
class _Entrant:
    """A candidate in the race.

    Attributes:
        times: microseconds by round.
        dropped: as in `CandidateTime`.
    """

    candidate: Candidate
    call: Runnable | None = None
    times: dict[int, float] = field(default_factory=dict)
    dropped: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.times.values())

    @property
    def fastest(self) -> float:
        return min(self.times.values())

    def drop(self, stage: str, error: Exception) -> None:
        """Leave because of an error."""
        lines = str(error).strip().splitlines() or [""]
        self.dropped = f"failed to {stage}: {type(error).__name__}: {lines[0]}"
        level = logging.WARNING if stage == "build" else logging.INFO
        logger.log(level, "candidate %r %s. It is not used.", self.candidate.name, self.dropped)
        logger.debug("candidate %r:", self.candidate.name, exc_info=error)

    def compare(
        self, got: Sequence[Tensor], wanted: Sequence[Tensor], given: Sequence[Any]
    ) -> None:
        """Leave if the outputs are not what they should be for some inputs."""
        tensors = [item for item in given if isinstance(item, Tensor)]
        try:
            what = disagreement(got, wanted, inputs=tensors)
        except Exception as error:  # out of memory
            return self.drop("be checked", error)
        if what is not None:
            self.dropped = f"wrong: {what}"

    def beats(self, reference: _Entrant) -> bool:
        """Whether it is faster by the margin, and steadily, in the rounds that both ran.

        One that is clearly faster may lose some rounds to noise: a race that ends early has few.
        """
        shared = self.times.keys() & reference.times.keys()
        if not shared:
            return False
        ours, theirs = ([e.times[r] for r in shared] for e in (self, reference))
        margin = MARGIN if len(shared) >= STAGES[0][0] else CLEARLY
        faster = sum(a < b for a, b in zip(ours, theirs, strict=True))
        ahead = statistics.median(theirs) / max(statistics.median(ours), 1e-9)
        wanted = STEADY if ahead < CLEARLY else 0.5
        return ahead >= margin and faster >= wanted * len(shared)

    def lap(self) -> CandidateTime:
        if not self.times:
            return CandidateTime(self.candidate.name, dropped=self.dropped)
        ordered = sorted(self.times.values())
        last = len(ordered) - 1
        p20, p80 = ordered[round(0.2 * last)], ordered[round(0.8 * last)]
        return CandidateTime(self.candidate.name, self.median, p20, p80, self.dropped)


@dataclass(slots=True)
class _Course:
    """One race from start to verdict."""

    reference: _Entrant
    entrants: list[_Entrant]
    device: torch.device
    deadline: float
    clock: Callable[[], float]
    timer: Stopwatch | None
    say: Progress
    sets: list[list[Any]] = field(default_factory=list)
    finished: int = 0
    exhausted: bool = False

    @property
    def racing(self) -> list[_Entrant]:
        return [entrant for entrant in self.entrants if entrant.dropped is None]

    def check(self, inputs: Callable[[], list[Any]], deadline: float) -> None:
        """Build each candidate, run it once, and drop it if its outputs are not right."""
        if self.clock() >= deadline:
            return self._no_time(self.racing)
        try:
            given = inputs()
            intact = _Intact(given)
        except Exception as error:  # out of memory
            for entrant in self.entrants:
                entrant.drop("get inputs", error)
            return
        self.sets.append(given)
        outputs = self._trial(self.reference, intact)
        if outputs is None:
            for entrant in self.racing:
                entrant.dropped = "not checked: the reference candidate does not work"
            return
        for entrant in self.entrants:
            if entrant is self.reference:
                continue
            if self.clock() >= deadline:
                return self._no_time([e for e in self.racing if e.call is None])
            got = self._trial(entrant, intact)
            if got is not None:
                entrant.compare(got, outputs, given)

    def _trial(self, entrant: _Entrant, intact: _Intact) -> Sequence[Tensor] | None:
        """Return a candidate's outputs for the first set; None if it was dropped while it ran."""
        number = self.entrants.index(entrant) + 1
        self.say(f"building candidate {number} of {len(self.entrants)}: {entrant.candidate.name}")
        try:
            call = entrant.candidate.prepare()
        except Exception as error:
            entrant.drop("build", error)
            return None
        outputs: Sequence[Tensor] | None = None
        changed: list[int] = []
        try:
            try:
                outputs = call(list(self.sets[0]))
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
            finally:
                changed = intact.restore()  # which fails, too, where the device's context is lost
        except Exception as error:
            entrant.drop("run", error)
        if entrant.dropped is None and changed:
            entrant.dropped = f"wrong: it changes its input {changed[0]}"
        if entrant.dropped is not None:
            return None
        entrant.call = call
        return outputs

    def run(self, inputs: Callable[[], list[Any]], rounds: int | None) -> None:
        """Time the remaining candidates, in rounds."""
        try:
            self.timer = self.timer or stopwatch(self.device)
        except RuntimeError as error:  # no memory for the buffer that flushes caches
            logger.debug("nothing can be timed: %s", error)
            return
        if not self._rounds(1):
            return
        if self._add_sets(inputs):
            # Calls are short and samples take several: the round on one set was a warm-up, and its
            # times stand until the first round replaces them.
            self.finished = 0
        if rounds is not None:
            self._rounds(rounds)
            return
        share = self._share_of_rounds()
        for until, factor in STAGES:
            count = max(STAGES[0][0], round(share * until))
            if count == self.finished:
                break  # there is nothing new to decide by
            if not self._rounds(count):
                return
            self._leave_behind(count, factor)
        if self._lead() > 1.0:
            self._rounds(round(share * ROUNDS))
        if 1.0 < self._lead() < CLOSE:
            self._rounds(round(share * CLOSE_ROUNDS))

    def _share_of_rounds(self) -> float:
        fastest = min(entrant.median for entrant in self.racing)
        return LONG_SHARE if fastest * len(self.sets) >= LONG_US else 1.0

    def _lead(self) -> float:
        """Return how many times faster than the reference the best candidate is."""
        if not self.reference.times:
            return math.inf
        best = min(entrant.median for entrant in self.racing)
        return self.reference.median / max(best, 1e-9)

    def _add_sets(self, inputs: Callable[[], list[Any]]) -> bool:
        """Make as many sets of inputs as a sample needs; whether there are more than one."""
        fastest = min(entrant.median for entrant in self.racing)
        nbytes = sum(t.nbytes for t in self.sets[0] if isinstance(t, Tensor))
        wanted = min(sets_of_inputs(self.device, nbytes), math.ceil(SAMPLE_US / max(fastest, 1.0)))
        try:
            while len(self.sets) < wanted:
                self.sets.append(inputs())
        except RuntimeError as error:  # out of memory: the race goes on with those that there are
            logger.debug("a race has %d sets of inputs: %s", len(self.sets), error)
        return len(self.sets) > 1

    def _rounds(self, until: int) -> bool:
        """Run rounds until there were so many; False if the race is over."""
        while self.finished < until:
            racing = self.racing
            if len(racing) < 2:
                return False
            self.say(f"round {self.finished + 1}, {len(racing)} candidates, {self._leader()}")
            turn = self.finished % len(racing)
            for entrant in racing[turn:] + racing[:turn]:
                if self.clock() >= self.deadline:
                    self._no_time([e for e in self.racing if not e.times])
                    return False
                assert entrant.call is not None and self.timer is not None
                try:
                    entrant.times[self.finished] = self.timer(entrant.call, self.sets)
                except Exception as error:
                    entrant.drop("run", error)
            self.finished += 1
        return len(self.racing) > 1

    def _leave_behind(self, rounds: int, factor: float) -> None:
        """Drop those further behind the best than this, and the slower half of many.

        The fastest rounds are compared: one that a busy machine spoiled throws nobody out.
        """
        ordered = sorted(self.racing, key=lambda entrant: entrant.fastest)
        places = max(KEPT, len(ordered) // 2)
        for place, entrant in enumerate(ordered):
            allowed = CLEARLY if entrant is self.reference else factor
            far = entrant.fastest > allowed * ordered[0].fastest
            if far or (place >= places and entrant is not self.reference):
                entrant.dropped = BEHIND.format(rounds)

    def _leader(self) -> str:
        timed = [entrant for entrant in self.racing if entrant.times]
        if not timed:
            return "none timed yet"
        best = min(timed, key=lambda entrant: entrant.median)
        return f"best {best.candidate.name} {duration(best.median)}"

    def _no_time(self, missed: Sequence[_Entrant]) -> None:
        """Note that the budget is spent, before these had their turn."""
        self.exhausted = True
        for entrant in missed:
            entrant.dropped = NO_TIME

    def verdict(self) -> Verdict:
        """Return the fastest candidate that beats the reference, or the reference."""
        better = [e for e in self.racing if e is not self.reference and e.beats(self.reference)]
        winner = min(better, key=lambda entrant: entrant.median, default=self.reference)
        laps = tuple(entrant.lap() for entrant in self.entrants)
        return Verdict(winner.candidate.name, laps, self.exhausted)


class _Intact:
    """The bytes of some inputs, to detect a candidate that writes to them."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._seen: list[tuple[int, Tensor, Tensor]] = []
        for number, value in enumerate(inputs):
            if isinstance(value, Tensor):
                flat = torch.empty(0, dtype=torch.uint8, device=value.device)
                flat.set_(value.untyped_storage())
                self._seen.append((number, flat, flat.clone()))

    def restore(self) -> list[int]:
        """Undo what was written, and return the numbers of the inputs that were written to."""
        changed = []
        for number, now, before in self._seen:
            if not torch.equal(now, before):
                now.copy_(before)
                changed.append(number)
        return changed


def _report(verdict: Verdict, *, quiet: bool) -> None:
    for lap in verdict.laps:
        if lap.dropped is not None and lap.dropped.startswith("wrong: "):
            logger.warning(
                "the candidate %r is %s. It is not used; please report it.", lap.name, lap.dropped
            )
    if verdict.exhausted and not quiet:
        logger.warning(
            "a race ran out of time, the best so far is used: %s. "
            'options={"race_budget_s": ...} gives it more.',
            verdict,
        )
    else:
        logger.info("race: %s", verdict)


@contextlib.contextmanager
def _apart_from_the_model(device: torch.device) -> Iterator[None]:
    """Run the body with real tensors, without autocast, on random numbers of its own."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(disable_modes())  # AOTAutograd compiles in a mode that makes fake tensors
        enter(torch.no_grad())
        enter(torch.autocast("cpu", enabled=False))
        if device.type != "cuda":
            enter(torch.random.fork_rng(devices=[]))
        else:
            enter(torch.autocast("cuda", enabled=False))
            enter(torch.cuda.device(device))
            current = torch.cuda.current_device()
            enter(torch.random.fork_rng(devices=[current]))
            torch.cuda.manual_seed(0)
        torch.random.default_generator.manual_seed(0)
        yield
