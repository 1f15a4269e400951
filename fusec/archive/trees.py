"""Nested arguments and results as data: positions of tensors, and values that must be equal.

::

    TREE ::= {"tensor": k}                          the k-th tensor
           | {"argument": k}                        of results: the k-th tensor of the arguments
           | {"value": null | true | 3 | 0.5 | ""}  must be equal
           | {"tuple": [TREE, ...]} | {"list": [TREE, ...]}
           | {"dict": [[key, TREE], ...]}           keys are texts, in the order of the model's

A result that is a mapping or a dataclass (``ModelOutput`` of transformers, say) is a dictionary,
and a named tuple is a tuple: loading imports no classes of other packages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from fusec.errors import UsageError

Tree: TypeAlias = "dict[str, Any]"
_VALUES = (bool, int, float, str, type(None))


def describe(value: Any, path: str, leaf: Callable[[torch.Tensor, str], Tree]) -> Tree:
    """Return the tree of a nested value.

    Args:
        path: its name in messages: "batch", and of a part "batch['mask']".
        leaf: returns the tree of a tensor with this path.
    Raises:
        UsageError: naming what is no tensor, number, text, or container of these.
    """
    match value:
        case torch.Tensor():
            return leaf(value, path)
        case tuple() | list():
            kind = "tuple" if isinstance(value, tuple) else "list"
            parts = enumerate(value)
            return {kind: [describe(part, f"{path}[{k}]", leaf) for k, part in parts]}
        case Mapping():
            return {"dict": [_entry(path, key, part, leaf) for key, part in value.items()]}
        case _ if is_plain(value):
            return {"value": value}
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = (field.name for field in dataclasses.fields(value))
            return {"dict": [_entry(path, name, getattr(value, name), leaf) for name in names]}
        case _:
            raise UsageError(
                f"{path} is a {type(value).__name__}. An archive takes and returns tensors, "
                "numbers, texts, None, and tuples, lists and dictionaries of these."
            )


def is_same(value: Any, other: Any) -> bool:
    """Return True for two equal values of one type: of floats zeros have a sign, and NaN is NaN."""
    if type(value) is not type(other):
        return False
    return repr(value) == repr(other) if isinstance(value, float) else bool(value == other)


def is_plain(value: Any) -> bool:
    """Return True for a number, a text or None."""
    return type(value) in _VALUES


def _entry(
    path: str, key: Any, part: Any, leaf: Callable[[torch.Tensor, str], Tree]
) -> tuple[str, Tree]:
    if type(key) is not str:
        raise UsageError(f"{path} has the key {key!r}; in an archive keys are texts.")
    return key, describe(part, f"{path}[{key!r}]", leaf)


def take(tree: Tree, value: Any, path: str, tensors: list[Any]) -> None:
    """Add the tensors of a value to ``tensors``, in the order of its tree.

    Raises:
        UsageError: where it does not match the tree, with what was given and what is wanted.
    """
    ((kind, inner),) = tree.items()
    match kind:
        case "tensor":
            if not isinstance(value, torch.Tensor):
                raise _wrong(path, value, "a tensor")
            tensors.append(value)
        case "value":
            if not is_same(value, inner):
                raise _wrong(path, value, f"{inner!r}, which it was built with,")
        case "tuple" | "list":
            if not isinstance(value, tuple | list) or len(value) != len(inner):
                raise _wrong(path, value, f"a {kind} of {len(inner)}")
            for k, (part, given) in enumerate(zip(inner, value, strict=True)):
                take(part, given, f"{path}[{k}]", tensors)
        case _:
            names = [name for name, _ in inner]
            if not isinstance(value, Mapping) or value.keys() != set(names):
                raise _wrong(path, value, f"a dictionary of {', '.join(names)}")
            for name, part in inner:
                take(part, value[name], f"{path}[{name!r}]", tensors)


def _wrong(path: str, value: Any, wanted: str) -> UsageError:
    seen = repr(value) if type(value) in _VALUES else f"a {type(value).__name__}"
    if isinstance(value, tuple | list):
        seen += f" of {len(value)}"
    if isinstance(value, Mapping):
        seen = f"a dictionary of {', '.join(map(str, value))}"
    return UsageError(f"{path} is {seen}; {wanted} is wanted.")


def put(tree: Tree, tensors: Sequence[Any], arguments: Sequence[Any]) -> Any:
    """Return the nested value of a tree.

    Args:
        tensors, arguments: what ``{"tensor": k}`` and ``{"argument": k}`` stand for.
    """
    ((kind, inner),) = tree.items()
    match kind:
        case "tensor":
            return tensors[inner]
        case "argument":
            return arguments[inner]
        case "value":
            return inner
        case "tuple":
            return tuple(put(part, tensors, arguments) for part in inner)
        case "list":
            return [put(part, tensors, arguments) for part in inner]
        case _:
            return {name: put(part, tensors, arguments) for name, part in inner}


def tensors_of(tree: Tree, path: str = "") -> Iterator[tuple[int, str]]:
    """Yield the position and the path of each ``{"tensor": k}`` in a tree, in order."""
    ((kind, inner),) = tree.items()
    match kind:
        case "tensor":
            yield inner, path
        case "tuple" | "list":
            for k, part in enumerate(inner):
                yield from tensors_of(part, f"{path}[{k}]")
        case "dict":
            for name, part in inner:
                yield from tensors_of(part, f"{path}['{name}']")


def checked(tree: Tree, tensors: int, arguments: int = 0) -> Tree:
    """Return a tree that was read from JSON, if it is valid.

    Args:
        tensors, arguments: how many of them there are.
    Raises:
        ValueError: for anything that ``describe`` does not make.
    """
    match tree:
        case {"tensor": int(k)} if len(tree) == 1 and type(k) is int and 0 <= k < tensors:
            return tree
        case {"argument": int(k)} if len(tree) == 1 and type(k) is int and 0 <= k < arguments:
            return tree
        case {"value": inner} if len(tree) == 1 and type(inner) in _VALUES:
            return tree
        case {"tuple": list(parts)} | {"list": list(parts)} if len(tree) == 1:
            for part in parts:
                checked(part, tensors, arguments)
            return tree
        case {"dict": list(entries)} if len(tree) == 1:
            for name, part in entries:
                if type(name) is not str:
                    raise ValueError(f"no key: {name!r}")
                checked(part, tensors, arguments)
            return tree
        case _:
            raise ValueError(f"no tree: {tree!r}")
