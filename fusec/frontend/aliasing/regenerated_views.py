"""Detect results that AOTAutograd regenerates outside of the compiled graph with a wrong gradient.

Where a result is a view of an input or of another result, AOTAutograd takes that tensor and replays
the views. What the program did to gradients between the two is lost: a hook on a view; the backward
of an ``autograd.Function`` that returns its argument's memory; a view made under ``no_grad``, whose
autograd history ends before its base; values with gradients that were written to a detached tensor;
and, where inputs share memory that is written, which of them the result is a view of. Dynamo's
graphs are searched for such results before compilation; one that has them runs as it is.

Dynamo itself registers a hook on an input after the graph has run. If the graph writes the input,
the hook sees the gradient of the written value: only the frame, run by Python, has eager's.

Assumes: nodes carry ``meta["example_value"]``, in which views share their base's storage and have
the program's autograd history.
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
"""Names of the functions that Dynamo's graphs call for ``x.detach()`` and ``x.data``."""


def loses_gradients(gm: fx.GraphModule) -> bool:
    """Return True if a result's gradient would differ from eager's."""
    given = list(map(memory_of, _tensors(gm.graph.find_nodes(op="placeholder"))))
    results = _tensors(gm.graph.output_node().all_input_nodes)
    returned = Counter(map(memory_of, results))
    shared = {one for one, count in returned.items() if one in given or count > 1}
    if any(map(_history_ends_before_base, results)) or _writes_views_of_one(gm, given, returned):
        return True
    return bool(shared) and any(memory_of(t) in shared for t in _changed_histories(gm))


def _writes_views_of_one(
    gm: fx.GraphModule, given: Sequence[int], returned: Mapping[int, int]
) -> bool:
    """Return True if several inputs share memory that is written and that a result is a view of.

    AOTAutograd regenerates such inputs from a synthetic base, and such results from the wrong one.
    """
    twice = {one for one, count in Counter(given).items() if count > 1 and one in returned}
    if not twice:
        return False
    written = (node for each in gm.graph.nodes for node in written_by(each))
    return any(memory_of(t) in twice for t in _tensors(written))


def hooks_what_it_writes() -> bool:
    """Return True if Dynamo's graph writes an input that has gradients and a registered hook."""
    return any(not t.is_leaf and t._version > 0 for t in hooked_inputs())


def _changed_histories(gm: fx.GraphModule) -> Iterator[torch.Tensor]:
    """Yield tensors whose gradient is not that of the tensor they are a view of.

    These are views with hooks, views that an ``autograd.Function`` returns, whose gradient is its
    own (torch 2.11 traces hooks as such), and detached tensors that require gradients because they
    were written after the ``detach``.
    """
    for node in gm.graph.nodes:
        name = called_name(node)
        if name == "register_hook":
            yield from (t for t in _tensors(node.args[:1]) if t._base is not None)
        elif name == "autograd_function_apply":
            given = set(map(memory_of, _tensors(node.args)))
            yield from (t for t in _tensors(node.users) if memory_of(t) in given)
        elif name in _DETACHES:
            yield from (t for t in _tensors([node]) if t.requires_grad)


def _tensors(nodes: Iterable[Any]) -> list[torch.Tensor]:
    return [t for t in map(tensor_of, nodes) if t is not None]


def _history_ends_before_base(tensor: torch.Tensor) -> bool:
    """Return True for a view whose autograd history ends before its base.

    Also for one that autograd refuses: a part of a ``split`` whose base was written since.
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
