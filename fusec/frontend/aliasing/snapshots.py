"""Snapshots: copies, for the backward, of inputs that the forward overwrites.

AOTAutograd's graphs are functional except at the end, where ``copy_(x, new)`` writes an input (or
the wrapper does, with a result of the forward). Its partitioner assumes that an input never
changes: it saves ``x``, and the backward recomputes from it what the forward computed. But the
memory of ``x`` has two *versions*, and the backward reads the second one::

    q = x[i]; copy_(x, x * 0.5)          forward
    x[i] again                           backward: of the halved x

Here the first version becomes a value of its own, a *snapshot*: ``s = clone(x)``, which all
consumers read. It is a value of the forward that must not be recomputed, so the cut saves it, or a
value computed from it, whichever is smaller. ``x`` itself, which only writes use then, is not
saved. After the cut the forward reads ``x`` again, for its reads come before its write; a snapshot
remains where it is saved, itself or through a view.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fusec.frontend.fx_passes.fx_nodes import aten, call_like, is_view, tensor_of
from fusec.ir.expr import reach
from fusec.torch_interior import written_arguments

_IN_BACKWARD = ("is_backward", "must_be_in_backward")
_MARK = "fusec_snapshot"
_SAME_MEMORY = (operator.getitem, aten._unsafe_view.default)
"""Calls that may return the memory of an argument, besides views."""


def take_snapshots(joint: fx.Graph, outputs: int) -> list[fx.Node]:
    """Redirect a joint graph's reads of overwritten inputs to snapshots; return the snapshots.

    The caller makes them outputs of the forward until the graph is cut, so that a snapshot that
    only the backward reads is taken in the forward.

    Args:
        outputs: how many of the graph's outputs are the forward's.
    """
    snapshots = []
    for node in _overwritten(joint, outputs):
        windows = (user for user in node.users if user.target is aten.as_strided.default)
        snapshots += [_take(version, outputs) for version in (node, *windows)]
    return [snapshot for snapshot in snapshots if snapshot is not None]


def drop_snapshots(forward: fx.GraphModule) -> None:
    """Make a forward read inputs instead of snapshots whose memory does not outlive the call."""
    written: set[fx.Node] = set()
    for node in forward.graph.nodes:
        for source in node.all_input_nodes:
            if source.meta.get(_MARK) and source.args[0] not in written and not _is_returned(node):
                node.replace_input_with(source, source.args[0])
        written.update(written_arguments(node))
    for node in forward.graph.nodes:
        if node.meta.get(_MARK) and not node.users:
            forward.graph.erase_node(node)
    forward.recompile()


def _overwritten(joint: fx.Graph, outputs: int) -> list[fx.Node]:
    """Return the inputs that the forward writes, or that its wrapper writes from an output."""
    described = joint.output_node().meta.get("desc") or []
    wrapped = {getattr(desc, "mutated_input", None) for desc in list(described)[:outputs]} - {None}
    written = {
        target
        for node in joint.nodes
        if node.meta.get("partitioner_tag") not in _IN_BACKWARD
        for target in written_arguments(node)
    }
    return [
        node
        for node in joint.find_nodes(op="placeholder")
        if tensor_of(node) is not None and (node in written or node.meta.get("desc") in wrapped)
    ]


def _take(node: fx.Node, outputs: int) -> fx.Node | None:
    """Redirect the consumers of an input, or a view, to a new snapshot; None without consumers."""
    readers = [user for user in node.users if _reads(user, node, outputs)]
    if not readers:
        return None
    graph = node.graph
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first) if node.op == "placeholder" else graph.inserting_after(node):
        snapshot = call_like(node, aten.clone.default, node)
    snapshot.meta.update({"recompute": CheckpointPolicy.MUST_SAVE, _MARK: True})
    for user in readers:
        if user.op == "output":
            values: Any = user.args[0]
            gradients = (snapshot if v is node else v for v in values[outputs:])
            user.args = ((*values[:outputs], *gradients),)
        else:
            user.replace_input_with(node, snapshot)
    return snapshot


def _reads(user: fx.Node, node: fx.Node, outputs: int) -> bool:
    """Return True if a node reads an input's first version, or returns it as a gradient."""
    if user.op == "output":
        return node in list(user.args[0])[outputs:]  # type: ignore[arg-type]
    whole = user.target is aten.as_strided.default and node.op == "placeholder"
    return not whole and node not in written_arguments(user)


def _is_returned(node: fx.Node) -> bool:
    """Return True for the output, and for a view that reaches the output through views alone."""

    def seen_by(found: fx.Node) -> Iterable[fx.Node]:
        return found.users if is_view(found) or found.target in _SAME_MEMORY else ()

    return any(found.op == "output" for found in reach((node,), seen_by))
