"""Runs a console line of a page as far as a test can: what would install or train is looked up."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusec.tools.cli import main
from tests.docs.pages import ROOT, Command


def run(command: Command, directory: Path = ROOT) -> None:
    """Assert that a command works, and prints what the page shows.

    Args:
        directory: where it is run; ``fusec`` runs in this process.
    """
    match command.argv:
        case ("fusec", *args):
            with inside(directory):
                printed = fusec(args)
            if command.output is not None:
                assert printed.strip("\n") == command.output.strip("\n")
        case ("make", target):
            subprocess.run(["make", "-n", target], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        case ("pip", "install", "-e", what):
            extras = re.findall(r"\w+", what)
            known = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
            assert all(re.search(rf"^{extra} = \[", known, re.MULTILINE) for extra in extras)
        case ("python", example, *_) if example.startswith("examples/"):
            tested = (ROOT / "tests/test_examples.py").read_text(encoding="utf-8")
            assert (ROOT / example).exists() and Path(example).stem in tested
        case ("python", "-m", module, *_):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        case ("pytest", *args):
            assert all((ROOT / arg).exists() for arg in args if "/" in arg)
        case _:
            pytest.fail(f"nobody knows how to test: {' '.join(command.argv)}")


@contextlib.contextmanager
def inside(directory: Path) -> Iterator[None]:
    """Make a directory the current one while the block runs."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def fusec(args: list[str]) -> str:
    """Run fusec's command line in this process; return what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(args)
    assert code == 0, err.getvalue()
    return out.getvalue()
