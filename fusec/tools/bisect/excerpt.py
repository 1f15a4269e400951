"""``Excerpt``: a graph as lines of plain torch, which can be printed, run and made smaller.

Both kinds of FX graphs have this form: Dynamo's, with functions and methods of torch, and
AOTAutograd's, of ATen. Types hold the hints of symbolic sizes; ``static`` also puts them into the
arguments. A node without a public name (an operation of fusec's own, say) becomes a random input.

Worked example::

    inputs   x: f32[8, 16]   w: f32[16]
    add  = torch.ops.aten.add.Tensor(x, w)
    tanh = torch.ops.aten.tanh.default(add)
    results  tanh
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fusec.driver.launches import described_launches
from fusec.frontend.fx_passes.fx_nodes import hint_of
from fusec.frontend.origin import origin_of
from fusec.torch_interior import FakeTensorMode, OpOverload, qualified_name

_PLAIN = ("torch.ops.aten.", "torch.ops.prims.", "torch.", "_operator.", "math.")
_HIDDEN = "torch.ops."
_COPY = "torch.ops.aten.copy_.default"
"""Writes back to an input at a graph's end: such a node counts as a result."""
_NO_LESS_THAN_ZERO = frozenset(
    ("abs", "exp", "relu", "rsqrt", "sigmoid", "softmax", "_softmax", "sqrt", "square", "var")
)
"""Operations whose results are never negative: drawn so where they become inputs."""


class NotPlain(Exception):
    """A graph cannot be written as lines of plain torch, for the given reason."""


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an input or line, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor's shape, layout, type and device; strides are in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str


Type: TypeAlias = TensorType | int | None
"""A tensor's type, an integer's value, or None for any other value (a tuple, say)."""


@dataclass(frozen=True, slots=True)
class Input:
    """A random tensor, or a number.

    Attributes:
        most: the exclusive upper bound of random integers.
        positive: floats are drawn from 0 to 1, else from a normal distribution.
        trained: it requires a gradient.
    """

    name: str
    type: TensorType | int
    most: int = 2
    positive: bool = False
    trained: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """``name = target(*args, **kwargs)``; a target that begins with a dot is a method.

    Attributes:
        where: the user's source line, or "".
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    type: Type
    where: str = ""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Inputs, lines and the names of the results.

    Attributes:
        trains: the gradients of trained inputs are results, too.
        dynamic: sizes are symbols when it is compiled.
    """

    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    results: tuple[str, ...]
    trains: bool = False
    dynamic: bool = False

    @property
    def types(self) -> dict[str, Type]:
        """The type of each value, by its name."""
        inputs: dict[str, Type] = {one.name: one.type for one in self.inputs}
        return inputs | {line.name: line.type for line in self.lines}


# -- from graphs -----------------------------------------------------------------------------------


def from_graph(gm: fx.GraphModule, *, trains: bool = False) -> Excerpt:
    """Convert an FX graph to an excerpt with random inputs.

    Raises:
        NotPlain: if plain lines can express none of the graph's results.
    """
    inputs: list[Input] = []
    lines: list[Line] = []
    known: dict[str, Type] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            break
        kind = _type(node.meta.get("val", node.meta.get("example_value")))
        if node.op == "get_attr" and kind is None:
            kind = _type(functools.reduce(getattr, str(node.target).split("."), gm))
        target = _target(node)
        if target is not None and all(n.name in known for n in node.all_input_nodes):
            where = next(iter(origin_of(node).source), "")
            line = Line(node.name, target, node.args, node.kwargs, kind, where)
            lines.append(rewritten(line, lambda v: Ref(v.name) if isinstance(v, fx.Node) else v))
        elif kind is not None:
            trained = trains and getattr(node.meta.get("example_value"), "requires_grad", False)
            inputs.append(Input(node.name, kind, trained=trained))
        else:
            continue
        known[node.name] = kind
    returned = [node.name for node in gm.graph.output_node().all_input_nodes]
    written = [line.name for line in lines if line.target == _COPY]
    results = dict.fromkeys(
        n for n in (*returned, *written) if isinstance(known.get(n), TensorType)
    )
    values = [n.meta.get("val", n.meta.get("example_value")) for n in gm.graph.nodes]
    dynamic = any(isinstance(value, torch.SymInt) for value in values)
    return alive(Excerpt(tuple(inputs), tuple(lines), tuple(results), trains, dynamic))


def _type(value: Any) -> Type:
    match value:
        case torch.Tensor() if value.layout is torch.strided:
            shape, strides = map(hint_of, value.shape), map(hint_of, value.stride())
            return TensorType(tuple(shape), tuple(strides), value.dtype, str(value.device))
        case torch.SymInt():
            return hint_of(value)
        case bool():
            return None
        case int():
            return value
        case _:
            return None


def _target(node: fx.Node) -> str | None:
    """Return the public name of a node's target, or None if it has none."""
    if node.op == "call_method":
        return f".{node.target}"
    if node.op != "call_function":
        return None
    target: Any = node.target
    name = f"{_HIDDEN}{target}" if isinstance(target, OpOverload) else qualified_name(target)
    own = name.startswith(_HIDDEN) and not name.startswith(_PLAIN[:2])
    return name if name.startswith(_PLAIN) and not own and _found(name) else None


def _found(name: str) -> bool:
    try:
        return callable(resolve(name))
    except (AttributeError, ImportError):
        return False


# -- what an excerpt is made of --------------------------------------------------------------------


def rewritten(line: Line, change: Callable[[Any], Any]) -> Line:
    """Return a line with each reference and constant in its arguments changed."""
    args, kwargs = map_aggregate((line.args, line.kwargs), change)
    return replace(line, args=args, kwargs=kwargs)


def reads(line: Line) -> list[str]:
    """Return the names that a line refers to, in order."""
    found: list[str] = []
    rewritten(line, lambda value: found.append(value.name) if isinstance(value, Ref) else None)
    return found


def alive(excerpt: Excerpt) -> Excerpt:
    """Return an excerpt without lines and inputs that no result needs.

    Raises:
        NotPlain: if a result needs another name, or there is no result.
    """
    needed = set(excerpt.results)
    kept: list[Line] = []
    for line in reversed(excerpt.lines):
        if line.name in needed:
            kept.append(line)
            needed.update(reads(line))
    inputs = tuple(one for one in excerpt.inputs if one.name in needed)
    missing = needed - {one.name for one in inputs} - {line.name for line in kept}
    if missing or not excerpt.results:
        raise NotPlain(f"{min(missing, default='no result')} has no plain name")
    return replace(excerpt, inputs=inputs, lines=tuple(reversed(kept)))


def static(excerpt: Excerpt) -> Excerpt:
    """Return an excerpt with its symbolic sizes replaced by their hints, not yet ``alive``."""
    numbers = {name: kind for name, kind in excerpt.types.items() if isinstance(kind, int)}
    lines = tuple(
        rewritten(line, lambda v: numbers.get(v.name, v) if isinstance(v, Ref) else v)
        for line in excerpt.lines
        if line.name not in numbers
    )
    return replace(excerpt, lines=lines, dynamic=False)


def as_inputs(excerpt: Excerpt, names: Iterable[str]) -> Excerpt:
    """Return an excerpt with the named lines as inputs; lines that fed only these stay."""
    chosen = set(names)
    made = tuple(
        Input(line.name, line.type, positive=_is_positive(line))
        for line in excerpt.lines
        if line.name in chosen and line.type is not None
    )
    known = {one.name for one in made}
    lines = tuple(line for line in excerpt.lines if line.name not in known)
    return replace(excerpt, inputs=(*excerpt.inputs, *made), lines=lines)


def _is_positive(line: Line) -> bool:
    words = line.target.removeprefix("torch.ops.").split(".")
    return any(word in _NO_LESS_THAN_ZERO for word in words)


# -- running it ------------------------------------------------------------------------------------


@functools.cache
def resolve(target: str) -> Any:
    """Import the function that a line's target names."""
    first, *path = target.split(".")
    return functools.reduce(getattr, path, importlib.import_module(first))


def retyped(excerpt: Excerpt) -> Excerpt | None:
    """Infer the types of an excerpt's lines again, on fake tensors; None if it cannot run."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values: dict[str, Any] = {}
    lines: list[Line] = []
    try:
        with mode, torch.no_grad():
            for one in excerpt.inputs:
                values[one.name] = _fake(one.type)
            for line in excerpt.lines:
                values[line.name] = _evaluate(line, values)
                lines.append(replace(line, type=_type(values[line.name])))
    except Exception:  # operations raise anything for sizes that do not fit
        return None
    return replace(excerpt, lines=tuple(lines))


def _fake(kind: TensorType | int) -> Any:
    if isinstance(kind, int):
        return kind
    return torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device=kind.device)


def _evaluate(line: Line, values: Mapping[str, Any]) -> Any:
    filled = rewritten(line, lambda v: values[v.name] if isinstance(v, Ref) else v)
    args: Sequence[Any] = filled.args
    if line.target.startswith("."):
        return getattr(args[0], line.target[1:])(*args[1:], **filled.kwargs)
    return resolve(line.target)(*args, **filled.kwargs)


# -- the part of a graph that one launch computes --------------------------------------------------


def slice_of(gm: fx.GraphModule, wanted: Collection[str], stored: Collection[str]) -> Excerpt:
    """Return the excerpt that computes the wanted nodes from the stored ones.

    Args:
        wanted, stored: names of nodes; a wanted node is computed even if it is stored, too.
    Raises:
        NotPlain: if it cannot be written in plain torch.
    """
    excerpt = from_graph(gm)
    types = excerpt.types
    results = tuple(name for name in wanted if isinstance(types.get(name), TensorType))
    inputs = [name for name in stored if name not in wanted]
    return alive(as_inputs(alive(replace(excerpt, results=results)), inputs))


def node_of(gm: fx.GraphModule, held: tuple[str, int | None]) -> str:
    """Return the name of a value's node: of its ``getitem``, if any, for an element of a tuple."""
    name, place = held
    if place is None:
        return name
    for node in gm.graph.nodes:
        is_element = getattr(node.target, "__name__", "") == "getitem"
        if is_element and node.args[0].name == name and node.args[1] == place:
            return str(node.name)
    return name


def launch_slices(gm: fx.GraphModule, manifest: bytes) -> Iterator[tuple[str, str, Excerpt]]:
    """Yield each launch that plain torch can express: name, library's call or "", and excerpt.

    Of kernels these are the distinct ones. Of the library's calls it is no convolution: its time
    follows from the memory format of images, which is chosen for the whole graph.
    """
    kernels, externs = described_launches(manifest)
    names = {node.name for node in gm.graph.nodes}
    stored = {name for row in kernels for name in row["nodes"]} | {row["node"] for row in externs}
    found = [(r["name"], "", r["nodes"], stored) for r in kernels if r["code"] == r["name"]]
    found += [(r["node"], r["op"], [r["node"]], names) for r in externs if "conv" not in r["op"]]
    for launch, library, wanted, before in found:
        with suppress(NotPlain):
            yield launch, library, slice_of(gm, wanted, before)
