"""The command line, as a user meets it: results, stages, exit codes, messages.

Most tests call ``main`` in this process, which saves the seconds that importing torch takes; those
about memory and instant help start a process.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusec.errors import NotWritable, UsageError
from fusec.options import Options, environment_variables
from fusec.runtime.cache.store import open_cache
from fusec.tools.cli import COMMANDS, main
from fusec.tools.cli.inputs import TensorInput, parse_spec
from fusec.tools.cli.model import load_callable
from fusec.tools.cli.output import _style, replacing
from fusec.tools.report.observe import new_fake_mode, observe
from fusec.tools.report.stages import STAGES
from fusec.torch_interior import FakeTensor
from tests.planted import recode

CONVERTED = """
import torch, torch.nn as nn

def tied():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    return model.to(torch.bfloat16)
"""

MODELS = """
import torch, torch.nn as nn, torch.nn.functional as F

class AddNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
    def forward(self, x, r):
        h = x + r
        return self.norm(h), h

def relu(x):
    return F.relu(x) * 0.5 + 1.0

def scaled(x, factor, negate):
    return -x * factor if negate else x * factor

def classifier():
    return nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 10), nn.GELU())

def reads_values():
    rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(rates[2]))

def broken(x):
    return x.view(3, 5)

def unknown_op(x):
    return torch.special.bessel_j0(x) + 1

def breaks(x):
    y = torch.sin(x) + 1
    torch._dynamo.graph_break()
    return torch.cos(y) * 2

class Needs(nn.Module):
    def __init__(self, width, depth):
        super().__init__()

class Big(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(65536, 65536) for _ in range(8)])
    def forward(self, x):
        return self.layers(x)

instance = AddNorm()
number = 3
"""

WARM = """
import torch

@torch.compile(backend="fusec")
def table(x):
    return torch.relu(x) * 2 + 1

WARM = table(torch.ones(4))

def scaled(x):
    return x * table(x) + WARM
"""

PAIR = ("--input", "bf16[8,64]", "bf16[8,64]")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "cli_models.py"
    path.write_text(MODELS)
    return path


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def explained(capsys: pytest.CaptureFixture[str], *args: object) -> list[dict]:
    code, out, err = run(capsys, "explain", *args, "--json")
    assert code == 0, err
    document = json.loads(out)
    check_schema(document)
    return document["graphs"]


def check_schema(document: dict) -> None:
    """Assert that a document is of schema 1: these names, these types, no others."""
    assert set(document) == {"schema", "graphs", "breaks", "recompiles", "unseen", "outside"}
    assert document["schema"] == 1
    numbers = {"bytes_eager", "bytes_moved", "bytes_floor", "held", "launches_eager", "launches"}
    for graph in document["graphs"]:
        assert set(graph) == {
            "name",
            "kernels",
            "externs",
            "loops",
            "decisions",
            "remarks",
            "modules",
            "called",
            "sums",
            "passes",
            *numbers,
        }
        assert all(type(graph[name]) is int and graph[name] >= 0 for name in numbers)
        assert graph["launches"] == len(graph["kernels"]) + len(graph["externs"])
        assert graph["bytes_floor"] <= graph["bytes_moved"]
        for kernel in graph["kernels"]:
            about = {"name", "outputs", "bytes", "source", "members", "module", "expected"}
            assert set(kernel) == about | {"function"} and kernel["expected"] is None
            assert kernel["outputs"] and all(type(line) is str for line in kernel["source"])
        for extern in graph["externs"]:
            assert set(extern) == {"op", "reason", "module", "bytes"}
            assert extern["op"] and extern["reason"]
        for decision in graph["decisions"]:
            assert set(decision) == {"a", "b", "taken", "reason", "saved_us", "against"}
            assert decision["reason"]


# dump

CONTENT = {
    "fx": "class ",
    "graph": "graph inference(",
    "kernels": "kernel k0 ->",
    "plan": "k0",
    "program": "program add_layer_norm_k0(",
    "wrapper": "def call(args):",
}


@pytest.mark.parametrize(
    ("stage", "target"), zip(CONTENT, itertools.cycle(("cpu", "sm_90")), strict=False)
)
def test_dump_prints_each_stage(capsys, models, target, stage) -> None:
    code, out, _ = run(
        capsys, "dump", f"{models}:AddNorm", *PAIR, "--stage", stage, "--target", target
    )
    assert code == 0
    assert CONTENT[stage] in out
    assert target in out.splitlines()[0]


@pytest.mark.parametrize(("target", "lanes"), [("cpu:sse4", 4), ("cpu:avx2", 8), ("cpu:amx", 16)])
def test_dump_prints_sources_for_processors_that_are_not_here(
    capsys, models, target, lanes
) -> None:
    code, out, _ = run(capsys, "dump", f"{models}:relu", "--input", "f32[64]", "--target", target)
    assert code == 0 and target in out.splitlines()[0]
    assert f"i_i0o * {lanes}LL)" in out


def test_dump_prints_sources_in_the_target_s_language(capsys, models) -> None:
    _, cpp, _ = run(capsys, "dump", f"{models}:relu", "--input", "f32[64]", "--target", "cpu")
    _, triton, _ = run(capsys, "dump", f"{models}:relu", "--input", "f32[64]", "--target", "sm_80")
    assert 'extern "C" void relu_mul_add_k0(' in cpp
    assert "@triton.jit" in triton


ASSEMBLY = {
    ("sm_90", "ttir"): "tt.func public @relu_mul_add_k0",
    ("sm_90", "ttgir"): "ttg.",
    ("sm_90", "llir"): "define",
    ("sm_90", "ptx"): ".target sm_90a",
    ("sm_90", "sass"): "EXIT",
    ("sm_80", "sass"): "EXIT",
    ("sm_100", "ptx"): ".target sm_100a",
    ("sm_120", "ptx"): ".target sm_120a",
    ("gfx942", "sass"): "s_endpgm",
    ("gfx942", "ptx"): "s_endpgm",
}


@pytest.mark.parametrize(("target", "stage"), ASSEMBLY)
def test_dump_compiles_to_machine_code_without_a_gpu(capsys, models, target, stage) -> None:
    place = f"{models}:relu"
    code, out, err = run(
        capsys, "dump", place, "--input", "f32[4096]", "--stage", stage, "--target", target
    )
    assert code == 0, err
    assert ASSEMBLY[target, stage] in out


@pytest.fixture
def first() -> None:
    """Let Dynamo count its compiles from 0, as in a process of its own."""
    torch._dynamo.reset()


def test_dump_writes_every_stage_of_every_graph(capsys, models, tmp_path, first) -> None:
    code, out, _ = run(
        capsys, "dump", f"{models}:instance", *PAIR, "--train", "--target", "cpu", "-o", tmp_path
    )
    assert code == 0
    written = [Path(line).relative_to(tmp_path).as_posix() for line in out.splitlines()]
    assert all((tmp_path / name).stat().st_size for name in written)
    for graph in ("forward-0_0", "backward-0_0"):
        expected = {"fx.py", "graph.txt", "kernels.txt", "plan.txt", "program.txt", "wrapper.py"}
        names = [name.partition("/")[2] for name in written if name.startswith(graph)]
        assert names == sorted(names)  # in the order of the compile
        assert {name[3:] for name in names} >= expected | {"source-k0.cpp"}
        assert {name.split("-")[1].split(".")[0] for name in names} <= set(STAGES)
    index = (tmp_path / "index.txt").read_text().splitlines()
    assert index[0].startswith("forward-0_0: graph forward [0/0], cpu, ")


def test_dump_removes_what_an_earlier_one_wrote_and_nothing_else(
    capsys, models, tmp_path, first
) -> None:
    args = ("--input", "f32[64]", "--stage", "source", "-o", tmp_path)
    assert run(capsys, "dump", f"{models}:relu", *args)[0] == 0
    folder = tmp_path / "inference-0_0"
    (folder / "mine.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    torch._dynamo.reset()
    assert run(capsys, "dump", f"{models}:relu", *args[:2], "--stage", "graph", *args[4:])[0] == 0
    assert sorted(file.name for file in folder.iterdir()) == ["22-graph.txt", "mine.txt"]
    assert (tmp_path / "other").is_dir()


def test_a_program_dumps_in_the_same_form(capsys, models, tmp_path, first) -> None:
    asked = ("dump", f"{models}:relu", "--input", "f32[64]", "-o", tmp_path / "asked")
    assert run(capsys, *asked)[0] == 0
    torch._dynamo.reset()
    sys.path.insert(0, str(models.parent))
    relu = importlib.import_module("cli_models").relu
    options = {"dump_dir": str(tmp_path / "ran")}
    torch.compile(relu, backend="fusec", options=options)(torch.randn(64))
    kept = {"source-k0.cpp", "kernels.txt", "fx.py", "wrapper.py"}
    found = [
        {file.name for file in (tmp_path / which).glob("inference-0_0/*") if file.name[3:] in kept}
        for which in ("asked", "ran")
    ]
    assert found[0] == found[1] and len(found[0]) == 4
    torch._dynamo.reset()
    torch.compile(relu, backend="fusec", options=options)(torch.randn(64))
    names = {folder.name for folder in (tmp_path / "ran").iterdir()}
    assert names == {"index.txt", "inference-0_0", "inference-0_0-2"}


def test_dump_prints_what_any_rewrite_left(capsys, models) -> None:
    args = ("dump", f"{models}:relu", "--input", "f32[8]")
    for stage, says in (("masked_writes", "class"), ("share", "graph inference("), ("fuse", "k0")):
        code, out, _ = run(capsys, *args, "--stage", stage)
        assert code == 0 and says in out, stage
    code, out, _ = run(capsys, *args, "--stage", "freeze")  # an option that is off
    assert code == 0 and "this compile has no stage 'freeze'" in out


def test_dump_prints_the_rewrites_that_changed_something(capsys, models) -> None:
    code, out, _ = run(capsys, "dump", f"{models}:relu", "--input", "f32[8]", "--changed")
    assert code == 0
    stages = re.findall(r"^# -- graph inference: (\w+), cpu --$", out, re.MULTILINE)
    assert stages[0] == "capture" and {"fuse", "lower"} < set(stages)
    assert "share" not in stages, "nothing stands there twice"


def test_dump_prints_one_stage_or_those_that_changed(capsys, models) -> None:
    args = ("dump", f"{models}:relu", "--input", "f32[8]", "--stage", "fx", "--changed")
    code, _, err = run(capsys, *args)
    assert code == 2 and "leave out one of them" in err


def test_dump_writes_assembly_under_the_name_of_what_it_is(capsys, models, tmp_path, first) -> None:
    args = ("--input", "f32[64]", "--target", "gfx942", "--stage", "sass", "-o", tmp_path)
    code, out, _ = run(capsys, "dump", f"{models}:relu", *args)
    assert code == 0
    assert re.fullmatch(rf"{tmp_path}/inference-0_0/\d\d-sass-k0\.amdgcn\n", out)


def test_dump_with_dynamic_sizes_keeps_them_symbolic(capsys, models) -> None:
    args = ("--input", "f32[8,64]", "--stage", "graph")
    _, static, _ = run(capsys, "dump", f"{models}:relu", *args)
    code, dynamic, _ = run(capsys, "dump", f"{models}:relu", *args, "--dynamic")
    assert code == 0
    assert "f32[8, 64]" in static
    assert "f32[8, 64]" not in dynamic and ": size" in dynamic


# explain


def test_explain_reports_one_kernel_with_the_user_s_lines(capsys, models) -> None:
    (graph,) = explained(capsys, f"{models}:AddNorm", *PAIR)
    (kernel,) = graph["kernels"]
    assert len(kernel["outputs"]) == 2
    lines = MODELS.splitlines()
    for code in ("h = x + r", "return self.norm(h), h"):
        number = next(n for n, line in enumerate(lines, 1) if code in line)
        assert f"cli_models.py:{number} in forward: {code}" in kernel["source"]
    assert graph["launches_eager"] == 2 and graph["launches"] == 1


def test_explain_train_reports_forward_and_backward(capsys, models) -> None:
    graphs = explained(capsys, f"{models}:instance", *PAIR, "--train", "--target", "sm_90")
    assert [graph["name"] for graph in graphs] == ["forward", "backward"]


def test_explain_reports_every_graph_of_a_model_that_breaks(capsys, models) -> None:
    graphs = explained(capsys, f"{models}:breaks", "--input", "f32[64]")
    assert [graph["name"] for graph in graphs] == ["inference", "inference_1"]


def test_explain_names_eager_kernels_with_the_reason(capsys, models) -> None:
    (graph,) = explained(capsys, f"{models}:unknown_op", "--input", "f32[64]")
    (extern,) = graph["externs"]
    assert extern["op"].startswith("special_bessel_j0")
    assert "no lowering" in extern["reason"]


def test_explain_as_text_shows_what_the_json_form_has(capsys, models) -> None:
    inputs = ("--input", "i64[8,16]<100", "--target", "sm_90", "--race", "library")
    code, out, err = run(capsys, "explain", f"{models}:classifier", *inputs)
    assert code == 0
    for word in ("graph inference", "launches", "bytes", "floor", "kernels", "eager kernels"):
        assert word in out
    assert "addmm" in out or "mm.default" in out
    assert "tracing" in err and "tracing" not in out


def test_explain_takes_numbers_and_booleans(capsys, models) -> None:
    (graph,) = explained(capsys, f"{models}:scaled", "--input", "f32[64]", "0.5", "true")
    assert len(graph["kernels"]) == 1


def test_explain_builds_a_model_that_reads_values_with_real_tensors(capsys, models) -> None:
    forward, _ = explained(capsys, f"{models}:reads_values", "--input", "f32[8,64]", "--train")
    assert any("rand" in extern["op"] for extern in forward["externs"])


def test_explain_reads_code_that_calls_what_it_compiled_when_imported(capsys, tmp_path) -> None:
    (tmp_path / "warm.py").write_text(WARM)
    [graph] = explained(capsys, f"{tmp_path}/warm.py:scaled", "--input", "f32[4]")
    [kernel] = graph["kernels"]
    assert any("x * table(x) + WARM" in line for line in kernel["source"])


def test_explain_converts_a_model_that_does_not_take_its_inputs_type(capsys, models) -> None:
    place = f"{models}:reads_values"
    code, _, err = run(capsys, "explain", place, "--input", "bf16[8,64]")
    assert code == 0
    assert "converted to torch.bfloat16" in err


def test_a_model_that_converts_itself_has_no_memory_for_its_weights(tmp_path) -> None:
    (tmp_path / "converted.py").write_text(CONVERTED)
    mode = new_fake_mode()
    model = load_callable(f"{tmp_path}/converted.py:tied", 1, mode)
    assert isinstance(model, torch.nn.Module)
    assert all(isinstance(weight, FakeTensor) for weight in model.parameters())
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert model[0].weight is model[1].weight
    (graph,) = observe(model, [torch.zeros(2, 64, dtype=torch.bfloat16)], mode=mode)
    assert graph.eager.launches == 2


def test_a_function_of_any_arguments_is_called_with_the_inputs(tmp_path) -> None:
    (tmp_path / "any.py").write_text("def total(*parts, **more): return parts[1] + more['a']\n")
    model = load_callable(f"{tmp_path}/any.py:total", 3, new_fake_mode())
    assert model(1, 2, a=3) == 5


def test_explain_finds_targets_in_modules_of_the_working_directory(
    capsys, models, monkeypatch
) -> None:
    monkeypatch.chdir(models.parent)
    assert len(explained(capsys, "cli_models:relu", "--input", "f32[64]")) == 1
    assert len(explained(capsys, "torch.nn:Softsign", "--input", "f32[64]")) == 1


@pytest.mark.slow
def test_a_model_too_big_for_the_machine_is_traced_without_its_weights(models) -> None:
    script = (
        "import sys\n"
        "from fusec.tools.cli import main\n"
        "code = main(sys.argv[1:])\n"
        # `ru_maxrss` counts what the process that started this one had.
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM:'))\n"
        "print(peak.split()[1], file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    command = [sys.executable, "-c", script, "explain", f"{models}:Big"]
    command += ["--input", "f32[4,65536]", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    weights = 8 * 65536 * 65536 * 4
    assert sum(g["bytes_eager"] for g in json.loads(done.stdout)["graphs"]) > weights
    assert int(done.stderr.split()[-1]) * 1024 < 2e9


# files that are written


def test_who_reads_a_file_that_is_replaced_keeps_it_whole(tmp_path: Path) -> None:
    """A server maps the weights that a build writes anew."""
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        with replacing(path) as file:
            file.write_bytes(b"new")
        assert (reader.read(), path.read_bytes()) == (b"old", b"new")
    with pytest.raises(NotWritable, match="cannot write"), replacing(path) as file:
        file.write_bytes(b"half")
        raise OSError("the disk is full")
    assert path.read_bytes() == b"new" and [*tmp_path.iterdir()] == [path]


# cache, doctor, help


def test_cache_is_shown_and_emptied(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path / "cache"))
    assert run(capsys, "cache", "path")[:2] == (0, f"{tmp_path / 'cache'}\n")
    code, out, _ = run(capsys, "cache")
    assert code == 0 and "entries    0" in out and "sound" in out
    assert run(capsys, "cache", "clear")[:2] == (0, "removed 0 files\n")


def test_a_cache_that_is_no_directory_is_said_by_the_exit_code(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path / "file"))
    for action in ("stats", "list", "clear"):
        assert run(capsys, "cache", action)[0] == 4
    monkeypatch.setenv("FUSEC_CACHE", "0")
    assert run(capsys, "cache")[0] == 0


def test_the_cache_is_listed_by_model_and_target(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path / "listed"))
    assert run(capsys, "cache", "list")[1] == "the cache is empty\n"
    options = {"cache_dir": str(tmp_path / "listed")}
    for _ in range(2):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(torch.nn.LayerNorm(8), backend="fusec", options=options)(torch.ones(2, 8))
        open_cache(Options(**options)).forget()  # as the next process
    code, out, _ = run(capsys, "cache", "list")
    assert code == 0
    _, *rows = sorted(out.splitlines())
    pattern = r"LayerNorm\S* +cpu +2 +0\.\d MiB +2 +\d+ s ago +\d+ s ago$"
    assert any(re.match(pattern, row) for row in rows), out
    listed = json.loads(run(capsys, "cache", "list", "--json")[1])["entries"]
    graphs = {entry["graph"]: entry for entry in listed}
    assert graphs.keys() == {"inference", "start", ""}  # and the compiler
    assert graphs["inference"]["hits"] == 1 and graphs["inference"]["bytes"] > 1000


def test_doctor_reports_this_machine(capsys) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code in (0, 4)
    for word in ("torch", "triton", "processor", "C++ compiler", "GPU", "cache"):
        assert word in out


def test_doctor_shows_what_is_set_and_the_free_disk(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FUSEC_FUSION", "0")
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path / "not" / "yet"))
    out = run(capsys, "doctor")[1]
    assert re.search(r"^FUSEC_FUSION +0$", out, re.MULTILINE)
    assert re.search(r"^disk +[\d.]+ GiB free$", out, re.MULTILINE)
    monkeypatch.setenv("FUSEC_CACHE_DIR", "/proc/cache")  # of which nothing is free
    code, out, _ = run(capsys, "doctor")
    assert code == 4 and "0.0 GiB free" in out and "FUSEC_CACHE_SIZE_MB" in out
    assert "\n2 problems\n" in out  # and no directory can be made there


def test_on_a_terminal_headings_are_bold_and_source_lines_are_whole() -> None:
    lines = EXPLAINED.splitlines()
    styles = [_style(line, below) for line, below in zip(lines, [*lines[1:], ""], strict=True)]
    assert styles == ["bold", "", "bold", "", "dim", ""]


EXPLAINED = """graph inference
  bytes     66.1 MB  62.9 MB  62.9 MB
  kernels
    k0  12.6 MB  add, add_2
          block.py:15 in forward: h = x + r
  and 1 more, which --json lists
"""


def test_doctor_fails_without_a_compiler(capsys, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("FUSEC_CXX", "no-such-compiler")
    code, out, _ = run(capsys, "doctor")
    assert code == 4
    assert "PROBLEM" in out and "g++" in out


def test_doctor_tries_to_write_to_the_cache(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path / "cache"))
    assert "a file can be written" in run(capsys, "doctor")[1]
    monkeypatch.setenv("FUSEC_CACHE_DIR", "/proc/nope")
    code, out, _ = run(capsys, "doctor")
    assert code == 4
    assert "the cache /proc/nope cannot be made" in out


def test_doctor_names_a_compiler_that_does_not_exist(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FUSEC_CXX", "misspelt++")
    code, out, _ = run(capsys, "doctor")
    assert code == 4
    assert "'misspelt++', which does not exist" in out and "builds an OpenMP" in out


def test_help_lists_commands_and_variables_without_importing_torch() -> None:
    script = "import sys; from fusec.tools.cli import main; main(['cache', 'path']); main([]);"
    script += "sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in (*COMMANDS, *(variable.name for variable in environment_variables())):
        assert name in done.stdout


# errors

WRONG = {
    "target": (["explain", "{m}:rleu", "--input", "f32[2]"], "Did you mean 'relu'?"),
    "no name": (["explain", "{m}"], "path.py:name"),
    "file": (["explain", "{d}/cli_model.py:relu"], "cli_models.py"),
    "module": (["explain", "no_such_module:relu"], "no module 'no_such_module'"),
    "type": (["explain", "{m}:number"], "of type int"),
    "class": (["explain", "{m}:Needs"], "needs arguments (width, depth)"),
    "too few": (["explain", "{m}:AddNorm", "--input", "f32[8,64]"], "(x, r)"),
    "none": (["explain", "{m}:relu"], "(x)"),
    "dtype": (["explain", "{m}:relu", "--input", "f23[8]"], "Did you mean 'f32'?"),
    "shape": (["explain", "{m}:relu", "--input", "f32[8,x]"], "bf16[8,128,768]"),
    "bound": (["explain", "{m}:relu", "--input", "f32[8]<10"], "i64[8,128]<50257"),
    "size": (["explain", "{m}:relu", "--input", f"f32[{10**20},8]"], "elements"),
    "spec": (["explain", "{m}:relu", "--input", "f32"], "bf16[8,128,768]"),
    "stage": (
        ["dump", "{m}:relu", "--input", "f32[8]", "--stage", "sas"],
        "Did you mean 'sass'?",
    ),
    "stage of cpu": (
        ["dump", "{m}:relu", "--input", "f32[8]", "--stage", "ptx", "--target", "cpu"],
        "sm_90",
    ),
    "race": (["explain", "{m}:relu", "--input", "f32[8]", "--race", "fuse"], "mean 'fused'?"),
    "row": (["dump", "{m}:relu", "--input", "f32[8]", "--target", "sm90"], "'sm_90'"),
    "command": (["dmp"], "Did you mean 'dump'?"),
    "action": (["cache", "clean"], "Did you mean 'clear'?"),
    "option": (["explain", "{m}:relu", "--jsn"], "--jsn"),
    "nothing": (["dump"], "TARGET"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_usage_exits_with_2_and_says_what_is_right(capsys, models, case) -> None:
    args, expected = WRONG[case]
    code, out, err = run(capsys, *(a.format(m=models, d=models.parent) for a in args))
    assert code == 2
    assert out == ""
    assert expected in err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("next: fusec")


@pytest.mark.parametrize("stdout", ("/dev/full", "closed"))
def test_results_that_cannot_be_written_are_a_fault_of_the_machine(stdout) -> None:
    script = "import sys; from fusec.tools.cli import main; sys.exit(main(['cache', 'path']))"
    command = f'{sys.executable} -c "{script}" >{"&-" if stdout == "closed" else stdout}'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "standard output" in done.stderr and "VERIFY" not in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_wrong_variable_exits_with_2(capsys, models, monkeypatch) -> None:
    monkeypatch.setenv("FUSEC_FUSION", "maybe")
    code, _, err = run(capsys, "explain", f"{models}:relu", "--input", "f32[8]")
    assert code == 2 and "FUSEC_FUSION" in err


def test_a_model_that_fails_by_itself_shows_its_own_error(capsys, models) -> None:
    code, _, err = run(capsys, "explain", f"{models}:broken", "--input", "f32[4]")
    assert code == 3
    assert "RuntimeError: shape '[3, 5]' is invalid for input of size 4" in err
    assert "cli_models.py" in err and "x.view(3, 5)" in err
    assert "Traceback" not in err and "dynamo" not in err.lower()
    last = err.splitlines()[-1]
    assert last.startswith("next: fusec explain") and "--traceback, or call the model" in last
    code, _, err = run(capsys, "explain", f"{models}:broken", "--input", "f32[4]", "--traceback")
    assert code == 3 and "Traceback" in err
    assert err.splitlines()[-1].startswith("next: call the model itself")


def test_code_that_fails_when_imported_shows_its_own_error(capsys, tmp_path) -> None:
    (tmp_path / "fails.py").write_text("value = 1 / 0\n")
    code, _, err = run(capsys, "explain", f"{tmp_path}/fails.py:f", "--input", "f32[4]")
    assert code == 3
    assert "ZeroDivisionError" in err and "fails.py:1" in err


def test_a_failing_pass_shows_the_stages_before_it(capsys, models, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("planted")

    recode(monkeypatch, "cpu", plans=fail)
    args = (f"{models}:relu", "--input", "f32[8]")
    code, out, _ = run(capsys, "dump", *args, "--stage", "graph")
    assert code == 0 and "graph inference(" in out
    code, _, err = run(capsys, "explain", *args)
    assert code == 3
    assert "KeyError: 'planted'" in err and "Traceback" not in err
    assert "FUSEC_VERIFY=1 fusec explain" in err.splitlines()[-1]
    assert "Traceback" in run(capsys, "explain", *args, "--traceback")[2]


# specs


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("bf16[8,128,768]", TensorInput("bf16", (8, 128, 768))),
        ("i64[8, 128] < 50257", TensorInput("i64", (8, 128), 50257)),
        ("f32[]", TensorInput("f32", ())),
        ("f32[2,3|4|5]", TensorInput("f32", (2, 3), later=((2, 4), (2, 5)))),
        ("bool[0,3]", TensorInput("bool", (0, 3))),
        ("3", 3),
        ("-0.5", -0.5),
        ("true", True),
        ("None", None),
        ("[3, f32[2]]", [3, TensorInput("f32", (2,))]),
    ],
)
def test_specs_are_parsed(text: str, spec: object) -> None:
    parsed = parse_spec(text)
    assert parsed == spec and type(parsed) is type(spec)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "f32[",
        "f32[1.5]",
        "[3",
        "i64[3]<0",
        "i64[3]<x",
        "f33[2]",
        "f32[1|]",
        f"i64[3]<{1 << 63}",
    ],
)
def test_what_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_spec(text)
