"""Detect gradients that eager refuses, because the graph changes a tensor that autograd saved.

AOTAutograd traces with autograd, so most such graphs raise at compile time the error that eager
raises in the backward. But the version counters of its tensors miss a write through a view of a
saved tensor, or to a list of tensors (``torch._foreach_mul_``), and the gradient would silently be
that of the changed values. A Dynamo graph with such a write runs forward and backward once more, as
in eager, on fake tensors.

What an ``autograd.Function`` saves is not checked once Dynamo has traced it into a call, not even
where the graph runs as it is: only the frame itself, run by Python, raises.
"""

from __future__ import annotations

import logging
import operator
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import increment_version

from fusec.frontend.aliasing.overlap import memory_of, written_by
from fusec.frontend.fx_passes.fx_nodes import fakes_of
from fusec.torch_interior import FakeTensor, autograd_function_apply

logger = logging.getLogger("fusec.compile")

REFUSED = "modified by an inplace operation"
"""Part of the message of torch's error for such a gradient."""


def modifies_saved_tensor(gm: fx.GraphModule) -> bool:
    """Return True if eager refuses a graph's gradients, for a write that AOTAutograd overlooks."""
    if not _writes_beside(gm):
        return False
    try:
        _train(gm)
    except RuntimeError as error:
        return REFUSED in str(error)
    except Exception as error:  # a missing fake kernel, say: AOTAutograd's trace reports it better
        logger.debug("a graph's gradients are not tried: %s", error)
    return False


def modifies_function_saved_tensor(gm: fx.GraphModule) -> bool:
    """Return True if a graph writes memory that an earlier ``autograd.Function`` saved."""
    saved: set[int] = set()
    for node in gm.graph.nodes:
        if any(memory_of(t) in saved for target in written_by(node) for t in _traced(target)):
            return True
        if node.target is autograd_function_apply:
            made = (t for user in node.users for t in _traced(user))
            if any(tensor.requires_grad for tensor in made):
                saved.update(map(memory_of, _saved(gm, node)))
    return False


def _saved(gm: fx.GraphModule, call: fx.Node) -> Iterator[FakeTensor]:
    """Yield the arguments and results that a call of an ``autograd.Function`` saves."""
    body: Any = call.args[0]
    forward: Any = gm.get_submodule(body.target)
    given = dict(zip(forward.graph.find_nodes(op="placeholder"), call.args[2:], strict=False))
    made, saved = forward.graph.output_node().args[0]
    results = {user.args[1]: user for user in call.users if user.target is operator.getitem}
    listed = made if isinstance(made, list | tuple) else (made,)
    given |= {value: results[k] for k, value in enumerate(listed) if k in results}
    for k in call.kwargs.get("saved_for_backward_idx", ()):  # type: ignore[union-attr]
        yield from _traced(given.get(saved[k]))


def _writes_beside(gm: fx.GraphModule) -> bool:
    """Return True if a graph with gradients writes memory of several tensors, or a tensor list."""
    objects: dict[int, set[int]] = defaultdict(set)
    written: set[int] = set()
    learns = listed = False
    for node in gm.graph.nodes:
        for tensor in _tensors(node.meta.get("example_value")):
            objects[memory_of(tensor)].add(id(tensor))
            learns = learns or (node.op != "placeholder" and tensor.requires_grad)
        for target in written_by(node):
            listed = listed or isinstance(target, list | tuple)
            written.update(memory_of(t) for t in _traced(target) if t.is_floating_point())
    shared = any(len(objects[memory]) > 1 for memory in written)
    return learns and bool(written) and (shared or listed)


class _Counting(fx.Interpreter):
    """Run a graph, and increment the versions of tensors written in a list, as eager's kernels do.

    The kernels of fake tensors do not (``torch._foreach_mul_``, torch 2.13).
    """

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        for target in written_by(n):
            if isinstance(target, list | tuple):
                tensors: Any = self.map_nodes_to_values(target, n)
                increment_version(tuple(tensors))
        return made


def _train(gm: fx.GraphModule) -> None:
    """Run a graph forward and backward on fake tensors."""
    given = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    mode = next(t for value in given for t in _tensors(value)).fake_mode
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(torch.enable_grad())
        if (symbols := mode.shape_env) is not None:
            stack.enter_context(symbols.suppress_guards())
            stack.enter_context(symbols.ignore_fresh_unbacked_symbols())
        inputs = [_leaf(value) if isinstance(value, FakeTensor) else value for value in given]
        made = _Counting(gm).run(*inputs)
        results = [t for t in made if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.autograd.backward(results, [torch.ones_like(t) for t in results])


def _leaf(value: FakeTensor) -> torch.Tensor:
    made = torch.empty_like(value, requires_grad=False)
    made.item_memo = value.item_memo  # type: ignore[attr-defined]
    if value.requires_grad:
        made.requires_grad_()
        return made if value.is_leaf else made.clone()
    return made


def _traced(target: Any) -> Iterator[FakeTensor]:
    for node in target if isinstance(target, list | tuple) else (target,):
        if isinstance(node, fx.Node):
            yield from _tensors(node.meta.get("example_value"))


def _tensors(value: Any) -> list[FakeTensor]:
    return [one for one in fakes_of(value) if one.layout is torch.strided]
