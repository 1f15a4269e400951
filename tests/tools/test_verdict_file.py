"""Verdicts as a file: exported from one cache, merged into another, from the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fusec.errors import EnvironmentProblem, UsageError
from fusec.runtime.cache.store import Cache
from fusec.runtime.race.verdicts import (
    CandidateTime,
    Verdict,
    all_verdicts,
    load_verdict,
    store_verdict,
)
from fusec.tools.cli import main
from fusec.tools.cli.cache import Imported, export_verdicts, import_verdicts
from tests.limits import files_up_to

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


def test_a_failed_export_leaves_the_earlier_file(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "verdicts.json"
    file.write_text("earlier")
    said = r"cannot write .*verdicts\.json: File too large"
    with files_up_to(10), pytest.raises(EnvironmentProblem, match=said):
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
