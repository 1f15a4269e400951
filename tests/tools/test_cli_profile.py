"""``fusec profile``: a model or a script, and a table of where a step's time goes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from fusec.tools.cli import main

SCRIPT = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32)

    def forward(self, x):
        return torch.tanh(self.a(x))

def shift(x, by):
    return x * by

if __name__ == "__main__":
    net = Net()
    model = torch.compile(net)
    steps = int(sys.argv[sys.argv.index("--steps") + 1])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(8, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("done", sys.argv[1:])
    sys.exit(7 if "fail" in sys.argv else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    torch._dynamo.reset()
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_s_steps_are_profiled_behind_its_own_output(capsys, script: Path) -> None:
    file = script.parent / "profile.json"
    assert main(["profile", "--json", str(file), str(script), "--steps", "8", "fail"]) == 7
    printed, _ = capsys.readouterr()
    assert printed.startswith("done ['--steps', '8', 'fail']\ntrain.py on cpu, ")
    # A backward that is compiled beside its forward leaves one more step that is warm.
    assert re.search(r"a step \(the mean of the middle half of [56]\)", printed)
    assert "a backward: " in printed and "the optimizer's step" in printed
    document = json.loads(file.read_text())
    total = sum(row["seconds"] for row in (*document["launches"], *document["rest"]))
    assert total == pytest.approx(document["step_seconds"], rel=0.1)


def test_a_model_is_profiled_by_line_with_options_on_both_sides(capsys, script: Path) -> None:
    trace = script.parent / "trace.json"
    place = f"{script}:Net"
    line = ["--by", "line", place, "--input", "f32[8,32]", "--steps", "3", "--trace", str(trace)]
    assert main(["profile", *line]) == 0
    printed, said = capsys.readouterr()
    assert printed.startswith(f"{place} on cpu, ") and "the middle half of 3" in printed
    assert "train.py:12 in forward: return torch.tanh(self.a(x))" in " ".join(printed.split())
    assert "compiling and running" in said
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert any(name.startswith("fusec inference") for name in names)


def test_a_target_may_stand_behind_its_inputs(capsys, script: Path) -> None:
    line = ["--steps", "1", "--input", "f32[8,32]", f"{script}:Net"]
    assert main(["profile", *line]) == 0
    assert "lines, by time" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "arguments are required: TARGET or SCRIPT"),
        (["nowhere.py"], "there is no file 'nowhere.py'"),
        (["nowhere.py:Net", "--input", "f32[8]"], "there is no file 'nowhere.py'"),
        (["--by", "layer", "{script}"], "Did you mean 'module'?|unknown view 'layer'"),
        (["{script}:Net", "--by", "layer"], "unknown view 'layer'"),
        (["{script}:Net", "--steps", "0"], "--steps is 1 at least"),
        (["{script}:Net", "twice"], "'twice' stands behind a TARGET"),
        (["--train", "{script}"], "is a script; --input and --train are of a TARGET"),
        (["--json", "/nowhere/x.json", "{script}"], "there is no directory for"),
    ],
)
def test_a_wrong_line_is_refused_at_once(capsys, script: Path, line: list[str], said: str) -> None:
    code = main(["profile", *(word.replace("{script}", str(script)) for word in line)])
    err = capsys.readouterr().err
    assert code == 2, err
    assert any(text in err for text in said.split("|")), err


def test_a_script_that_fails_before_a_step_keeps_its_exit_code(capsys, tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    for ends, code in {
        "raise SystemExit(5)": 5,
        "raise KeyboardInterrupt": 130,
        "1 / 0": 3,
    }.items():
        path.write_text(ends)
        assert main(["profile", str(path)]) == code
        assert "plain.py has no step to profile" in capsys.readouterr().err


def test_a_script_that_compiles_nothing_is_an_error_that_says_so(capsys, tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text("print('mine')\n")
    assert main(["profile", str(path)]) == 2
    printed, said = capsys.readouterr()
    assert printed == "mine\n"
    assert "plain.py has no step to profile" in said and "Traceback" not in said


GPT2 = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

config = {"n_layer": 2, "n_embd": 192, "n_head": 4, "vocab_size": 1024}
model = GPT2LMHeadModel(GPT2Config(**config, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
compiled = torch.compile(model, backend="fusec")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(12):
    ids = torch.randint(0, 1024, (4, 128))
    compiled(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_training_step_of_gpt2_is_all_named_and_adds_up(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    torch._dynamo.reset()
    (tmp_path / "gpt2.py").write_text(GPT2)
    file = tmp_path / "profile.json"
    assert main(["profile", "--json", str(file), str(tmp_path / "gpt2.py")]) == 0
    document = json.loads(file.read_text())
    launches = document["launches"]
    assert len(launches) > 30 and all(row["computes"] and row["source"] for row in launches)
    assert sum("h.1." in row["where"] for row in launches) >= 10
    spent = sum(row["seconds"] for row in launches)
    rest = {row["name"].partition(",")[0]: row["seconds"] for row in document["rest"]}
    assert spent + sum(rest.values()) == pytest.approx(document["step_seconds"], rel=0.1)
    assert rest["Python"] < 0.5 * document["step_seconds"]  # what has no name is the least
