"""Decompositions of custom operations: functions in plain torch that compute the same.

A custom operation is an eager kernel to the compiler: nothing fuses with it. With a decomposition
it is captured and fused like any other code. Worked example::

    @fusec.register_decomposition("mylib::silu_and_mul")
    def silu_and_mul(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

AOTAutograd decomposes an operation without side effects below autograd, so a gradient that its
author registered stays. One that writes its arguments is replaced in Dynamo's graph, where
AOTAutograd makes plain results of its writes; as in eager, no gradient goes through it. Outside
compiled graphs the operation itself runs.

A decomposition may write tensors that it makes; what it returns is copied where it would share
memory with an argument, or with another result. What it raises is reported as its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from fusec.errors import UsageError
from fusec.frontend.aliasing.overlap import memory_of
from fusec.frontend.fx_passes.dynamo_graph import call_instead, graphs_in
from fusec.frontend.fx_passes.flex_attention import spell_out_attention
from fusec.frontend.fx_passes.fx_nodes import hint_of
from fusec.torch_interior import (
    EXAMPLE,
    OpOverload,
    OpOverloadPacket,
    bound_arguments,
    dispatch_functionalize,
    pytree,
    tensors_in,
    tracing_nothing,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])
DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {}


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
        DECOMPOSITIONS[target] = function
        return function

    return register


def custom_decompositions() -> Iterator[tuple[OpOverload, Callable[..., Any]]]:
    """Yield operations without side effects, each with its decomposition."""
    for target, function in DECOMPOSITIONS.items():
        if not target._schema.is_mutable:
            yield target, functools.partial(_decomposed, target, function)


def spell_out(gm: fx.GraphModule) -> None:
    """Replace ``flex_attention``, and operations that write their arguments, by plain operations.

    Both need what AOTAutograd does: it differentiates attention, and makes plain results of writes.

    Args:
        gm: a graph of Dynamo.
    """
    spell_out_attention(gm)
    call_instead(graphs_in(gm), _spelled_out)


def _spelled_out(node: fx.Node) -> Callable[..., Any] | None:
    """Return what to call instead of an operation that writes its arguments; else None."""
    target: Any = _only_overload(node.target)
    function = DECOMPOSITIONS.get(target)
    if function is None or not target._schema.is_mutable:
        return None
    declared = pytree.tree_leaves(node.meta.get(EXAMPLE))
    made = functools.partial(_without_gradient, target, function, declared)
    return functools.update_wrapper(made, function)


def _without_gradient(
    target: OpOverload,
    function: Callable[..., Any],
    declared: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the decomposition of an operation that writes its arguments, without gradients.

    A result that the schema says is an argument is that argument.

    Raises:
        UsageError: if it writes an argument that the operation does not.
    """
    given = bound_arguments(target, args, kwargs)
    parameters = {a.name: a for a in target._schema.arguments}
    written = [given[name] for name, a in parameters.items() if _is_written(a)]
    places = {memory_of(tensor) for tensor in tensors_in(written)}
    kept = [
        (name, tensor)
        for name in parameters
        for tensor in tensors_in(given[name])
        if memory_of(tensor) not in places
    ]
    before = [tensor._version for _, tensor in kept]
    with torch.no_grad():
        made = _called(target, function, args, kwargs)
    for (name, tensor), version in zip(kept, before, strict=True):
        if tensor._version != version:
            raise UsageError(
                f"the decomposition of {target} writes {name}, which the operation does not: "
                "its schema says what it writes."
            )
    results, spec = pytree.tree_flatten(made)
    _check_results(target, results, declared)
    same = {alias: given[n] for n, a in parameters.items() for alias in _aliases(a)}
    aliases = [next(iter(_aliases(result)), "") for result in target._schema.returns]
    if len(aliases) == len(results) and any(aliases):
        own = _apart(results, (args, kwargs))
        results = [same.get(a, r) for a, r in zip(aliases, own, strict=True)]
        return pytree.tree_unflatten(results, spec)
    return _apart(made, (args, kwargs))


def _aliases(part: Any) -> frozenset[str]:
    """Return the names of an argument's or result's memory in a schema: ``a`` of ``(a!)``."""
    return frozenset(part.alias_info.before_set) if part.alias_info is not None else frozenset()


def _is_written(part: Any) -> bool:
    return part.alias_info is not None and part.alias_info.is_write


def _decomposed(target: OpOverload, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the results of a decomposition, with the strides that the operation declares."""
    with tracing_nothing():
        declared = pytree.tree_leaves(target(*args, **kwargs))
    made = _called(target, dispatch_functionalize(function), args, kwargs)
    results, spec = pytree.tree_flatten(made)
    _check_results(target, results, declared)
    laid_out = pytree.tree_unflatten(map(_laid_out, results, declared), spec)
    return _apart(laid_out, (args, kwargs))


def _called(
    target: OpOverload, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Call a decomposition with all arguments of the operation, in their order in its schema.

    Raises:
        UsageError: for whatever it raises.
    """
    parameters = target._schema.arguments
    given = bound_arguments(target, args, kwargs)
    positional = [given[a.name] for a in parameters if not a.kwarg_only]
    try:
        return function(*positional, **{a.name: given[a.name] for a in parameters if a.kwarg_only})
    except Exception as problem:
        said = f"{type(problem).__name__}: {problem}"
        raise UsageError(f"the decomposition of {target} cannot be traced: {said}") from problem


def _check_results(target: OpOverload, made: Sequence[Any], declared: Sequence[Any]) -> None:
    """Check that a decomposition returns what the operation does.

    Raises:
        UsageError: if the results have another number, shape or type.
    """
    ours, theirs = map(_described, (made, declared))
    if ours != theirs:
        raise UsageError(
            f"the decomposition of {target} returns {ours}, where the operation returns {theirs}."
        )


def _described(results: Sequence[Any]) -> str:
    """Return types and shapes in words, symbolic sizes by their hints."""

    def kind(result: Any) -> str:
        if isinstance(result, torch.Tensor):
            return f"{str(result.dtype).removeprefix('torch.')}{[*map(hint_of, result.shape)]}"
        return "None" if result is None else type(result).__name__

    return "nothing" if [*results] in ([], [None]) else ", ".join(map(kind, results))


def _laid_out(made: Any, declared: Any) -> Any:
    """Return a result with the strides of the operation's; as text, symbols need no guards."""
    if not isinstance(made, torch.Tensor) or str(made.stride()) == str(declared.stride()):
        return made
    empty = torch.empty_strided(made.shape, declared.stride(), dtype=made.dtype, device=made.device)
    return torch.ops.aten.copy.default(empty, made)


def _apart(made: Any, given: Any) -> Any:
    """Return results, each that shares memory with an argument or an earlier result copied."""
    seen = {memory_of(tensor) for tensor in tensors_in(given)}

    def alone(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        if memory_of(result) in seen:
            result = result.clone()
        seen.add(memory_of(result))
        return result

    return pytree.tree_map(alone, made)


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
