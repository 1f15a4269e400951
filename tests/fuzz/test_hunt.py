"""The hunt around the fuzzers: children that die, findings, a corpus that a hunt goes on with."""

from __future__ import annotations

import json
import os
import sys
from itertools import islice
from pathlib import Path

import pytest

from tests.fuzz.hunt import Corpus, Hunt, first_failing, parse_seed, run_seeds, seeds_of
from tests.fuzz.parts import CRASHED, FAILED, HUNG, PARTS, RIGHT, Part, Verdict

CHILD = """
import json, os, sys, time
for text in sys.argv[1:]:
    part, _, seed = text.partition(":")
    row = {"part": part, "seed": int(seed)}
    print(json.dumps(row), flush=True)
    if part == "dies" and seed == "1":
        os.abort()
    if part == "hangs" and seed == "1":
        time.sleep(600)
    wrong = part == "fails" and seed == "1"
    said = {"kind": "failed", "said": "off", "source": "x = 1\\n"} if wrong else {}
    print(json.dumps(row | {"verdict": said}), flush=True)
"""


def hunt_of(tmp_path: Path, part: str, most: int = 4) -> Hunt:
    corpus = Corpus.at(tmp_path / "corpus.jsonl")
    seeds = seeds_of([Part(part, lambda seed: Verdict())], 0, corpus.kinds)
    command = (sys.executable, "-S", "-c", CHILD)
    return Hunt(corpus, tmp_path, seeds, most, command=command, limits={"hangs": 3.0})


@pytest.mark.parametrize(
    ("part", "kind"), (("dies", CRASHED), ("hangs", HUNG), ("fails", FAILED), ("works", RIGHT))
)
def test_a_seed_that_ends_its_child_is_a_finding_and_the_others_are_run(tmp_path, part, kind):
    hunt = hunt_of(tmp_path, part)
    hunt.run(1)
    kinds = Corpus.at(tmp_path / "corpus.jsonl").kinds
    assert kinds == {(part, n): kind if n == 1 else RIGHT for n in range(4)}
    assert [path.name for path in hunt.found] == [f"{part}_1.py"] * (kind != RIGHT)
    assert hunt.programs == 4


def test_a_resumed_hunt_begins_with_what_failed_and_leaves_out_the_rest(tmp_path):
    hunt_of(tmp_path, "fails").run(1)
    again = hunt_of(tmp_path, "fails", most=3)
    again.seeds = first_failing(again.corpus, again.seeds, ["fails"])
    assert list(islice(again.seeds, 3)) == [("fails", 1), ("fails", 4), ("fails", 5)]


def test_a_line_of_a_corpus_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"part": "a", "seed": 1, "kind": "right"}\n{"part": "a", "se')
    assert Corpus.at(path).kinds == {("a", 1): RIGHT}


def test_each_part_has_its_share_of_a_round():
    parts = [Part("a", lambda seed: Verdict(), share=2), Part("b", lambda seed: Verdict())]
    drawn = list(islice(seeds_of(parts, 5, {("a", 6): RIGHT}), 6))
    assert drawn == [("a", 5), ("a", 7), ("b", 5), ("a", 8), ("a", 9), ("b", 6)]


def test_a_child_tells_of_a_part_that_raises(capfd):
    def run(seed: int) -> Verdict:
        os.write(1, b"what a program prints")
        raise ValueError("off")

    run_seeds([parse_seed("a:3")], {"a": Part("a", run)})
    begun, ended = map(json.loads, capfd.readouterr().out.splitlines())
    assert begun == {"part": "a", "seed": 3}
    assert ended["verdict"]["kind"] == FAILED and ended["verdict"]["said"] == "ValueError: off"


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_a_seed_of_each_part_is_right(name):
    ran = 0
    for seed in range(20):  # transformers builds not all architectures small
        verdict = PARTS[name].run(seed)
        assert verdict.kind == RIGHT, verdict.said
        ran += verdict.programs
        if ran:
            return
    raise AssertionError("no seed had a program")
