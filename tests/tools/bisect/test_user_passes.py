"""A pass of the user that is at fault is named, and one that is not is left out of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fusec
from fusec.driver.user_passes import REGISTERED
from fusec.notation import Expr, Graph, Op, op, rewrite
from fusec.tools.bisect.hunt import Hunt
from fusec.tools.bisect.questions import WITHOUT_PASSES
from fusec.tools.bisect.source import CRASH, WRONG
from fusec.tools.cli import main
from fusec.tools.verify import kernels
from tests.tools.bisect import plants
from tests.tools.bisect.test_bisect import here

SCRIPT = """
import torch
import fusec
from fusec.notation import Graph, Op, op, rewrite


@fusec.register_pass("sines")
def sines(graph):
    def rule(node):
        return op("sin", *node.args) if isinstance(node, Op) and node.name == "tanh" else node
    return graph.map(lambda exprs: rewrite(exprs, rule))


def f(x):
    return torch.tanh(x) * 2


torch.compile(f, backend="fusec", options={"passes": "sines"})(torch.randn(8, 16))
"""


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    known = dict(REGISTERED)
    fusec.register_pass("sines")(sines)
    fusec.register_pass("lists")(lists)
    fusec.register_pass("looks")(lambda graph: graph)
    yield
    kernels._tallies.clear()  # a kernel that was off would explain the errors of later tests
    REGISTERED.clear()
    REGISTERED.update(known)


def sines(graph: Graph) -> Graph:
    def rule(node: Expr) -> Expr:
        return op("sin", *node.args) if isinstance(node, Op) and node.name == "tanh" else node

    return graph.map(lambda exprs: rewrite(exprs, rule))


def lists(graph: Graph) -> Any:
    return list(graph.nodes)


def program(passes: str) -> Callable[[Any], None]:
    def run(backend: Any) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x) * 2

        torch.compile(f, backend=backend, options={"passes": passes})(torch.randn(8, 16))

    return run


def test_a_pass_that_computes_something_else_is_named_with_the_option_that_helps() -> None:
    found = Hunt(WRONG, print, here).run(program("looks, sines"))
    assert found is not None
    assert (found.stage, found.op, found.helps) == ("sines", "mul.Tensor", (WITHOUT_PASSES,))
    assert found.unshown and not found.source


def test_a_pass_that_returns_no_graph_is_named() -> None:
    found = Hunt(CRASH, print, here).run(program("looks, lists"))
    assert found is not None
    assert (found.stage, found.helps) == ("lists", (WITHOUT_PASSES,))
    assert found.said.startswith("PassError: the pass 'lists' returned an object of type list")


def test_a_fault_of_fusec_s_own_is_shown_without_the_passes(own_stages: None, monkeypatch) -> None:
    monkeypatch.setenv("FUSEC_CACHE", "0")
    plants.crashing_pass()
    found = Hunt(CRASH, print, here).run(program("looks"))
    assert found is not None
    assert (found.stage, found.helps, found.unshown) == ("share", (), False)
    assert "looks" not in found.source


@pytest.mark.slow
def test_the_command_prints_no_report_of_a_bug_that_is_the_user_s(tmp_path, capsys) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    code = main(["bisect", "--wrong", "-o", str(tmp_path / "repro.py"), str(script)])
    printed = capsys.readouterr().out
    assert code == 1 and "for a bug report" not in printed
    assert "stage      sines" in printed and f"gone with  {WITHOUT_PASSES}" in printed
    assert not (tmp_path / "repro.py").exists()
