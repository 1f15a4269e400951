"""Read Dynamo's graph breaks and recompiles: line, reason and remedy.

Both are read from torch's own trace, the one that ``tlparse`` reads: the text of a graph break, and
the metrics of a compile. A remedy is what to change; where one line of settings does it, that line
is the setting. ``tests/tools/report/test_breaks.py`` applies each and checks that it works.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusec.frontend.origin import NO_TEXT, printable, unresumed
from fusec.tools.terminal import alike, wrapped

_FRAME = re.compile(r'^ *File "([^\n"]*)", line (\d+), in ([^\n]*)$', re.MULTILINE)
_PLACE = re.compile(r"Graph break in user code at (.+):(\d+)$", re.MULTILINE)
_LIBRARY = re.compile(
    r"[/\\](torch|importlib|runpy)[/\\]|[/\\]runpy\.py$|^<(frozen|eval_with_key)\b"
)
_OPTIMIZER = re.compile(r"user code at .*[/\\]torch[/\\]optim[/\\]optimizer\.py:\d+$", re.MULTILINE)
_SKIPPED = re.compile(r"Skipping the function|graph break in loop|results in a skip|skip tracing")
_ADDRESS = re.compile(r"<\w+ (\S+) at 0x[0-9a-f]+>")
_USELESS = re.compile("report an issue|is fundamental|caused by an earlier")


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's program: where it is and its text."""

    path: str
    line: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        text = f"{os.path.basename(self.path)}:{self.line} in {self.function}"
        return printable(f"{text}: {self.code}" if self.code else text)


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to change; ``setting`` is a line of settings that does instead, or "".

    Attributes:
        meant: nothing is to be changed: what the program does needs this compile.
    """

    change: str
    setting: str = ""
    meant: bool = False

    def __str__(self) -> str:
        return f"{self.change}; or {self.setting}" if self.setting else self.change


@dataclass(frozen=True, slots=True)
class Break:
    """One line at which Dynamo ends a graph.

    Attributes:
        reason: Dynamo's explanation.
        skipped: the whole function runs eagerly, because Dynamo cannot go on after the line.
        count: how often it was compiled.
    """

    place: Place
    reason: str
    remedy: Remedy
    skipped: bool = False
    count: int = 1

    @property
    def said(self) -> str:
        """What happens there, and why."""
        what = f"all of {self.place.function} runs eagerly" if self.skipped else "a graph ends"
        return f"{what}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Recompile:
    """One function that was compiled again: the guard that failed, and the seconds it took."""

    place: Place
    reason: str
    remedy: Remedy
    seconds: float = 0.0
    count: int = 1

    @property
    def kind(self) -> str:
        """The guard without names and numbers."""
        return re.sub(r"'[^']*'|\d+", "#", self.reason)

    @property
    def said(self) -> str:
        """How often it was compiled again, how long that took, and why."""
        times = "once more" if self.count == 1 else f"{self.count} more times"
        return f"compiled {times}, {self.seconds:.1f} s: {self.reason}"


# -- breaks --------------------------------------------------------------------------------------


def read_break(text: str) -> Break:
    """Parse the text of a graph break, as Dynamo writes it to torch's trace."""
    title, explanation, hints = _message(text)
    asked = f"{title}\n{explanation}"
    reason = printable(_ADDRESS.sub(r"\1", explanation or title)).rstrip(".")
    useful = [hint for hint in hints if not _USELESS.search(hint)]
    other = Remedy(printable(useful[0]).rstrip(".") if useful else "none is known")
    remedy = _remedy(_REMEDIES, asked) or other
    return Break(_place(text), reason, remedy, bool(_SKIPPED.search(text)))


def is_library(path: str) -> bool:
    """Return True for a file of torch's, or of Python's importlib and runpy."""
    return bool(_LIBRARY.search(path))


def is_planned(text: str) -> bool:
    """Return True for the break that torch puts around each optimizer's step: it costs nothing.

    The step itself is a separate function after the break, and one graph.
    """
    return bool(_OPTIMIZER.search(text))


def merge_breaks(breaks: Iterable[Break]) -> tuple[Break, ...]:
    """Merge breaks of the same line and reason, with their count; skipped functions first."""
    merged = (
        replace(some[-1], count=sum(b.count for b in some), skipped=any(b.skipped for b in some))
        for some in alike(breaks, lambda b: (b.place, b.reason))
    )
    return tuple(sorted(merged, key=lambda b: not b.skipped))


def _message(text: str) -> tuple[str, str, list[str]]:
    """Return title, explanation and hints of the first break that a text names."""
    match = re.search(
        r"(?:^|\n)(?P<title>[^\n]+)\n  Explanation: (?P<why>.*?)(?P<hints>(?:\n  Hint: .*?)*)"
        r"\n\s*\n?  Developer debug context",
        text,
        re.DOTALL,
    )
    if match is None:
        lines = [line for line in text.strip().splitlines() if line.strip()]
        return (lines[-1].strip() if lines else "unknown"), "", []
    title = re.sub(r"^(Graph Break Reason|[\w.]+Unsupported): ", "", match["title"].strip())
    hints = [" ".join(hint.split()) for hint in match["hints"].split("\n  Hint: ") if hint.strip()]
    why = match["why"].split("\n\n")[0]
    return title, " ".join(why.split()), hints


def _place(text: str) -> Place:
    """Return the innermost line of the user's program in a break's stack."""
    stack = text.partition("Traceback (most recent call last)")[0]
    frames = [Place(p, int(n), where.strip()) for p, n, where in _FRAME.findall(stack)]
    named = _PLACE.search(text)
    if not frames and named:
        frames = [Place(named[1], int(named[2]), "")]
    own = [frame for frame in frames if not is_library(frame.path)] or frames
    return with_code(own[-1]) if own else Place("", 0, "")


def with_code(place: Place) -> Place:
    """Return a place with its line's text, and the function's name without Dynamo's prefix."""
    function, _ = unresumed(place.function)
    code = linecache.getline(place.path, place.line).strip() or NO_TEXT
    return replace(place, function=function, code=code)


_REMEDIES = {
    r"builtin (?:operator )?`?print": Remedy(
        "print outside of what is compiled",
        "torch._dynamo.config.reorderable_logging_functions.add(print)",
    ),
    r"logging\.Logger method": Remedy(
        "log outside of what is compiled, or let Dynamo leave the call out: add the method to "
        "torch._dynamo.config.ignore_logging_functions"
    ),
    r"Tensor\.item\(\)|_local_scalar_dense": Remedy(
        "keep the number a tensor, without .item()",
        "torch._dynamo.config.capture_scalar_outputs = True",
    ),
    r"Data-dependent branching|data-dependent control flow": Remedy(
        "compute both and choose: torch.where(condition, a, b); torch.cond where both are too much"
    ),
    r"Dynamic (?:shape|slicing) operator|output shape depends on input Tensor data": Remedy(
        "keep the shape: torch.where(mask, x, 0) in place of x[mask]",
        "torch._dynamo.config.capture_dynamic_output_shape_ops = True",
    ),
    r"function `<function (\S+) at .*torch\.compiler\.disable`": Remedy(
        r"remove torch.compiler.disable from \1, or call \1 outside"
    ),
    r"torch\.compiler\.disable`": Remedy(
        "remove torch.compiler.disable, or call what it wraps outside"
    ),
}
"""Patterns of a break's title and reason -> its remedy, which may name groups of a match."""


def _remedy(rows: Mapping[str, Remedy], text: str) -> Remedy | None:
    """Return the first remedy whose pattern is found in a text."""
    for pattern, remedy in rows.items():
        if (match := re.search(pattern, text)) is not None:
            return replace(remedy, change=match.expand(remedy.change))
    return None


# -- recompiles ----------------------------------------------------------------------------------


def read_recompile(metrics: Mapping[str, Any], place: Place) -> Recompile | None:
    """Return the recompile that the metrics of a compile describe, or None for a first compile.

    Args:
        place: of the function that was compiled.
    """
    reason = metrics.get("recompile_reason")
    if not reason:
        return None
    guard = re.sub(r"^\d+/\d+: |\s{2,}# .*", "", str(reason).strip().splitlines()[0])
    said = printable(guard)
    other = Remedy("keep what the guard names the same from call to call")
    remedy = _remedy(_RECOMPILE_REMEDIES, said) or other
    seconds = float(metrics.get("entire_frame_compile_time_s") or 0.0)
    return Recompile(place, said, remedy, seconds)


def merge_recompiles(recompiles: Iterable[Recompile]) -> tuple[Recompile, ...]:
    """Merge the recompiles of each function by kind of reason, the longest first.

    The code after a graph break counts as its function: it is recompiled for the same reasons.
    """
    merged = (
        replace(some[0], seconds=sum(r.seconds for r in some), count=sum(r.count for r in some))
        for some in alike(recompiles, lambda r: (r.place.path, r.place.function, r.kind))
    )
    return tuple(sorted(merged, key=lambda r: -r.seconds))


def place_of_compile(metrics: Mapping[str, Any]) -> Place:
    """Return the place of the function that a compile was for."""
    name, behind = unresumed(str(metrics.get("co_name") or ""))
    path, first = str(metrics.get("co_filename") or ""), int(metrics.get("co_firstlineno") or 0)
    return Place(path, behind or first, name)


_RECOMPILE_REMEDIES = {
    r"___stack\d+": Remedy(
        "it is compiled for what a graph break hands over: mend the break first"
    ),
    r"len\(.*_modules\)|___check_obj_id|___check_type_id": Remedy(
        "none: another object runs the same code, and is compiled for itself", meant=True
    ),
    r"^len\((.+)\) == \d": Remedy(
        r"let \1 keep its length, or change it outside of what is compiled"
    ),
    r"tensor '(.+)' size mismatch at index (\d+)": Remedy(
        r"torch._dynamo.mark_dynamic(\1, \2), or torch.compile(..., dynamic=True)"
    ),
    r"tensor '(.+)' (stride|rank|dtype|requires_grad) mismatch": Remedy(
        r"call it with the same \2 of \1 each time"
    ),
    r"^Unexpected recompilation": Remedy(
        "none: threads compiled it at the same time, or a guard depends on more"
    ),
    r"training": Remedy("none: training and evaluation are two graphs", meant=True),
    r"grad_mode": Remedy("none: with and without gradients are two graphs", meant=True),
    r"^(.+?) == [-\d.]": Remedy(r"pass \1 as a tensor where it changes with each call"),
}
"""Patterns of a guard that failed -> the remedy."""

# -- text ----------------------------------------------------------------------------------------


def item_lines(mark: str, place: str, said: str, remedy: Remedy) -> list[str]:
    """Return what happens at a place, and its remedy, whose setting stays in one line."""
    margin = " " * 6
    return [
        *wrapped(place, f"  {mark:<3} ", margin),
        *wrapped(said, margin, margin),
        *wrapped(f"-> {remedy}", margin, f"{margin}   ", whole=remedy.setting),
    ]


def break_lines(breaks: Sequence[Break]) -> list[str]:
    """Return each break with its line, reason and remedy; nothing if there are none."""
    lines = [f"graph breaks: {len(breaks)}"] if breaks else []
    for one in breaks:
        times = f" ({one.count} times)" if one.count > 1 else ""
        lines += item_lines("", f"{one.place}{times}", one.said, one.remedy)
    return lines


def unseen_lines(unseen: str, run: str = "--run") -> list[str]:
    """Return where an observation on fake tensors ended; nothing if it saw all.

    Args:
        run: what runs the model.
    """
    why = f"asks for the value of a tensor, which has none here; {run} runs the model"
    first = f"from here on not seen: {unseen}"
    return [*wrapped(first, following="  "), *wrapped(why, "  ", "  ")] if unseen else []


def recompile_lines(recompiles: Sequence[Recompile]) -> list[str]:
    """Return each function that was compiled again; nothing if there are none."""
    lines = [f"recompiles: {sum(one.count for one in recompiles)}"] if recompiles else []
    for one in recompiles:
        lines += item_lines("", str(one.place), one.said, one.remedy)
    return lines
