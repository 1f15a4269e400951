"""Arguments that have names alone go by their names, wherever a model is called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fusec
from fusec.errors import UsageError
from fusec.tools.cli import main
from fusec.tools.report.arguments import Arguments, described, fitting

MODEL = """
import torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x, *, scale, shift=None, **more):
        y = self.a(x) * scale
        y = y if shift is None else y + shift
        return y * more["extra"] if "extra" in more else y
"""
GIVEN = ("--input", "f32[4,8]", "scale=f32[8]", "extra=f32[4,1]")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("named") / "named_models.py"
    path.write_text(MODEL)
    torch.save({"x": torch.ones(4, 8), "scale": torch.ones(8)}, path.with_suffix(".pt"))
    return f"{path}:Scaled"


def scaled(x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
    return x.tanh() * scale


@pytest.mark.parametrize("command", ["explain", "explain --run", "dump", "lock"])
def test_the_lines_of_each_are_in_what_a_command_shows(capsys, target: str, command: str) -> None:
    assert main([*command.split(), target, *GIVEN]) == 0
    shown = capsys.readouterr().out.replace(r"\"", '"')  # a lock is JSON
    assert 'return y * more["extra"]' in shown


@pytest.mark.parametrize("train", [(), ("--train",)])
def test_results_are_compared_and_called_by_their_names(capsys, target: str, train) -> None:
    assert main(["check", target, *GIVEN, *train]) == 0
    printed = capsys.readouterr().out
    assert "input scale after" in printed and "input extra after" in printed
    assert ("gradient of input scale" in printed) == bool(train)


def test_a_file_of_arguments_with_names(capsys, target: str) -> None:
    saved = Path(target.partition(":")[0]).with_suffix(".pt")
    assert main(["check", target, "--input", f"@{saved}"]) == 0
    assert "input x after" in capsys.readouterr().out


def test_several_sizes_of_what_has_a_name(capsys, target: str) -> None:
    assert main(["check", target, "--input", "f32[4|6,8]", "scale=f32[4|6,1]"]) == 0
    assert "call 1: input scale after" in capsys.readouterr().out


def test_a_profile_and_an_archive_of_it(capsys, target: str, tmp_path: Path) -> None:
    assert main(["profile", target, *GIVEN, "--train", "--steps", "2"]) == 0
    file = tmp_path / "a.fusec"
    given = ("--input", "f32[4,8]", "scale=f32[8]", "--with-weights", "-o", str(file))
    assert main(["build", target, *given]) == 0


def test_what_is_missing_is_said_with_what_there_is(capsys, target: str) -> None:
    assert main(["explain", target, "--input", "f32[4,8]"]) == 2
    said = capsys.readouterr().err
    assert "which takes (x, scale=, shift=, **more): missing a required argument: 'scale'" in said


def test_explain_takes_what_the_model_does_but_its_own_options() -> None:
    (graph,) = fusec.explain(scaled, torch.ones(4), scale=torch.ones(4)).graphs
    assert any("x.tanh() * scale" in line for line in graph.kernels[0].source)
    with pytest.raises(UsageError, match="target= is an option of fusec's"):
        fusec.explain(scaled, torch.ones(4), target=torch.ones(4))


def test_an_exported_program_has_its_named_examples(capsys, tmp_path: Path) -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return x.tanh() * scale

    file = tmp_path / "m.pt2"
    given = (torch.ones(4),), {"scale": torch.ones(4)}
    torch.export.save(torch.export.export(Module(), *given), file)
    assert main(["check", str(file)]) == 0
    assert "input scale after" in capsys.readouterr().out


def test_arguments_are_kept_as_they_are_given() -> None:
    assert fitting(scaled, [1], {"scale": 2}) == Arguments((1,), {"scale": 2})
    assert described(scaled) == "x, scale="
    with pytest.raises(TypeError, match="too many positional"):
        fitting(scaled, [1, 2], {})
    with pytest.raises(TypeError, match="it has no argument 'scael'; did you mean scale="):
        fitting(scaled, [1], {"scael": 2})
    with pytest.raises(TypeError, match="'targt'; did you mean target="):
        fitting(scaled, [1], {"targt": "cpu"}, ("target", "train"))
    with pytest.raises(TypeError, match=r"it has no argument 'colour'$"):
        fitting(scaled, [1], {"colour": 2}, ("target", "train"))
    with pytest.raises(TypeError, match="no names"):
        fitting(print.__self__.__build_class__, [1], {"scale": 2})
    assert list(Arguments((1,), {"b": 2}).labelled()) == [("0", 1), ("b", 2)]
