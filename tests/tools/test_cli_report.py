"""``fusec report`` and ``fusec run -o``: one HTML file, and what is refused before any work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fusec.driver.observers import observing
from fusec.tools.cli import main
from fusec.tools.report.html.document import Collected
from fusec.tools.report.watching import watch
from tests.planted import fail

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])

    def forward(self, x):
        for layer in self.h:
            x = x + layer(x).tanh()
        print("inside")
        return x.exp()

if __name__ == "__main__":
    model = torch.compile(Net())
    for _ in range(3):
        model(torch.randn(8, 32)).sum().backward()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch._dynamo.reset()
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    return path


def test_a_report_of_a_model_is_one_file(capsys, model: Path) -> None:
    output = model.with_suffix(".html")
    assert main(["report", f"{model}:Net", "--input", "f32[8,32]", "-o", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    page = output.read_text(encoding="utf-8")
    assert "h.*</h4>" in page and "<b>3 ×</b>" in page
    assert "a graph ends here" in page and "net.py:13 in forward" in page
    assert "-> fusec" not in page and 'id="compile"' in page


def test_a_report_of_a_run_has_measured_times(capsys, model: Path) -> None:
    output = model.with_suffix(".html")
    assert main(["run", "-o", str(output), str(model)]) == 0
    assert str(output) in capsys.readouterr().out
    page = output.read_text(encoding="utf-8")
    assert "Do this first" in page and "net.py:13 in forward" in page
    assert ", measured</td>" in page
    assert page.count('class="graph"') == 4  # two forwards, two backwards


def test_graphs_of_a_run_are_collected_with_their_times(model: Path) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(torch.tanh(x) * 2).real.exp()

    torch.compile(step, backend="fusec")(torch.randn(64, 64))  # in the cache
    torch._dynamo.reset()
    with watch("here") as watched, observing(Collected()) as collected:
        compiled = torch.compile(step, backend="fusec")
        for _ in range(3):
            compiled(torch.randn(64, 64))
    torch.compile(torch.sin, backend="fusec")(torch.randn(8))  # behind the block
    document = collected.document(watched.seen)
    (graph,) = document.graphs
    assert graph.report.name == watched.seen.graphs[0].summary.id
    assert {box.timing.word for box in graph.boxes} == {"measured"}
    assert {box.kind for box in graph.boxes} == {"kernel", "library"}
    spent = sum(box.timing.us * box.count for box in graph.boxes)
    assert 0 < spent * 3 <= document.seen.run_seconds * 1e6


def test_a_graph_whose_compile_failed_is_drawn_as_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, torch.ops.aten.sin.default, ZeroDivisionError("planted"))
    with (
        watch("here") as watched,
        observing(Collected()) as collected,
        pytest.warns(match="planted"),
    ):
        torch.compile(lambda x: torch.sin(x) * 37, backend="fusec")(torch.randn(8))
    (graph,) = collected.document(watched.seen).graphs
    assert "planted" in graph.problem and not graph.boxes
    assert [call.first.op for call in graph.calls] == ["sin.default", "mul.Tensor"]


@pytest.mark.parametrize("command", ["report", "run"])
def test_where_nothing_can_be_written_nothing_is_compiled(
    capsys, model: Path, tmp_path: Path, command: str
) -> None:
    target = [f"{model}:Net", "--input", "f32[8,32]"] if command == "report" else [str(model)]
    assert main([command, "-o", str(tmp_path), *target]) == 4
    assert main([command, "-o", str(tmp_path / "none" / "a.html"), *target]) == 2
    said = capsys.readouterr().err
    assert said.count("cannot write") == 1 and "no directory for" in said
    assert "tracing" not in said and "inside" not in said


@pytest.mark.parametrize("command", ["report", "run"])
def test_a_missing_jinja2_is_said_first(
    capsys, model: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    target = [f"{model}:Net", "--input", "f32[8,32]"] if command == "report" else [str(model)]
    output = str(model.with_suffix(".html"))
    assert main([command, "-o", output, *target]) == 4
    said = capsys.readouterr().err
    assert "pip install 'fusec[cli]'" in said and "tracing" not in said
