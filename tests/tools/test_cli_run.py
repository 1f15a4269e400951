"""``fusec run``: a script of the user's, unchanged, and the page behind its output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusec.tools.cli import main
from fusec.tools.report.run_script import run_script

SCRIPT = """
import sys
import torch
from torch import nn
import beside

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32)

    def forward(self, x):
        y = self.a(x)
        print("inside")
        return torch.tanh(y)

if __name__ == "__main__":
    net = Net()
    model = net if "plain" in sys.argv else torch.compile(net{settings})
    with torch.no_grad():
        print("result", tuple(model(torch.randn(8, 32)).shape), sys.argv[1:])
    if "fail" in sys.argv:
        raise ValueError("mine")
    if "exit" in sys.argv:
        sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    torch._dynamo.reset()
    (tmp_path / "beside.py").write_text("")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("{settings}", ""))
    return path


def test_a_script_runs_as_it_is_and_a_page_follows(capsys, script: Path) -> None:
    assert main(["run", str(script), "--epochs", "3"]) == 0
    printed, said = capsys.readouterr()
    assert "inside\nresult (8, 32) ['--epochs', '3']\n\ntrain.py: " in printed
    assert "do this first: 1 graph break\n" in printed
    assert 'train.py:14 in forward: print("inside")' in printed
    assert "reorderable_logging_functions.add(print)" in printed
    assert "graphs: 2, " in printed
    assert "1 x torch.compile without backend='fusec'" in said


def test_the_record_is_written_as_json(capsys, script: Path) -> None:
    file = script.parent / "seen.json"
    assert main(["run", "--json", str(file), str(script)]) == 0
    document = json.loads(file.read_text())
    assert [b["place"]["line"] for b in document["breaks"]] == [14]
    assert len(document["graphs"]) == 2


def test_what_the_script_does_not_compile_stays_so(capsys, script: Path) -> None:
    assert main(["run", str(script), "plain"]) == 0
    printed, said = capsys.readouterr()
    assert "nothing was compiled" in printed
    assert "--all compiles every model" in said


def test_all_compiles_what_the_script_does_not(capsys, script: Path) -> None:
    assert main(["run", "--all", str(script), "plain"]) == 0
    assert "graphs: 2, " in capsys.readouterr().out
    assert torch.nn.Linear(2, 2)(torch.ones(2)).shape == (2,)
    assert torch.nn.Module.__call__.__module__ == "torch.nn.modules.module"


def test_another_backend_s_mode_and_options_do_no_harm(capsys, script: Path) -> None:
    script.write_text(SCRIPT.replace("{settings}", ', options={"max_autotune": True}'))
    assert main(["run", str(script)]) == 0
    assert "graphs: 2, " in capsys.readouterr().out


def test_the_exit_code_is_the_script_s(capsys, script: Path) -> None:
    assert main(["run", str(script), "exit"]) == 7
    assert "graphs: 2, " in capsys.readouterr().out


def test_an_exception_of_the_script_is_shown_as_python_shows_it(capsys, script: Path) -> None:
    assert main(["run", str(script), "fail"]) == 3
    printed, said = capsys.readouterr()
    assert said.startswith(f'Traceback (most recent call last):\n  File "{script}", line 23')
    assert "ValueError: mine" in said
    assert "graphs: 2, " in printed


def test_a_script_that_is_not_there_is_refused(capsys, script: Path) -> None:
    assert main(["run", str(script.parent / "trian.py")]) == 2
    assert "Did you mean" in capsys.readouterr().err
    assert main(["run", "--json", "/nowhere/x.json", str(script)]) == 2


def test_its_file_is_absolute_and_its_arguments_are_all_its_own(
    capsys, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    elsewhere = script.parent / "elsewhere"
    elsewhere.mkdir()
    script.write_text(
        "import os, pickle, sys, __main__\n"
        "class Here: pass\n"
        f"os.chdir({str(elsewhere)!r})\n"
        "print(__file__, sys.argv, os.path.exists(__file__))\n"
        "assert type(pickle.loads(pickle.dumps(Here()))) is __main__.Here\n"
    )
    assert main(["run", "--json", "seen.json", "train.py", "--", "--json", "x"]) == 0
    printed, _ = capsys.readouterr()
    assert printed.startswith(f"{script} ['train.py', '--', '--json', 'x'] True\n")
    assert (script.parent / "seen.json").is_file() and not list(elsewhere.iterdir())
    assert sys.modules["__main__"].__dict__.get("Here") is None


def test_an_interrupt_ends_with_the_page_too(capsys, script: Path) -> None:
    script.write_text("raise KeyboardInterrupt")
    assert main(["run", str(script)]) == 130
    printed, said = capsys.readouterr()
    assert f'File "{script}", line 1' in said
    assert "train.py: " in printed


def test_what_is_no_python_is_shown_without_frames_of_fusec(capsys, script: Path) -> None:
    script.write_text("def f(:")
    assert main(["run", str(script)]) == 3
    _, said = capsys.readouterr()
    assert said.startswith(f'  File "{script}", line 1\n')


def test_the_page_does_not_follow_where_the_script_sends_its_lines(capsys, script: Path) -> None:
    script.write_text("import sys\nsys.stdout = open(__file__ + '.log', 'w')\nprint('mine')")
    own = sys.stdout
    try:
        assert main(["run", str(script)]) == 0
    finally:
        sys.stdout = own
    assert Path(f"{script}.log").read_text() == "mine\n"
    printed, _ = capsys.readouterr()
    assert "nothing was compiled" in printed and "by phase" not in printed


def test_threads_of_the_script_end_before_the_page(capsys, script: Path) -> None:
    script.write_text(
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()\n"
    )
    assert main(["run", str(script)]) == 0
    assert capsys.readouterr().out.startswith("late\n\ntrain.py: ")


def test_a_record_that_cannot_be_written_is_refused_before_the_script_runs(
    capsys, script: Path
) -> None:
    assert main(["run", "--json", str(script.parent), str(script)]) == 4
    assert capsys.readouterr().out == ""
    assert main(["run"]) == 2
    assert "required: SCRIPT." in capsys.readouterr().err


def test_the_package_is_a_command(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fusec", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("fusec ")


def test_a_script_of_a_package_may_import_what_is_beside_it(tmp_path: Path, capsys) -> None:
    package = tmp_path / "outer" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "net.py").write_text("NAME = __name__\n")
    (package.parent / "other.py").write_text("NAME = __name__\n")
    script = package / "train.py"
    script.write_text("from . import net\nfrom ..other import NAME\nprint(net.NAME, NAME)\n")
    ran = run_script(script, [], every=False)
    assert (ran.code, capsys.readouterr().out) == (0, "outer.inner.net outer.other\n")


@pytest.mark.parametrize(
    ("own", "hint"),
    [
        (["-o", "x.html"], "fusec run -o x.html {script}"),
        (["--epochs", "3", "--json=seen.json"], "fusec run --json=seen.json {script}"),
        (["--trace", "t.json", "--epochs", "3"], "fusec profile --trace t.json {script}"),
        (["--", "-o", "x.html"], ""),
        (["--epochs", "3"], ""),
    ],
)
def test_an_option_behind_the_script_is_hinted_at(
    capsys, script: Path, own: list[str], hint: str
) -> None:
    script.write_text("import sys\nprint(sys.argv[1:])")
    assert main(["run", str(script), *own]) == 0
    printed, said = capsys.readouterr()
    assert str(own) in printed
    assert hint.format(script=script) in said and ("behind the script" in said) == bool(hint)
    assert main(["run", "-q", str(script), *own]) == 0
    assert capsys.readouterr().err == ""
