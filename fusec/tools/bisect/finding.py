"""``Finding``: the result of a bisection, as text and as JSON.

The JSON form, schema 1, is stable: fields are added, never renamed or removed.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from fusec import __version__
from fusec.tools.bisect.recorder import Culprit
from fusec.tools.bisect.source import CRASH, SLOWER, WRONG

SCHEMA = 1
_VERB = {
    WRONG: "computes something else than eager",
    CRASH: "fails",
    SLOWER: "is slower than eager",
}


WITHOUT_PASSES = "passes=''"
"""The option that helps where the user's passes are at fault."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The fault that a bisection has found.

    Attributes:
        graph, kernel: their names in the user's program.
        stage: the rewrite that is wrong or fails, as ``fusec dump --stage`` has it, or "launch".
        op, line: the operation and the user's source line.
        said: the difference, the exception, the times.
        merge: the fusion decision that introduces the fault, or "".
        helps: options under which the fault is gone.
        source: the file's text.
        unshown: no file shows the fault by itself.
        library: the call in the place of an eager kernel, where it is slower than that, or "".
        values: the tensors that are saved beside the file for it to load; most files draw theirs.
    """

    kind: str
    graph: str
    kernel: str
    stage: str
    op: str
    line: str
    said: str
    merge: str = ""
    helps: tuple[str, ...] = ()
    source: str = ""
    unshown: bool = False
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    library: str = ""

    @classmethod
    def of(cls, kind: str, culprit: Culprit) -> Finding:
        """Return the finding as it is known before the program is reduced."""
        return cls(
            kind,
            culprit.graph,
            culprit.kernel,
            culprit.stage,
            culprit.op,
            culprit.line,
            culprit.said,
            library=culprit.library,
        )

    @property
    def title(self) -> str:
        """One sentence, for the top of the file."""
        return f"fusec {_VERB[self.kind]}: {_first_line(self.said)}"

    @property
    def sentence(self) -> str:
        """What to put into a bug report."""
        parts = [
            f"fusec {__version__} (torch {torch.__version__}, {_device()}) {_VERB[self.kind]}",
            *([f"at {self.op}"] if self.op else []),
            *([f"in {self.library}"] if self.library else []),
            *([f"in stage {self.stage!r}"] if self.stage else []),
            *([f"with the merge of {self.merge}"] if self.merge else []),
        ]
        return f"{' '.join(parts)}: {_first_line(self.said)}"

    def to_json(self, indent: int | None = 2) -> str:
        """Return the JSON form."""
        fields: dict[str, Any] = asdict(replace(self, values={}))
        fields["values"] = sorted(self.values)
        return json.dumps(
            {"schema": SCHEMA, "found": True, **fields, "sentence": self.sentence}, indent=indent
        )

    def __str__(self) -> str:
        rows = {
            "graph": self.graph,
            "eager kernel" if self.library else "kernel": self.kernel,
            "library": self.library,
            "stage": self.stage,
            "merge": self.merge,
            "operation": self.op,
            "line": self.line,
            "seen": self.said,
            "gone with": ", ".join(self.helps),
        }
        width = max(map(len, rows))
        table = [f"  {name:<{width}}  {_indented(t, width)}" for name, t in rows.items() if t]
        return "\n".join([f"fusec {_VERB[self.kind]}", *table])


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _indented(text: str, width: int) -> str:
    return text.strip().replace("\n", "\n" + " " * (width + 4))


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
