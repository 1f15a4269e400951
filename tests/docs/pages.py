"""The pages of documentation as tests read them: fenced blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(\w+\.(?:py|c))`[^`\n]*:\n\n$")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        heading: the heading above it.
        language: what stands behind the fence; "" for plain text.
        start: where its text begins in the page's.
    """

    heading: str
    language: str
    text: str
    start: int = 0


@dataclass(frozen=True, slots=True)
class Command:
    """A console line, and what the page shows as its output: None where it shows nothing."""

    argv: tuple[str, ...]
    output: str | None


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page, top to bottom; its path is relative to the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text[: match.start()]), re.MULTILINE)
        found.append(Block(headings[-1], match[1], match[2], match.start(2)))
    return found


def python(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    return [block.text for block in blocks(page) if block.language == "python"]


def commands(page: str) -> list[Command]:
    """Return the console lines of a page.

    A plain block right behind a single command is its output.
    """
    found = []
    given = [*blocks(page), Block("", "end", "")]
    for block, behind in pairwise(given):
        if block.language != "sh":
            continue
        lines = block.text.replace("\\\n", " ").splitlines()
        split = [tuple(shlex.split(line, comments=True)) for line in lines]
        argvs = [argv for argv in split if argv]
        shown = len(argvs) == 1 and behind.language == "" and behind.heading == block.heading
        found += [Command(argv, behind.text if shown else None) for argv in argvs]
    return found


@dataclass(frozen=True, slots=True)
class Step:
    """A line typed at a console, ``$ fusec ...``, and what the page shows that it prints.

    Attributes:
        start: where what is printed begins in the page's text.
    """

    line: str
    printed: str
    start: int


STEP = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


def steps(page: str) -> list[Step]:
    """Return what is typed in the page's console blocks, top to bottom."""
    return [
        Step(step[1], step[2], block.start + step.start(2))
        for block in blocks(page)
        if block.language == "console"
        for step in STEP.finditer(block.text)
    ]


def files(page: str) -> dict[str, str]:
    """Return the files that a page shows: code behind a paragraph that ends with a name."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = {}
    for match in FENCE.finditer(text):
        named = NAMED.search(text[: match.start()])
        if named is not None and match[1] in ("python", "c"):
            found[named[1]] = match[2]
    return found
