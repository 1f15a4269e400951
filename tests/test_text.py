"""No text that fusec has printed is read again: who wants a structure takes the structure.

Patterns are for what others print: compilers, the kernel, the file system, stack traces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
READERS = {"re", "ast", "tokenize", "parse", "shlex", "html"}
"""Modules of the standard library that take text apart."""

OF_OTHERS = {
    "fusec/tools/cli/__init__.py": "quotes what the user typed",
    "fusec/tools/cli/inputs.py": "what the user typed",
    "fusec/tools/cli/line.py": "what the user typed",
    "fusec/tools/dumps.py": "names of files and folders",
    "fusec/tools/cli/lock.py": "quotes what the user typed",
    "fusec/errors.py": "file names in a traceback",
    "fusec/tools/emulator/parse.py": "the PTX that Triton prints",
    "fusec/frontend/origin.py": "the stack traces of FX nodes",
    "fusec/ir/names.py": "which characters of a wanted name an identifier has",
    "fusec/tools/report/breaks.py": "what Dynamo says of graph breaks and guards",
    "fusec/tools/report/explanation_text.py": "the names of FX nodes",
    "fusec/tools/report/__init__.py": "markup of a notebook, for which characters are escaped",
    "fusec/tools/terminal.py": "markup of a notebook, for which characters are escaped",
    "fusec/runtime/cache/store.py": "names of files",
    "fusec/runtime/kernels/processor.py": "/proc/cpuinfo",
    "fusec/tools/static_amd.py": "the assembly that Triton prints",
    "fusec/tools/static_checks.py": "what Triton, ptxas and the disassembler print",
    "fusec/driver/splitting.py": "the names of what Dynamo's graphs call",
    "fusec/runtime/kernels/triton_interior.py": "names of targets",
}
"""Text that fusec did not print."""

LEFT = {
    "fusec/tools/cli/output.py": "which lines of a report are the user's code, to be dim",
    "fusec/tools/report/explanation.py": "a kernel's source lines, which programs hold as text",
    "fusec/tools/report/static_rules.py": "which line of a printed kernel is which access",
}
"""Text that fusec did: to be mended."""


def readers(files: dict[str, str]) -> Iterator[str]:
    """Yield the files that import what takes text apart."""
    for path, source in files.items():
        if READERS.intersection(re.findall(r"^\s*(?:import|from)\s+(\S+)", source, re.MULTILINE)):
            yield path


def test_only_what_others_print_is_read() -> None:
    files = sorted((ROOT / "fusec").rglob("*.py"))
    sources = {f.relative_to(ROOT).as_posix(): f.read_text(encoding="utf-8") for f in files}
    assert set(readers(sources)) == OF_OTHERS.keys() | LEFT.keys()


def test_a_reader_of_printed_text_is_found() -> None:
    planted = {
        "fusec/a.py": "import re\n",
        "fusec/b.py": "from ast import parse\n",
        "fusec/c.py": "",
    }
    assert list(readers(planted)) == ["fusec/a.py", "fusec/b.py"]
