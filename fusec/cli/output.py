"""Where the command line writes: results to stdout, progress to stderr, colour for a terminal."""

from __future__ import annotations

import os
import sys


def progress(message: str) -> None:
    """Say on stderr what is being done."""
    print(f"fusec: {message}", file=sys.stderr, flush=True)


def show(text: str, language: str = "text") -> None:
    """Print a result; on a terminal in colour, where rich is installed and NO_COLOR is not set.

    Args:
        language: of the text: "python", "cpp", "text".
    """
    if not (sys.stdout.isatty() and _show_in_colour(text, language)):
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    sys.stdout.flush()


def _show_in_colour(text: str, language: str) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    try:
        # An extra of the package: plain text does as well.
        from rich.console import Console
        from rich.syntax import Syntax
    except ImportError:
        return False
    console = Console(highlight=True, soft_wrap=True)
    if language == "text":
        console.print(text, markup=False)
    else:
        console.print(Syntax(text, language, background_color="default"))
    return True
