"""Random training programs, eager against the compiled ones, and some that were wrong once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from fusec.driver import backend
from fusec.errors import Unsupported
from fusec.options import Options
from tests.fuzz import training
from tests.fuzz.training import Training, as_file, draw, failures, is_as_torch, wrong
from tests.planted import fail_to_build

MATRIX = (("leaf", (3, 3)),)


def program(*lines: str, returns: str, inputs=MATRIX) -> Training:
    return Training(0, inputs, lines, returns)


FOUND = {
    "a detached result of what two views are made of": program(
        "y = torch.sin(a0)", returns="y[:2], y[2:], y.detach()"
    ),
    "the same beside a result of its own": program(
        "y = torch.sin(a0)", returns="y[:2], y[2:], y.detach(), y * 3"
    ),
    "a view, detached": program("y = a0 * 2", returns="y.view(-1).detach(), y"),
    "detached, and viewed then": program("y = a0 * 2", returns="y.detach().view(-1), y.t(), y"),
    "a view of a result that has its shape": program(
        "y = a0 * 2", returns="y.view(3, 3), y, y", inputs=(("buffer", (3, 3)),)
    ),
    "a detached result, twice": program(
        "y = a0 * 2", "z = y.detach()", returns="z, z, y, y.detach()"
    ),
    "a view and the same view, detached": program(
        "y = a0 * 2", returns="y.t().detach(), y.t()"
    ),
    "rows and the same rows, detached": program("y = a0 * 2", returns="y[0].detach(), y[0]"),
    "one of several views, detached": program(
        "y = a0 * 2", "p, q = y.split(2)", returns="p, p.detach(), q"
    ),
    "views of what is computed of indices alone": program(
        "y = torch.arange(6.0)", returns="y.view(2, 3), y, y[2:], a0 * 2"
    ),
    "views of a constant": program(
        "y = torch.zeros(2, 3)", returns="{'p': y[0], 'q': [y.t(), y]}"
    ),
    "equal values in memory of their own": program(
        "y = a0 * 2", returns="y, y.clone(), a0 * 2, y.clone().view(-1)"
    ),
    "a result without gradient of what has one": program(
        "with torch.no_grad():\n    v = a0.view(-1)", "y = a0 * 2", returns="v, y, a0.detach()"
    ),
    "a hook on a view that is returned": program(
        "v = a0.view(-1)", "v.register_hook(lambda g: g * 2)", returns="v, a0 * 2"
    ),
    "a hook on a view of a result": program(
        "y = a0 * 2", "v = y.view(-1)", "v.register_hook(lambda g: g * 2)", returns="v, y"
    ),
    "a hook on an input that is written": program(
        "a0.register_hook(lambda g: g * 0.5)", "y = a0.mean()", "a0[0] = 0.5", returns="y",
        inputs=(("computed", (3, 3)),)
    ),
    "what was added with gradients to a detached input": program(
        "d = a1.detach().view(-1)", "d.add_(a0[0, 0])", returns="d",
        inputs=(*MATRIX, ("buffer", (3, 3)))
    ),
    "a view of one of two inputs in memory that is written": program(
        "with torch.no_grad():\n    a1[0].mul_(0.5)", "v = a0.t()", returns="v, [v, v]",
        inputs=(("computed", (1, 4)), ("view", (1, 4)))
    ),
    "one of two inputs, detached, in memory that is written": program(
        "v = a1.detach()", "with torch.no_grad():\n    a0.mul_(0.5)", returns="v, v",
        inputs=(("computed", (1, 4)), ("view", (3, 3)))
    ),
}  # fmt: skip


OTHERS = {
    "complex": program(
        "y = torch.view_as_complex(a0[:, :2].contiguous() * 2)",
        "v = torch.view_as_real(y)",
        returns="v, v.detach(), a0 * 3",
    ),
    "inputs": program("y = a0 @ a0", returns="a0, a0.detach(), a0.view(-1), a0.view(3, 3), y, a0"),
    "param": program(
        "y = a0 @ a0",
        returns="a0, a0.t(), a0.t(), y.t(), y.detach()",
        inputs=(("parameter", (3, 3)),),
    ),
    "cat parts": program(
        "a = a0 * 2", "y = torch.cat((a, a0))", returns="y, a, y[:3], y[3:].detach()"
    ),
    "expand": program("y = a0.sum(0)", "e = y.expand(4, 3)", returns="e, y, e.detach(), e[0]"),
    "inplace view": program("y = a0 * 2", "v = y[0]", "v.mul_(3)", returns="y, v, y.detach()"),
    "inplace input": program(
        "a0.mul_(2)",
        "v = a0[1:]",
        returns="v, a0, v.detach(), a0.detach()",
        inputs=(("computed", (3, 3)),),
    ),
    "buffer": program(
        "a1.add_(a0.detach())",
        returns="a1, a1[0], a1.detach(), a0 * a1",
        inputs=(("leaf", (3, 3)), ("buffer", (3, 3))),
    ),
    "tensor const": program(
        "t = torch.tensor([1.0, 2.0, 3.0])", returns="t, t.view(3, 1), t[1:].detach(), a0 * t"
    ),
    "data": program("y = a0 * 2", returns="y.data, y, y.t().data"),
    "unsqueeze": program("y = a0 * 2", "v = y.unsqueeze(0).squeeze(0)", returns="v, y, v.detach()"),
    "imag": program("y = a0.sin()", "z = y.t().contiguous().t()", returns="z, y, z.detach(), y.mT"),
    "flip": program("y = a0.sin()", "z = y.flip(0)", returns="z, z[0], z.view(-1).detach(), y"),
    "reqgrad": program("y = a0.detach() * 2", "v = y.view(-1)", returns="v, y, y.t(), a0.sin()"),
    "no grad compute": program(
        "with torch.no_grad():\n    y = a0.sin()\n    v = y[0]",
        returns="y, v, v.detach(), a0.cos(), y.view(3, 3)",
    ),
    "chain": program(
        "y = a0.sin()",
        "with torch.no_grad():\n    v = y.view(-1)",
        "w = v.view(3, 3)",
        "u = v.detach()",
        returns="u, w, v, y",
    ),
    "split all": program(
        "y = a0.sin()", "p, q, r = y.unbind()", returns="p, q, r, q.detach(), r.view(3, 1)"
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ({}, {"dynamic": True}, {"verify": True}), ids=repr)
@pytest.mark.parametrize("name", OTHERS)
def test_results_in_other_relations_are_eager_s(name: str, how: dict[str, bool]) -> None:
    assert not wrong(OTHERS[name], **how)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FOUND)
def test_a_program_that_was_wrong_is_right(name: str) -> None:
    assert not wrong(FOUND[name])


def test_a_graph_that_runs_as_eager_kernels_detaches_as_well(monkeypatch) -> None:
    fail_to_build(monkeypatch, Unsupported("a test"))
    for name in [*FOUND][1::2]:
        assert not wrong(FOUND[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 240, 12))
def test_compiled_training_programs_do_what_eager_does(first: int) -> None:
    drawn = [draw(seed) for seed in range(first, first + 12)]
    assert not [as_file(*one) for one in failures(drawn) if not is_as_torch(*one)]


def test_a_few_training_programs_do_what_eager_does() -> None:
    assert not [as_file(*one) for one in failures([draw(seed, memory=False) for seed in range(6)])]


def test_a_seed_is_one_program_and_seeds_reach_every_kind_of_line() -> None:
    drawn = [draw(seed) for seed in range(60)]
    assert drawn[7] == draw(7)
    text = "\n".join(one.source() for one in drawn)
    for kind in (training.VALUES, training.VIEWS, training.DETACHED, training.MEMORY):
        assert any(line.partition("{x}")[2][:6] in text for line in kind)
    assert {kind for one in drawn for kind, _ in one.inputs} == set(training.KINDS)


def without_detaching(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """Compile a graph whose results are what AOTAutograd's decompositions make of ``detach``."""
    options = Options.from_compile(None, {"cache": False})

    def compile_one(graph: fx.GraphModule, given: Sequence[Any], *, name: str) -> Any:
        for node in graph.graph.find_nodes(
            op="call_function", target=torch.ops.aten.detach.default
        ):
            node.target = torch.ops.aten.alias.default
        return backend.compile_one_graph(graph, given, name=name, options=options)

    return backend.compile_with(gm, inputs, compile_one, backend.context_of(inputs, options))


def test_results_that_are_one_object_are_found() -> None:
    found = wrong(FOUND["a view, detached"], without_detaching)
    assert any("requires_grad" in line for line in found)
