"""The machine code of a report's kernels: texts, facts and verdicts, each kernel compiled once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fusec.tools.assembly import Assembly
from fusec.tools.report.stages import Staged, assemble
from fusec.tools.report.static_report import judge
from fusec.tools.report.static_rules import CheckedKernel, Finding
from fusec.tools.static_checks import PROCESSORS

STAGES = {"ptx": "PTX", "sass": "SASS", "amdgcn": "assembly"}
"""The stages below the source that are shown -> their labels."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The machine code of kernels: its facts, texts and verdicts.

    Attributes:
        kernels: (graph, kernel) -> its facts.
        texts: (graph, code) -> stage -> text.
        seconds: that it took.
    """

    kernels: Mapping[tuple[str, str], CheckedKernel]
    texts: Mapping[tuple[str, str], Mapping[str, str]]
    faults: tuple[Finding, ...]
    warnings: tuple[Finding, ...]
    seconds: float


def judge_code(staged: Sequence[Staged], say: Callable[[str], None]) -> Judged | None:
    """Compile the kernels of some graphs to machine code; None if no target has static checks.

    Args:
        say: gets a line of progress for each graph.
    """
    known = [one for one in staged if one.target.name in PROCESSORS]
    if not known:
        return None
    start = time.perf_counter()
    texts: dict[tuple[str, str], Mapping[str, str]] = {}

    def assembled(one: Staged, name: str) -> Assembly:
        made = assemble(one, name)
        shown = {STAGES[s]: made.text(s) for s in made.stages if s in STAGES}
        texts[one.name, name] = shown
        return made

    report = judge(known, say, assembled)
    return Judged(
        {(kernel.graph, kernel.name): kernel for kernel in report.kernels},
        texts,
        report.faults,
        report.warnings,
        time.perf_counter() - start,
    )
