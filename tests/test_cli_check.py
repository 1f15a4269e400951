"""``fusec check``: verdicts, exit codes, the JSON form, messages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fusec.cli import main
from fusec.errors import BuildError
from fusec.report import static_verdict
from fusec.report.stages import Staged, assemble
from fusec.runtime.triton_kernel import CompiledAsm

MODELS = """
import torch, torch.nn as nn, torch.nn.functional as F

class NormGelu(nn.Module):
    def __init__(self, width=4096):
        super().__init__()
        self.norm = nn.LayerNorm(width)
    def forward(self, x, r):
        h = x + r
        return F.gelu(self.norm(h)), h

def relu(x):
    return F.relu(x) * 0.5 + 1.0

def long_norm():
    return NormGelu(8192)

def nothing(x):
    return x
"""

PAIR = ("--input", "bf16[2048,4096]", "bf16[2048,4096]")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("check") / "check_models.py"
    path.write_text(MODELS)
    return path


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main(["check", *(str(arg) for arg in args)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def judged(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, dict]:
    code, out, err = run(capsys, "--static", *args, "--json")
    assert out, err
    document = json.loads(out)
    check_schema(document)
    return code, document


INTEGERS = {
    "programs", "bytes", "registers", "spill_bytes", "shared_bytes", "blocks", "widest",
    "narrowest", "wgmma", "mma", "tcgen05", "tma", "copies", "barriers", "convert_layouts",
    "instructions",
}  # fmt: skip
OTHERS = {
    "graph", "name", "code", "kind", "problem", "floor_us", "occupancy", "wide_share", "left_out",
    "instructions_per_byte",
}  # fmt: skip


def check_schema(document: dict) -> None:
    """Assert that a document is of schema 1: these names, no others."""
    assert set(document) == {"schema", "target", "graphs", "kernels", "faults", "warnings"}
    assert document["schema"] == 1
    for graph in document["graphs"]:
        assert set(graph) == {"name", "eager_kernels", "bytes_moved", "bytes_floor"}
        assert graph["bytes_floor"] <= graph["bytes_moved"]
    for kernel in document["kernels"]:
        assert set(kernel) == INTEGERS | OTHERS
        builds = not kernel["problem"]
        assert all(type(kernel[n]) is int for n in INTEGERS if builds)
        for left_out in kernel["left_out"]:
            assert set(left_out) == {"buffer", "line", "width", "reason"}
    for finding in (*document["faults"], *document["warnings"]):
        assert set(finding) == {"graph", "kernel", "rule", "seen", "advice"}
        assert all(finding.values())


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_norm_and_gelu_are_clean(capsys, models, target) -> None:
    code, document = judged(capsys, f"{models}:NormGelu", *PAIR, "--target", target)
    assert code == 0
    assert document["target"] == target
    assert document["faults"] == []
    (kernel,) = document["kernels"]
    assert (kernel["kind"], kernel["spill_bytes"], kernel["left_out"]) == ("reduction", 0, [])
    assert (kernel["widest"], kernel["narrowest"], kernel["wide_share"]) == (16, 16, 1.0)
    assert kernel["programs"] == 2048
    assert kernel["bytes"] == document["graphs"][0]["bytes_floor"]
    assert 0 < kernel["instructions_per_byte"] < 10


def test_training_is_judged_forward_and_backward(capsys, models) -> None:
    code, document = judged(
        capsys, f"{models}:NormGelu", *PAIR, "--train", "--target", "sm_90", "--dynamic"
    )
    assert code == 0, document["faults"]
    assert [graph["name"] for graph in document["graphs"]] == ["forward", "backward"]
    assert {kernel["graph"] for kernel in document["kernels"]} == {"forward", "backward"}


def in_one_warp(staged: Staged, name: str) -> CompiledAsm:
    """Compile a kernel for fewer threads than it was planned for, so that it spills."""
    assert staged.compiled is not None
    programs = {n: replace(p, warps=1) for n, p in staged.compiled.programs.items()}
    return assemble(replace(staged, compiled=replace(staged.compiled, programs=programs)), name)


def test_a_spilling_kernel_fails_the_check(capsys, models, monkeypatch) -> None:
    monkeypatch.setattr(static_verdict, "assemble", in_one_warp)
    pair = ("--input", "bf16[2048,8192]", "bf16[2048,8192]")
    args = (f"{models}:long_norm", *pair, "--target", "sm_90")
    code, out, _ = run(capsys, "--static", *args)
    assert code == 1
    assert "faults: 1" in out
    assert "inference k0  spills: " in out and "bytes are spilled at 255 registers" in out
    code, document = judged(capsys, *args)
    assert code == 1
    assert [fault["rule"] for fault in document["faults"]] == ["spills"]


def test_a_kernel_that_does_not_build_fails_the_check(capsys, models, monkeypatch) -> None:
    def fail(*_: object) -> CompiledAsm:
        raise BuildError(("ptxas",), "planted", 1)

    monkeypatch.setattr(static_verdict, "assemble", fail)
    args = (f"{models}:relu", "--input", "f32[4096,4096]", "--target", "sm_90")
    code, document = judged(capsys, *args)
    assert code == 1
    assert [fault["rule"] for fault in document["faults"]] == ["build"]
    assert "planted" in document["kernels"][0]["problem"]
    assert document["kernels"][0]["registers"] is None
    code, out, _ = run(capsys, "--static", *args)
    assert code == 1 and "planted" in out


def test_text_has_facts_and_reasons(capsys, models) -> None:
    args = (f"{models}:relu", "--input", "bf16[4095]", "--target", "sm_90")
    code, out, _ = run(capsys, "--static", *args)
    assert code == 0
    for word in ("target sm_90", "graph inference", "regs", "spill", "k0  pointwise", "floor"):
        assert word in out
    assert "k0: not held to 16 bytes: arg0_1" in out
    assert "the mask ends between multiples of 16 bytes" in out
    assert "faults: none" in out


def test_kernels_of_the_same_code_are_compiled_once(capsys, models, monkeypatch) -> None:
    compiled = []

    def counted(staged: Staged, name: str) -> CompiledAsm:
        compiled.append(name)
        return assemble(staged, name)

    monkeypatch.setattr(static_verdict, "assemble", counted)
    _, document = judged(capsys, f"{models}:NormGelu", *PAIR, "--train", "--target", "sm_90")
    codes = [(kernel["graph"], kernel["code"]) for kernel in document["kernels"]]
    assert len(compiled) == len(set(codes))


def test_a_model_of_eager_kernels_has_nothing_to_judge(capsys, models) -> None:
    args = (f"{models}:nothing", "--input", "f32[4,4]", "--target", "sm_90")
    code, out, _ = run(capsys, "--static", *args)
    assert code == 0
    assert "nothing was compiled" in out or "no kernels" in out


WRONG = {
    "cpu": (["--static", "{m}:relu", "--input", "f32[8]", "--target", "cpu"], "--target sm_80"),
    "amd": (["--static", "{m}:relu", "--input", "f32[8]", "--target", "gfx942"], "static checks"),
    "row": (["--static", "{m}:relu", "--input", "f32[8]", "--target", "sm90"], "'sm_90'"),
    "name": (["--static", "{m}:rleu", "--input", "f32[8]", "--target", "sm_90"], "'relu'"),
    "spec": (["--static", "{m}:relu", "--input", "f32[x]", "--target", "sm_90"], "bf16[8,128,768]"),
    "no model": (["--static"], "TARGET"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_usage_exits_with_2_and_says_what_is_right(capsys, models, case) -> None:
    args, expected = WRONG[case]
    code, out, err = run(capsys, *(arg.format(m=models) for arg in args))
    assert code == 2
    assert out == ""
    assert expected in err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("next: fusec check")
