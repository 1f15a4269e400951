"""The page of Python's interface, written from docstrings: see ``test_reference.py``."""

from __future__ import annotations

import inspect
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fusec
from fusec import backend, errors
from fusec.archive.graph import BadArchive
from fusec.archive.model import Model
from fusec.tools.report.explanation import Explanation
from fusec.tools.report.run_report import Seen
from fusec.tools.report.watching import Watch

HEAD = """# Python interface

What `import fusec` has, and what it returns and raises, as the docstrings say it. All other names
are private, but those of `fusec.notation`, for [passes of your own](passes.md). The backend's
options are on [a page of their own](options.md), the command line in `fusec --help`.
"""
BACKEND = 'torch.compile(model, backend="fusec")'
FUNCTIONS = (
    *("expect", "explain", "kernels", "load", "name_size", "refreeze"),
    *("register_decomposition", "register_pass", "watch"),
)
RETURNED = {
    "fusec.tools.report.Explanation": Explanation,
    "fusec.tools.report.watching.Watch": Watch,
    "fusec.tools.report.run_report.Seen": Seen,
    "fusec.archive.model.Model": Model,
}
_BY_NAME = inspect.Parameter.KEYWORD_ONLY
_PART = re.compile(r"^(Args|Attributes|Raises|Returns):$")


def page() -> str:
    """Return the whole page."""
    parts = [HEAD, _function('torch.compile(model, backend="fusec")', backend.fusec, called=False)]
    parts += [_function(f"fusec.{name}", getattr(fusec, name)) for name in FUNCTIONS]
    parts += ["## What they return\n", *(_class(name, one) for name, one in RETURNED.items())]
    parts += ["## What they raise\n", "All but the last are in `fusec.errors`.\n", _raised()]
    return re.sub("\n{3,}", "\n\n", "\n".join(parts))


def _function(name: str, function: Callable[..., Any], *, called: bool = True) -> str:
    head = [f"## `{name}`", ""]
    if called:
        head += ["```python", *signature(name, function), "```", ""]
    return "\n".join([*head, *_prose(inspect.getdoc(function) or ""), ""])


def _class(name: str, one: type) -> str:
    lines = [f"### `{name}`", "", *_prose(inspect.getdoc(one) or ""), ""]
    bases = [vars(base) for base in one.__mro__[:-1] if base.__module__.startswith("fusec.")]
    for member, value in ChainMap(*bases).items():
        if member.startswith("_") or not (doc := _doc(value)):
            continue
        said = member if isinstance(value, property) else f"{member}{_short(value)}"
        lines.append(f"* `{said}`: {' '.join(_plain(doc).split())}")
    return "\n".join(lines).rstrip("\n") + "\n"


def _doc(value: Any) -> str:
    """Return the first paragraph of a member's docstring; "" for what is no method or property."""
    is_member = isinstance(value, property) or inspect.isfunction(value)
    return (inspect.getdoc(value) or "").partition("\n\n")[0] if is_member else ""


def _short(value: Any) -> str:
    names = [
        str(p.replace(annotation=p.empty)) for p in inspect.signature(value).parameters.values()
    ]
    return f"({', '.join(name for name in names if name != 'self')})"


def _raised() -> str:
    """Return a line for each error, those that a caller may meet."""
    found = [
        one
        for one in vars(errors).values()
        if inspect.isclass(one) and issubclass(one, Exception) and one.__module__ == errors.__name__
    ]
    return "\n".join(f"* `{one.__name__}`: {_first(one)}" for one in (*found, BadArchive)) + "\n"


def _first(one: type) -> str:
    return " ".join(_plain((inspect.getdoc(one) or "").partition("\n\n")[0]).split())


def signature(name: str, function: Callable[..., Any]) -> list[str]:
    """Return a function's head, a parameter a line, without the quotes of deferred annotations."""
    found = inspect.signature(function)
    shown = [_parameter(one) for one in found.parameters.values()]
    keyword = [one.kind for one in found.parameters.values()]
    if (
        inspect.Parameter.KEYWORD_ONLY in keyword
        and inspect.Parameter.VAR_POSITIONAL not in keyword
    ):
        shown.insert(keyword.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returned = str(found.return_annotation).strip("'")
    return [f"{name}(", *(f"    {one}," for one in shown), f") -> {returned}"]


def _parameter(one: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    default = "" if one.default is one.empty else f" = {one.default!r}"
    kind = str(one.annotation).strip("'")
    return f"{stars.get(one.kind, '')}{one.name}: {kind}{default}"


def _prose(doc: str) -> Iterator[str]:
    """Yield a docstring as Markdown: sections are lists of names."""
    inside = False
    for line in _joined(_plain(doc).splitlines()):
        if part := _PART.match(line):
            inside = True
            yield from ("", f"{part[1]}:", "")
        elif inside and line.startswith("    "):
            name, colon, said = line.strip().partition(": ")
            yield f"* `{name}`: {said}" if colon else f"* {line.strip()}"
        else:
            yield line


def _joined(lines: Sequence[str]) -> list[str]:
    """Return lines, those of a section without their breaks."""
    found: list[str] = []
    for line in lines:
        if line.startswith(" " * 8) and found:
            found[-1] += " " + line.strip()
        else:
            found.append(line)
    return found


def _plain(doc: str) -> str:
    return doc.replace("``", "`")
