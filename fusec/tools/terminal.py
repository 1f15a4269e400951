"""Reports, as JSON and as text for a terminal: its width, tables that fit it, paragraphs.

The width is the terminal's, or that of ``COLUMNS``; 100 where output goes to a file. Names are cut
only where a table is wider than that, and the last column of a table is wrapped, never cut.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, TypeVar

Row = TypeVar("Row")
_DEFAULT, _LEAST = 100, 60
_LEAST_NAME, _LEAST_TEXT = 8, 14
_LEAST_BESIDE = 20
_GAP = "  "
_BELOW = " " * 6
SCHEMA = 1
"""Of the JSON forms, which are stable: fields are added, never renamed or removed."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a command found: it prints, has a JSON form, and is shown by a notebook."""

    def text(self, *, whole: bool = False) -> str:
        """Return the text; ``whole`` shows what is many, too."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form as dictionaries and lists; its class's module describes it."""
        return asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """Return the JSON form."""
        return json.dumps({"schema": SCHEMA, **self.to_dict()}, indent=indent)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text())}</pre>"


def columns() -> int:
    """Return the greatest width of a line."""
    return max(shutil.get_terminal_size((_DEFAULT, 24)).columns, _LEAST)


def format_table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return rows with their columns aligned, to the right for the columns in ``right``."""
    return _aligned(rows, [max(map(len, column)) for column in zip(*rows, strict=True)], right)


def fitted_table(
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    *,
    names: Sequence[int] = (),
    indent: int = 0,
) -> list[str]:
    """Return an indented table that is at most as wide as the terminal.

    Args:
        names: columns whose cells may be cut; the last column is wrapped, below each row where
            there is too little room beside it.
    """
    *widths, last = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = columns() - indent - len(_GAP) * len(widths)
    rest = sum(width for column, width in enumerate(widths) if column not in names)
    wanted = sum(widths[column] for column in names)
    text = min(last, max(room - rest - wanted, (room - rest) * 2 // 5, _LEAST_TEXT))
    beside = text == last or text >= _LEAST_BESIDE
    cut = _shares([widths[column] for column in names], room - rest - text * beside)
    widths = [
        cut[list(names).index(column)] if column in names else width
        for column, width in enumerate(widths)
    ]
    lines: list[str] = []
    for row in rows:
        cells = [shorten(cell, width) for cell, width in zip(row, widths, strict=False)]
        if not beside:
            lines += _aligned([cells], widths, right)
            lines += textwrap.wrap(
                row[-1], columns() - indent, initial_indent=_BELOW, subsequent_indent=f"{_BELOW}  "
            )
            continue
        first, *more = textwrap.wrap(row[-1], max(text, 1)) or [""]
        start = _aligned([[*cells, first]], [*widths, len(first)], right)[0]
        margin = " " * (sum(widths) + len(_GAP) * len(widths))
        lines += [start, *(margin + line for line in more)]
    return [" " * indent + line for line in lines]


def format_bytes(size: int) -> str:
    """Return a size in powers of ten: ``1.57 MB``."""
    return in_units(size, ("B", "kB", "MB", "GB", "TB"))


def format_seconds(seconds: float) -> str:
    """Return a time as ``4.2 us``, ``4.2 ms`` or ``4.2 s``."""
    return format_us(seconds * 1e6)


def format_us(us: float) -> str:
    """Return microseconds as ``format_seconds`` does."""
    return in_units(us, ("us", "ms", "s"))


def in_units(value: float, units: Sequence[str]) -> str:
    """Format a value with three digits, in the first unit in which it is less than a thousand.

    Args:
        units: each a thousand of the one before.
    """
    *smaller, largest = units
    for unit in smaller:
        digits = f"{value:.3g}"
        if abs(float(digits)) < 1000:
            return f"{digits} {unit}".rstrip()
        value /= 1000
    return f"{value:.0f} {largest}" if abs(value) >= 1000 else f"{value:.3g} {largest}"


def alike(rows: Iterable[Row], kind: Callable[[Row], object]) -> list[list[Row]]:
    """Group rows by kind, in the order of their first occurrence."""
    found: dict[object, list[Row]] = {}
    for row in rows:
        found.setdefault(kind(row), []).append(row)
    return list(found.values())


def indented(lines: Sequence[str], by: int = 2) -> list[str]:
    """Return lines moved to the right."""
    return [f"{' ' * by}{line}" for line in lines]


def shorten(text: str, limit: int) -> str:
    """Return a text cut to some columns, with dots where something is missing."""
    return text if len(text) <= limit else f"{text[: max(limit - 3, 0)]}..."


def tail(text: str, limit: int) -> str:
    """Return the end of a text, with dots where something is missing before it."""
    return text if len(text) <= limit else f"...{text[len(text) - max(limit - 3, 0) :]}"


def wrapped(text: str, first: str = "", following: str = "", *, whole: str = "") -> list[str]:
    """Return a paragraph as lines with prefixes.

    Args:
        whole: a part of the text that stays in one line where it can, so that it can be copied.
    """
    kept = whole.replace(" ", _GLUE)
    lines = textwrap.wrap(
        text.replace(whole, kept) if whole else text,
        columns(),
        initial_indent=first,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_GLUE, " ") for line in lines]


_GLUE = "\x00"
"""Replaces a space at which no line may break."""


def _aligned(
    rows: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[int]
) -> list[str]:
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if position in right else cell.ljust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(_GAP.join(cells).rstrip())
    return lines


def _shares(wanted: Sequence[int], room: int) -> list[int]:
    """Return the widths of columns that share some room: the widest are reduced first."""
    most = max(wanted, default=0)
    while most > _LEAST_NAME and sum(min(width, most) for width in wanted) > room:
        most -= 1
    return [min(width, most) for width in wanted]
