"""A compile that takes long says on a terminal what it is at, and nothing elsewhere."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest
import torch

from fusec.runtime import progress
from tests.calls import calls_of
from tests.support import compile_with


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Looks:
    """Stands for the event that ends a line: it comes after some looks."""

    def __init__(self, count: int) -> None:
        self.left = count

    def wait(self, seconds: float) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture(autouse=True)
def sixty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")


def shown(terminal: Terminal, looks: int) -> list[str]:
    """What a line shows that is looked at so many times before its compile ends."""
    line = progress._Line("graph forward")
    line.said, line.done = "passes", Looks(looks)  # type: ignore[assignment]
    line.run()
    return [part.strip() for part in terminal.getvalue().split("\r")]


def test_what_takes_long_is_one_line_that_is_empty_at_the_end() -> None:
    line = "fusec: compiling graph forward: passes (0 s)"
    with redirect_stderr(Terminal()) as terminal:
        assert shown(terminal, 2) == ["", line, line, "", ""]
    assert "\n" not in terminal.getvalue()


def test_what_ends_soon_shows_nothing() -> None:
    with redirect_stderr(Terminal()) as terminal:
        assert shown(terminal, 0) == [""]


def test_a_race_has_the_line_to_itself() -> None:
    with redirect_stderr(Terminal()) as terminal, progress.race_line() as say:
        say("candidate 1")
        assert shown(terminal, 2) == ["", "fusec: race: candidate 1"]


def test_the_outermost_compile_says_what_is_done() -> None:
    with (
        redirect_stderr(Terminal()),
        progress.long_compile("graph forward"),
        progress.long_compile("graph body"),
    ):
        progress.say("build")
        assert [(line.name, line.said) for line in progress._open] == [
            ("graph forward", "build"), ("graph body", ""),
        ]  # fmt: skip
    assert not progress._open


def test_a_compile_tells_its_stages() -> None:
    with redirect_stderr(Terminal()), calls_of(progress.say) as calls:
        compile_with(lambda x: x.sin() + 1)(torch.ones(7))
    said = [call.arguments["text"] for call in calls]
    assert said[0] == "key"
    assert {"capture", "passes", "the C++ compiler builds kernels: 1"} <= set(said)


def test_nothing_is_shown_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.long_compile("graph forward"), progress.race_line() as say:
        assert not progress._open
        say("candidate 1")
    assert capsys.readouterr() == ("", "")
