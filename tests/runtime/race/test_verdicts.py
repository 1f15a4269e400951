"""Verdicts of races: text, JSON form, the cache that keeps them, the file that moves them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from fusec.errors import EnvironmentProblem, UsageError
from fusec.runtime.cache.store import Cache
from fusec.runtime.race.verdicts import (
    CandidateTime,
    Imported,
    Verdict,
    all_verdicts,
    duration,
    export_verdicts,
    import_verdicts,
    load_verdict,
    store_verdict,
)
from fusec.tools.cli import main

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
        ({"winner": 3}, "a winner is text"),
        ({"exhausted": 0}, "exhausted is true or false"),
        ({"laps": {}}, "no list"),
        ({"sizes": 3}, "no list of integers"),
        ({"sizes": [True]}, "no list of integers"),
        ({"laps": [3]}, "a lap has the fields"),
        ({"laps": [{"name": "fused", "us": 1}]}, "a lap has the fields"),
        ({"laps": [{**asdict(FUSED), "dropped": 3}]}, "why it was dropped, or null"),
    ],
)
def test_another_json_form_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Verdict.from_dict({**VERDICT.to_dict(), **change})


@pytest.mark.parametrize("time", ["1", True, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(time: object) -> None:
    found = VERDICT.to_dict()
    found["laps"][0]["us"] = time
    with pytest.raises(ValueError, match="is no time"):
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


# As a file.


def test_exported_verdicts_are_imported_elsewhere(directory: Path, tmp_path: Path) -> None:
    cache, file = fresh(directory), tmp_path / "verdicts.json"
    store_verdict(cache, "a", VERDICT)
    store_verdict(cache, "b", Verdict("library", (LIBRARY,), exhausted=True))
    assert export_verdicts(fresh(directory), file) == 2
    elsewhere = tmp_path / "elsewhere"
    assert import_verdicts(fresh(elsewhere), file) == Imported(2, 0, 0)
    assert all_verdicts(fresh(elsewhere)) == all_verdicts(cache)


def test_an_import_merges(directory: Path, tmp_path: Path) -> None:
    file, cache = tmp_path / "verdicts.json", fresh(directory)
    slow = Verdict("library", (LIBRARY,))
    hasty = Verdict("library", (LIBRARY,), exhausted=True)
    for key, verdict in {"same": VERDICT, "mine": slow, "hasty": hasty, "new": slow}.items():
        store_verdict(cache, key, verdict)
    export_verdicts(cache, file)
    here = fresh(tmp_path / "here")
    for key in ("same", "mine", "hasty", "only here"):
        store_verdict(here, key, VERDICT)
    assert import_verdicts(here, file) == Imported(added=1, replaced=1, kept=2)
    assert all_verdicts(fresh(tmp_path / "here")) == {
        "same": VERDICT,
        "mine": slow,
        "hasty": VERDICT,  # the file's ran out of time, the one here did not
        "new": slow,
        "only here": VERDICT,
    }


GOOD = {"kind": "fusec verdicts", "schema": 2, "verdicts": {"k": VERDICT.to_dict()}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (json.dumps(GOOD).encode()[:-20], "not JSON"),
        (b"[]", "the file has the fields kind, schema, verdicts"),
        (json.dumps({**GOOD, "kind": "other"}).encode(), "its kind is 'other'"),
        (json.dumps({**GOOD, "schema": 1}).encode(), "its schema is 1, and this fusec reads 2"),
        (json.dumps({**GOOD, "verdicts": []}).encode(), "the verdicts are no object"),
        (
            json.dumps({**GOOD, "verdicts": {**GOOD["verdicts"], "bad": {}}}).encode(),
            "at 'bad': a verdict has the fields",
        ),
    ],
)
def test_a_bad_file_is_named_and_nothing_of_it_is_kept(
    directory: Path, tmp_path: Path, content: bytes, said: str
) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"bad\.json.*Nothing was imported") as caught:
        import_verdicts(fresh(directory), file)
    assert said in str(caught.value)
    assert all_verdicts(fresh(directory)) == {}


def test_a_file_that_is_not_there_or_not_readable_is_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no file '.*none\.json'"):
        import_verdicts(fresh(directory), tmp_path / "none.json")
    with pytest.raises(EnvironmentProblem, match=r"cannot read .*: Is a directory"):
        import_verdicts(fresh(directory), tmp_path)


def test_a_failed_export_leaves_the_earlier_file(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "verdicts.json"
    file.write_text("earlier")

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(EnvironmentProblem, match=r"cannot write .*verdicts\.json: No space left"):
        export_verdicts(fresh(directory), file)
    assert file.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [file]


# The command line.


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(list(args))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_line_moves_verdicts(capsys, monkeypatch, directory, tmp_path) -> None:
    file = str(tmp_path / "verdicts.json")
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(directory))
    store_verdict(fresh(directory), "k", VERDICT)
    code, out, err = run(capsys, "cache", "export", file)
    assert (code, out) == (0, "")
    assert err == f"fusec: 1 verdicts written to {file}\n"
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert run(capsys, "cache", "import", file)[:2] == (
        0,
        "1 verdicts: 1 new, 0 in place of others, 0 left as they were\n",
    )
    assert "verdicts   1\n" in run(capsys, "cache")[1]
    assert load_verdict(fresh(tmp_path / "elsewhere"), "k") == VERDICT


def test_verdicts_can_be_piped(capfd, monkeypatch, directory) -> None:
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(directory))
    store_verdict(fresh(directory), "k", VERDICT)
    read, write = os.pipe()
    assert main(["cache", "export", f"/dev/fd/{write}"]) == 0
    os.close(write)
    with open(read) as pipe:
        assert json.load(pipe)["verdicts"]["k"] == VERDICT.to_dict()


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["export"], 2, "which FILE? Write `fusec cache export verdicts.json`"),
        (["import"], 2, "which FILE?"),
        (["clear", "x.json"], 2, "`fusec cache clear` takes no file, and got 'x.json'"),
        (["exprt", "x.json"], 2, "Did you mean 'export'?"),
        (["import", "none.json"], 2, "there is no file 'none.json'"),
        (["export", "none/x.json"], 4, "cannot write none/x.json"),
    ],
)
def test_wrong_use_is_said(capsys, monkeypatch, tmp_path, args, code, said) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path / "cache"))
    found, out, err = run(capsys, "cache", *args)
    assert (found, out) == (code, "")
    assert said in err
    assert err.splitlines()[-1].startswith(("next: fusec", "next: another directory"))


def test_an_import_that_would_be_lost_is_an_error(capsys, monkeypatch, directory, tmp_path) -> None:
    file = tmp_path / "verdicts.json"
    file.write_text(json.dumps(GOOD))
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(directory))
    monkeypatch.setenv("FUSEC_CACHE", "0")
    code, out, err = run(capsys, "cache", "import", str(file))
    assert (code, out) == (4, "")
    assert "keeps no verdicts: the cache on disk is turned off" in err
