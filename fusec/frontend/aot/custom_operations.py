"""Decompositions of custom operations: functions in plain torch that compute the same.

A custom operation is an eager kernel to the compiler: nothing fuses with it. With a decomposition
it is captured and fused like any other code. Worked example::

    @fusec.register_decomposition("mylib::silu_and_mul")
    def silu_and_mul(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

AOTAutograd decomposes an operation without side effects below autograd, so a gradient that its
author registered stays. One that writes its arguments is replaced in Dynamo's graph,
where AOTAutograd makes plain results of its writes; as in eager, no gradient goes through it.
Outside compiled graphs the operation itself runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import fx

from fusec.errors import UsageError
from fusec.frontend.fx_passes.flex_attention import spell_out_attention
from fusec.frontend.fx_passes.fx_nodes import hint_of
from fusec.torch_interior import OpOverload, OpOverloadPacket, pytree, tracing_nothing

_Function = TypeVar("_Function", bound=Callable[..., Any])
_DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {}


def register_decomposition(operation: Any) -> Callable[[_Function], _Function]:
    """Register the decorated function as the decomposition of a custom operation.

    Graphs that were compiled before keep what they have; a second decomposition replaces the first.

    Args:
        operation: its name, as ``"mylib::norm"`` or ``"mylib::norm.out"``, or what
            ``torch.ops.mylib.norm`` or ``torch.library.custom_op`` returned.
    Raises:
        UsageError: for an operation that does not exist or is PyTorch's own, or a function that
            does not take its arguments.
    """
    target = _overload(operation)

    def register(function: _Function) -> _Function:
        _check_parameters(target, function)
        _DECOMPOSITIONS[target] = function
        return function

    return register


def custom_decompositions() -> Iterator[tuple[OpOverload, Callable[..., Any]]]:
    """Yield operations without side effects, each with its decomposition."""
    for target, function in _DECOMPOSITIONS.items():
        if not target._schema.is_mutable:
            yield target, functools.partial(_checked, target, function)


def spell_out(gm: fx.GraphModule) -> None:
    """Replace ``flex_attention``, and operations that write their arguments, by plain operations.

    Args:
        gm: a graph of Dynamo.
    """
    spell_out_attention(gm)
    for part in gm.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        written = [node for node in part.graph.nodes if _written(node) in _DECOMPOSITIONS]
        for node in written:
            node.target = _without_gradient(_DECOMPOSITIONS[_written(node)])
        if written:
            part.recompile()


def _written(node: fx.Node) -> Any:
    """Return the operation of a call if it writes its arguments."""
    target = _only_overload(node.target)
    writes = isinstance(target, OpOverload) and target._schema.is_mutable
    return target if writes else None


def _without_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    return run


def _checked(target: OpOverload, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the results of a decomposition, with the strides that the operation declares.

    Raises:
        UsageError: if the results have not the number, shape or type that the operation has.
    """
    made, spec = pytree.tree_flatten(function(*args, **kwargs))
    with tracing_nothing():
        declared = pytree.tree_leaves(target(*args, **kwargs))
    ours, theirs = map(_described, (made, declared))
    if ours != theirs:
        raise UsageError(
            f"the decomposition of {target} returns {ours}, where the operation returns {theirs}: "
            "register a function with its results."
        )
    return pytree.tree_unflatten(map(_laid_out, made, declared), spec)


def _described(results: list[Any]) -> str:
    tensors = (r for r in results if isinstance(r, torch.Tensor))
    kinds = [f"{str(t.dtype).removeprefix('torch.')}{[*map(hint_of, t.shape)]}" for t in tensors]
    return ", ".join(kinds) if len(kinds) == len(results) else f"{len(results)} results"


def _laid_out(made: Any, declared: Any) -> Any:
    """Return a result with the strides of the operation's."""
    if not isinstance(made, torch.Tensor) or str(made.stride()) == str(declared.stride()):
        return made
    empty = torch.empty_strided(made.shape, declared.stride(), dtype=made.dtype, device=made.device)
    return torch.ops.aten.copy.default(empty, made)


def _overload(operation: Any) -> OpOverload:
    """Return the overload that is meant.

    Raises:
        UsageError: if there is none, or it is PyTorch's own.
    """
    named = getattr(operation, "_opoverload", operation)
    if isinstance(named, str):
        namespace, _, name = named.partition("::")
        packet, _, overload = name.partition(".")
        try:
            found = getattr(getattr(torch.ops, namespace), packet)
            named = getattr(found, overload) if overload else found
        except AttributeError:
            raise UsageError(
                f"no operation {operation!r}: name one that torch.library knows, as 'mylib::norm'."
            ) from None
    if str(named).partition(".")[0] in ("aten", "prims", "prim"):
        raise UsageError(f"{named} is PyTorch's own, which fusec decomposes itself.")
    target = _only_overload(named)
    if not isinstance(target, OpOverload):
        raise UsageError(
            f"{operation!r} is no custom operation, or has several overloads: name one, as "
            "'mylib::norm.default'."
        )
    return target


def _only_overload(target: Any) -> Any:
    """Return the overload of a packet that has one; anything else as it is."""
    if isinstance(target, OpOverloadPacket) and len(target.overloads()) == 1:
        return getattr(target, target.overloads()[0])
    return target


def _check_parameters(target: OpOverload, function: Callable[..., Any]) -> None:
    arguments = target._schema.arguments
    positional = [a.name for a in arguments if not a.kwarg_only]
    named = {a.name: None for a in arguments if a.kwarg_only}
    try:
        inspect.signature(function).bind(*positional, **named)
    except TypeError as problem:
        raise UsageError(
            f"{function.__qualname__}{inspect.signature(function)} does not take the arguments of "
            f"{target._schema}: {problem}."
        ) from None
