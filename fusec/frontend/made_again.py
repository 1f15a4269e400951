"""Results that AOTAutograd makes again outside of the compiled graph, with another gradient.

Where a result is a view of an input or of another result, AOTAutograd takes that tensor and replays
the views. What the program did to gradients on the way is lost: a hook that it has put on a view,
and a view that it has made under ``no_grad``, which leads back to nothing. Graphs of Dynamo are
looked through for such results before; they run as they are.

Assumes: nodes carry ``meta["example_value"]``, in which views share their base's storage and have
the history that they have in the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fusec.frontend.overlap import called_name, memory_of, tensor_of


def loses_gradients(gm: fx.GraphModule) -> bool:
    """Return True if a result's gradient would be another than in eager."""
    inputs = set(map(memory_of, _tensors(gm.graph.find_nodes(op="placeholder"))))
    results = _tensors(gm.graph.output_node().all_input_nodes)
    counts = Counter(map(memory_of, results))
    shared = {one for one, count in counts.items() if one in inputs or count > 1}
    if any(map(_leads_nowhere, results)):
        return True
    if not shared:
        return False
    hooks = (node for node in gm.graph.nodes if called_name(node) == "register_hook")
    hooked = _tensors(node.args[0] for node in hooks)
    return any(t._base is not None and memory_of(t) in shared for t in hooked)


def _tensors(nodes: Iterable[Any]) -> list[torch.Tensor]:
    return [t for t in map(tensor_of, nodes) if t is not None]


def _leads_nowhere(tensor: torch.Tensor) -> bool:
    """Return True for a view with a history that ends before it comes to what it is a view of.

    Or that autograd refuses: a part of a ``split`` of what was written since.
    """
    try:
        base, function = tensor._base, tensor.grad_fn
    except RuntimeError:
        return True
    if base is None or function is None:
        return False
    while function is not None and function is not base.grad_fn:
        if len(function.next_functions) != 1:
            return False
        function = function.next_functions[0][0]
    return function is None
