"""The commands that contributors and reporters are asked to run are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fusec.tools.cli import new_parser
from tests.docs.pages import ROOT

FILES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))]
COMMAND = re.compile(r"`fusec( [^`]+)`")


def commands(file: Path) -> list[list[str]]:
    return [shlex.split(found) for found in COMMAND.findall(file.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("file", [f for f in FILES if commands(f)], ids=lambda file: file.stem)
def test_each_command_is_one(file: Path) -> None:
    for argv in commands(file):
        if argv != ["explain"]:  # which wants a model
            new_parser().parse_args(argv)


def test_each_target_of_make_is_one() -> None:
    known = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"`?make ([\w-]+)", FILES[0].read_text(encoding="utf-8"))
    assert {"test", "lint"} <= {*named}
    assert all(re.search(rf"^{target}:", known, re.MULTILINE) for target in named)
