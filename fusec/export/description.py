"""Describe how a model is called, as data that ``archive/model.py`` reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fusec.archive import trees
from fusec.archive.graph import Spec, spec_of
from fusec.archive.model import HELD, named_tensors
from fusec.errors import UsageError
from fusec.export.tracing import Seen
from fusec.tools.report.arguments import signature_of
from fusec.torch_interior import FakeTensor

_BY = {
    inspect.Parameter.POSITIONAL_ONLY: "order",
    inspect.Parameter.VAR_POSITIONAL: "order",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "either",
    inspect.Parameter.KEYWORD_ONLY: "name",
    inspect.Parameter.VAR_KEYWORD: "name",
}


def describe(
    fn: Callable[..., Any],
    fake: Callable[..., Any],
    given: tuple[list[Any], dict[str, Any]],
    result: Any,
    seen: Seen,
    sizes: Mapping[int, tuple[str | None, ...]],
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return how the graph is called, as ``archive.model.read_calling`` reads it.

    Also return the held values, of buffers that no ``state_dict`` has and of constants, by name.
    """
    taken = seen.parts[0].arguments[: len(seen.given)]
    specs = {id(argument): spec for argument, spec in zip(seen.given, taken, strict=True)}
    tensors: list[tuple[str, torch.Tensor]] = []

    def leaf(tensor: torch.Tensor, path: str) -> trees.Tree:
        tensors.append((path, tensor))
        return {"tensor": len(tensors) - 1}

    arguments = [
        {"name": name, "by": by, "tree": trees.describe(value, name, leaf), "default": default}
        for name, by, value, default in bound_arguments(fn, *given)
    ]
    frozen = _frozen(fn, fake, seen) if seen.recipe is not None else []
    weights, held = _weights(fn, fake, seen)
    weights += [(torch.empty(0), row) for row, _ in frozen]
    held |= {f"{HELD}{row['names'][0]}": content for row, content in frozen}
    positions = {id(t): k for k, (_, t) in reversed(list(enumerate(tensors)))}
    positions |= {id(t): len(tensors) + k for k, (t, _) in enumerate(weights)}
    made = {id(t): k for k, t in enumerate(seen.returned)}

    def returned(tensor: torch.Tensor, path: str) -> trees.Tree:
        if id(tensor) in positions:
            return {"argument": positions[id(tensor)]}
        if id(tensor) in made:
            return {"tensor": made[id(tensor)]}
        raise UsageError(f"{path} is a tensor that the model's graph does not return.")

    rows = [
        {
            "path": path,
            "spec": specs.get(id(tensor)) or _unread(tensor, sizes.get(id(tensor), ())),
            "gradient": tensor.requires_grad,
        }
        for path, tensor in tensors
    ]
    calling = {
        "arguments": arguments,
        "tensors": rows,
        "weights": [row for _, row in weights],
        "graph": [_taken(positions, seen, k, spec) for k, spec in enumerate(taken)]
        + list(range(len(tensors) + len(weights) - len(frozen), len(tensors) + len(weights))),
        "result": trees.describe(result, "result", returned),
    }
    return calling, held


def _unread(tensor: torch.Tensor, names: Sequence[str | None]) -> Spec:
    """Return the spec of a tensor that the graph does not take."""
    dtype, extents, strides = spec_of(tensor)
    if not any(names):
        return dtype, extents, strides
    shape = [name or extent for name, extent in zip(names, extents, strict=True)]
    dense = [("*", 1, 1, *shape[axis + 1 :]) for axis in range(len(shape))]
    return dtype, tuple(shape), tuple(dense)


def _taken(positions: Mapping[int, int], seen: Seen, k: int, spec: Spec) -> Any:
    """Return a graph's argument as data: a size, a position, or None if it is unread."""
    if k in seen.unread:
        return None
    return spec if isinstance(seen.given[k], int) else _position(positions, k, seen.given[k])


def _position(positions: Mapping[int, int], k: int, argument: Any) -> int:
    found = positions.get(id(argument))
    if found is None:
        raise UsageError(
            f"argument {k} of the graph, a {type(argument).__name__}, is neither an input nor a "
            "tensor of the module: make it a parameter, a buffer or an input."
        )
    return found


def bound_arguments(
    fn: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
) -> list[tuple[str, str, Any, bool]]:
    """Return (name, how it may be given, value, whether that is its default) of each argument.

    Raises:
        UsageError: if they do not fit the signature.
    """
    parameters = signature_of(fn)
    if not parameters:
        return [(f"argument {k}", "order", value, False) for k, value in enumerate(args)]
    try:
        bound = inspect.Signature(list(parameters.values())).bind(*args, **named)
    except TypeError as error:
        raise UsageError(f"the inputs do not fit ({', '.join(parameters)}): {error}.") from error
    given = set(bound.arguments)
    bound.apply_defaults()
    found: list[tuple[str, str, Any, bool]] = []
    ordered = True
    for name, value in bound.arguments.items():
        by, parameter = _BY[parameters[name].kind], parameters[name]
        match parameter.kind:
            case inspect.Parameter.VAR_POSITIONAL:
                found += [(f"{name}[{k}]", by, part, False) for k, part in enumerate(value)]
            case inspect.Parameter.VAR_KEYWORD:
                found += [(key, by, part, False) for key, part in value.items()]
            case _ if name in given or trees.is_plain(value):
                by = "name" if by == "either" and not ordered else by
                found.append((name, by, value, _is_default(value, parameter.default)))
            case _:  # a default that is no data: later arguments are passed by name
                ordered = False
    return found


def _is_default(value: Any, default: Any) -> bool:
    return trees.is_plain(value) and type(value) is type(default) and value == default


def _weights(
    fn: Callable[..., Any], fake: Callable[..., Any], seen: Seen
) -> tuple[list[tuple[torch.Tensor, dict[str, Any]]], dict[str, bytes]]:
    """Return the tensors of the module that the graph takes, each with its row, and held values."""
    if not isinstance(fn, nn.Module) or not isinstance(fake, nn.Module):
        return [], {}
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(fake).items():
        names.setdefault(id(tensor), []).append(name)
    saved, real = fn.state_dict().keys(), named_tensors(fn)
    rows, held = [], {}
    given = enumerate(seen.given)
    read = {id(t): t for k, t in given if id(t) in names and k not in seen.unread}
    sources = seen.recipe.positions if seen.recipe is not None else ()
    fixed = {id(seen.given[k]) for k in sources}
    for tensor in read.values():
        own = names[id(tensor)]
        value = real[own[0]]
        if id(tensor) in fixed:  # exchanged, it would not match the constants
            own = [f"frozen {own[0]}"]
        kept = not any(name in saved for name in own)
        if kept:
            held[f"{HELD}{own[0]}"] = _content(own[0], value)
        parameter = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        row = {"names": own, "spec": spec_of(tensor), "parameter": parameter, "held": kept}
        rows.append((tensor, row))
    return rows, held


def _frozen(
    fn: Callable[..., Any], fake: Callable[..., Any], seen: Seen
) -> list[tuple[dict[str, Any], bytes]]:
    """Compute the constants from the current weights; return their rows as weights, and values."""
    assert seen.recipe is not None and isinstance(fn, nn.Module) and isinstance(fake, nn.Module)
    real = named_tensors(fn)
    names = {id(tensor): name for name, tensor in named_tensors(fake).items()}
    sources = [real[names[id(seen.given[k])]] for k in seen.recipe.positions]
    if any(isinstance(tensor, FakeTensor) for tensor in sources):
        raise UsageError("freeze computes with weights, so that they are needed: --with-weights.")
    with torch.no_grad():
        values = seen.recipe.compute(*(tensor.detach() for tensor in sources))
    specs = seen.parts[0].arguments[len(seen.given) :]
    return [
        ({"names": [f"frozen {k}"], "spec": spec, "parameter": False, "held": True},
         _content(f"frozen {k}", value))
        for k, (spec, value) in enumerate(zip(specs, values, strict=True))
    ]  # fmt: skip


def _content(name: str, tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements as bytes."""
    if isinstance(tensor, FakeTensor):
        raise UsageError(
            f"{name} is in no state_dict, so that the archive holds its value, and the model was "
            "built without memory: give --with-weights."
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""
