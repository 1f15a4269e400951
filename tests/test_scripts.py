"""Scripts as people write them under ``fusec run``: the page is short, and says what is true.

``tests/scripts`` has small programs of the kinds that are tried first, each by its own hand-written
model; four of the kinds are among the examples. Of each, every line that the page names is the
program's, every module exists, and the times add up.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from fusec.tools.cli import main

ROOT = Path(__file__).parents[1]
SCRIPTS = {
    "nano_gpt": "tests/scripts",
    "trainer": "tests/scripts",  # as with the Trainer of transformers
    "convnet": "tests/scripts",  # as in timm
    "diffusion": "examples",  # as in diffusers
    "graph_net": "tests/scripts",  # as in PyG
    "ppo": "examples",
    "pinn": "examples",
    "lstm": "tests/scripts",
    "audio": "tests/scripts",
    "recommender": "tests/scripts",
    "kalman": "tests/scripts",
    "ode": "tests/scripts",
    "vmap": "tests/scripts",
    "beam_search": "examples",
}
FAST = ("recommender", "graph_net")
MOST_LINES = 60
_SLACK_S = 1e-3


class Ran:
    """A script that ran: its page, its record, and its modules' classes by the modules' names."""

    def __init__(self, script: Path, folder: Path) -> None:
        self.script = script
        self.kinds: dict[str, set[str]] = {"": set()}
        printed, record = io.StringIO(), folder / "seen.json"
        torch._dynamo.reset()
        with (
            mock.patch.dict(os.environ),  # the Trainer leaves its settings there
            _modules_made() as made,
            contextlib.redirect_stdout(printed),
        ):
            self.code = main(["run", "--json", str(record), str(script)])
        for module in dict.fromkeys(made):
            for name, part in module.named_modules():
                self.kinds.setdefault(name, set()).add(type(part).__name__)
        text = printed.getvalue()
        self.page = text[text.rindex(f"\n{script.name}: ") + 1 :]
        self.record: dict[str, Any] = json.loads(record.read_text())

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield all kernels and eager kernels of all graphs."""
        for graph in self.record["graphs"]:
            yield from (*graph["kernels"], *graph["externs"])


@contextlib.contextmanager
def _modules_made() -> Iterator[list[nn.Module]]:
    """Yield the modules that get parts in a block."""
    made: list[nn.Module] = []
    hook = register_module_module_registration_hook(lambda module, *_: made.append(module))
    try:
        yield made
    finally:
        hook.remove()


@pytest.fixture(scope="module", params=SCRIPTS)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    name = request.param
    pytest.importorskip("transformers" if name == "trainer" else "torch")
    return Ran(ROOT / SCRIPTS[name] / f"{name}.py", tmp_path_factory.mktemp(name))


def _marks(name: str) -> list[Any]:
    return [] if name in FAST else [pytest.mark.slow]


@pytest.mark.parametrize(
    "ran", [pytest.param(name, marks=_marks(name)) for name in SCRIPTS], indirect=True
)
def test_the_page_of_a_script_is_short_and_true(ran: Ran) -> None:
    assert ran.code == 0
    assert ran.record["graphs"]
    _is_short(ran)
    _names_are_the_program_s(ran)
    _lines_are_the_program_s(ran)
    _times_add_up(ran)


def _is_short(ran: Ran) -> None:
    lines = ran.page.splitlines()
    assert len(lines) < MOST_LINES, ran.page
    assert max(map(len, lines)) <= 100


def _names_are_the_program_s(ran: Ran) -> None:
    """Assert that each module that is named is one that the script made."""
    for text in (ran.page, json.dumps(ran.record)):
        assert "__dict__" not in text and "_orig_mod" not in text and "L['" not in text
    named = {part["module"] for part in ran.parts()}
    parts = {end for module in named for end in module.split("..")}
    assert parts <= ran.kinds.keys(), parts - ran.kinds.keys()
    for part in ran.parts():
        wanted = _MODULES.get(part.get("op", ""))
        kinds = set().union(*(ran.kinds[end] for end in part["module"].split("..")))
        assert wanted is None or any(kind.startswith(wanted) for kind in kinds), part


_MODULES = {
    "convolution.default": "Conv",
    "convolution_backward.default": "Conv",
    "_embedding_bag.default": "EmbeddingBag",
    "_embedding_bag_backward.default": "EmbeddingBag",
    "embedding_dense_backward.default": "Embedding",
    "_thnn_fused_lstm_cell.default": "LSTM",
    "native_batch_norm_backward.default": "BatchNorm",
}
"""An eager kernel -> how the classes of modules begin that call it, in these scripts."""


def _lines_are_the_program_s(ran: Ran) -> None:
    """Assert that each line that is named has that code, in that function."""
    source = ran.script.read_text()
    lines, functions = source.splitlines(), _functions(source)
    places = [graph["place"] for graph in ran.record["graphs"]]
    places += [one["place"] for kind in ("breaks", "recompiles") for one in ran.record[kind]]
    for place in places:
        if Path(place["path"]).name == ran.script.name:
            assert place["function"] in functions(place["line"]), place
    said = [line for part in ran.parts() for line in part["source"]]
    own = [match for line in said if (match := _SOURCE.search(line))]
    for match in own:
        if match["file"] == ran.script.name:
            assert match["code"].rstrip(".… ") in lines[int(match["line"]) - 1], match[0]
    assert not said or own


_SOURCE = re.compile(r"(?P<file>[\w]+\.py):(?P<line>\d+)(?: in [\w.<>]+)?:? *(?P<code>.*)")


def _functions(source: str) -> Any:
    """Return what gives the names of the functions around a line."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]

    def around(line: int) -> set[str]:
        """Return them; a function begins with its decorators."""
        names = {"<module>"}
        for node in found:
            first = min(one.lineno for one in (node, *node.decorator_list))
            if first <= line <= (node.end_lineno or first):
                names.add(node.name)
        return names

    return around


def _times_add_up(ran: Ran) -> None:
    """Assert that launches take no longer than their graphs, and these than the program."""
    record = ran.record
    graphs = {f"{g['name']} {g['compile']}": g["run_seconds"] for g in record["graphs"]}
    spent: dict[str, float] = {}
    for launch in record["launches"]:
        spent[launch["graph"]] = spent.get(launch["graph"], 0.0) + launch["seconds"]
    assert spent.keys() <= graphs.keys()
    for graph, seconds in spent.items():
        assert seconds <= graphs[graph] + _SLACK_S, graph
    assert sum(graphs.values()) + record["collection_seconds"] <= record["seconds"]
