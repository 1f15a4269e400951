"""``fusec check``: verdicts on machine code and on results, exit codes, JSON, messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusec.frontend.call import AtenCall
from fusec.frontend.ops.arithmetic import mul
from fusec.frontend.value import Value
from fusec.ir.graph import FlatKernel
from fusec.ir.machine import Machine
from fusec.passes.schedule import gpu_plans
from fusec.passes.schedule.plan import Plan
from fusec.tools.cli import main
from fusec.tools.report import comparison
from fusec.tools.report.stages import assemble
from fusec.tools.report.static_rules import match_accesses
from tests.calls import calls_of
from tests.planted import lower, plant, recode, reprint

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

def small_norm():
    return NormGelu(128)

def nothing(x):
    return x

def each(*inputs):
    return tuple(x + 1 for x in inputs)

def of_one_type(x):
    return x @ torch.ones(8, 8)

def twice(x):
    return F.relu(torch.sort(F.relu(x)).values)

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    def forward(self, x, ids):
        self.calls += 1
        x.mul_(2)
        return F.gelu(self.linear(x)), x[:, ids], "done"
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
    "instructions_per_byte", "expected_us", "expected_share", "cause",
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


@pytest.mark.sampled(2)
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
    if target == "sm_90":  # the one that the model of a kernel's time knows
        assert kernel["expected_us"] * kernel["expected_share"] == pytest.approx(kernel["floor_us"])
    assert bool(kernel["cause"]) == (target == "sm_90")


@pytest.mark.slow
def test_training_is_judged_forward_and_backward(capsys, models) -> None:
    code, document = judged(
        capsys, f"{models}:NormGelu", *PAIR, "--train", "--target", "sm_90", "--dynamic"
    )
    assert code == 0, document["faults"]
    assert [graph["name"] for graph in document["graphs"]] == ["forward", "backward"]
    assert {kernel["graph"] for kernel in document["kernels"]} == {"forward", "backward"}


def in_one_warp(kernel: FlatKernel, machine: Machine) -> tuple[Plan, ...]:
    """Plan a kernel for so few threads that it spills."""
    return tuple(replace(plan, warps=1) for plan in gpu_plans(kernel, machine))


def test_a_spilling_kernel_fails_the_check(capsys, models, monkeypatch) -> None:
    recode(monkeypatch, "sm_90", plans=in_one_warp)
    pair = ("--input", "bf16[2048,8192]", "bf16[2048,8192]")
    args = (f"{models}:long_norm", *pair, "--target", "sm_90")
    code, out, _ = run(capsys, "--static", *args)
    assert code == 1
    assert "faults: 1" in out
    assert "inference k0  spills: " in out and "bytes are spilled at" in out


def test_a_kernel_that_does_not_build_fails_the_check(capsys, models, monkeypatch) -> None:
    reprint(monkeypatch, "sm_90", lambda source: source.replace("tl.load(", "tl.planted("))
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


@pytest.mark.slow
def test_explain_has_the_time_that_machine_code_lets_expect(capsys, models) -> None:
    args = (f"{models}:relu", "--input", "bf16[4096,4096]", "--target", "sm_90")
    (checked,) = judged(capsys, *args)[1]["kernels"]

    def explained(*more: str) -> tuple[dict | None, str]:
        assert main(["explain", *args, *more, "--json"]) == 0
        (graph,) = json.loads(capsys.readouterr().out)["graphs"]
        assert main(["explain", *args, *more]) == 0
        return graph["kernels"][0]["expected"], capsys.readouterr().out

    expected, text = explained("--static")
    assert expected is not None
    assert (expected["us"], expected["cause"]) == (checked["expected_us"], checked["cause"])
    assert f"{checked['expected_share']:.2f} of the floor: {checked['cause']}"[:40] in text
    expected, text = explained()
    assert expected is None and "of the floor" not in text


def test_kernels_of_the_same_code_are_compiled_and_read_once(capsys, models) -> None:
    arguments = (f"{models}:twice", "--input", "f32[64,256]", "--target", "sm_90")
    with calls_of(assemble) as compiled, calls_of(match_accesses) as read:
        _, document = judged(capsys, *arguments)
    codes = [kernel["code"] for kernel in document["kernels"]]
    assert len(codes) == 2 and len(compiled) == len(read) == len(set(codes)) == 1
    _, out, _ = run(capsys, "--static", *arguments)
    assert "1 eager kernel, which" in out


def test_a_model_of_eager_kernels_has_nothing_to_judge(capsys, models) -> None:
    args = (f"{models}:nothing", "--input", "f32[4,4]", "--target", "sm_90")
    code, out, _ = run(capsys, "--static", *args)
    assert code == 0
    assert "nothing was compiled" in out or "no kernels" in out


# results


def compared(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, dict]:
    code, out, err = run(capsys, *args, "--json")
    assert out, err
    document = json.loads(out)
    assert set(document) == {*("schema", "device", "compiled", "eager_random", "results", "faults")}
    assert document["schema"] == 1
    fields = {"name", "dtype", "shape", "eager_error", "fusec_error", "problem", "call"}
    assert all(set(result) == fields for result in document["results"])
    return code, document


def test_results_in_training_agree_with_eager(capsys, models) -> None:
    pair = ("--input", "f32[8,4096]", "f32[8,4096]")
    code, document = compared(capsys, f"{models}:NormGelu", *pair, "--train")
    assert code == 0, document
    assert document["faults"] == []
    names = {result["name"] for result in document["results"]}
    assert {"output[0]", "output[1]", "input 0 after", "gradient of input 1"} <= names
    assert "gradient of parameter norm.weight" in names
    assert all(result["fusec_error"] < 1e-2 for result in document["results"])


def test_inputs_and_buffers_after_the_call_are_compared(capsys, models) -> None:
    specs = ("--input", "f32[8,16]", "i64[5]<16")
    code, document = compared(capsys, f"{models}:Counting", *specs)
    assert code == 0, document
    results = {result["name"]: result for result in document["results"]}
    assert results["buffer calls after"]["dtype"] == "int64"
    assert results["buffer calls after"]["fusec_error"] is None
    assert results["output[2]"]["dtype"] == "str"
    assert results["input 0 after"]["problem"] == ""


def test_a_module_of_another_type_is_converted(capsys, models) -> None:
    code, out, err = run(capsys, f"{models}:Counting", "--input", "bf16[8,16]", "i64[5]<16")
    assert code == 0, err
    assert "converted to torch.bfloat16" in err
    assert "faults: none" in out and "agrees" in out


def test_a_model_that_does_not_run_in_fp64_is_said(
    capsys: pytest.CaptureFixture[str], models: Path
) -> None:
    code, out, _ = run(capsys, f"{models}:of_one_type", "--input", "f32[4,8]")
    assert code == 0 and "no errors: the model does not run in fp64" in out
    _, out, _ = run(capsys, f"{models}:relu", "--input", "f32[4,8]")
    assert "does not run" not in out


def test_wrong_results_fail_the_check(capsys, models, monkeypatch) -> None:
    plant(monkeypatch, torch.ops.aten.add.Tensor)
    args = (f"{models}:relu", "--input", "f32[64]")
    code, document = compared(capsys, *args)
    assert code == 1
    assert document["faults"] == ["output"]
    (output, _) = document["results"]
    assert "max error 0.01" in output["problem"]
    assert output["eager_error"] < 1e-6 < 0.009 < output["fusec_error"]
    code, out, _ = run(capsys, *args)
    assert code == 1 and "faults: 1" in out


def test_several_sizes_go_through_one_compile_and_are_compared_each(capsys, models) -> None:
    pair = ("--input", "f32[5|8|3,4096]", "f32[5|8|3,4096]", "--dynamic", "--train")
    code, document = compared(capsys, f"{models}:NormGelu", *pair)
    assert code == 0, document
    assert document["compiled"] == 1
    outputs = [r for r in document["results"] if r["name"] == "output[0]"]
    assert [(r["call"], r["shape"]) for r in outputs] == [
        (0, [5, 4096]), (1, [8, 4096]), (2, [3, 4096]),
    ]  # fmt: skip
    code, out, _ = run(capsys, f"{models}:relu", "--input", "f32[5|8]")
    assert code == 0 and "call 1: output" in out and "calls: 2, through 2 graphs" in out


def test_a_kernel_that_is_off_fails_the_check_by_the_name_of_its_gradient(
    capsys, models, monkeypatch
) -> None:
    def wrong(rule: Callable[..., Value], call: AtenCall, *args: Any, **named: Any) -> Value:
        return call.pointwise(lambda a: mul(a, 1.5), rule(call, *args, **named))

    lower(monkeypatch, torch.ops.aten.gelu_backward.default, wrong)
    pair = ("--input", "f32[5|8,4096]", "f32[5|8,4096]", "--dynamic", "--train")
    code, document = compared(capsys, f"{models}:NormGelu", *pair)
    assert code == 1
    assert "gradient of input 0" in document["faults"]
    assert not [name for name in document["faults"] if name.startswith(("output", "buffer"))]
    code, out, _ = run(capsys, f"{models}:NormGelu", *pair)
    assert code == 1 and "call 1: gradient of input 0" in out and "max error" in out


def test_a_model_that_fails_by_itself_shows_its_own_error(capsys, models) -> None:
    code, _, err = run(capsys, f"{models}:NormGelu", "--input", "f32[8,64]", "f32[8,64]")
    assert code == 3
    assert "normalized_shape" in err and "check_models.py" in err and "Traceback" not in err


class Cache:
    """An object of a model's own, of which pytree knows nothing."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys, self.name = [keys], "k"


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        y = self.a(x)
        return {"logits": y.exp(), "cache": Cache(y * 2), **self.others()}

    def others(self) -> dict[str, object]:
        return {"nothing": object()}


class CachingAlone(Caching):
    """What Dynamo of torch 2.15 compiles: a function that makes an ``object()`` it leaves alone."""

    def others(self) -> dict[str, object]:
        return {}


def test_an_object_is_compared_by_the_tensors_in_it() -> None:
    result = comparison.compare(Caching(), [torch.randn(4, 8)])
    assert result.faults == ()
    named = {r.name: r for r in result.results}
    assert named["output['cache'].keys[0]"].shape == (4, 8)
    assert named["output['nothing']"].dtype == "object"


def test_a_wrong_tensor_in_an_object_is_a_fault() -> None:
    def wrong(gm, inputs, **_):
        return lambda *args: tuple(out + 0.01 for out in gm.forward(*args))

    torch._dynamo.reset()  # which may have given up on the code that both share
    result = comparison.compare(CachingAlone(), [torch.randn(4, 8)], backend=wrong)
    assert "output['cache'].keys[0]" in [fault.name for fault in result.faults]


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.ReLU())


def test_a_model_with_dropout_draws_eager_s_numbers_and_says_so() -> None:
    result = comparison.compare(dropping(), [torch.randn(16, 64)], train=True)
    assert result.eager_random and result.faults == ()
    assert "random numbers: eager's" in str(result)
    quiet = comparison.compare(dropping().eval(), [torch.randn(16, 64)])
    assert not quiet.eager_random and "random" not in str(quiet)


def test_a_dropout_that_draws_others_is_a_fault_by_the_names_of_its_gradients() -> None:
    own = {"fallback_random": False}
    result = comparison.compare(dropping(), [torch.randn(16, 64)], train=True, options=own)
    problems = {fault.name: fault.problem for fault in result.faults}
    assert "gradient of parameter 1.weight" in problems
    assert not [problem for problem in problems.values() if "output 0" in problem]


def many(count: int, off: str = "") -> comparison.Comparison:
    """Return the comparison of a deep model, of which one gradient is off."""
    names = [
        f"gradient of parameter encoder.layer.{n}.attention.query.weight" for n in range(count)
    ]
    rows = [comparison.Result("output", "float32", (8, 64), 1e-7, 2e-7, "")]
    rows += [comparison.Result(n, "float32", (64, 64), 1e-6, 3e-6, "") for n in names]
    rows[2] = replace(rows[2], fusec_error=0.5, problem=off)
    return comparison.Comparison(tuple(rows), device="cpu")


def test_many_tensors_are_one_line_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    made = many(40)
    assert len(made.text(whole=True).splitlines()) > 40
    lines = [" ".join(line.split()) for line in str(made).splitlines()]
    assert lines[2:] == [
        "tensors eager fusec", "outputs 1 1e-07 2e-07 agree",
        "gradients 40 1e-06 0.5 agree", "", "faults: none",
    ]  # fmt: skip
    monkeypatch.setenv("COLUMNS", "60")
    assert "layer.1.attention.query" not in str(made)
    text = str(many(40, "max error 0.5 at (3, 4), where eager is off by 1e-06"))
    assert "1 off" in text and "encoder.layer.1.attention.query.weight" in text
    assert "max error 0.5" in text and "faults: 1" in text
    assert max(map(len, text.splitlines())) <= 60 and len(text.splitlines()) < 14
    assert max(map(len, many(40).text(whole=True).splitlines())) <= 60


def test_a_line_for_each_of_many_is_an_option(capsys, models) -> None:
    line = (f"{models}:each", "--input", *["f32[8]"] * 7)
    assert "input 0 after" not in run(capsys, *line)[1]
    assert "input 0 after" in run(capsys, *line, "-v")[1]


# errors

WRONG = {
    "sizes": (["{m}:NormGelu", "--input", "f32[1|2]", "f32[1|2|3]"], "2 and 3 sizes"),
    "axes": (["{m}:relu", "--input", "f32[1|2,1|2|3]"], "different numbers of sizes"),
    "target without static": (["{m}:relu", "--input", "f32[8]", "--target", "sm_90"], "--static"),
    "inputs": (["{m}:relu"], "(x)"),
    "cpu": (["--static", "{m}:relu", "--input", "f32[8]", "--target", "cpu"], "--target sm_80"),
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


# -- --emulate -------------------------------------------------------------------------------------

SMALL = ("--input", "bf16[4,128]", "bf16[4,128]", "--train")


@pytest.mark.slow
def test_emulated_kernels_stand_beside_eager(
    capsys: pytest.CaptureFixture[str], models: Path
) -> None:
    code, out, err = run(capsys, "--emulate", f"{models}:small_norm", *SMALL)
    assert code == 0, err
    assert out.startswith("target sm_90, emulated")
    assert "warp instructions" in out and "agree" in out and "faults: none" in out


def test_emulated_kernels_as_json(capsys: pytest.CaptureFixture[str], models: Path) -> None:
    code, out, _ = run(capsys, "--emulate", f"{models}:small_norm", *SMALL, "--json")
    document = json.loads(out)
    assert (code, document["schema"], document["target"]) == (0, 1, "sm_90")
    assert {row["graph"] for row in document["kernels"]} == {"forward", "backward"}
    assert all(row["instructions"] > 0 and not row["fault"] for row in document["kernels"])
    assert document["faults"] == [] and document["results"]


def test_a_fault_of_an_emulated_kernel_is_shown(
    capsys: pytest.CaptureFixture[str], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reprint(monkeypatch, "sm_90", lambda source: re.sub(", mask=[^)]*, other=0.0", "", source))
    code, out, _ = run(capsys, "--emulate", f"{models}:relu", "--input", "f32[33]")
    assert code == 1
    assert "out of bounds" in out and "Triton line" in out and "the run ended there" in out


def test_an_emulated_target_has_to_be_known(
    capsys: pytest.CaptureFixture[str], models: Path
) -> None:
    code, _, err = run(
        capsys, "--emulate", f"{models}:relu", "--input", "f32[33]", "--target", "gfx942"
    )
    assert code == 2 and "sm_90" in err
    code, _, err = run(capsys, "--emulate", "--static", f"{models}:relu", "--input", "f32[33]")
    assert code == 2 and "leave out one" in err
