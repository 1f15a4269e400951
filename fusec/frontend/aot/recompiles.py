"""Warnings of source lines that make Dynamo recompile a function at each call, once per line.

A graph is valid under guards: the shapes of its inputs, and the number that an input holds if the
program uses it as an index. ``x.unsqueeze_(0)`` gives the next call one more dimension, and
``y[i]`` is valid for one ``i``. Both are correct, and slow where each call differs. Dynamo breaks
the graph at the former, so that only the inputs of the next graph show it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fusec.errors import warn_once
from fusec.frontend.aliasing.overlap import tensor_of
from fusec.frontend.origin import origin_of
from fusec.torch_interior import compile_numbers, known_number

FEW = 2
"""Compiles of one function that are not worth a warning."""

_dimensions: dict[int, list[list[int]]] = {}
"""The dimensions of the inputs of each compile, by Dynamo's number of the function."""


def warn_of_recompiles(gm: fx.GraphModule) -> None:
    """Warn of the source line that makes Dynamo recompile a graph's function repeatedly."""
    function, compiled_before = compile_numbers()
    inputs = gm.graph.find_nodes(op="placeholder")
    before = _dimensions.setdefault(function, [])
    before.append([tensor.dim() for tensor in map(tensor_of, inputs) if tensor is not None])
    if compiled_before != FEW:
        return
    for a, b, c in zip(*before, strict=False) if len(before) == FEW + 1 else ():
        if abs(b - a) == 1 and c - b == b - a:
            warn_once(
                f"fusec: {next(_lines(gm), 'a graph')}: compiled anew for an input of {a}, then "
                f"{b}, then {c} dimensions; does a call change it for the next, as unsqueeze_ does?"
            )
    for node in inputs:
        if known_number(node.meta.get("example_value")) is not None:
            warn_once(
                f"fusec: {next(_lines(gm, node), 'a graph')}: compiled anew for each number that "
                "the index holds; an index of one element, i.view(1), takes any"
            )


def forget() -> None:
    """Clear the record of compiles; for a reset of Dynamo, whose counts restart from zero."""
    _dimensions.clear()


def _lines(gm: fx.GraphModule, reads: fx.Node | None = None) -> Iterator[str]:
    """Yield the user's source lines of a graph's calls, or of those that take ``reads``."""
    for node in gm.graph.nodes:
        if node.op != "placeholder" and (reads is None or reads in node.all_input_nodes):
            yield from origin_of(node).source
