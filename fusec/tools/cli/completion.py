"""Print a script that completes fusec's command lines in a shell: put it where the shell looks.

fusec completion bash > ~/.local/share/bash-completion/completions/fusec
fusec completion zsh  > "${fpath[1]}/_fusec"
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

from fusec.errors import EnvironmentProblem, UsageError
from fusec.options import choices_of
from fusec.tools.cli.cache import ACTIONS
from fusec.tools.cli.line import STAGES, TARGET_NAMES
from fusec.tools.cli.output import show

HELP = "print a completion script for bash, zsh, tcsh or fish"
SHELLS = ("bash", "zsh", "tcsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("shell", metavar="|".join(SHELLS))


def run(arguments: argparse.Namespace) -> int:
    """Print the script of one shell."""
    if arguments.shell not in SHELLS:
        raise UsageError.unknown("shell", arguments.shell, SHELLS)
    try:
        import shtab  # local: an extra of the package
    except ImportError:
        raise EnvironmentProblem(
            "completion is made by shtab, which is not installed: pip install 'fusec[cli]'."
        ) from None
    # Local: it lists this module among the commands.
    from fusec.tools.cli import new_parser

    parser = new_parser()
    for action in _actions(parser):
        words = _WORDS.get(action.dest)
        if words is not None:
            action.choices = list(words)
        elif action.dest in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    show(shtab.complete(parser, shell=arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


_WORDS: Mapping[str, tuple[str, ...]] = {
    "target": TARGET_NAMES,
    "stage": STAGES,
    "action": ACTIONS,
    "shell": SHELLS,
    **{name: choices_of(name) for name in ("race", "descriptors", "roles")},
}
"""Argument -> its choices. fusec's parsers have no choices, as its errors suggest the nearest."""
_FILES = ("model", "script", "directory", "file", "output", "check")
