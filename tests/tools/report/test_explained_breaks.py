"""``explain`` of models that Dynamo takes apart: every break is named, and what was not seen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fusec
from fusec.tools.cli import main
from tests.tools.report import unclean

UNCLEAN = {
    unclean.Printing: "print(",
    unclean.Item: ".item()",
    unclean.Branch: "if y.sum()",
    unclean.Mask: "x[x > 0]",
    unclean.Disabled: "noted(",
}
ASK = (unclean.Item, unclean.Branch, unclean.Mask)
"""Those that ask for the values of tensors."""


@pytest.mark.parametrize("model", UNCLEAN, ids=lambda model: model.__name__)
def test_explain_names_the_break_its_line_and_a_remedy(model: type[nn.Module]) -> None:
    explained = fusec.explain(model(), torch.randn(8, 32))
    (found,) = explained.breaks
    assert UNCLEAN[model] in found.place.code
    text = str(explained)
    assert "graph breaks: 1\n" in text
    assert f"unclean.py:{found.place.line} in forward: " in text
    assert "-> " in text


@pytest.mark.parametrize("model", UNCLEAN, ids=lambda model: model.__name__)
def test_what_needs_values_is_said_to_be_unseen(model: type[nn.Module]) -> None:
    explained = fusec.explain(model(), torch.randn(8, 32))
    assert bool(explained.unseen) == (model in ASK)
    assert ("from here on not seen: " in str(explained)) == (model in ASK)
    if model in ASK:
        assert UNCLEAN[model] in explained.unseen


def test_a_function_that_runs_eagerly_as_a_whole_is_not_called_empty() -> None:
    text = str(fusec.explain(unclean.Printing(), torch.randn(8, 32)))
    assert "nothing is compiled: all of the call runs eagerly" in text
    assert "no tensor operations" not in text


@pytest.mark.parametrize("model", ASK, ids=lambda model: model.__name__)
def test_with_values_all_graphs_are_seen(capsys, model: type[nn.Module]) -> None:
    target = f"{Path(unclean.__file__)}:{model.__name__}"
    assert main(["explain", target, "--input", "f32[8,32]", "--run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["graphs"]) == 2
    assert document["unseen"] == ""
    assert len(document["breaks"]) == 1


def test_a_training_step_on_values_has_its_backward(capsys) -> None:
    target = f"{Path(unclean.__file__)}:Item"
    assert main(["explain", target, "--input", "f32[8,32]", "--run", "--train", "--json"]) == 0
    names = [graph["name"] for graph in json.loads(capsys.readouterr().out)["graphs"]]
    assert sorted(names) == ["backward", "backward_1", "forward", "forward_1"]


def test_what_a_setting_captures_is_seen(capsys, tmp_path: Path) -> None:
    path = tmp_path / "captured.py"
    setting = "torch._dynamo.config.capture_scalar_outputs = True"
    path.write_text(f"import torch\nfrom tests.tools.report.unclean import Item\n{setting}\n")
    with torch._dynamo.config.patch(capture_scalar_outputs=False):
        assert main(["explain", f"{path}:Item", "--input", "f32[8,32]", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["breaks"], document["unseen"]) == ([], "")
    assert len(document["graphs"]) == 1


def test_explaining_again_sees_the_same_breaks() -> None:
    model, x = unclean.Printing(), torch.randn(8, 32)
    assert fusec.explain(model, x).breaks == fusec.explain(model, x).breaks != ()


def test_a_clean_model_has_no_breaks() -> None:
    explained = fusec.explain(unclean.Chosen(), torch.randn(8, 32))
    assert (explained.breaks, explained.unseen) == ((), "")
    assert "break" not in str(explained)


def test_a_function_that_one_call_compiles_twice_is_a_recompile() -> None:
    def part(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos() + 1

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return part(x), part(x[:4])

    explained = fusec.explain(model, torch.randn(8))
    assert {one.place.function for one in explained.recompiles} == {"part"}
    text = str(explained)
    assert "recompiles: " in text and "size mismatch at index 0. expected 8, actual 4" in text


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).tanh()
        print("a part")
        return y + x


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Part(), Part()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.h:
            x = part(x)
        return x


def test_a_graph_of_a_part_is_called_by_its_module() -> None:
    text = str(fusec.explain(Parts(), torch.randn(4, 8)))
    assert "graph inference of h.0 (Part)\n" in text
    torch._dynamo.reset()
    compiled = torch.compile(Parts(), backend="fusec")
    with fusec.watch() as watched:
        compiled(torch.randn(4, 8)).sum().backward()
    kinds = {(g.summary.name, g.summary.called) for g in watched.seen.graphs}
    assert {("forward", "h.0 (Part)"), ("backward", "")} <= kinds
    rows = re.findall(r"^  \d/\d  backward .*$", str(watched), re.MULTILINE)
    assert rows and all(" (Part), test_explained_breaks.py:" in row for row in rows)
    whole = str(fusec.explain(unclean.Item(), torch.randn(8, 32)))
    assert "graph inference\n" in whole


@pytest.mark.parametrize("train", [False, True])
def test_behind_a_break_modules_have_their_paths_in_the_whole_model(train: bool) -> None:
    explained = fusec.explain(unclean.Layered(), torch.randn(8, 32), train=train)
    named = {
        graph.name: set(graph.modules) & {"norm", "h.0", "h.0.a", "h.1.a"}
        for graph in explained.graphs
    }
    first = "forward" if train else "inference"
    assert named[first] == {"norm"}
    assert named[f"{first}_1"] == {"h.0", "h.0.a"}  # called by the layer's own function
    assert named[f"{first}_2"] == {"h.0"}  # the tanh behind its break
    assert named[f"{first}_3"] == {"h.1.a"}  # the outer function calls it `last`
