"""The JSON that a page shows is what is printed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import fusec as compiler
from tests.docs.console import fusec, inside
from tests.docs.pages import blocks, python


def rounded(value: Any) -> Any:
    """Return a document whose numbers have the digits that a page shows."""
    match value:
        case float():
            return float(f"{value:.3g}")
        case list():
            return [rounded(part) for part in value]
        case dict():
            return {name: rounded(part) for name, part in value.items()}
        case _:
            return value


def test_explain_prints_the_json_of_the_page(tmp_path: Path) -> None:
    (shown,) = [b.text for b in blocks("docs/debugging.md") if b.language == "json"]
    (tmp_path / "block.py").write_text(python("docs/debugging.md")[0])
    spec = "f32[8,128,768]"
    with inside(tmp_path):
        line = f"explain block.py:Block --input {spec} {spec} --target sm_90 --race library --json"
        made = fusec(line.split())
    assert rounded(json.loads(made)) == rounded(json.loads(shown))


def names(value: Any) -> Iterator[str]:
    """Yield the names of a document's fields, without the keys of what is a table."""
    match value:
        case list():
            for part in value:
                yield from names(part)
        case dict():
            for name, part in value.items():
                yield name
                if name not in ("seconds", "compile_seconds", "modules", "multiplied"):
                    yield from names(part)


def test_docstrings_name_the_fields_of_what_is_explained_and_watched() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.sort(x).values @ x, -1)

    torch._dynamo.reset()
    explained = compiler.explain(function, torch.randn(8, 8), dynamic=True)
    with compiler.watch() as seen:
        torch.compile(function, backend="fusec")(torch.randn(8, 8))
    for report in (explained, seen.seen):
        named = set(re.findall(r'"(\w+)"', sys.modules[type(report).__module__].__doc__ or ""))
        assert set(names(json.loads(report.to_json()))) <= named
