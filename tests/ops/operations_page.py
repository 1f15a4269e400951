"""``docs/operations.md``: each operation of PyTorch's ``op_db``, and what of it eager kernels run.

``python -m tests.ops.op_db`` writes the page; ``test_op_db.py`` compares its rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.ops.op_db import Outcome  # imports the table, which takes 4 s

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
LOWERED, OUTSIDE, ELSEWHERE, NONE = "lowered", "outside graphs", "not on CPUs", "-"

_SHORT = {
    "random numbers: a seed for each draw": "seeds",
    "a type that only eager kernels compute with": "other types",
}
"""A reason -> what a cell says of all calls that have it."""

_ROW = re.compile(r"^\| `([^`]+)` \| (.*) \| (.*) \|$", re.MULTILINE)

_INTRODUCTION = """# Operations

Every operation of PyTorch's own table, `op_db` (torch {torch}), and what became of it in a graph
of its own on a CPU: whether all of it was lowered to fusec's kernels, or which eager kernels run in
it. `make test-all` compares each with eager: results, gradients, strides and errors, for f32, a
half type, i64, bool and c64, contiguous and not, with scalars and without elements
(`tests/ops/op_db.py`). This page is made by `python -m tests.ops.op_db` from its f32 runs, or the
first type that an operation has; the tests say when it is out of date.

Lowered without an eager kernel, seeds aside: {forward} of {total} operations ({share:.0%}).
Of the {trained} with a backward graph, {backward} have it lowered.

- Larger products (`mm`, `bmm`) and attention are eager kernels on CPUs only (design.md, §4); the
  table's samples have a few rows and columns, and become sums in kernels.
- `seeds`: one small eager kernel draws the seeds of random numbers; the draws are lowered.
- `other types`: tensors of a type that only eager kernels compute with: `complex32`, and `float8`
  but for conversions and copies.
- `outside graphs`: Dynamo ends its graph there, for the size of the result depends on data, say.
- A tensor without elements is left to the eager kernel; that is not counted.

What is not compared: values of uninitialised tensors (`empty` and its like) and of random draws
(`tests/ops/test_random.py` looks at those); `pinv` of complex matrices
(numerics.md); and errors of these operations:

{refused}

| operation | forward | backward |
|---|---|---|
"""


def row_of(outcome: Outcome | None = None) -> tuple[str, str]:
    """Return the cells of an operation: how its forward and its backward ran, if a CPU has it."""
    if outcome is None:
        return ELSEWHERE, NONE
    if outcome.breaks or not outcome.graphs:
        return OUTSIDE, NONE
    forward, backward = {"forward", "inference"} & outcome.graphs, {"backward"} & outcome.graphs
    return _cell(outcome, forward), _cell(outcome, backward)


def _cell(outcome: Outcome, graphs: set[str]) -> str:
    if not graphs:
        return NONE
    found = {
        _SHORT.get(reason, operation.partition(".")[0])
        for graph, operation, reason in outcome.externs
        if graph in graphs
    }
    return ", ".join(sorted(found)) or LOWERED


def recorded_rows() -> dict[str, tuple[str, str]]:
    """Return the page's rows by operation."""
    return {name: (a, b) for name, a, b in _ROW.findall(PAGE.read_text(encoding="utf-8"))}


def recorded_version() -> str:
    """Return the version of torch that the page is of."""
    (version,) = re.findall(r"\(torch (\S+)\)", PAGE.read_text(encoding="utf-8"))
    return str(version)


def page(rows: Mapping[str, tuple[str, str]], refused: Mapping[str, str]) -> str:
    """Return the text of the page.

    Args:
        refused: operations whose errors are not compared, and why.
    """
    forward = sum(set(a.split(", ")) <= {LOWERED, "seeds"} for a, _ in rows.values())
    trained = sum(b != NONE for _, b in rows.values())
    text = _INTRODUCTION.format(
        torch=release(),
        forward=forward,
        total=len(rows),
        share=forward / len(rows),
        trained=trained,
        backward=sum(b == LOWERED for _, b in rows.values()),
        refused="\n".join(f"- `{k}`: {why}." for k, why in refused.items()),
    )
    return text + "".join(f"| `{name}` | {a} | {b} |\n" for name, (a, b) in rows.items())


def release() -> str:
    """Return torch's version without its build."""
    return torch.__version__.partition("+")[0]
