"""What a wrapper takes of its graph, written down and read again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._higher_order_ops import auto_functionalize

from fusec.runtime.calls.outside import NOTHING, describe, described, of_graph
from tests.calls import calls_of
from tests.support import BACKEND

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


# -- operators that change their arguments ---------------------------------------------------------

changes = torch.library.Library("changes", "FRAGMENT")
changes.define("two(Tensor(a!) a, Tensor(b!) b, float s) -> Tensor")
changes.define("each(Tensor(a!)[] xs, Tensor(b!)? last) -> ()")
changes.define("halves(Tensor(a!) a) -> (Tensor, Tensor)")


def two(a: torch.Tensor, b: torch.Tensor, s: float) -> torch.Tensor:
    a.add_(s)
    b.mul_(2)
    return a.sum() + b.sum()


def each(xs: list[torch.Tensor], last: torch.Tensor | None) -> None:
    for k, x in enumerate(xs):
        x.add_(k + 1)
    if last is not None:
        last.zero_()


def halves(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = a.sum()
    a.neg_()
    return total, a * 1


for name, rule in (("two", two), ("each", each), ("halves", halves)):
    changes.impl(name, rule, "CompositeExplicitAutograd")
torch.library.register_fake("changes::two", lambda a, b, s: a.new_empty(()), lib=changes)
torch.library.register_fake(
    "changes::halves", lambda a: (a.new_empty(()), torch.empty_like(a)), lib=changes
)


def of_views(x: torch.Tensor) -> Any:
    y = x * 2
    return y, torch.ops.changes.two(y[1:3], y[:, 0], 3.0)


def of_a_transpose(x: torch.Tensor) -> Any:
    y = x.t() * 2
    return y, torch.ops.changes.two(y, x, 1.5), x + 1


def of_parts_of_an_input(x: torch.Tensor) -> Any:
    return torch.ops.changes.two(x[::2], x.t()[1], 1.5), x + 1


def of_lists(x: torch.Tensor) -> Any:
    y = [x * 1, x + 1, x[1]]
    torch.ops.changes.each(y, None)
    z = x * 3
    torch.ops.changes.each([z], z[0])
    return y, z, x


def with_results(x: torch.Tensor) -> Any:
    return torch.ops.changes.halves(x[1:]), torch.ops.changes.halves(x.t()), x * 1


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("place", ("whole", "transposed", "part"))
@pytest.mark.parametrize(
    "call", (of_views, of_a_transpose, of_parts_of_an_input, of_lists, with_results)
)
def test_an_operator_changes_copies_of_its_arguments(
    call: Callable[..., Any], place: str, dynamic: bool
) -> None:
    memory = torch.randn(10, 9)
    inputs = []
    for own in (memory, memory.clone(), memory.clone()):
        x = {"whole": own, "transposed": own.t(), "part": own[2:6, 3:8]}[place]
        inputs.append((own, x))
    (eager, x), (changed, y), (_, first) = inputs
    wanted = call(x)
    torch.compiler.reset()
    compiled = torch.compile(call, backend=BACKEND, dynamic=dynamic)
    compiled(first)
    with calls_of(auto_functionalize._generate_new_op_kwargs_from_bases) as torch_s:
        found = compiled(y)
    torch.testing.assert_close(found, wanted)
    assert torch.equal(changed, eager)
    assert BACKEND != "fusec" or not torch_s
