"""Verdicts of races: text, JSON form, the cache that keeps them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from fusec.runtime.cache.store import Cache
from fusec.runtime.race.verdicts import (
    CandidateTime,
    Verdict,
    all_verdicts,
    duration,
    load_verdict,
    store_verdict,
)

MB = 1 << 20
FUSED = CandidateTime("fused", 412.0, 409.5, 420.0)
LIBRARY = CandidateTime("library", 455.2, 450.0, 461.0, "behind after 7 rounds")
WRONG = CandidateTime("fused 16x16", dropped="wrong: output 0, 3 of 8 elements")
VERDICT = Verdict("fused", (FUSED, LIBRARY, WRONG), sizes=(100, 768))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def fresh(directory: Path) -> Cache:
    """A cache as the next process would see it: nothing in memory."""
    return Cache(directory, MB)


# Text.


def test_a_verdict_reads_as_a_line_of_explain() -> None:
    assert str(Verdict("fused", (LIBRARY, FUSED))) == "fused 412 us, library 455 us: fused"
    assert str(VERDICT) == "fused 412 us, library 455 us, 1 wrong: fused"


def test_a_verdict_names_few_ways_and_always_the_winner() -> None:
    laps = [CandidateTime(f"way {i}", float(i), i, i) for i in range(1, 7)]
    laps += [
        CandidateTime("bad", dropped="failed to build: x"),
        CandidateTime("late", dropped="no time left"),
    ]
    assert str(Verdict("way 5", tuple(laps), exhausted=True)) == (
        "way 1 1.00 us, way 2 2.00 us, way 3 3.00 us, way 5 5.00 us, 2 slower, 1 failed, "
        "1 no time left: way 5 (out of time)"
    )


def test_a_race_in_which_nothing_was_timed_says_so() -> None:
    assert str(Verdict("library", (CandidateTime("library"),))) == "nothing was timed: library"


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (8.236, "8.24 us"),
        (9.999, "10.0 us"),
        (41.23, "41.2 us"),
        (412.4, "412 us"),
        (9999.0, "9999 us"),
        (9999.9, "10.0 ms"),
        (1234567.0, "1235 ms"),
    ],
)
def test_durations_have_three_digits(us: float, text: str) -> None:
    assert duration(us) == text


# JSON.


def test_the_json_form_is_read_back() -> None:
    assert Verdict.from_json(VERDICT.to_json()) == VERDICT
    assert json.loads(VERDICT.to_json())["laps"][0] == {
        "name": "fused", "us": 412.0, "p20": 409.5, "p80": 420.0, "dropped": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"winner": "other"}, "the winner 'other' has no lap"),
        ({"winner": 3}, "winner: 3 is no text"),
        ({"exhausted": 0}, "exhausted: 0 is neither true nor false"),
        ({"laps": {}}, "laps: {} is no list"),
        ({"sizes": 3}, "sizes: 3 is no list"),
        ({"sizes": [True]}, "one of sizes: True is no count"),
        ({"laps": [3]}, "one of laps has the fields name, us"),
        ({"laps": [{"name": "fused", "us": 1}]}, "one of laps has the fields name, us"),
        ({"laps": [{**asdict(FUSED), "dropped": 3}]}, "dropped: 3 is no text"),
    ],
)
def test_another_json_form_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Verdict.from_dict({**VERDICT.to_dict(), **change})


@pytest.mark.parametrize("time", ["1", True, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(time: object) -> None:
    found = VERDICT.to_dict()
    found["laps"][0]["us"] = time
    with pytest.raises(ValueError, match=r"us: .* is no number"):
        Verdict.from_dict(found)


# Kept.


def test_the_next_process_finds_a_verdict(directory: Path) -> None:
    store_verdict(fresh(directory), "gemm 4096 H200", VERDICT)
    assert load_verdict(fresh(directory), "gemm 4096 H200") == VERDICT
    assert load_verdict(fresh(directory), "gemm 4096 H100") is None


def test_a_verdict_is_found_in_memory_where_the_disk_is_off() -> None:
    cache = Cache(None, 0)
    store_verdict(cache, "k", VERDICT)
    assert load_verdict(cache, "k") == VERDICT
    assert all_verdicts(cache) == {"k": VERDICT}


def test_a_torn_file_is_a_miss(directory: Path) -> None:
    store_verdict(fresh(directory), "k", VERDICT)
    (file,) = directory.glob("*.fusec")
    file.write_bytes(file.read_bytes()[:-7])
    assert load_verdict(fresh(directory), "k") is None
    assert not file.exists()


def test_sound_bytes_that_are_no_verdict_are_a_miss(directory: Path) -> None:
    fresh(directory).store("verdict 1\0k", {"verdict.json": b'{"winner": "x"}'})
    fresh(directory).store("verdict 1\0other", {"other.json": b"{}"})
    assert load_verdict(fresh(directory), "k") is None
    assert load_verdict(fresh(directory), "other") is None


def test_all_verdicts_are_found_among_other_entries(directory: Path) -> None:
    cache = fresh(directory)
    long = "k" * 200_000
    for key in ("a", "b", long):
        store_verdict(cache, key, VERDICT)
    cache.store("kernels", {"kernels.so": bytes(100)})
    (directory / f"{'0' * 64}.fusec").write_bytes(b"damaged")
    os.mkfifo(directory / f"{'1' * 64}.fusec")
    assert all_verdicts(fresh(directory)) == dict.fromkeys(("a", "b", long), VERDICT)
