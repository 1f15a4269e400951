"""The JSON that a page shows is what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
