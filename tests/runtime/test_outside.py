"""What a wrapper takes of its graph, written down and read again."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import fx

from fusec.runtime.outside import NOTHING, describe, described, of_graph

aten = torch.ops.aten


def graph_of(target: Any, *args: Any, **named: Any) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.create_node("call_function", target, args, named, name="made"))
    return fx.GraphModule({}, graph)


def test_operators_types_and_devices_are_written_down() -> None:
    gm = graph_of(aten.zeros.default, [2, 3], dtype=torch.int64, device=torch.device("cpu"))
    paths = [("args", 0, 1), ("kwargs", "device"), ("kwargs", "dtype")]
    taken = {"calls": ["made"], "constants": [("made", path) for path in paths]}
    text = json.dumps(describe(json.loads(json.dumps(taken)), gm))
    assert json.loads(text) == {
        "calls": {"made": "aten.zeros.default"},
        "constants": [
            ["made", ["args", 0, 1], "value", 3],
            ["made", ["kwargs", "device"], "device", "cpu"],
            ["made", ["kwargs", "dtype"], "torch", "int64"],
        ],
    }
    found, whole = described(json.loads(text)), of_graph(gm)
    assert found.calls == whole.calls
    for path in paths:
        assert found.constant("made", path) == whole.constant("made", path)


def test_a_wrapper_that_takes_nothing_is_described_so() -> None:
    found = describe({"calls": [], "constants": []}, graph_of(aten.mm.default))
    assert found == {"calls": {}, "constants": []} and described(found).names().keys() == {
        "constant"
    }
    with pytest.raises(KeyError, match="no constant"):
        NOTHING.constant("made", ())


def own(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    "gm",
    [graph_of(own, 1), graph_of(aten.zeros.default, torch.ones(2)), graph_of(max, 1)],
    ids=("the user's function", "a tensor", "Python's function"),
)
def test_what_cannot_be_written_down_needs_the_graph(gm: fx.GraphModule) -> None:
    taken = {"calls": ["made"], "constants": [("made", ("args", 0))]}
    assert describe(taken, gm) is None


BAD = [
    None,
    {},
    {"calls": [], "constants": []},
    {"calls": {"made": "aten.no_such.default"}, "constants": []},
    {"calls": {"made": "os.system"}, "constants": []},
    {"calls": {"made": "c10d.broadcast_.default"}, "constants": []},
    {"calls": {}, "constants": [["made", ["args", 0], "torch", "load"]]},
    {"calls": {}, "constants": [["made", ["args", 0], "value", []]]},
    {"calls": {}, "constants": [["made", ["args", 0], "device", "moon"]]},
    {"calls": {}, "constants": [["made"]]},
]


@pytest.mark.parametrize("found", BAD, ids=str)
def test_anything_else_is_an_error(found: Any) -> None:
    with pytest.raises(ValueError):
        described(found)
