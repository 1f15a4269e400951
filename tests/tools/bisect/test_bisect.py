"""``fusec bisect``: planted faults end with their culprit and a file that shows them."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusec.driver.pipeline import compile_to_source
from fusec.errors import FusecError, ModelError, UsageError
from fusec.frontend.fx_passes.packing import has_onednn
from fusec.tools.bisect import questions
from fusec.tools.bisect.excerpt import Excerpt, Input, Line, Ref, TensorType, from_graph
from fusec.tools.bisect.hunt import Hunt, Paces, died, waiting
from fusec.tools.bisect.recorder import (
    Begun,
    Called,
    Ended,
    Recorder,
    Stepped,
    Timing,
    pace,
    read_events,
)
from fusec.tools.bisect.source import CRASH, SLOWER, WRONG, Fault, as_file
from fusec.tools.bisect.trial import AGREES, HANGS, INVALID, LAUNCH, Died, run_apart, run_here
from fusec.tools.cli import main, new_parser
from fusec.tools.cli.bisect import call_script, read_program
from fusec.tools.cli.line import take_program
from tests.calls import calls_of
from tests.support import tune
from tests.tools.bisect import plants
from tests.verdicts import decide_products

ROOT = Path(__file__).parents[3]
MODEL = """
import torch
from torch import nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(32)

    def forward(self, x, r):
        h = torch.tanh(x + r) * 2
        return F.gelu(self.up(self.norm(h))), h
"""
SCRIPT = """
import sys
import torch
from model import Block

model = torch.compile(Block())
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for _ in range(2):
    a, h = model(torch.randn(4, 16, 32), torch.randn(4, 16, 32))
    (a.sum() + h.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
print("the script's own line", sys.argv[1:])
"""
TANH = "model.py:13 in forward: h = torch.tanh(x + r) * 2"


def here(work: Callable[..., Any], *args: Any, seconds: float | None = None) -> Any:
    """Stand in for ``run_apart``: call a function in this process."""
    torch.compiler.reset()
    return work(*args)


def step(backend: Any) -> None:
    """Run a program with a backend in fusec's place."""
    x, w = torch.randn(8, 16), torch.randn(16, requires_grad=True)
    compiled = torch.compile(lambda x, w: torch.tanh(x * w).sum(1) + 1, backend=backend)
    compiled(x, w).sum().backward()


@pytest.fixture
def planted(own_stages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_CACHE", "0")


# -- in this process -------------------------------------------------------------------------------


def test_a_sound_program_has_nothing_to_find() -> None:
    assert Hunt(CRASH, print, here).run(step) is None


def test_a_pass_that_crashes_is_found_with_its_operation(planted) -> None:
    plants.crashing_pass()
    said: list[str] = []
    found = Hunt(CRASH, said.append, here).run(step)
    assert (found.graph, found.stage, found.op) == ("forward", "share", "tanh")
    assert found.line.startswith("test_bisect.py:")
    assert found.said == "ValueError: a planted crash"
    assert not found.helps
    assert "torch.randn(1, 1)" in found.source
    assert "in stage 'share': ValueError: a planted crash" in found.sentence
    assert "fusec" not in "".join(line for line in found.source.splitlines() if "import" in line)
    outcome = here(run_here, found.source)
    assert (outcome.kind, outcome.cause, outcome.stage) == (CRASH, "ValueError", "share")


def test_a_rewrite_of_the_joint_graph_is_found_though_its_kernels_agree(planted) -> None:
    plants.wrong_joint_graph()
    found = Hunt(WRONG, print, here).run(step)
    assert found is not None
    assert (found.graph, found.kernel, found.op) == ("forward", "", "mul")
    assert "mul = a * b" in found.source


def test_a_crash_is_no_answer_to_what_is_wrong(planted) -> None:
    plants.crashing_pass()
    with pytest.raises(FusecError, match=r"a planted crash\nThat is a question for fusec bisect"):
        Hunt(WRONG, print, here).run(step)


def test_a_program_that_fails_by_itself_is_the_user_s(planted) -> None:
    def fails(backend: Any) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        Hunt(CRASH, print, here).run(fails)


def test_the_stage_that_computes_something_else_is_found_by_interpreters(planted) -> None:
    from tests.tools.bisect.test_excerpt import PLAIN, one_line

    excerpt = one_line(PLAIN, "torch.ops.aten.tanh.default")
    assert here(questions.first_wrong_stage, excerpt, {}) == questions.BEHIND
    plants.wrong_pass()
    assert here(questions.first_wrong_stage, excerpt, {}) == "simplify"


def test_the_merge_with_which_a_fault_comes_is_found_in_few_trials() -> None:
    for guilty in (1, 2, 7, 100):
        asked: list[int] = []

        def gone(more: Any, guilty: int = guilty, asked: list[int] = asked) -> bool:
            asked.append(more["merge_limit"])
            return more["merge_limit"] < guilty

        assert questions.guilty_merge(gone) == guilty
        assert len(asked) < 16
    assert questions.guilty_merge(lambda more: False) == 0
    assert questions.guilty_merge(lambda more: True) == 0


@pytest.mark.skipif(not has_onednn(), reason="this torch is built without oneDNN")
def test_the_last_merge_is_one_of_kernels_and_no_way_to_run(monkeypatch, tmp_path) -> None:
    x, w = torch.randn(32, 16), torch.randn(16, 8)
    sums = lambda x, w: (x.exp().sum(1), x.exp().sum(1).tanh(), x @ w)  # noqa: E731
    excerpt = from_graph(make_fx(sums)(x, w))

    def last() -> Any:
        return here(questions.last_merge, excerpt, {})

    tune(monkeypatch, "races", product=1)
    decide_products(monkeypatch, tmp_path, "oneDNN", last)
    with calls_of(compile_to_source) as compiles:
        assert last() == "tanh with sum_1+sum_2"
    assert [d.b for d in compiles[-1].result.decisions if d.taken][-1] == "oneDNN"


@pytest.mark.parametrize(
    ("text", "kind", "cause"),
    [
        ("import torch\ntorch.testing.assert_close(torch.ones(2), torch.zeros(2))", WRONG, ""),
        ("x = 1", AGREES, ""),
        ("import torch\ntorch.ones(2) + torch.ones(3)", INVALID, "RuntimeError"),
        ("import sys\nsys.exit(9.0 - 2.0 > 3.5)", SLOWER, ""),
        ("import sys\nsys.exit(3.0 - 2.0 > 3.5)", AGREES, ""),
    ],
)
def test_a_file_comes_to_what_it_shows(text: str, kind: str, cause: str) -> None:
    outcome = run_here(text)
    assert (outcome.kind, outcome.cause) == (kind, cause)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["bisect", "model.py:Block"], "required"),
        (["bisect", "--wrong"], "TARGET or SCRIPT"),
        (["bisect", "--wrong", "--crash", "x.py"], "not allowed with"),
        (["bisect", "--wrong", "missing.py"], "there is no file"),
        (["bisect", "--wrong", "missing.py:Block", "--input", "f32[2]"], "there is no file"),
        (["bisect", "--wrong", "conftest.py", "--input", "f32[2]"], "there is no file"),
        (["bisect", "--wrong", "torch.nn:Softsign", "--input", "f23[2]"], "f23"),
        (["bisect", "torch.nn:Softsign", "--input", "f32[2]"], "--wrong --crash --slower"),
        (["bisect", "conftest.py", "--wrong"], "stand before a script"),
        (["bisect", "--wrong", "torch.nn:Softsign", "f32[2]"], "'f32[2]' stands behind a TARGET"),
        (["bisect", "--wrong", "torch.nn:Softsign", "--inptu", "f32[2]"], "--inptu"),
        (["bisect", "--wrong", "--timeout", "0", "torch.nn:Softsign"], "--timeout"),
        (["bisect", "--wrong", "--timeout", "soon", "torch.nn:Softsign"], "--timeout"),
    ],
)
def test_a_wrong_line_is_refused(capsys, line: list[str], said: str) -> None:
    assert main(line) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_at_once(capsys, tmp_path: Path) -> None:
    line = ["bisect", "--wrong", "torch.nn:Softsign", "--input", "f32[2]", "-o", str(tmp_path)]
    assert main(line) == 4
    assert "cannot write" in capsys.readouterr().err


def endless(work: Callable[..., Any], *args: Any, seconds: float | None = None) -> Any:
    """Stand in for ``run_apart`` where a program goes on when its time is over."""
    here(work, *args)
    raise Died(HANGS)


@pytest.mark.parametrize("kind", [WRONG, CRASH])
def test_a_program_that_does_not_end_is_ended(kind: str) -> None:
    with pytest.raises(
        FusecError, match=r"still running after 5 s, with nothing found\n.*--timeout"
    ):
        Hunt(kind, print, endless, timeout=5.0).run(step)


def test_a_program_that_compiles_nothing_in_its_time_is_the_user_s() -> None:
    with pytest.raises(ModelError, match="nothing was compiled in the 5 s"):
        Hunt(WRONG, print, endless, timeout=5.0).run(lambda backend: None)


def test_the_graph_that_hangs_is_the_one_that_began_and_did_not_end() -> None:
    dynamo, own = (Begun(n, name, None, {}) for n, name in enumerate(("Dynamo", "forward")))
    compiled = [dynamo, own, Ended(1), Ended(0)]
    assert waiting(compiled[:2]) is own and waiting(compiled[:3]) is dynamo
    assert waiting(compiled) is None
    called = [*compiled, Called(1, 2)]
    assert waiting(called) is own and waiting([*called, Ended(1)]) is None
    said = died(called, HANGS, 2)
    assert said is not None and said.finding.said == "the process ended by hangs when it ran"
    after = died([*called, Ended(1)], "SIGSEGV", 2)
    assert after is not None and after.finding.said == "the process ended by SIGSEGV after it ran"


def test_a_file_reads_the_program_s_own_values(tmp_path: Path) -> None:
    kind = TensorType((3,), (1,), torch.float32, "cpu")
    line = Line("y", "torch.tanh", (Ref("given"),), {}, kind)
    excerpt = Excerpt((Input("given", kind),), (line,), ("y",))
    text = as_file(excerpt, Fault(CRASH, saved=True))
    assert 'saved["given"].clone(),' in text
    file = tmp_path / "made.py"
    torch.save({"given": torch.ones(3)}, file.with_suffix(".pt"))
    assert run_here(text, str(file)).kind == AGREES
    assert run_here(text, str(tmp_path / "other.py")).cause == "FileNotFoundError"


# -- in processes of their own ---------------------------------------------------------------------


def bisect(folder: Path, plant: str, *arguments: str) -> tuple[subprocess.CompletedProcess, dict]:
    """Run ``fusec bisect`` in a folder with a plant in each process; check that it is quick."""
    (folder / "model.py").write_text(MODEL)
    (folder / "train.py").write_text(SCRIPT)
    start = time.monotonic()
    done = python(folder, plant, "-m", "fusec", "bisect", *arguments)
    assert time.monotonic() - start < 180
    return done, json.loads(done.stdout) if "--json" in arguments else {}


def python(
    folder: Path, plant: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess:
    """Run Python with a plant, or with none."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    calls = f"from tests.tools.bisect import plants\nplants.{plant}()\n" if plant else ""
    (site / "sitecustomize.py").write_text(calls)
    path = os.pathsep.join([str(site), str(ROOT)])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "FUSEC_CACHE": "0", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "kind", "stage"),
    [
        ("wrong_kernel", WRONG, questions.BEHIND),
        ("wrong_pass", WRONG, "simplify"),
        ("wrong_rewrite", WRONG, "masked_writes"),
        ("crashing_pass", CRASH, "share"),
        ("killing_kernel", CRASH, LAUNCH),
        ("slow_kernel", SLOWER, ""),
    ],
)
def test_a_planted_fault_ends_with_a_file_that_shows_it(
    tmp_path: Path, plant: str, kind: str, stage: str
) -> None:
    done, found = bisect(tmp_path, plant, "--json", f"--{kind}", "train.py", "--epochs", "3")
    assert done.returncode == 1, done.stderr
    assert (found["stage"], found["op"], found["line"]) == (stage, "tanh", TANH)
    assert found["graph"] == ("Dynamo" if plant == "wrong_rewrite" else "forward")
    assert found["kernel"] == ("" if plant == "wrong_rewrite" or kind == CRASH else "k0")
    assert "Traceback" not in done.stderr
    file = tmp_path / "fusec_repro.py"
    assert file.read_text() == found["source"]
    assert 10 <= len(found["source"].splitlines()) <= 40
    shown = python(tmp_path, plant, file.name)
    assert shown.returncode == (-8 if plant == "killing_kernel" else 1)
    assert python(tmp_path, "", file.name).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "kind", "kernel", "code"),
    [
        ("wrong_for_large", WRONG, "k0", 1),
        ("failing_for_large", CRASH, "", 1),
        ("killing_for_large", CRASH, "", -8),
    ],
)
def test_a_fault_of_the_program_s_own_values_has_them_beside_its_file(
    tmp_path: Path, plant: str, kind: str, kernel: str, code: int
) -> None:
    (tmp_path / "large.py").write_text(
        "import torch\nfrom model import Block\nx = 100 * torch.randn(4, 16, 32)\n"
        "with torch.no_grad():\n    torch.compile(Block())(x, x)\n"
    )
    done, found = bisect(tmp_path, plant, "--json", f"--{kind}", "large.py")
    assert done.returncode == 1, done.stderr
    assert (found["kernel"], found["line"]) == (kernel, TANH) and found["values"]
    file = tmp_path / "fusec_repro.py"
    assert sorted(torch.load(file.with_suffix(".pt"))) == found["values"]
    assert python(tmp_path, plant, file.name).returncode == code
    assert python(tmp_path, "", file.name).returncode == 0


IMAGES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x):
        return x + self.b(torch.relu(self.norm(self.a(x))))

net = Net()
model = torch.compile(net, backend="fusec")
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for step in range(8):
    model(torch.randn(2, 4, 16, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ROWS = """
import torch
from torch import nn

layers = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh())
model = torch.compile(layers, backend="fusec")
with torch.no_grad():
    for _ in range(8):
        model(torch.randn(64, 64))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "script", "named"),
    [
        ("slow_layout", IMAGES, {"stage": "memory_formats", "gone with": "channels_last=False"}),
        ("slow_library", ROWS, {"library": "mm.default", "operation": "mm"}),
        ("slow_kernel", ROWS, {"kernel": "k1", "operation": "tanh"}),
    ],
)
def test_what_makes_a_program_slower_is_named_on_a_page(
    tmp_path: Path, plant: str, script: str, named: dict[str, str]
) -> None:
    (tmp_path / "slow.py").write_text(script)
    done, _ = bisect(tmp_path, plant, "--slower", "slow.py")
    assert done.returncode == 1, done.stderr
    rows = dict(re.split(" {2,}", line.strip(), maxsplit=1) for line in _table(done.stdout))
    assert {name: rows.get(name) for name in named} == named
    assert "a step of the program takes" in rows["seen"]
    lines = done.stdout.splitlines() + done.stderr.splitlines()
    assert len(lines) < 40 and "Traceback" not in done.stderr
    assert len((tmp_path / "fusec_repro.py").read_text().splitlines()) < 60


def _table(printed: str) -> list[str]:
    return printed.partition("\n\n")[0].splitlines()[1:]


def test_what_helps_a_file_alone_is_not_said_to_help() -> None:
    told: dict[str, list[Any]] = {
        "{}": [Stepped(2000.0)],
        "None": [Stepped(1000.0)],
        repr({"race": "library"}): [Stepped(2500.0)],
        repr({"fusion": False}): [Stepped(1600.0)],
        repr({"channels_last": False}): [Stepped(1010.0)],
    }

    def apart(work: Any, program: Any, file: Path, more: Any, seconds: float) -> None:
        with file.open("wb") as stream:
            for event in told[repr(more)]:
                pickle.dump(event, stream)

    paces = Paces(Hunt(SLOWER, print, apart), step)
    assert paces.is_slower() and paces.both() == (2000.0, 1000.0)
    helps = {name: paces.helps({name: value}, 5.0) for name, value in
             {"race": "library", "fusion": False, "channels_last": False}.items()}  # fmt: skip
    assert helps == {"race": False, "fusion": False, "channels_last": True}


def test_a_program_of_few_steps_is_known_by_its_graphs() -> None:
    graph = Timing("Dynamo", "", 100.0, 300.0, (), {})

    def apart(work: Any, program: Any, file: Path, more: Any, seconds: float) -> None:
        fast = replace(graph, fusec_us=120.0)
        with file.open("wb") as stream:
            pickle.dump(fast if more else graph, stream)

    paces = Paces(Hunt(SLOWER, print, apart), step)
    assert paces.both() == (300.0, 100.0) and paces.helps({"fusion": False}, 0.0)


def test_steps_are_timed_optimizer_and_all(tmp_path: Path) -> None:
    def run(backend: Any) -> None:
        compiled = torch.compile(lambda x: torch.tanh(x) * 2, backend=backend)
        for _ in range(8):
            compiled(torch.ones(4))
            time.sleep(0.02)

    for more in ({}, {"fusion": False}, None):
        file = tmp_path / f"{more}"
        file.touch()
        torch.compiler.reset()
        pace(run, file, more)
        (stepped,) = [event for event in read_events(file) if isinstance(event, Stepped)]
        assert stepped.us > 20_000


@pytest.mark.slow
def test_a_merge_that_is_wrong_is_named_and_fusion_off_helps(tmp_path: Path) -> None:
    line = ["--wrong", "model.py:Block", "--input", "f32[4,16,32]", "f32[4,16,32]", "--train"]
    done, _ = bisect(tmp_path, "wrong_merge", *line, "-o", "least.py")
    assert done.returncode == 1, done.stderr
    assert "python least.py\n\nfor a bug report:\n  fusec " in done.stdout
    page = (ROOT / "docs/debugging.md").read_text()
    table = done.stdout.partition("\n\n")[0].splitlines()
    assert len(table) == 9
    assert [line for line in table if line not in page and " seen " not in line] == []
    assert (tmp_path / "least.py").read_text().partition("import torch")[2] in page
    assert python(tmp_path, "wrong_merge", "least.py").returncode == 1


@pytest.mark.slow
def test_a_sound_script_ends_with_nothing_found(tmp_path: Path) -> None:
    for kind in (WRONG, CRASH):
        done, _ = bisect(tmp_path, "", f"--{kind}", "train.py")
        assert (done.returncode, done.stdout) == (0, "nothing found\n"), done.stderr
        assert "the script's own line []" in done.stderr
    assert not (tmp_path / "fusec_repro.py").exists()


def test_a_process_that_dies_before_a_compile_is_the_user_s() -> None:
    def dies(*_: Any, **__: Any) -> None:
        raise Died("SIGSEGV")

    for kind in (CRASH, WRONG):
        with pytest.raises(ModelError, match="ended by SIGSEGV before anything was compiled"):
            Hunt(kind, print, dies).run(step)


def test_a_script_may_end_its_process_itself() -> None:
    def ends(*_: Any, **__: Any) -> None:
        raise Died("exit 0")

    assert Hunt(CRASH, print, ends).run(step) is None


def test_options_may_stand_behind_a_target() -> None:
    line = ["bisect", "torch.nn:Softsign", "--crash", "--input", "f32[2]", "--json", "-q"]
    arguments = new_parser().parse_args(line)
    read = read_program(*take_program(arguments), arguments)
    assert read.args == ("torch.nn:Softsign", ("f32[2]",), False, False)
    assert (arguments.kind, arguments.json, arguments.quiet) == (CRASH, True, True)
    line = ["bisect", "--wrong", str(Path(__file__)), "--crash", "--", "-q"]
    arguments = new_parser().parse_args(line)
    read = read_program(*take_program(arguments), arguments)
    assert read.args == (Path(__file__), ["--crash", "--", "-q"], False)
    assert (arguments.kind, arguments.quiet) == (WRONG, False)


def test_a_script_may_end_with_any_exit_code_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    for code in ("0", "3", "130"):
        call_script(script, [code], False, "eager")
    with pytest.raises(ModelError, match=r"ends\.py ended with an exception"):
        call_script(script, ["no number"], False, "eager")


@pytest.mark.slow
def test_a_file_that_is_there_keeps_its_text_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "fusec_repro.py").write_text("mine")
    done, _ = bisect(tmp_path, "crashing_pass", "--crash", "train.py")
    assert (tmp_path / "fusec_repro.old.py").read_text() == "mine"
    assert "fusec_repro.py was there: it is fusec_repro.old.py now" in done.stderr


@pytest.mark.slow
def test_a_script_that_fails_by_itself_is_the_user_s(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise ValueError('mine')\n")
    done, _ = bisect(tmp_path, "", "--crash", "bad.py")
    assert done.returncode == 3
    assert "ValueError: mine" in done.stderr
    assert done.stderr.count("the model itself fails") == 1
    done, _ = bisect(tmp_path, "", "--wrong", "model.py:Blok", "--input", "f32[4,16,32]")
    assert done.returncode == 2
    assert "Valid: Block." in done.stderr


@pytest.mark.slow
def test_a_process_that_dies_is_told_by_its_signal() -> None:
    with pytest.raises(Died) as death:
        run_apart(os.abort)
    assert death.value.how == "SIGABRT"
    with pytest.raises(Died) as death:
        run_apart(time.sleep, 60, seconds=0.5)
    assert death.value.how == "hangs"
    with pytest.raises(RuntimeError, match="ValueError"):
        run_apart(int, "x")
    with pytest.raises(UsageError, match="odd"):
        run_apart(_refuse)


def _refuse() -> None:
    raise UsageError("odd")


@pytest.mark.slow
def test_torch_s_own_minifier_shrinks_a_crash_where_failures_are_errors(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(SCRIPT.replace("Block())", 'Block(), backend="fusec")'))
    strict = {"FUSEC_STRICT": "1"}
    seen = python(tmp_path, "crashing_pass", "train.py", TORCHDYNAMO_REPRO_AFTER="dynamo", **strict)
    assert "Minifier script written to" in seen.stderr
    (launcher,) = tmp_path.rglob("minifier_launcher.py")
    python(tmp_path, "crashing_pass", str(launcher), **strict)
    least = (tmp_path / "repro.py").read_text()
    assert "torch.tanh(" in least and "gelu" not in least
    again = python(tmp_path, "crashing_pass", "repro.py", **strict)
    assert again.returncode == 1 and "a planted crash" in again.stderr


def test_what_torch_s_setting_asks_is_an_option_of_what_is_found(tmp_path: Path) -> None:
    recorder = Recorder(CRASH, tmp_path / "events")
    torch.use_deterministic_algorithms(True)
    try:
        torch.compile(lambda x: x.sin() * 2, backend=recorder.backend)(torch.ones(4))  # type: ignore
    finally:
        torch.use_deterministic_algorithms(False)
    begun = [one for one in read_events(tmp_path / "events") if isinstance(one, Begun)]
    assert begun
    assert all(one.options["deterministic"] for one in begun)
