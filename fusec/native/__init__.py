"""The C library that runs what ``fusec build --native`` wrote: ``fusec.h``, and its sources.

They are compiled with the program that uses them, and need the C library of Linux alone::

    cc program.c $(python -m fusec.native) -o program
"""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """Return the folder of ``fusec.h`` and of the sources."""
    return Path(__file__).parent


def flags() -> list[str]:
    """Return the arguments with which a C compiler builds a program that uses these files."""
    return ["-I", str(path()), *map(str, sorted(path().glob("*.c"))), "-ldl"]
