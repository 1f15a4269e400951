"""Results that AOTAutograd makes again outside of the compiled graph, with another gradient.

Where a result is a view of an input or of another result, AOTAutograd takes that tensor and replays
the views. What the program did to gradients on the way is lost: a hook that it has put on a view,
a view that it has made under ``no_grad``, which leads back to nothing, what it has added with
gradients to a detached tensor, and which of several inputs in one memory it is a view of, where
that memory is written. Graphs of Dynamo are looked through for such results before; they run as
they are.

Dynamo itself puts a hook on an input when the graph has run: on the gradient of what the graph has
made of it. Where that is another, only the frame itself, run by Python, has eager's.

Assumes: nodes carry ``meta["example_value"]``, in which views share their base's storage and have
the history that they have in the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusec.frontend.aliasing.overlap import called_name, memory_of, tensor_of, written_by
from fusec.torch_interior import hooked_inputs

_DETACHES = frozenset({"detach", "_get_data_attr"})
"""Names of what Dynamo's graphs call for ``x.detach()`` and ``x.data``."""


def loses_gradients(gm: fx.GraphModule) -> bool:
    """Return True if a result's gradient would be another than in eager."""
    given = list(map(memory_of, _tensors(gm.graph.find_nodes(op="placeholder"))))
    results = _tensors(gm.graph.output_node().all_input_nodes)
    returned = Counter(map(memory_of, results))
    shared = {one for one, count in returned.items() if one in given or count > 1}
    if any(map(_leads_nowhere, results)) or _writes_views_of_one(gm, given, returned):
        return True
    return bool(shared) and any(memory_of(t) in shared for t in _changed_histories(gm))


def _writes_views_of_one(
    gm: fx.GraphModule, given: Sequence[int], returned: Mapping[int, int]
) -> bool:
    """Return True where inputs share memory that is written, and that a result is a view of.

    AOTAutograd makes such inputs anew of their common base, and such results of the wrong one.
    """
    twice = {one for one, count in Counter(given).items() if count > 1 and one in returned}
    if not twice:
        return False
    written = (node for each in gm.graph.nodes for node in written_by(each))
    return any(memory_of(t) in twice for t in _tensors(written))


def hooks_what_it_writes() -> bool:
    """Return True if Dynamo's graph writes an input with gradients on which a hook was put."""
    return any(not t.is_leaf and t._version > 0 for t in hooked_inputs())


def _changed_histories(gm: fx.GraphModule) -> Iterator[torch.Tensor]:
    """Yield tensors whose gradients are others than those of what they are views of.

    These are views with hooks, and detached tensors that require gradients: they were written since
    they were detached.
    """
    for node in gm.graph.nodes:
        if called_name(node) == "register_hook":
            yield from (t for t in _tensors(node.args[:1]) if t._base is not None)
        elif called_name(node) in _DETACHES:
            yield from (t for t in _tensors([node]) if t.requires_grad)


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
