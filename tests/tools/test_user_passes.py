"""Passes of the user in what tools print: stages, explanations, files, checks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fusec
from fusec.driver.user_passes import REGISTERED
from fusec.errors import UsageError
from fusec.tools.cli import main

MODEL = """
import torch
import fusec
from fusec.notation import Op, op, rewrite


def wave(x):
    return torch.tanh(x) * 2


def renaming(old, new):
    def rule(node):
        return op(new, *node.args) if isinstance(node, Op) and node.name == old else node
    return lambda graph: graph.map(lambda exprs: rewrite(exprs, rule))


fusec.register_pass("sines")(renaming("tanh", "sin"))
fusec.register_pass("cosines")(renaming("sin", "cos"))
fusec.register_pass("nothing")(renaming("erf", "sin"))


@fusec.register_pass("fails")
def fails(graph):
    raise ValueError("on purpose")
"""


@pytest.fixture
def model(tmp_path: Path) -> Iterator[str]:
    known = dict(REGISTERED)
    (tmp_path / "passes_model.py").write_text(MODEL)
    torch._dynamo.reset()
    yield f"{tmp_path}/passes_model.py:wave"
    REGISTERED.clear()
    REGISTERED.update(known)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main([*args, "--input", "f32[8,16]"])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_dump_prints_what_a_pass_left(capsys, model: str) -> None:
    line = ("dump", model, "--option", "passes=sines,cosines", "--stage")
    for stage, operation in (("graph", "tanh"), ("sines", "sin"), ("cosines", "cos")):
        code, out, _ = run(capsys, *line, stage)
        assert code == 0 and f"tanh[i0, i1] = {operation}(arg0_1[i0, i1])" in out, stage
        assert out.startswith(f"# -- graph inference: {stage}, cpu --")


def test_dump_takes_the_names_of_passes_from_the_environment_too(capsys, model, monkeypatch):
    monkeypatch.setenv("FUSEC_PASSES", "sines")
    code, out, _ = run(capsys, "dump", model, "--stage", "sines")
    assert code == 0 and "sin(arg0_1[i0, i1])" in out


def test_the_history_of_a_compile_has_passes_in_their_place(capsys, model: str) -> None:
    _, out, _ = run(capsys, "dump", model, "--option", "passes=sines,nothing", "--changed")
    stages = re.findall(r"^# -- graph inference: (\w+), cpu --$", out, re.MULTILINE)
    assert stages[:2] == ["capture", "sines"] and "nothing" not in stages


def test_files_of_stages_have_passes_in_their_place(capsys, model: str, tmp_path: Path) -> None:
    line = ("dump", model, "--option", "passes=sines", "-o", str(tmp_path / "dump"))
    _, out, _ = run(capsys, *line)
    names = [Path(name).name for name in out.splitlines()]
    assert names == sorted(names)
    assert [name[3:] for name in names[2:5]] == ["graph.txt", "sines.txt", "inline.txt"]


def test_a_program_writes_the_stages_of_its_passes(model: str, tmp_path: Path) -> None:
    namespace: dict[str, object] = {}
    exec(compile(MODEL, "passes_model.py", "exec"), namespace)
    options = {"passes": "sines", "dump_dir": str(tmp_path / "dump"), "strict": True}
    call = torch.compile(namespace["wave"], backend="fusec", options=options)  # type: ignore
    x = torch.randn(8, 16)
    torch.testing.assert_close(call(x), x.sin() * 2)
    (file,) = (tmp_path / "dump").glob("*/*-sines.txt")
    assert "sin(arg0_1[i0, i1])" in file.read_text()


def test_explain_says_what_each_pass_rewrote(capsys, model: str) -> None:
    line = ("explain", model, "--option", "passes=sines,nothing")
    _, out, _ = run(capsys, *line)
    assert "  passes of yours\n    sines    rewrote 1 of 2 lines\n    nothing  nothing\n" in out
    _, out, _ = run(capsys, *line, "--json")
    assert json.loads(out)["graphs"][0]["passes"] == [
        {"name": "sines", "rewritten": 1, "lines": 2},
        {"name": "nothing", "rewritten": 0, "lines": 2},
    ]
    assert "passes of yours" not in run(capsys, "explain", model)[1]


def test_python_s_functions_take_passes_by_the_options(model: str) -> None:
    namespace: dict[str, object] = {}
    exec(compile(MODEL, "passes_model.py", "exec"), namespace)
    wave, x = namespace["wave"], torch.randn(8, 16)
    (kernel,) = fusec.kernels(wave, x, options={"passes": "sines"})  # type: ignore[arg-type]
    assert "sin(" in kernel.notation and "sines" in kernel.staged.passes
    assert "sin(" in kernel.staged.text("sines")
    with pytest.raises(UsageError, match="unknown stage 'cosines'"):
        kernel.staged.text("cosines")
    with pytest.raises(UsageError, match=r"unknown pass 'sine'. Did you mean 'sines'"):
        fusec.explain(wave, x, options={"passes": "sine"})  # type: ignore[arg-type]


def test_check_finds_what_a_pass_changes(capsys, model: str) -> None:
    code, out, _ = run(capsys, "check", model, "--option", "passes=nothing")
    assert code == 0 and "faults: none" in out
    code, out, _ = run(capsys, "check", model, "--option", "passes=sines")
    assert code == 1 and "faults: none" not in out


@pytest.mark.parametrize(
    ("passes", "stage", "said"),
    [
        ("", "sines", "unknown stage 'sines'"),
        ("sins", "graph", "unknown pass 'sins'. Did you mean 'sines'?"),
        ("sines", "sine", "unknown stage 'sine'. Did you mean 'sines'?"),
        ("fails", "fails", "the pass 'fails' raised ValueError: on purpose, at passes_model.py:"),
    ],
)
def test_what_is_wrong_is_said(capsys, model: str, passes: str, stage: str, said: str) -> None:
    code, _, err = run(capsys, "dump", model, "--option", f"passes={passes}", "--stage", stage)
    assert code == 2 and said in err


def test_what_stood_before_a_pass_that_fails_is_printed(capsys, model: str) -> None:
    code, out, _ = run(capsys, "dump", model, "--option", "passes=fails", "--stage", "graph")
    assert code == 0 and "tanh[i0, i1] = tanh(arg0_1[i0, i1])" in out


def test_a_report_has_the_passes_of_a_graph(capsys, model: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    line = ("report", model, "--option", "passes=sines", "-o", str(page))
    code, _, err = run(capsys, *line)
    assert code == 0, err
    assert "your pass sines: 1 of 2 lines" in page.read_text()
