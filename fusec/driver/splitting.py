"""Split a graph of Dynamo around the operations that AOTAutograd does not trace.

Such an operation runs as PyTorch runs it, between graphs that are compiled: as if the program had a
graph break there. A graph ``sin; scan; cos`` whose ``scan`` has no gradient that can be traced
becomes::

    part 0: sin     compiled, forward and backward
    part 1: scan    eager, with the reason
    part 2: cos     compiled; where that fails, it is cut in turn

The operation is found in the exception's frames, which hold the node that was traced. If they hold
none, as when a gradient fails, it is the last one of the shortest prefix of the graph that fails.
Parts may only pass values to each other: a graph with ``unsqueeze_``, or a ``vmap`` that Dynamo has
inlined, is not cut. Nor is one whose gradient eager refuses, because it changes what autograd has
saved: a part may return a copy of that, as a row of a loop's states, and no backward would raise.
"""

from __future__ import annotations

import operator
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from fusec.errors import FusecError, Unsupported, stage_of
from fusec.frontend.aliasing.overlap import called_name, writes_to_shared_memory
from fusec.frontend.aliasing.saved_changes import REFUSED
from fusec.frontend.origin import op_name
from fusec.torch_interior import (
    EXAMPLE,
    TorchDynamoException,
    is_shipping,
    keep_dynamo_names,
    split_module,
)

Compile: TypeAlias = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

MOST = 16
"""The most operations of one graph that run between its parts; a graph with more runs as it is."""

_CALLS = ("call_function", "call_method", "call_module")
_METADATA = {
    *("unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "as_strided_"),
    *("resize_", "resize_as_", "set_", "detach_", "requires_grad_", "rename_", "apply_"),
}
"""Calls that change a tensor's shape, or its part in autograd, in place."""
_STATE = re.compile(r"_nesting$|^_(enter|exit)_(?!autocast)|_hooks_(dis|en)able$|_allowed$")
"""Calls that change a state of the process until another call changes it back."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An operation that runs between compiled parts, and the exception of its trace."""

    part: fx.GraphModule
    op: str
    error: Exception


@dataclass(slots=True)
class SplittingCompiler:
    """Compiles graphs, in parts where that is necessary.

    Attributes:
        compile_part: compiles a graph.
        try_part: raises what AOTAutograd would raise in ``compile_part``.
        made: how many parts were compiled.
    """

    compile_part: Compile
    try_part: Compile
    made: int = 0
    kept: list[Kept] = field(default_factory=list)

    def compile(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        whole: Callable[[], Callable[..., Any]] | None = None,
    ) -> Callable[..., Any]:
        """Return a callable that runs a graph.

        Args:
            whole: compiles the graph in place of ``compile_part``.
        Raises:
            Unsupported: if eager refuses the gradient.
            Exception: the trace's, if the graph may not be cut or no part can be compiled.
        """
        shared = writes_to_shared_memory(gm)
        if shared:
            error: Exception = Unsupported("it writes to memory that elements share")
        else:
            try:
                with _restored():
                    call = whole() if whole else self.compile_part(gm, inputs)
                self.made += 1
                return call
            except (FusecError, TorchDynamoException):  # the user's mistake; a message to Dynamo
                raise
            except Exception as raised:
                if stage_of(raised):  # a defect of fusec's own, which no cut hides
                    raise
                if REFUSED in str(raised):
                    raise Unsupported("its backward raises, as it does in eager") from raised
                error = raised
        if len(self.kept) == MOST or is_shipping() or not all(map(_makes_values, _calls(gm))):
            raise error
        node = shared[0] if shared else _at_hand(error, gm.graph)
        return self._around(node or self._last_of_what_fails(gm, inputs), error, gm, inputs)

    def _around(
        self, node: fx.Node, error: Exception, gm: fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        calls = _calls(gm)
        first = calls.index(node)
        behind = first + 1
        for call in calls[first + 1 :]:  # its results belong to it
            if call.target is not operator.getitem or call.args[0] is not node:
                break
            behind += 1
        numbers = {call: (k >= first) + (k >= behind) for k, call in enumerate(calls)}
        whole = _split(gm, numbers)
        parts = _parts(whole)
        for name, part in parts.items():
            run: Callable[..., Any]
            if any(one.name == node.name for one in _calls(part)):
                self.kept.append(Kept(part, op_name(node.target), error))
                run = part.forward
            else:
                run = _with_values(self.compile, part, gm, inputs)
            setattr(whole, name, _CompiledPart(run, is_last=name == list(parts)[-1]))
        if not self.made:
            raise error
        return whole.forward

    def _last_of_what_fails(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.Node:
        """Return the last call of the shortest prefix of a graph that fails."""
        calls = _calls(gm)
        traced, failing = 0, len(calls)
        while failing - traced > 1:
            middle = (traced + failing) // 2
            whole = _split(gm, {call: int(k >= middle) for k, call in enumerate(calls)})
            try:
                with _restored():
                    _with_values(self.try_part, next(iter(_parts(whole).values())), gm, inputs)
                traced = middle
            except Exception:
                failing = middle
        return calls[failing - 1]


@contextmanager
def _restored() -> Iterator[None]:
    """Restore autograd and autocast modes, which a trace that fails in their region leaves on."""
    learns, caches, depth = torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), _depth()
    modes = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    try:
        yield
    finally:
        torch.set_grad_enabled(learns)
        torch.set_autocast_cache_enabled(caches)
        for kind, enabled, dtype in modes:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        for _ in range(_depth() - depth):
            torch.autocast_decrement_nesting()


def _depth() -> int:
    """Return how many regions of autocast are open; at 0 it clears its cache of casts."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


class _CompiledPart(torch.nn.Module):
    """A part as a module; each but the last restores the mode of gradients after its call."""

    def __init__(self, call: Callable[..., Any], *, is_last: bool) -> None:
        super().__init__()
        self.call, self.is_last = call, is_last

    def forward(self, *args: Any) -> Any:
        if self.is_last:
            return self.call(*args)
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            return self.call(*args)


def _split(gm: fx.GraphModule, numbers: Mapping[fx.Node, int]) -> fx.GraphModule:
    """Return a graph that calls its parts, by the part number of each call.

    Traced values of tensors are removed meanwhile: with them each part would take the symbols of
    their sizes, some of which have no node. Tensors have their sizes.
    """
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
    traced = [n for n in gm.graph.nodes if n.meta.get(EXAMPLE) is not None]
    held = {n: n.meta.pop(EXAMPLE) for n in traced if not isinstance(n.meta[EXAMPLE], symbolic)}
    try:
        whole = split_module(
            gm, gm, numbers.__getitem__, keep_original_order=True, keep_original_node_name=True
        )
    finally:
        for node, example in held.items():
            node.meta[EXAMPLE] = example
    examples = {node.name: example for node, example in held.items()}
    for part in _parts(whole).values():
        keep_dynamo_names(gm, part)
        for node in part.graph.nodes:
            if node.name in examples:
                node.meta[EXAMPLE] = examples[node.name]
    return whole


def _parts(whole: fx.GraphModule) -> dict[str, Any]:
    """Return the parts that a graph calls, in order; its modules also are branches and bodies."""
    names = [str(node.target) for node in whole.graph.nodes if node.op == "call_module"]
    return {name: getattr(whole, name) for name in names}


def _with_values(
    compile_part: Compile, part: Any, gm: fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Compile a part, which may return one value, as AOTAutograd wants it: returning tuples."""
    given = dict(zip((n.name for n in _inputs(gm)), inputs, strict=True))
    examples = [given.get(node.name, node.meta.get(EXAMPLE)) for node in _inputs(part)]
    output = part.graph.output_node()
    (returned,) = output.args
    if isinstance(returned, tuple | list):
        return compile_part(part, examples)
    output.args = ((returned,),)
    part.recompile()
    call = compile_part(part, examples)
    return lambda *args: call(*args)[0]


def _calls(gm: Any) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op in _CALLS]


def _inputs(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


def _at_hand(error: Exception, graph: fx.Graph) -> fx.Node | None:
    """Return the innermost call of a graph that the frames of an exception hold."""
    inner: BaseException = getattr(error, "inner_exception", None) or error
    found = None
    for frame, _ in traceback.walk_tb(inner.__traceback__):
        for value in list(frame.f_locals.values()):
            if isinstance(value, fx.Node) and value.graph is graph and value.op in _CALLS:
                found = value
    return found


def _makes_values(call: fx.Node) -> bool:
    """Return True for a call whose only effects are on the contents of the graph's values."""
    name = called_name(call)
    return name not in _METADATA and _STATE.search(name) is None
