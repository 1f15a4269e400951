"""What kernels do, counted: a golden of the emulator for one version of Triton.

Counts are of PTX, so that they change with Triton. A golden that changes says what a change of
fusec costs: bytes by space, barriers, instructions by what they are issued to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

import pytest
import torch
import triton

from fusec.tools.emulator.launch import Counts
from fusec.tools.report.emulation import Emulator
from tests.tools.emulator.programs import MEMORY, PRODUCTS

VERSION = "3.7.1"
"""Of Triton, whose PTX is counted."""
NAMES = (
    "gelu and bias", "a transpose", "dropout", "embedding", "layer norm", "a long layer norm",
    "softmax", "softmax of long rows", "cross-entropy of long rows", "group norm",
    "a split sum of columns", "a foreach kernel", "linear and GELU", "linear of few rows", "GEMV",
    "swiglu", "causal attention", "causal attention of wide heads", "decoding",
)  # fmt: skip
COLUMNS = [field.name for field in fields(Counts) if field.name != "events"]
TRAFFIC = slice(1, COLUMNS.index("floats"))
PIPES = slice(TRAFFIC.stop, None)


def counted(name: str) -> Iterator[tuple[str, Counts]]:
    """Yield the kernels of a program's forward, by their results, and what they did."""
    program = {**MEMORY, **PRODUCTS}[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    emulator = Emulator.of("sm_90", {"race": "fused", "descriptors": "always"})
    with torch.no_grad():
        torch.compile(program.fn, backend=emulator.backend, dynamic=False)(*program.inputs)
    for one in emulator.kernels:
        if one.launches:
            yield one.name, one.kernel.counts


@pytest.mark.slow
@pytest.mark.skipif(triton.__version__ != VERSION, reason=f"counts PTX of Triton {VERSION}")
def test_kernels_do_no_more_than_they_did(golden: Callable[[str, str], None]) -> None:
    lines = []
    for name in NAMES:
        for kernel, counts in counted(name):
            lines.append(f"{name}, {kernel}: {counts.instructions} instructions")
            for part in (TRAFFIC, PIPES):
                found = [(column, getattr(counts, column)) for column in COLUMNS[part]]
                lines.append("  " + "  ".join(f"{column} {n}" for column, n in found if n))
    golden("counts", "\n".join(lines))


def test_each_instruction_is_issued_to_one_pipe() -> None:
    for _, counts in counted("softmax"):
        pipes = (counts.floats, counts.integers, counts.specials, counts.moves, counts.accesses)
        assert sum(pipes) + counts.products + counts.controls == counts.instructions
        assert counts.specials > 0 and counts.products == 0
