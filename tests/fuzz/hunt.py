"""A hunt: seeds of parts in child processes, what became of them in a corpus.

A child (``run_seeds``) says in JSON, line by line, which seed it begins and what became of it. So
the hunter knows which one a child died of, or hangs at: that seed is a finding, and the others go
to another child. The corpus has one line for each seed that ended, the latest line counts::

    {"part": "programs", "seed": 17, "kind": "failed", "said": "...", "seconds": 2.1,
     "versions": "torch 2.13.0, triton 3.7.1", ...}
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, TypeAlias

from tests.fuzz.parts import CRASHED, FAILED, HUNG, PARTS, RIGHT, Part, Verdict

ROOT = Path(__file__).parents[2]
VERSIONS = ", ".join(f"{name} {version(name)}" for name in ("torch", "triton") if find_spec(name))
BATCH = 40
"""Seeds a child: enough that the import of torch is little, few enough that its memory is."""
Seed: TypeAlias = tuple[str, int]
"""A part's name and a seed of it."""


@dataclass(slots=True)
class Corpus:
    """What became of each seed so far, kept in a file of JSON lines."""

    path: Path
    kinds: dict[Seed, str] = field(default_factory=dict)

    @staticmethod
    def at(path: Path) -> Corpus:
        """Return the corpus of a file; a line that was cut off is left out."""
        corpus = Corpus(path)
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                row = json.loads(line)
                corpus.kinds[row["part"], row["seed"]] = row["kind"]
            except (ValueError, KeyError):
                continue
        return corpus

    def add(self, seed: Seed, verdict: Verdict, seconds: float) -> None:
        self.kinds[seed] = verdict.kind
        row = {"part": seed[0], "seed": seed[1], "kind": verdict.kind, "said": verdict.said[:2000],
               "programs": verdict.programs, "seconds": round(seconds, 2),
               "at": time.strftime("%Y-%m-%d %H:%M:%S"), "versions": VERSIONS}  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def failing(self) -> list[Seed]:
        return [seed for seed, kind in self.kinds.items() if kind != RIGHT]


def seeds_of(parts: Sequence[Part], first: int, done: Mapping[Seed, Any]) -> Iterator[Seed]:
    """Yield seeds that are not done, without end: of each part its share in each round."""

    def left(part: Part) -> Iterator[int]:
        return (n for n in count(first) if (part.name, n) not in done)

    numbers = {part.name: left(part) for part in parts}
    while True:
        for part in parts:
            yield from ((part.name, n) for n in islice(numbers[part.name], part.share))


@dataclass(slots=True)
class Hunt:
    """What goes on: which seeds, how long, and where findings are written."""

    corpus: Corpus
    out: Path
    seeds: Iterator[Seed]
    most: int
    until: float = float("inf")
    programs: int = 0
    found: list[Path] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    command: Sequence[str] = (sys.executable, "-m", "tests.fuzz", "--child")
    limits: Mapping[str, float] = field(
        default_factory=lambda: {name: part.limit_s for name, part in PARTS.items()}
    )
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, jobs: int) -> None:
        """Hunt in so many children at once, until there are programs enough or the time is up."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        while batch := self._next():
            while batch:
                batch = self._run_batch(batch)

    def _next(self) -> list[Seed]:
        with self.lock:
            wanted = min(BATCH, self.most)
            if time.time() >= self.until or wanted <= 0:
                return []
            batch = list(islice(self.seeds, wanted))
            self.most -= len(batch)
            return batch

    def _run_batch(self, batch: list[Seed]) -> list[Seed]:
        """Run seeds in one child; return those that it did not come to."""
        left, begun, since = dict.fromkeys(batch), None, time.time()
        child = subprocess.Popen(
            [*self.command, *(f"{part}:{seed}" for part, seed in batch)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        lines = _lines_of(child)
        while True:
            limit = self.limits.get(begun[0], 600.0) if begun else 300.0
            line = _line(lines, min(limit, max(self.until - time.time() + 60, 1)))
            if line is None or not line:
                break
            row = json.loads(line)
            seed: Seed = (row["part"], row["seed"])
            if "verdict" in row:
                self._note(seed, Verdict(**row["verdict"]), time.time() - since)
                left.pop(seed, None)
                begun = None
            else:
                begun, since = seed, time.time()
        hung = child.poll() is None and line is None
        _end(child)
        if begun is None:
            return list(left) if len(left) < len(batch) else []
        left.pop(begun)
        if not (hung and time.time() >= self.until):
            self._note(begun, _death(begun, child.returncode, hung), time.time() - since)
        return list(left) if time.time() < self.until else []

    def _note(self, seed: Seed, verdict: Verdict, seconds: float) -> None:
        with self.lock:
            self.corpus.add(seed, verdict, seconds)
            self.programs += verdict.programs
            self.counts[verdict.kind] += 1
            if verdict.kind != RIGHT:
                self.found.append(self._written(seed, verdict))
            if sum(self.counts.values()) % 50 == 0:
                print(f"{self.programs} programs, {len(self.found)} found", file=sys.stderr)

    def _written(self, seed: Seed, verdict: Verdict) -> Path:
        path = self.out / f"{seed[0]}_{seed[1]}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(verdict.source or _replay(seed, verdict))
        print(f"{path}: {verdict.kind}: {verdict.said[:300]}", file=sys.stderr, flush=True)
        return path


def run_seeds(seeds: Iterable[Seed], parts: Mapping[str, Part] = PARTS) -> None:
    """Run seeds in this process, and tell the hunter of each: the child's side."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what programs print is no answer
    for name, seed in seeds:
        row: dict[str, Any] = {"part": name, "seed": seed}
        print(json.dumps(row), file=answers, flush=True)
        try:
            verdict = parts[name].run(seed)
        except Exception as error:
            verdict = Verdict(FAILED, f"{type(error).__name__}: {error}")
        print(json.dumps(row | {"verdict": asdict(verdict)}), file=answers, flush=True)


def parse_seed(text: str) -> Seed:
    """Return ``part:seed`` as both."""
    name, _, seed = text.partition(":")
    return name, int(seed)


def first_failing(corpus: Corpus, rest: Iterator[Seed], names: Iterable[str]) -> Iterator[Seed]:
    """Yield what failed so far, then the rest."""
    known = set(names)
    return chain([seed for seed in corpus.failing() if seed[0] in known], rest)


def _replay(seed: Seed, verdict: Verdict) -> str:
    said = "\n".join(f"# {line}" for line in verdict.said.splitlines())
    return f"{said}\nfrom tests.fuzz.hunt import run_seeds\n\nrun_seeds([{seed!r}])\n"


def _death(seed: Seed, code: int | None, hung: bool) -> Verdict:
    if hung:
        return Verdict(HUNG, f"{seed[0]} {seed[1]} does not end")
    name = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    return Verdict(CRASHED, f"{seed[0]} {seed[1]} ends its process: {name}")


def _lines_of(child: subprocess.Popen[str]) -> queue.Queue[str]:
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    return lines


def _line(lines: queue.Queue[str], seconds: float) -> str | None:
    """Return the next line, "" at the end, None where none comes in time."""
    try:
        return lines.get(timeout=seconds)
    except queue.Empty:
        return None


def _end(child: subprocess.Popen[str]) -> None:
    """End a child and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
