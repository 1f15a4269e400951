"""The race, on plain functions and a clock that they move: who wins, who is dropped and why."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from fusec.errors import InternalError
from fusec.runtime.race import autotune
from fusec.runtime.race.autotune import Candidate, CandidateTime, Runnable, Verdict, race

CPU = torch.device("cpu")


def right(inputs: list[Any]) -> list[Tensor]:
    x, y = inputs
    inputs.clear()
    return [torch.relu(x @ y)]


def wrong(inputs: list[Any]) -> list[Tensor]:
    x, y = inputs
    outputs = [torch.relu(x @ y)]
    outputs[0][-1, -1] += 1.0
    return outputs


def writes(inputs: list[Any]) -> list[Tensor]:
    outputs = [torch.relu(inputs[0] @ inputs[1])]
    inputs[1][0, 0] += 1.0
    return outputs


def raises(inputs: list[Any]) -> list[Tensor]:
    raise RuntimeError("no kernel image\nis available")


def make_inputs() -> list[Any]:
    return [torch.randn(8, 16), torch.randn(16, 4)]


@dataclass
class Track:
    """A clock in microseconds that candidates move, and a record of what was called."""

    now: float = 0.0
    calls: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now / 1e6

    def timer(self, call: Runnable, sets: Sequence[list[Any]]) -> float:
        before = self.now
        call(list(sets[0]))
        return self.now - before

    def candidate(
        self,
        name: str,
        *times: float,
        run: Runnable = right,
        build: float = 0.0,
        fails: Exception | None = None,
    ) -> Candidate:
        """A candidate whose calls take these times in turn, the first of them being the check's."""
        turns = itertools.cycle(times)

        def call(inputs: list[Any]) -> Sequence[Tensor]:
            self.calls.append(name)
            self.now += next(turns)
            return run(inputs)

        def prepare() -> Runnable:
            self.now += build
            if fails is not None:
                raise fails
            return call

        return Candidate(name, prepare)

    def race(self, *candidates: Candidate, budget_s: float = 1.0, **more: Any) -> Verdict:
        more = {"reference": "library", **more}
        return race(
            candidates, make_inputs, budget_s=budget_s, device=CPU, clock=self.clock,
            timer=self.timer, **more,
        )  # fmt: skip


@pytest.fixture
def track() -> Track:
    return Track()


def reasons(verdict: Verdict) -> dict[str, str | None]:
    return {lap.name: lap.dropped for lap in verdict.laps}


# Who wins.


def test_the_fastest_candidate_wins_and_each_has_its_lap(track: Track) -> None:
    verdict = track.race(
        track.candidate("library", 100),
        track.candidate("fused", 90),
        track.candidate("separate", 115),
    )
    assert verdict == Verdict(
        "fused",
        (
            CandidateTime("library", 100.0, 100.0, 100.0, None),
            CandidateTime("fused", 90.0, 90.0, 90.0, None),
            CandidateTime("separate", 115.0, 115.0, 115.0, "behind after 7 rounds"),
        ),
    )
    assert str(verdict) == "fused 90.0 us, library 100 us, separate 115 us: fused"


@pytest.mark.parametrize(("fused", "winner"), [(99, "library"), (97.2, "library"), (97, "fused")])
def test_a_candidate_has_to_beat_the_reference_by_a_margin(
    track: Track, fused: float, winner: str
) -> None:
    assert (
        track.race(track.candidate("library", 100), track.candidate("fused", fused)).winner
        == winner
    )


def test_a_candidate_that_is_faster_only_now_and_then_does_not_win(track: Track) -> None:
    # The median is 90 against 100, but one round in three is lost.
    verdict = track.race(track.candidate("library", 100), track.candidate("fused", 90, 90, 130))
    assert verdict.winner == "library"
    assert verdict.laps[1].us == 90.0


def test_a_candidate_that_is_clearly_faster_may_lose_a_round_to_noise(track: Track) -> None:
    # Five times as fast, but in one of the three rounds after which the reference is left behind.
    verdict = track.race(
        track.candidate("library", 500), track.candidate("fused", 100, 100, 600, 100, 100)
    )
    assert verdict.winner == "fused"
    assert reasons(verdict)["library"] == "behind after 3 rounds"


def test_percentiles_come_with_the_median(track: Track) -> None:
    times = [0, 0, *range(101, 116)]  # the check's, the warm-up's, the rounds'
    verdict = track.race(track.candidate("library", *times), track.candidate("fused", 90))
    assert verdict.laps[0] == CandidateTime("library", 108.0, 104.0, 112.0)


def test_the_fastest_of_those_that_beat_the_reference_wins(track: Track) -> None:
    verdict = track.race(
        track.candidate("a", 95),
        track.candidate("library", 100),
        track.candidate("b", 92),
        track.candidate("c", 94),
    )
    assert verdict.winner == "b"


# How.


def test_rounds_are_interleaved_and_take_turns(track: Track) -> None:
    track.race(track.candidate("library", 100), track.candidate("a", 91), track.candidate("b", 90))
    # The check, the warm-up, then the rounds.
    assert "".join(name[0] for name in track.calls[:15]) == "lab" + "lab" + "lab" + "abl" + "bla"
    assert len(track.calls) == 3 * (2 + autotune.ROUNDS)


def test_a_close_race_has_more_rounds(track: Track) -> None:
    assert track.race(track.candidate("library", 2000), track.candidate("a", 1900)).winner == "a"
    assert len(track.calls) == 2 * (1 + autotune.CLOSE_ROUNDS)


@pytest.mark.parametrize(("best", "rounds"), [(6300, 5), (6700, 10)])
def test_long_samples_are_fewer(track: Track, best: float, rounds: int) -> None:
    track.race(track.candidate("library", 7000), track.candidate("fused", best))
    assert len(track.calls) == 2 * (1 + rounds)  # and the check's


def test_a_race_may_have_a_number_of_rounds(track: Track) -> None:
    verdict = track.race(track.candidate("library", 2000), track.candidate("a", 9000), rounds=5)
    assert len(track.calls) == 2 * (1 + 5) and verdict.times == {"library": 2000, "a": 9000}


def test_long_calls_have_no_warm_up(track: Track) -> None:
    verdict = track.race(track.candidate("library", 2000), track.candidate("fused", 1000))
    assert (verdict.winner, len(track.calls)) == ("fused", 2 * (1 + 3))


def test_a_race_ends_early_where_the_reference_leads(track: Track) -> None:
    assert (
        track.race(track.candidate("library", 100), track.candidate("fused", 101)).winner
        == "library"
    )
    assert len(track.calls) == 2 * (2 + 7)


def test_one_spoiled_round_throws_nobody_out(track: Track) -> None:
    # Two of the first three rounds on a busy machine.
    spoiled = [90, 90, 900, 90, 900, *[90] * 20]
    assert (
        track.race(track.candidate("library", 100), track.candidate("fused", *spoiled)).winner
        == "fused"
    )
    verdict = track.race(
        track.candidate("library", 100),
        track.candidate("fused", *spoiled),
        track.candidate("best", 88),
    )
    assert (verdict.winner, reasons(verdict)["fused"]) == ("best", None)


def test_those_clearly_behind_leave_after_the_first_stage(track: Track) -> None:
    verdict = track.race(
        track.candidate("library", 100), track.candidate("slow", 131), track.candidate("near", 129)
    )
    assert reasons(verdict)["slow"] == "behind after 3 rounds"
    assert reasons(verdict)["near"] == "behind after 7 rounds"
    assert track.calls.count("slow") == 2 + 3


def test_a_race_ends_when_one_candidate_is_left(track: Track) -> None:
    assert (
        track.race(track.candidate("library", 200), track.candidate("fused", 100)).winner == "fused"
    )
    assert len(track.calls) == 2 * (2 + 3)


def test_half_of_many_candidates_stay_and_the_reference(track: Track) -> None:
    candidates = [track.candidate(f"fused {i}", 100 + i) for i in range(12)]
    verdict = track.race(track.candidate("library", 115), *candidates)
    after = [why for why in reasons(verdict).values() if why == "behind after 3 rounds"]
    assert len(after) == 6
    assert verdict.laps[0].dropped is None
    assert verdict.winner == "fused 0"


def test_a_candidate_alone_is_not_timed(track: Track) -> None:
    assert track.race(track.candidate("library", 100)) == Verdict(
        "library", (CandidateTime("library"),)
    )
    assert track.calls == ["library"]


# Do no harm.


def test_a_wrong_candidate_is_dropped_with_a_warning(track: Track, caplog) -> None:
    verdict = track.race(track.candidate("library", 100), track.candidate("fused", 10, run=wrong))
    assert verdict.winner == "library"
    assert (reasons(verdict)["fused"] or "").startswith("wrong: output 0: max error 1")
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "the candidate 'fused' is wrong: output 0" in record.getMessage()
    assert track.calls == ["library", "fused"]


def test_a_candidate_that_writes_to_its_inputs_is_wrong_and_spoils_nobody(track: Track) -> None:
    verdict = track.race(
        track.candidate("library", 100),
        track.candidate("bad", 10, run=writes),
        track.candidate("fused", 50),
    )
    assert reasons(verdict)["bad"] == "wrong: it changes its input 1"
    assert verdict.winner == "fused"


def test_a_candidate_that_fails_to_build_or_run_is_dropped_with_a_line(
    track: Track, caplog
) -> None:
    caplog.set_level(logging.INFO, "fusec.race")
    verdict = track.race(
        track.candidate("library", 100),
        track.candidate("no build", 10, fails=ValueError("too many registers")),
        track.candidate("no run", 10, run=raises),
        track.candidate("fused", 50),
    )
    assert verdict.winner == "fused"
    assert reasons(verdict)["no build"] == "failed to build: ValueError: too many registers"
    assert reasons(verdict)["no run"] == "failed to run: RuntimeError: no kernel image"
    said = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert said[:2] == [
        ("WARNING", f"candidate 'no build' {reasons(verdict)['no build']}. It is not used."),
        ("INFO", f"candidate 'no run' {reasons(verdict)['no run']}. It is not used."),
    ]


def test_a_candidate_that_fails_while_it_is_timed_is_dropped(track: Track) -> None:
    left = iter([right, right, right, raises])
    verdict = track.race(
        track.candidate("library", 100),
        track.candidate("fused", 10, run=lambda inputs: next(left)(inputs)),
    )
    assert verdict.winner == "library"
    assert (reasons(verdict)["fused"] or "").startswith("failed to run")


def test_a_race_that_everybody_fails_ends(track: Track) -> None:
    def once() -> Runnable:
        left = iter([right])
        return lambda inputs: next(left, raises)(inputs)

    verdict = track.race(
        track.candidate("library", 100, run=once()), track.candidate("fused", 10, run=once())
    )
    assert verdict.winner == "library"


def test_if_all_others_fail_the_reference_wins(track: Track) -> None:
    fails = [track.candidate(f"fused {i}", 10, fails=ValueError(str(i))) for i in range(3)]
    assert track.race(track.candidate("library", 100), *fails).winner == "library"


@pytest.mark.parametrize("more", [{"run": raises}, {"fails": ValueError("x")}, {"run": writes}])
def test_nothing_wins_where_the_reference_does_not_work(track: Track, more: Any) -> None:
    verdict = track.race(track.candidate("library", 100, **more), track.candidate("fused", 10))
    assert verdict.winner == "library"
    assert reasons(verdict)["fused"] == "not checked: the reference candidate does not work"


def test_inputs_that_cannot_be_made_end_the_race(track: Track) -> None:
    def no_memory() -> list[Any]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    verdict = race(
        [track.candidate("library", 100), track.candidate("fused", 10)], no_memory,
        reference="library", budget_s=1.0, device=CPU,
    )  # fmt: skip
    assert verdict.winner == "library"
    assert reasons(verdict)["fused"] == (
        "failed to get inputs: OutOfMemoryError: CUDA out of memory"
    )


def test_further_sets_that_cannot_be_made_cost_nothing_else(track: Track) -> None:
    sets = iter([make_inputs()])

    def one_set() -> list[Any]:
        try:
            return next(sets)
        except StopIteration:
            raise RuntimeError("not enough memory") from None

    verdict = race(
        [track.candidate("library", 100), track.candidate("fused", 10)], one_set,
        reference="library", budget_s=1.0, device=CPU, clock=track.clock, timer=track.timer,
    )  # fmt: skip
    assert verdict.winner == "fused"


# The budget.


def test_a_race_out_of_time_uses_the_best_so_far_and_says_so(track: Track, caplog) -> None:
    verdict = track.race(
        track.candidate("library", 100), track.candidate("fused", 90), budget_s=1.1e-3
    )
    assert verdict.winner == "fused"
    assert verdict.exhausted
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert record.getMessage().startswith("a race ran out of time, the best so far is used: fused")


@pytest.mark.parametrize(("fused", "winner"), [(90, "library"), (70, "fused")])
def test_few_rounds_decide_only_what_is_clear(track: Track, fused: float, winner: str) -> None:
    candidates = track.candidate("library", 100), track.candidate("fused", fused)
    verdict = track.race(*candidates, budget_s=4.5e-4)
    assert (verdict.winner, verdict.exhausted) == (winner, True)


def test_candidates_that_there_is_no_time_to_build_are_left_out(track: Track) -> None:
    candidates = [track.candidate(f"fused {i}", 50 - i, build=200) for i in range(4)]
    verdict = track.race(track.candidate("library", 100), *candidates, budget_s=1200e-6)
    assert reasons(verdict)["fused 3"] == "no time left"
    assert verdict.exhausted
    assert verdict.winner == "fused 2"


def test_candidates_that_were_never_timed_say_so(track: Track) -> None:
    candidates = [track.candidate(f"fused {i}", 50) for i in range(4)]
    verdict = track.race(track.candidate("library", 100), *candidates, budget_s=501e-6)
    assert [lap.dropped for lap in verdict.laps] == [None, None, None, None, "no time left"]


def test_without_any_time_the_reference_wins_and_nothing_is_built(track: Track, caplog) -> None:
    verdict = track.race(
        track.candidate("library", 100), track.candidate("fused", 10), budget_s=0.0
    )
    assert verdict.winner == "library"
    assert verdict.exhausted
    assert set(reasons(verdict).values()) == {"no time left"}
    assert track.calls == []
    assert not caplog.records  # who spent the budget has said it


# The surroundings.


def test_random_numbers_of_the_user_are_as_if_there_was_no_race(track: Track) -> None:
    torch.manual_seed(7)
    wanted = torch.randn(3)
    torch.manual_seed(7)
    track.race(track.candidate("library", 100), track.candidate("fused", 50))
    assert torch.equal(torch.randn(3), wanted)


def test_two_races_see_the_same_numbers(track: Track) -> None:
    seen: list[Tensor] = []

    def spy(inputs: list[Any]) -> list[Tensor]:
        seen.append(inputs[0].clone())
        return right(inputs)

    for _ in range(2):
        track.race(track.candidate("library", 100, run=spy))
        torch.randn(3)
    assert torch.equal(*seen)


def test_a_race_inside_of_a_compile_has_real_tensors(track: Track) -> None:
    types: list[type] = []
    modes: list[tuple[bool, bool]] = []

    def spy(inputs: list[Any]) -> list[Tensor]:
        types.extend(map(type, inputs))
        modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return right(inputs)

    def compile_one(gm: Any, inputs: Any) -> Callable[..., Any]:
        verdict = track.race(track.candidate("library", 100, run=spy), track.candidate("fused", 50))
        assert verdict.winner == "fused"
        return lambda *args: gm(*args)

    compiled = torch.compile(lambda x: x.sin() + 1, backend=aot_autograd(fw_compiler=compile_one))
    with torch.autocast("cpu"):
        compiled(torch.randn(4))
    assert set(types) == {Tensor}
    assert set(modes) == {(False, False)}


def test_candidates_run_without_the_autocast_of_the_caller(track: Track) -> None:
    seen: list[torch.dtype] = []

    def spy(inputs: list[Any]) -> list[Tensor]:
        outputs = right(inputs)
        seen.append(outputs[0].dtype)
        return outputs

    with torch.autocast("cpu", torch.bfloat16):
        track.race(track.candidate("library", 100, run=spy))
        assert torch.is_autocast_enabled("cpu")
    assert seen == [torch.float32]


def test_the_real_stopwatch_takes_part(track: Track) -> None:
    candidates = [Candidate("library", lambda: right), Candidate("fused", lambda: right)]
    verdict = race(candidates, make_inputs, reference="library", budget_s=0.5, device=CPU)
    assert all(lap.us is not None and lap.us > 0 for lap in verdict.laps)


@pytest.mark.parametrize("names", [["fused"], ["library", "library"], []])
def test_a_race_without_one_reference_is_a_defect(track: Track, names: list[str]) -> None:
    with pytest.raises(InternalError, match="with the reference 'library'"):
        track.race(*(track.candidate(name, 100) for name in names))


# Progress.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setenv("COLUMNS", "40")
    yield 40


def test_a_terminal_shows_one_line_that_is_empty_at_the_end(track, monkeypatch, columns) -> None:
    terminal = Terminal()
    with contextlib.redirect_stderr(terminal):
        track.race(track.candidate("library", 100), track.candidate("fused", 90))
    lines = terminal.getvalue().split("\r")
    assert "\n" not in terminal.getvalue()
    assert lines[0] == lines[-1] == lines[-2].strip() == ""
    assert {len(line) for line in lines[1:-1]} == {columns - 1}
    assert lines[1].startswith("fusec: race: building candidate 1 of 2:")


def test_no_terminal_no_progress(track: Track, capsys) -> None:
    track.race(track.candidate("library", 100), track.candidate("fused", 90))
    assert capsys.readouterr() == ("", "")


def test_a_caller_may_take_the_progress(track: Track, capsys) -> None:
    lines: list[str] = []
    track.race(track.candidate("library", 100), track.candidate("fused", 90), progress=lines.append)
    assert lines[:4] == [
        "building candidate 1 of 2: library",
        "building candidate 2 of 2: fused",
        "round 1, 2 candidates, none timed yet",
        "round 1, 2 candidates, best fused 90.0 us",
    ]
    assert capsys.readouterr().err == ""
