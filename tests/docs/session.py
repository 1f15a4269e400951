"""Types the console lines of a page, in a directory with the page's files, and compares.

What follows from the model and the target is compared to the character. What was measured is not
the same twice: times, rates and sizes of memory are compared as "a number", and so is the space
around them. A line ``...`` of the page stands for any lines; lines of progress are left out.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from fusec.tools.cli import main
from tests.docs.console import inside
from tests.docs.pages import ROOT, Step, files, steps

EXACT = (
    "fusec explain",
    "fusec dump",
    "fusec lock",
    "cat",
    "fusec check --static",
    "fusec check --emulate",
)
"""Commands that measure nothing."""
PROGRESS = re.compile(r"^fusec: (?!error|verified).*\n", re.MULTILINE)
WARNED = re.compile(r"^\S+\.py:\d+: (?=\w*Warning: )")
UNIT = r" ?(?:us|ms|s|min|[kMGT]?B(?:/s)?|[KMG]iB|%)\b|(?<=\d)%|(?<=\d)x\b"
MEASURED = re.compile(
    rf"(?<![\w.])[+-]?\d[\d.,]*(?:e[+-]?\d+)?(?:{UNIT})|\b\d[\d.]*e[+-]\d+\b|\d+\.\d{(3,)}|0x\w+"
)


def write_files(page: str, directory: Path) -> None:
    """Write the files that a page shows."""
    for name, text in files(page).items():
        (directory / name).write_text(text, encoding="utf-8")


def play(page: str, directory: Path, *, update: bool) -> None:
    """Assert that each line of a page's console prints what the page shows.

    Args:
        update: write what is printed into the page, where the page elides nothing.
    """
    write_files(page, directory)
    exported: dict[str, str] = {}
    answers = [(step, typed(step.line, directory, exported)) for step in steps(page)]
    if update:
        rewrite(page, answers)
    for step, printed in answers:
        if not update or elides(step.printed):
            assert_alike(step, printed)


def typed(line: str, directory: Path, exported: dict[str, str]) -> str:
    """Return what a line prints, both streams of it; the paths in it are those of a `directory`.

    Args:
        exported: the variables that lines before have set, to which an ``export`` adds.
    """
    if line.startswith("export "):
        settings = line.replace("$PWD", str(directory)).split()[1:]
        exported.update(setting.split("=", 1) for setting in settings)
        return ""
    plain = line.startswith("fusec ") and not re.search(r"[|;&$]", line) and not exported
    printed = in_process(line, directory) if plain else by_shell(line, directory, exported)
    printed = PROGRESS.sub("", printed)
    return printed.replace(f"{directory}/", "").replace(f"{ROOT}/", "")


def in_process(line: str, directory: Path) -> str:
    """Run fusec's command line here, where torch is imported already."""
    torch._dynamo.reset()
    printed = io.StringIO()
    into = contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed)
    with inside(directory), into[0], into[1]:
        main(shlex.split(line)[1:])
    return printed.getvalue()


def by_shell(line: str, directory: Path, exported: dict[str, str]) -> str:
    """Run a line in bash, where `fusec` and `python` are those of this process."""
    head = f'python() {{ {sys.executable} "$@"; }}; fusec() {{ python -m fusec "$@"; }}; '
    path = ":".join((*exported.get("PYTHONPATH", "").split(), str(ROOT)))
    own = {name: value for name, value in os.environ.items() if name != "COLUMNS"}  # of the tests
    done = subprocess.run(
        ["bash", "-c", head + line], cwd=directory, text=True,
        env={**own, **exported, "PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.stdout


def elides(shown: str) -> bool:
    return any(line.strip() == "..." for line in shown.splitlines())


def assert_alike(step: Step, printed: str) -> None:
    """Assert that what a page shows is what was printed."""
    exact = step.line.startswith(EXACT)
    pattern = "".join(
        r"(?:.*\n)*" if line.strip() == "..." else re.escape(line) + r"\n"
        for line in comparable(step.printed, exact=exact)
    )
    got = "".join(f"{line}\n" for line in comparable(printed, exact=exact))
    assert re.fullmatch(pattern, got), f"$ {step.line}\n{printed}"


def comparable(text: str, *, exact: bool) -> list[str]:
    """Return the lines of a text; where it was measured, without numbers and widths."""
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    if exact:
        return lines
    return [re.sub(r" +", " ", MEASURED.sub("#", WARNED.sub("", line))).strip() for line in lines]


def rewrite(page: str, answers: list[tuple[Step, str]]) -> None:
    """Write what lines printed into a page, from its end to its beginning."""
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    for step, printed in reversed(answers):
        if not elides(step.printed):
            ending = "\n" if printed.strip() else ""
            after = text[step.start + len(step.printed) :]
            text = text[: step.start] + printed.strip("\n") + ending + after
    path.write_text(text, encoding="utf-8")
