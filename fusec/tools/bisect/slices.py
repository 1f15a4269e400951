"""The part of a graph that one kernel computes, as an excerpt of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from torch import fx

from fusec.driver.launches import described_launches
from fusec.tools.bisect.excerpt import Excerpt, NotPlain, TensorType, alive, as_inputs, from_graph


def slice_of(gm: fx.GraphModule, wanted: Collection[str], stored: Collection[str]) -> Excerpt:
    """Return the excerpt that computes the wanted nodes from the stored ones.

    Args:
        wanted, stored: names of nodes; a wanted node is computed even if it is stored, too.
    Raises:
        NotPlain: if it cannot be written in plain torch.
    """
    excerpt = from_graph(gm)
    types = excerpt.types
    results = tuple(name for name in wanted if isinstance(types.get(name), TensorType))
    inputs = [name for name in stored if name not in wanted]
    return as_inputs(alive(replace(excerpt, results=results)), inputs)


def node_of(gm: fx.GraphModule, held: tuple[str, int | None]) -> str:
    """Return the name of a value's node: of its ``getitem``, if any, for an element of a tuple."""
    name, place = held
    if place is None:
        return name
    for node in gm.graph.nodes:
        is_element = getattr(node.target, "__name__", "") == "getitem"
        if is_element and node.args[0].name == name and node.args[1] == place:
            return str(node.name)
    return name


def kernel_slices(gm: fx.GraphModule, manifest: bytes) -> Iterator[tuple[str, Excerpt]]:
    """Yield the name and excerpt of each distinct kernel that plain torch can express."""
    kernels, externs = described_launches(manifest)
    stored = {name for row in kernels for name in row["nodes"]} | {row["node"] for row in externs}
    for row in kernels:
        if row["code"] == row["name"]:
            try:
                yield row["name"], slice_of(gm, row["nodes"], stored)
            except NotPlain:
                continue


def library_slices(gm: fx.GraphModule, manifest: bytes) -> Iterator[tuple[str, str, Excerpt]]:
    """Yield the node of each library call of a graph, the operation called, and the excerpt.

    Only calls with a tensor result that plain torch can express, and no convolutions: their time
    follows from the memory format of images, which is chosen for the whole graph.
    """
    _, externs = described_launches(manifest)
    names = {node.name for node in gm.graph.nodes}
    for row in externs:
        before = names - {row["node"]}
        if "conv" in row["op"]:
            continue
        try:
            found = slice_of(gm, [row["node"]], before)
        except NotPlain:
            continue
        if found.results and row["node"] in names:
            yield row["node"], row["op"], found
