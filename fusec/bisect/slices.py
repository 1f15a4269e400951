"""The part of a graph that one kernel computes, as an excerpt of its own."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace

from torch import fx

from fusec.bisect.excerpt import Excerpt, NotPlain, TensorType, alive, as_inputs, from_graph


def slice_of(gm: fx.GraphModule, wanted: Collection[str], stored: Collection[str]) -> Excerpt:
    """Return the excerpt of some nodes' values, from others that are known.

    Args:
        wanted, stored: nodes by name; what is wanted is computed, though it be stored, too.
    Raises:
        NotPlain: if it cannot be said in plain torch.
    """
    excerpt = from_graph(gm)
    types = excerpt.types
    results = tuple(name for name in wanted if isinstance(types.get(name), TensorType))
    inputs = [name for name in stored if name not in wanted]
    return as_inputs(alive(replace(excerpt, results=results)), inputs)


def node_of(gm: fx.GraphModule, held: tuple[str, int | None]) -> str:
    """Return the name of the node that is a value; an element of a tuple has one of its own."""
    name, place = held
    if place is None:
        return name
    for node in gm.graph.nodes:
        is_element = getattr(node.target, "__name__", "") == "getitem"
        if is_element and node.args[0].name == name and node.args[1] == place:
            return str(node.name)
    return name


def kernel_slices(gm: fx.GraphModule, manifest: bytes) -> Iterator[tuple[str, Excerpt]]:
    """Yield what each code of a graph computes, as far as it can be said in plain torch."""
    summary = json.loads(manifest or "{}").get("summary", {"kernels": [], "externs": []})
    stored = {name for row in summary["kernels"] for name in row["nodes"]}
    stored |= {row["node"] for row in summary["externs"]}
    for row in summary["kernels"]:
        if row["code"] == row["name"]:
            try:
                yield row["name"], slice_of(gm, row["nodes"], stored)
            except NotPlain:
                continue
