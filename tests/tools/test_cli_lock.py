"""``fusec lock``: what it writes, that it is stable, and what it says when a fusion is lost."""

from __future__ import annotations

import json
import linecache
from pathlib import Path

import pytest
import torch

from fusec.runtime.race.autotune import race
from fusec.tools.cli import main
from tests.calls import calls_of
from tests.docs.console import inside

MODEL = """
import torch
from torch import nn

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.act = nn.GELU()
        self.out = nn.Linear(64, 512)

    def forward(self, x, r):
        h = self.norm(x + r)
        return self.out(self.act(h))

def softmax(x):
    return torch.softmax(x, -1) * 2

def reads(x):
    return x * x.max().item()
"""
INPUTS = ("--input", "f32[48,64]", "f32[48,64]")
LOST = "        h = self.norm(x + r)\n        h = h - h.mean(0)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def run(folder: Path, capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with inside(folder):
        code = main([*args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def lock(folder: Path, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    code, out, err = run(folder, capsys, "lock", *args, "-o", "model.lock")
    assert code == 0 and out == "", err
    return (folder / "model.lock").read_text()


def check(folder: Path, capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    code, out, _ = run(folder, capsys, "lock", "--check", "model.lock", *args)
    return code, out


def test_a_refactoring_that_loses_a_fusion_fails_with_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = lock(folder, capsys, "model.py:Head", *INPUTS, "--target", "cpu")
    (kernel,) = json.loads(text)["graphs"][0]["kernels"]
    parts = [(part["op"], part["module"]) for part in kernel["parts"]]
    assert parts == [("add", ""), ("layer_norm", "norm"), ("gelu", "act")]
    assert kernel["parts"][0]["line"].startswith("model.py:13 in forward")
    assert kernel["sums"] in ("64 as loop*16", "64 as loop*8")
    assert check(folder, capsys) == (0, "model.lock: as it was\n")

    (folder / "model.py").write_text(MODEL.replace("        h = self.norm(x + r)\n", LOST))
    linecache.checkcache()  # another process would read the file anew
    code, out = check(folder, capsys)
    assert code == 1
    first, second, *rest = out.splitlines()[1:]
    assert first.startswith("  inference: `norm` no longer fuses with `act`: merging would close")
    assert first.endswith("; new is `mean`, at model.py:14 in forward: h = h - h.mean(0)")
    assert second.startswith("  inference: a kernel is new: `") and "mean" in second
    assert "  inference: launches: 4, were 2" in rest
    assert rest[-1].startswith("if that is meant: fusec lock model.py:Head --input 'f32[48,64]'")
    code, out = check(folder, capsys, "--json")
    assert code == 1 and len(json.loads(out)["changes"]) >= 3


def test_a_line_that_moved_is_no_change(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = lock(folder, capsys, "model.py:Head", *INPUTS, "--train", "--target", "cpu")
    assert '"--train"]' in first and '"name": "backward"' in first
    (folder / "model.py").write_text("# A comment.\n" + MODEL)
    assert check(folder, capsys)[0] == 0


def test_the_text_is_the_same_each_time_and_has_no_timing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("model.py:softmax", "--input", "f32[8,64]", "--target", "sm_90")
    first = lock(folder, capsys, *given)
    assert run(folder, capsys, "lock", *given)[1] == first
    assert '"target": "sm_90"' in first and "warps 1" in first
    assert " us" not in first and " ms" not in first
    assert check(folder, capsys)[0] == 0
    dynamic = lock(folder, capsys, *given, "--dynamic")
    assert '"--dynamic"]' in dynamic and "any as loop*64, warps 1" in dynamic


def test_a_check_takes_the_ways_of_the_lock_and_races_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = ("--input", "f32[1024,64]", "f32[1024,64]")
    text = lock(folder, capsys, "model.py:Head", *inputs, "--target", "cpu")
    assert '"candidate": "ATen"' in text
    changed = text.replace('"candidate": "ATen"', '"candidate": "oneDNN"')
    (folder / "model.lock").write_text(changed)
    with calls_of(race) as races:
        code, out = check(folder, capsys)
    assert not races
    assert code == 1 and "is computed by oneDNN, was by ATen" in out


@pytest.mark.parametrize("asked", ["--help", "--train --train", "--check", "--stage=fx", "--input"])
def test_what_no_lock_asks_for_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], asked: str
) -> None:
    text = lock(folder, capsys, "model.py:softmax", "--input", "f32[8]", "--target", "cpu")
    words = json.dumps(["model.py:softmax", "--input", "f32[8]", *asked.split()])
    found = '["model.py:softmax", "--input", "f32[8]"]'
    assert found in text
    (folder / "model.lock").write_text(text.replace(found, words))
    code, out, err = run(folder, capsys, "lock", "--check", "model.lock")
    assert code == 2 and out == "" and "the file asks for `model.py:softmax" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--check", "model.lock", "model.py:Head"), "--check takes the file alone"),
        (("--check", "none.lock"), "there is no file 'none.lock'"),
        (("--check", "model.py"), "is no file of `fusec lock`, which writes JSON"),
        (("model.py:softmax", "--input", "f32[8]", "--json"), "--json is for --check"),
        (("model.py:reads", "--input", "f32[8]"), "Add --run"),
    ],
)
def test_a_wrong_line_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    code, out, err = run(folder, capsys, "lock", *args)
    assert code == 2 and message in err and (out == "" or "--json" in args)


def test_a_file_of_an_earlier_form_is_to_be_written_anew(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.lock").write_text("fusec lock 2\n# What fusec makes of a model.\nmodel a:b\n")
    code, out, err = run(folder, capsys, "lock", "--check", "model.lock")
    assert code == 2 and out == ""
    assert "has an earlier form, 'fusec lock 2'" in err and "write it anew" in err


@pytest.mark.parametrize("printed", [{"indent": 2}, {"sort_keys": True}, {"indent": "\t"}])
def test_a_file_that_a_formatter_printed_is_read(
    folder: Path, capsys: pytest.CaptureFixture[str], printed: dict[str, object]
) -> None:
    text = lock(folder, capsys, "model.py:softmax", "--input", "f32[8]", "--target", "cpu")
    (folder / "model.lock").write_text(json.dumps(json.loads(text), **printed))
    code, out = check(folder, capsys)
    assert code == 0 and "as it was" in out


ATTENTION = """
import torch

def attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
"""


def test_sums_that_are_added_to_memory_follow_the_file_s_setting_of_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--input", *["bf16[2,8,2048,64]"] * 3, "--train", "--target", "sm_90"]
    asked += ["--option", "race=fused"]
    programs = []
    try:
        for more in ("", "torch.use_deterministic_algorithms(True)"):
            (tmp_path / f"file{len(more)}.py").write_text(ATTENTION + more)
            text = lock(tmp_path, capsys, f"file{len(more)}.py:attention", *asked)
            programs.append(json.loads(text)["graphs"][-1])
    finally:
        torch.use_deterministic_algorithms(False)
    adding, in_order = ([kernel["sums"] for kernel in one["kernels"]] for one in programs)
    (said,) = (said for said in adding if "any order" in said)
    assert said.startswith("2048 as grid*128, added in any order, 2048 as loop*")
    assert not any("any order" in said for said in in_order)
