"""The C library that runs what ``fusec build --native`` wrote: ``fusec.h``, and its sources.

They are compiled with the program that uses them; only the C library of Linux is needed::

    cc -I "$FUSEC" program.c "$FUSEC"/*.c -ldl -o program
"""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """Return the folder of ``fusec.h`` and of the sources, which a program is compiled with."""
    return Path(__file__).parent
