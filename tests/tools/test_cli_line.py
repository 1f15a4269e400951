"""Command lines: what is wrong with one is said at once, in one message, before torch is imported;
inputs by name, from files and with arguments of the model's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import shtab
import torch

import fusec
from fusec.codegen.targets import TARGETS
from fusec.errors import UsageError
from fusec.processors import DEVICES
from fusec.tools.cli import line, main, new_parser
from fusec.tools.cli.inputs import TensorInput, parse_inputs
from fusec.tools.cli.line import check_target_name, constructed, is_target
from fusec.tools.cli.model import each_call
from fusec.tools.report import stages
from fusec.tools.report.arguments import Arguments
from fusec.tools.static_checks import PROCESSORS
from tests.support import without_compiler

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=32, *, bias=True):
        super().__init__()
        self.a = nn.Linear(width, width, bias=bias)

    def forward(self, x, scale=2.0, *, shift=None, pair=(0.0, None)):
        print("inside")
        return torch.tanh(self.a(x) * scale)

def several(x, mask=None, other=None):
    return x * 2 if other is None else x * 2 + other

def nested(tensors, options):
    return tensors[0] + options["by"] * tensors[1]
"""

WRONG = {
    "no command of this name": (["exlpain"], 2, "Did you mean 'explain'?"),
    "no such option": (["--verison"], 2, "Did you mean '--version'?"),
    "option": (["explain", "{m}:Net", "--inputs", "f32[8]"], 2, "Did you mean '--input'?"),
    "option of dump": (["dump", "{m}:Net", "--stag", "fx", "--chnged"], 2, "'--changed'?"),
    "explain --static of a CPU": (
        ["explain", "{m}:Net", "--input", "f32[8]", "--static", "--target", "cpu"],
        2,
        "no static checks",
    ),
    "option of check": (["check", "{m}:Net", "--statik"], 2, "Did you mean '--static'?"),
    "no target": (["explain"], 2, "TARGET"),
    "no target behind inputs": (["explain", "--input", "f32[8]"], 2, "TARGET"),
    "no name": (["explain", "{m}"], 2, "path.py:name"),
    "a name that is none": (["explain", "{m}:a-b"], 2, "path.py:name"),
    "no file": (["explain", "{d}/modle.py:Net"], 2, "model.py'?"),
    "no file for check": (["check", "{d}/modle.py:Net"], 2, "model.py'?"),
    "arguments that are no literals": (["explain", "{m}:Net(open)"], 2, "Block(64, bias=False)"),
    "half a call": (["explain", "{m}:Net(64"], 2, "Block(64, bias=False)"),
    "dtype": (["explain", "{m}:Net", "--input", "f23[8]"], 2, "Did you mean 'f32'?"),
    "dtype of torch": (["explain", "{m}:Net", "--input", "torch.flaot32[8]"], 2, "unknown dtype"),
    "dtype by name": (["explain", "{m}:Net", "--input", "x=f23[8]"], 2, "Did you mean 'f32'?"),
    "extent": (["check", "{m}:Net", "--input", "f32[8,x]"], 2, "extents are integers"),
    "a size": (["build", "{m}:Net", "--input", "f32[B=8]", "f32[B=4]"], 2, "two extents"),
    "bound": (["dump", "{m}:Net", "--input", "f32[8]<4"], 2, "a bound is"),
    "no spec": (["explain", "{m}:Net", "--input", "eight"], 2, "is no SPEC"),
    "size": (["explain", "{m}:Net", "--input", f"f32[{10**20},8]"], 2, "elements"),
    "a dictionary": (["explain", "{m}:Net", "--input", "{{f32[8]}}"], 2, "name: SPEC"),
    "in a list": (["explain", "{m}:Net", "--input", "[f32[8], f23[8]]"], 2, "mean 'f32'?"),
    "no exported program": (["explain", "{d}/nope.pt2"], 2, "no file"),
    "twice": (["explain", "{m}:Net", "--input", "x=f32[8]", "x=f32[8]"], 2, "given twice"),
    "no file of inputs": (["explain", "{m}:Net", "--input", "@in.pt"], 2, "no file 'in.pt'"),
    "target": (["explain", "{m}:Net", "--target", "sm90"], 2, "Did you mean 'sm_90'?"),
    "a device": (["explain", "{m}:Net", "--target", "H100"], 2, "it is 'sm_90'"),
    "another device": (["dump", "{m}:Net", "--target", "B200"], 2, "it is 'sm_100'"),
    "a third device": (["dump", "{m}:Net", "--target", "mi300x"], 2, "it is 'gfx942'"),
    "this device": (["check", "--static", "{m}:Net", "--target", "cuda"], 2, "leave --target out"),
    "unpacked": (["explain", "{m}:Net(**{{}})"], 2, "is no call"),
    "called twice": (["explain", "{m}:Net(8)(9)"], 2, "is no call"),
    "both checks": (["check", "--static", "--emulate", "{m}:Net"], 2, "leave out one"),
    "action": (["cache", "clean"], 2, "Did you mean 'clear'?"),
    "no script": (["run"], 2, "SCRIPT"),
    "no such script": (["run", "{d}/modle.py"], 2, "model.py'?"),
    "no directory for json": (["run", "--json", "/nowhere/x.json", "{m}"], 2, "no directory"),
    "a way to run products": (["explain", "{m}:Net", "--race", "fuse"], 2, "mean 'fused'?"),
    "roles": (["dump", "{m}:Net", "--roles", "maybe"], 2, "Valid: auto, cooperative"),
    "a stage": (["dump", "{m}:Net", "--stage", "sas"], 2, "Did you mean 'sass'?"),
    "a stage of GPUs": (["dump", "{m}:Net", "--stage", "ptx", "--target", "cpu"], 2, "sm_90"),
    "one stage and many": (["dump", "{m}:Net", "--stage", "fx", "--changed"], 2, "leave out one"),
    "nothing to judge": (["check", "--static", "{m}:Net", "--target", "cpu"], 2, "--target sm_80"),
    "a target to run on": (["check", "{m}:Net", "--target", "sm_90"], 2, "check --static"),
    "a target to emulate": (
        ["check", "--emulate", "{m}:Net", "--target", "gfx942"],
        2,
        "Valid: sm_90",
    ),
    "an option's name": (["explain", "{m}:Net", "--option", "fuson=0"], 2, "mean 'fusion'?"),
    "an option's value": (["explain", "{m}:Net", "--option", "fusion=maybe"], 2, "not 1 or 0"),
    "an option like no other": (["doctor", "--nope"], 2, "arguments: --nope.\nnext"),
    "no place for a report": (["run", "-o", "/proc/a.html", "{m}"], 4, "cannot write"),
    "a name without a spec": (["explain", "{m}:Net", "--input", "x="], 2, "is no SPEC"),
    "half a spec of a name": (["check", "{m}:Net", "--input", "x=f32[8"], 2, "is no SPEC"),
    "no name of a file": (["check", "{m}:Net", "--input", "@"], 2, "no file"),
    "a target without its place": (["check", ":Net", "--input", "f32[8]"], 2, "path.py:name"),
    "no steps": (["profile", "{m}:Net", "--steps", "0"], 2, "1 at least"),
    "steps": (["profile", "{m}:Net", "--steps", "many"], 2, "invalid int"),
    "a view": (["profile", "{m}:Net", "--by", "modules"], 2, "Did you mean 'module'?"),
    "inputs of a script": (["profile", "--train", "{m}"], 2, "are of a TARGET"),
    "no time": (["bisect", "--wrong", "--timeout", "0", "{m}:Net"], 2, "more than 0"),
    "what is no time": (["bisect", "--crash", "--timeout", "soon", "{m}"], 2, "invalid float"),
    "no kind of fault": (["bisect", "{m}:Net"], 2, "--wrong --crash --slower"),
    "no lock": (["lock", "--check", "{d}/no.lock"], 2, "no file"),
    "no file of lock's": (["lock", "--check", "{m}"], 2, "is no file of `fusec lock`"),
    "a lock and a model": (["lock", "--check", "{m}", "{m}:Net"], 2, "takes the file alone"),
    "a training step in C": (
        ["build", "{m}:Net", "--native", "--train"],
        2,
        "for inference: leave out --train",
    ),
    "a target of an archive": (["build", "{m}:Net", "--target", "sm_99"], 2, "mean 'sm_90'?"),
    "no place for a repro": (
        ["bisect", "--wrong", "{m}:Net", "-o", "/proc/a.py"],
        4,
        "cannot write",
    ),
    "no directory for a lock": (["lock", "{m}:Net", "-o", "/nowhere/a.lock"], 2, "no directory"),
    "no place for a lock": (["lock", "{m}:Net", "-o", "/proc/a.lock"], 4, "cannot write"),
    "no directory for a build": (["build", "{m}:Net", "-o", "/nowhere/a.fusec"], 2, "no directory"),
    "no place for a build": (["build", "{m}:Net", "-o", "/proc/a.fusec"], 4, "cannot write"),
    "no directory for dumps": (["dump", "{m}:Net", "-o", "/proc/nope"], 4, "cannot write"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("line") / "model.py"
    path.write_text(MODEL)
    return path


def filled(args: list[str], model: Path) -> list[str]:
    return [arg.format(m=model, d=model.parent) for arg in args]


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_line_has_its_exit_code_and_one_message(capsys, model: Path, case: str) -> None:
    args, code, expected = WRONG[case]
    assert main(filled(args, model)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err
    message, following = err.splitlines()
    assert message.startswith("fusec: error: ")
    assert following.startswith("next: ")


def test_all_of_that_is_said_before_torch_is_imported(model: Path) -> None:
    lines = {case: filled(args, model) for case, (args, _, _) in WRONG.items()}
    script = (
        "import json, sys; from fusec.tools.cli import main\n"
        "for case, args in json.loads(sys.argv[1]).items():\n"
        "    main(args)\n"
        "    if 'torch' in sys.modules: sys.exit(case)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(lines)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.splitlines()[-1]


def test_names_that_are_known_without_torch_are_those_that_there_are() -> None:
    assert set(line.TARGET_NAMES) == set(TARGETS)
    assert tuple(PROCESSORS) == tuple(DEVICES)
    assert line.STAGES == stages.STAGES


def test_a_wrong_variable_is_said_before_torch_is_imported(model: Path) -> None:
    script = (
        "import os, sys; from fusec.tools.cli import main\n"
        "os.environ['FUSEC_TARGET'] = 'sm90'\n"
        "assert main(['explain', sys.argv[1]]) == 2\n"
        "del os.environ['FUSEC_TARGET']; os.environ['FUSEC_FUSION'] = 'maybe'\n"
        "assert main(['explain', sys.argv[1]]) == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, f"{model}:Net"], check=True)


def test_quiet_leaves_results_and_errors(capsys, model: Path) -> None:
    args = ["explain", "-q", f"{model}:several", "--input", "f32[8]"]
    assert main(args) == 0
    out, err = capsys.readouterr()
    assert "graph inference" in out and err == ""
    assert main([*args, "f32"]) == 2
    assert "is no SPEC" in capsys.readouterr().err


def test_an_option_of_a_compile_may_be_given(capsys) -> None:
    args = ("torch.nn:LayerNorm(32)", "--input", "f32[8,32]", "--option")
    kernels = [
        len(explained(capsys, *args, f"fusion={on}")["graphs"][0]["kernels"]) for on in (1, 0)
    ]
    assert kernels == [1, 3]


def test_help_has_the_exit_codes(capsys) -> None:
    assert main([]) == 0
    assert "exit codes:\n  0  done\n" in capsys.readouterr().out


def test_shtab_completes_the_commands() -> None:
    for shell in ("bash", "zsh"):
        script = shtab.complete(new_parser(), shell=shell)
        assert all(word in script for word in ("explain", "--train"))


# -- inputs --------------------------------------------------------------------------------------


def test_inputs_have_names_and_files(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "named.pt")
    torch.save([torch.ones(3), 4], tmp_path / "more.pt")
    given = parse_inputs(["f32[8]", "k = 3", f"@{tmp_path}/named.pt", f"@{tmp_path}/more.pt"])
    assert len(given) == 4
    specs, named = given.read()
    assert specs[0] == TensorInput("f32", (8,)) and specs[2] == 4
    assert named["k"] == 3 and named["x"].shape == (2,)


def test_a_file_that_is_none_of_torch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_text("no tensors")
    with pytest.raises(UsageError, match=r"no file of torch\.save"):
        parse_inputs([f"@{tmp_path}/x.pt"]).read()
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(UsageError, match="holds more than tensors") as found:
        parse_inputs([f"@{tmp_path}/model.pt"]).read()
    assert "\n" not in str(found.value)


def test_torch_s_names_of_types_are_types() -> None:
    given = parse_inputs(["float32[8]", "torch.bfloat16[8]", "int64[2]<9"])
    assert [spec.dtype for spec in given.specs] == ["f32", "bf16", "i64"]


def test_a_call_of_a_constructor_is_read() -> None:
    assert constructed("Net") is None
    assert constructed("m.Net(64, [1, 2], bias=False)") == ("m.Net", [64, [1, 2]], {"bias": False})
    assert is_target("a.py:Net(x={1: 2})") and not is_target("f32[8]")


def explained(capsys, *args: str) -> dict:
    assert main(["explain", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_a_model_prints_is_not_in_the_json(capsys, model: Path) -> None:
    document = explained(capsys, f"{model}:Net", "--input", "f32[8,32]")
    assert len(document["breaks"]) == 1


def test_a_target_may_stand_behind_its_inputs(capsys, model: Path) -> None:
    assert main(["explain", "--input", "f32[8]", f"{model}:several"]) == 0
    assert "graph inference" in capsys.readouterr().out


def test_inputs_by_name_skip_those_with_defaults(capsys, model: Path) -> None:
    args = (f"{model}:several", "--input", "f32[8]", "other=f32[8]")
    (graph,) = explained(capsys, *args)["graphs"]
    assert graph["bytes_moved"] == 3 * 32


def test_an_option_without_its_value_is_not_said_to_be_misspelt(capsys, model: Path) -> None:
    assert main(["explain", f"{model}:Net", "--input"]) == 2
    assert "Did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "said"),
    [("Net(wdth=8)", "unexpected keyword"), ("Net(1, 2, 3, 4)", "too many"), ("dict(x=1)", "dict")],
)
def test_arguments_that_do_not_fit_are_a_wrong_line(
    capsys, model: Path, call: str, said: str
) -> None:
    (model.parent / "made.py").write_text(model.read_text() + "\ndict = dict\n")
    assert main(["explain", f"{model.parent}/made.py:{call}", "--input", "f32[8]"]) == 2
    assert said in capsys.readouterr().err


def test_a_name_that_the_model_does_not_have_is_refused(capsys, model: Path) -> None:
    assert main(["explain", f"{model}:several", "--input", "f32[8]", "y=f32[8]"]) == 2
    assert "(x, mask, other)" in capsys.readouterr().err


def test_a_model_is_built_with_arguments(capsys, model: Path) -> None:
    target = f"{model}:Net(64, bias=False)"
    assert main(["check", target, "--input", "f32[8,64]"]) == 0
    assert "8x64" in capsys.readouterr().out


def test_saved_and_nested_inputs_are_what_the_model_gets(capsys, model: Path) -> None:
    file = model.parent / "nested.pt"
    torch.save([[torch.ones(8), torch.ones(8)], {"by": torch.ones(8)}], file)
    target = f"{model}:nested"
    (graph,) = explained(capsys, target, "--input", f"@{file}")["graphs"]
    assert graph["bytes_moved"] == 4 * 32
    assert main(["check", target, "--input", f"@{file}"]) == 0


def test_nested_inputs_may_be_written_as_they_are(capsys, model: Path) -> None:
    (spec,) = parse_inputs(["([f32[8,2|4], 3], {by: i64[2]<9, off: none})"]).specs
    small, large = TensorInput("f32", (8, 2)), TensorInput("f32", (8, 4))
    index = TensorInput("i64", (2,), 9)
    calls = each_call(Arguments((spec,)))
    assert [call.args for call in calls] == [
        (([t, 3], {"by": index, "off": None}),) for t in (small, large)
    ]
    assert parse_inputs(["[]", "{}"]).specs == ([], {})
    args = (f"{model}:nested", "--input", "[f32[8], f32[8]]", "{by: f32[8]}")
    (graph,) = explained(capsys, *args)["graphs"]
    assert graph["bytes_moved"] == 4 * 32
    assert main(["check", *args]) == 0


def test_an_exported_program_is_a_target_with_inputs_of_its_own(capsys, model: Path) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    file = str(model.parent / "layer.pt2")
    torch.export.save(torch.export.export(layer, (torch.randn(4, 8),)), file)
    assert len(explained(capsys, file)["graphs"]) == 1
    assert len(explained(capsys, file, "--input", "f32[4,8]")["graphs"]) == 1
    assert main(["check", file]) == 0
    (model.parent / "none.pt2").write_text("nothing")
    capsys.readouterr()
    assert main(["explain", f"{model.parent}/none.pt2"]) == 2
    assert "no file of torch.export.save" in capsys.readouterr().err


def test_sparse_inputs_are_refused_by_check(capsys, model: Path) -> None:
    file = model.parent / "sparse.pt"
    torch.save([torch.eye(4).to_sparse()], file)
    assert main(["check", f"{model}:several", "--input", f"@{file}"]) == 2
    assert "torch.sparse_coo, which torch.compile does not take" in capsys.readouterr().err


def test_a_machine_without_a_compiler_is_said_to_be_one(capsys, model: Path, monkeypatch) -> None:
    monkeypatch.setenv("FUSEC_CACHE", "0")
    with without_compiler():
        assert main(["check", f"{model}:several", "--input", "f32[8]"]) == 4
    assert "next: fusec doctor" in capsys.readouterr().err


def test_full_memory_is_the_machine_s_fault(capsys, model: Path) -> None:
    args = ["check", f"{model}:several", "--input", "f32[9000000000000]"]
    assert main(args) == 4
    err = capsys.readouterr().err
    assert "memory is full" in err and "next: smaller sizes" in err
    assert main([*args, "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["exit_code"] == 4


def test_an_error_of_the_model_is_all_that_is_said(capfd, model: Path) -> None:
    assert main(["explain", f"{model}:Net", "--input", "f32[8,33]"]) == 3
    said = capfd.readouterr().err
    assert "the model itself fails" in said
    assert len(said.splitlines()) < 10


@pytest.mark.parametrize("args", [["explain", "{m}:Net", "--input", "f23[8]"], ["cache", "path"]])
def test_a_wrong_line_that_asks_for_json_gets_json(capsys, model: Path, args: list[str]) -> None:
    assert main([*filled(args, model), "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1 and document["exit_code"] == 2 and document["error"]


def test_a_file_of_a_package_is_named_by_its_module(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    package = tmp_path / "blocks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.py").write_text("from .two import Two\n")
    assert main(["explain", f"{package / 'one.py'}:Two", "--input", "f32[2]"]) == 2
    said = capsys.readouterr().err
    assert f"imports from its package: write blocks.one:NAME, in the folder {tmp_path}." in said


@pytest.mark.parametrize("name", ["H100", "h200", "NVIDIA H100", "hopper"])
def test_a_device_s_name_says_its_target_in_python_too(name: str) -> None:
    with pytest.raises(UsageError, match="for that device it is 'sm_90'"):
        fusec.explain(torch.tanh, torch.ones(3), target=name)
    with pytest.raises(UsageError, match="for that device it is 'sm_90'"):
        check_target_name(name)


def test_a_misspelt_option_of_explain_is_suggested() -> None:
    for wrong, right in (("targt", "target"), ("trian", "train"), ("dynamc", "dynamic")):
        with pytest.raises(TypeError, match=f"did you mean {right}="):
            fusec.explain(torch.nn.Softsign(), torch.ones(3), **{wrong: "sm_90"})
