"""The part of a graph that one kernel computes, as an excerpt of its own."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace

from torch import fx

from fusec.tools.bisect.excerpt import Excerpt, NotPlain, TensorType, alive, as_inputs, from_graph


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


def library_slices(gm: fx.GraphModule, manifest: bytes) -> Iterator[tuple[str, str, Excerpt]]:
    """Yield the node of each eager kernel of a graph, what is called in its place, and what it is.

    Only those of one result are, as far as they can be said in plain torch; no convolutions: how
    long these take follows from the format of images, which is a choice of the whole graph's.
    """
    summary = json.loads(manifest or "{}").get("summary", {"kernels": [], "externs": []})
    names = {node.name for node in gm.graph.nodes}
    for row in summary["externs"]:
        before = names - {row["node"]}
        if "conv" in row["op"]:
            continue
        try:
            found = slice_of(gm, [row["node"]], before)
        except NotPlain:
            continue
        if found.results and row["node"] in names:
            yield row["node"], row["op"], found
