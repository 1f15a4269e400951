"""Freezing: compute values that depend on a model's weights alone once, not in each call.

Runs on inference graphs of ATen under ``options={"freeze": True}``, after the passes that change
convolutions' weights (``channel_folding.py``) and formats. Weights and buffers stay inputs; frozen
weights, which are computed from them alone, and packed weights (``packing.py``) become constants of
the graph. The graph that computes those (``Recipe``) runs when a weight has changed
(``runtime/calls/frozen.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor, fx

from fusec.frontend.fx_passes.fx_nodes import is_view
from fusec.frontend.fx_passes.packing import PACKED, pack_convolutions, pack_products
from fusec.frontend.fx_passes.weights import bytes_of, decoded_values, fixed_values
from fusec.ir.expr import reach
from fusec.ir.machine import Machine
from fusec.torch_interior import unset_fake_temporarily

RECIPE = "fusec_recipe"
"""Key of a graph's ``meta``: its ``Recipe``, if it has constants."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The graph that computes the constants of another graph, and where these are kept.

    Attributes:
        reader: the graph that reads the constants.
        constants: its ``get_attr`` nodes for them.
        compute: the graph from weights to the constants' values.
        positions: the positions of these weights among the reader's inputs.
    """

    reader: fx.GraphModule
    constants: tuple[fx.Node, ...]
    compute: fx.GraphModule
    positions: tuple[int, ...]

    def keep(self, values: Sequence[Tensor]) -> None:
        """Store the values in the tensors that the graph reads: in the same ones each time."""
        for node, value in zip(self.constants, values, strict=True):
            held = getattr(self.reader, str(node.target))
            if value.layout is torch.strided:
                held.copy_(value)
            elif held.layout is torch.strided:  # packed, for the first time
                setattr(self.reader, str(node.target), value)
            else:  # MKL's packed weight depends on its alignment: no copy
                held.data = value

    def read_by(self, wrapper: str) -> Recipe:
        """Return the recipe of the constants that the graph's calls, or a wrapper's text, read.

        A packed weight that is only a candidate's operand is read where that candidate was chosen.
        """
        kept = [bool(n.users) or f"constant({n.name!r}, " in wrapper for n in self.constants]
        (values,) = self.compute.graph.output_node().args
        wanted = list(compress(values, kept))  # type: ignore[arg-type]
        inputs = self.compute.graph.find_nodes(op="placeholder")
        compute, taken = _computing(self.compute, inputs, wanted)
        positions = tuple(self.positions[k] for k in taken)
        return Recipe(self.reader, tuple(compress(self.constants, kept)), compute, positions)


def freeze(gm: fx.GraphModule, machine: Machine, *, packs: bool, panels: bool) -> None:
    """Turn values that depend on a graph's weights alone into constants, in place.

    Args:
        packs: pack weights for the libraries that take them packed.
        panels: pack weights of skinny products in panels, too.
    """
    known = fixed_values(gm)
    if not any(node.op == "placeholder" for node in known):
        return
    if packs:
        pack_convolutions(gm, known)
        pack_products(gm, known, machine if panels else None)
    offering = [node for node in gm.graph.nodes if PACKED in node.meta]
    # Kernels decode weights as they read them; what is decoded beforehand is read as wide floats.
    most = machine.fusion.constant_growth
    growth = dict.fromkeys(known, most) | dict.fromkeys(decoded_values(known), 1)
    wanted = dict.fromkeys(node for node in known if _is_worth(node, known, growth[node]))
    wanted.update(dict.fromkeys(p for node in offering for p in node.meta[PACKED].values()))
    if wanted:
        placeholders = gm.graph.find_nodes(op="placeholder")
        compute, positions = _computing(gm, placeholders, list(wanted))
        held = {node: _hold(gm, node, k) for k, node in enumerate(wanted)}
        for node in offering:
            node.meta[PACKED] = {kind: held[p] for kind, p in node.meta[PACKED].items()}
        gm.meta[RECIPE] = Recipe(gm, tuple(held.values()), compute, positions)
        gm.graph.eliminate_dead_code(lambda n: n.is_impure() or n in held.values())
    gm.recompile()


def _is_worth(node: fx.Node, known: dict[fx.Node, int], growth: int) -> bool:
    """Return True for a value that the rest of the graph reads, directly or through views."""
    if node.op == "placeholder" or not known[node] or is_view(node):
        return False
    if any(not isinstance(extent, int) for extent in node.meta["val"].shape):
        return False
    read = any(user not in known and user.op == "call_function" for user in _readers(node))
    # A returned constant would be the same tensor each time, which the caller may write.
    given = any(user.op == "output" for user in _readers(node))
    return read and not given and bytes_of(node) <= growth * known[node]


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the users of a node, and those of its views."""
    return reach(node.users, lambda user: user.users if is_view(user) else ())


# -- constants -------------------------------------------------------------------------------------


def _computing(
    gm: fx.GraphModule, inputs: Sequence[fx.Node], wanted: Sequence[fx.Node]
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Return the graph that computes some nodes alone, and the positions of the inputs it needs."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(gm.graph, copies)
    graph.output(tuple(copies[node] for node in wanted))
    graph.eliminate_dead_code(lambda node: node.op == "output")
    positions = tuple(k for k, node in enumerate(inputs) if copies[node].users)
    return fx.GraphModule(gm, graph), positions


def _hold(gm: fx.GraphModule, node: fx.Node, number: int) -> fx.Node:
    """Replace a node by a constant of its shape and strides."""
    value, name = node.meta["val"], f"frozen_{number}"
    with unset_fake_temporarily():
        made = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    gm.register_buffer(name, made)
    with gm.graph.inserting_before(node):
        constant = gm.graph.get_attr(name)
    constant.meta["val"] = value
    node.replace_all_uses_with(constant)
    return constant
