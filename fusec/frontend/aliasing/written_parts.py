"""Find the calls that replace a small part of an input, which a pass can turn into writes.

AOTAutograd turns ``x[:, p] = k`` into a ``select_scatter`` of all of x, and copies the result into
x at the end. As a definition it would be computed for every element. Where the part is far smaller
it stays a call, which ``passes/memory/in_place.py`` turns into a write in place.
"""

from __future__ import annotations

import torch
from torch import fx

from fusec.frontend.effects import UPDATES, WINDOW_UPDATES
from fusec.frontend.fx_passes.fx_nodes import count_elements, tensor_of

aten = torch.ops.aten
_PARTS = WINDOW_UPDATES | UPDATES.keys()


def parts_of_inputs(gm: fx.GraphModule, ratio: int) -> frozenset[fx.Node]:
    """Return the calls between an input and the ``copy_`` into it, if all of them replace parts.

    Args:
        ratio: least ratio of a tensor's elements to those of a part.

    Assumes: nodes carry ``meta["val"]``.
    """
    found: set[fx.Node] = set()
    for copy in gm.graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, node = copy.args[:2]
        chain = []
        while isinstance(node, fx.Node) and node.target in _PARTS and _is_small(node, ratio):
            chain.append(node)
            node = node.args[0]
        if node is target and target.op == "placeholder":
            found.update(chain)
    return frozenset(found)


def _is_small(call: fx.Node, ratio: int) -> bool:
    """Return True for a small window, and for any part that index tensors select."""
    if call.target in UPDATES:
        return True
    part = tensor_of(call.args[1])
    return part is not None and count_elements(part) * ratio <= count_elements(call.meta["val"])
