"""What docs/ir.md shows of a graph's structures is what ``fusec dump`` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.console import fusec, run
from tests.docs.pages import ROOT, Command, blocks, commands, python

PAGE = "docs/ir.md"

# The programs behind the page's further examples.
BEHIND = """
import torch
import torch.nn.functional as F


def linear(x, w, b):
    return F.gelu(F.linear(x, w, b))


def attention(q, k, v):
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * 0.125
    rows = torch.arange(1024)
    return torch.where(rows[:, None] >= rows, scores, float("-inf")).softmax(-1) @ v


def step(p, g, q, h, r, i):
    for parameter, gradient in ((p, g), (q, h), (r, i)):
        parameter.sub_(gradient, alpha=0.5)
"""
HEADS = ["--input", *["bf16[4,16,1024,64]"] * 3]
# By the first words of what is shown: the function and its inputs.
FURTHER = {
    "kernel k0 -> gelu ": [
        "linear", "--input", "bf16[8192,4096]", "bf16[16384,4096]", "bf16[16384]",
    ],
    "kernel k0 -> bmm_1 ": ["attention", *HEADS],
    "foreach b0 of 3 kernels": [
        "step", "--input", "f32[4,4]", "f32[4,4]", "f32[32]", "f32[32]", "f32[8,8]", "f32[8,8]",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def norm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the page's example; its first line names the file."""
    directory = tmp_path_factory.mktemp("ir")
    (text,) = python(PAGE)
    name, _ = text.removeprefix("# ").split("\n", 1)
    (directory / name).write_text(text, encoding="utf-8")
    return directory


@pytest.mark.parametrize("stage", ["graph", "kernels", "plan", "program"])
def test_a_stage_is_printed_as_shown(stage: str, norm: Path) -> None:
    (command,) = commands(PAGE)
    argv = tuple(stage if word == "graph" else word for word in command.argv)
    shown = next(b.text for b in blocks(PAGE) if b.heading.startswith(f"`{stage}`"))
    run(Command(argv, f"# -- graph inference: {stage}, sm_90 --\n{shown}"), norm)


def test_the_plan_on_a_cpu_is_as_shown(norm: Path) -> None:
    (command,) = commands(PAGE)
    argv = tuple({"graph": "plan", "sm_90": "cpu:avx512"}.get(word, word) for word in command.argv)
    plan = "plan k0    i0=grid  i1=loop*16    peel"
    assert f"`{plan}`" in (ROOT / PAGE).read_text(encoding="utf-8")
    run(Command(argv, f"# -- graph inference: plan, cpu:avx512 --\n{plan}"), norm)


@pytest.mark.parametrize("first", FURTHER)
def test_a_further_example_is_printed_as_shown(first: str, tmp_path: Path) -> None:
    (shown,) = (b.text for b in blocks(PAGE) if b.text.startswith(first))
    (tmp_path / "behind.py").write_text(BEHIND, encoding="utf-8")
    name, *inputs = FURTHER[first]
    target = ["--target", "sm_90", "--race", "fused", "--stage", "kernels"]
    printed = fusec(["dump", f"{tmp_path}/behind.py:{name}", *inputs, *target])
    assert printed.split("\n", 1)[1].strip() == shown.strip()
