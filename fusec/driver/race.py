"""The judge that races: candidates are built, timed on this machine, and the verdict is kept.

A ``Contest`` says how the candidates of a choice (``ir/choice.py``) are built and on which inputs
they run; ``driver/contests.py`` has one for each kind of choice. ``runtime/race/autotune.py`` times
them interleaved and checks each against the reference. The verdict is kept in the cache under all
that times depend on: the contest's key, the device, its threads, torch.

Sizes that are symbols are timed at their hints, and keys have the classes of these hints
(``size_class``): a batch of any size is raced once a class, and a reason names the size that was
timed.

On a CPU the races of a graph are limited by counts, not by time, so that one graph takes the same
candidates at each start: no product that is a small part of the graph
(``passes/fusion/libraries.py``), a few groups (``RaceTuning.groups``), the convolutions that matter
most (``frontend/fx_passes/memory_formats.py``). The time limit is for busy machines. If it is
reached, or no candidate could be timed, the choice is decided by rule. The ranks of a process group
agree on each verdict (``runtime/race/ranks.py``), also on one without times.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from filelock import FileLock, Timeout

from fusec.ir.choice import Choice, Decided
from fusec.runtime.cache.store import Cache
from fusec.runtime.race.autotune import Candidate, race
from fusec.runtime.race.ranks import Ranks
from fusec.runtime.race.stopwatch import warm_stopwatch
from fusec.runtime.race.verdicts import NO_TIME, CandidateTime, Verdict, load_verdict, store_verdict


@dataclass(slots=True)
class Races:
    """The races of one graph: their time limit, and where verdicts are kept.

    One process of a machine races at a time: concurrent races would measure each other.

    Attributes:
        left_s: seconds that are left for them.
        salt: names the device and the library versions on which times depend.
        cache: where verdicts are kept; None for nowhere.
        ranks: the process group that shares verdicts, or None.
        keeps_all: keep also verdicts that were unsteady or, for want of time, have no times.
        untimed: the limit is 0, so that only what is known already counts, as for a report.
    """

    device: torch.device
    left_s: float
    salt: str
    cache: Cache | None
    ranks: Ranks | None = None
    keeps_all: bool = False
    untimed: bool = field(init=False)

    def __post_init__(self) -> None:
        self.untimed = self.left_s <= 0

    def verdict(self, key: str, reference: str, run: Callable[[float], Verdict]) -> Verdict:
        """Return the verdict under a key: another rank's, the cache's, or what ``run`` measures.

        If the time limit is reached, the verdict has no times and names the reference.
        """
        key = f"{self.salt} {key}"
        verdict = self.ranks.published(key) if self.ranks is not None else None
        if verdict is None:
            verdict = self._own(key, reference, run)
            if self.ranks is not None:
                verdict = self.ranks.agree(key, verdict)
        return verdict

    def _own(self, key: str, reference: str, run: Callable[[float], Verdict]) -> Verdict:
        verdict = load_verdict(self.cache, key) if self.cache is not None else None
        if verdict is not None:
            return verdict
        started = time.monotonic()
        try:
            with race_lock(self.device).acquire(timeout=max(self.left_s, 0.0)):
                left = self.left_s - (time.monotonic() - started)
                verdict = run(left) if left > 0 else None
        except (Timeout, OSError):  # other processes race, or no lock can be created
            verdict = None
        self.left_s -= time.monotonic() - started
        if verdict is None:
            verdict = Verdict(
                reference, (CandidateTime(reference, dropped=NO_TIME),), exhausted=True
            )
        if self.cache is not None and (self.keeps_all or verdict.is_steady(reference)):
            store_verdict(self.cache, key, verdict)
        return verdict


def race_lock(device: torch.device) -> FileLock:
    """Return this user's lock for races on a type of device; it is reentrant within a thread."""
    path = Path(tempfile.gettempdir()) / f"fusec-race-{os.getuid()}-{device.type}.lock"
    return FileLock(path, is_singleton=True)


@dataclass(frozen=True, slots=True)
class Contest:
    """How the candidates of one choice are timed.

    Attributes:
        key: all that their times depend on beside the device: a verdict is kept under it.
        candidates: returns the candidates, among them the choice's reference.
        inputs: returns one set of arguments, of other values each time.
        sizes: the sizes at which they are timed.
        describe: turns the sizes of a verdict into the words of a reason; "" to leave them out.
        scale: the time of the whole over that of the part that is timed.
        rounds: how many rounds to run; default: until the winner is clear.
    """

    key: str
    candidates: Callable[[], Sequence[Candidate]]
    inputs: Callable[[], list[Any]]
    sizes: tuple[int, ...]
    describe: Callable[[tuple[int, ...]], str]
    scale: float = 1.0
    rounds: int | None = None


NewContest: TypeAlias = Callable[[Choice], Contest | None]
"""Returns a choice's contest; None to decide it by rule."""


class RaceJudge:
    """Decides choices by racing their candidates on this machine.

    Args:
        contests: the contest of each kind of choice; other kinds are decided by rule.
    """

    def __init__(self, races: Races, contests: Mapping[str, NewContest]) -> None:
        self.races = races
        self.contests = contests
        self._known: dict[str, Verdict] = {}

    def __call__(self, choice: Choice) -> Decided:
        """Return the winner: another rank's, the cache's, that of a race, or by rule."""
        make = self.contests.get(choice.kind)
        contest = make(choice) if make is not None else None
        if contest is None:
            return choice.by_rule()
        verdict = self._known.get(contest.key)
        if verdict is None:
            run = partial(self.race, contest, choice.reference)
            verdict = self.races.verdict(contest.key, choice.reference, run)
            self._known[contest.key] = verdict
        missing = "nothing is timed" if self.races.untimed else "there was no time"
        return decide(choice, contest, verdict, missing)

    def race(self, contest: Contest, reference: str, budget_s: float) -> Verdict:
        """Race a contest's candidates, and return the verdict."""
        device = self.races.device
        on_cpu = device.type == "cpu"
        verdict = race(
            contest.candidates(),
            contest.inputs,
            reference=reference,
            budget_s=budget_s,
            device=device,
            timer=warm_stopwatch if on_cpu else None,
            quiet=on_cpu,
            rounds=contest.rounds,
        )
        return replace(verdict, sizes=contest.sizes)


def decide(
    choice: Choice, contest: Contest, verdict: Verdict, missing: str = "there was no time"
) -> Decided:
    """Return a verdict as the decision of a choice; by rule if the verdict compared nothing.

    Args:
        missing: why there are no times, if the limit was reached.
    """
    times = verdict.times
    if choice.reference not in times or not verdict.compared or not choice.offers(verdict.winner):
        ruled = choice.by_rule()
        lost = missing if verdict.exhausted else str(verdict)
        return replace(ruled, reason=f"{ruled.reason}; not raced: {lost}")
    at = contest.describe(verdict.sizes)
    reason = f"measured at {at}: {verdict}" if at else f"measured: {verdict}"
    saved_us, reference_us = choice.saved_us(times), times[choice.reference]
    return Decided(verdict.winner, reason, saved_us * contest.scale, reference_us * contest.scale)
