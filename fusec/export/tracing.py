"""Trace a model's one graph on fake tensors, and compile it for a file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from fusec.archive.graph import Spec, formulas_in
from fusec.archive.sizes import SizeCondition, names_in
from fusec.codegen.targets import find_target
from fusec.driver.backend import compile_with, context_of
from fusec.driver.compiler import Addition, compile_entry
from fusec.driver.stages import CompileContext
from fusec.driver.trace import Trace
from fusec.driver.warm import Start
from fusec.errors import Unsupported, UsageError
from fusec.export.native import add_native
from fusec.export.packing import Packed, packed
from fusec.export.size_formulas import not_empty, renamed, renamed_spec, shape_guards
from fusec.frontend.fx_passes.freezing import RECIPE, Recipe
from fusec.options import Options
from fusec.runtime.calls.convention import Convention
from fusec.runtime.calls.executable import BoxedCall
from fusec.torch_interior import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    forgetting_code,
    pytree,
    sizes_of_any_value,
    unset_fake_temporarily,
    whole_backward,
)

_SQUEEZES = {getattr(torch.ops.aten.squeeze, name) for name in ("default", "dim", "dims")}
_PLACES = {
    torch.ops.aten.slice.Tensor: 1,
    torch.ops.aten.slice_scatter.default: 2,
    torch.ops.aten.select.int: 1,
    torch.ops.aten.select_scatter.default: 2,
}
"""Operations at a place of an axis -> the axis's position in their arguments; the place is next."""


@dataclass(slots=True)
class Seen:
    """What was compiled, and the call that was traced.

    Attributes:
        traced: the graph's arguments, with sizes as symbols.
        given, returned: its arguments and results in the call that was traced.
        recipe: how its last arguments, the frozen constants, are computed.
        unread: the positions of arguments without consumers.
        conditions: the conditions under which no tensor of the graph is empty.
    """

    convention: Convention | None = None
    parts: list[Packed] = field(default_factory=list)
    traced: tuple[Any, ...] = ()
    recipe: Recipe | None = None
    unread: frozenset[int] = frozenset()
    conditions: tuple[SizeCondition, ...] = ()
    given: tuple[Any, ...] = ()
    returned: tuple[Any, ...] = ()


@contextmanager
def tracing(mode: FakeTensorMode, train: bool) -> Iterator[None]:
    """Trace in a mode that does not assume that a dynamic size is other than 0 or 1.

    ``compile_graph`` adds what is not guarded then: no tensor is empty. NNPACK is off, because
    torch takes it for 16 images and up, which would become a condition.
    """
    with (
        sizes_of_any_value(),
        torch.backends.nnpack.flags(enabled=False),
        mode,
        torch.set_grad_enabled(train),
        forgetting_code(),
        whole_backward(),
    ):
        yield


def compile_graph(
    seen: Seen, options: Options, gm: fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Compile Dynamo's graph, and return a callable that runs it on fake tensors."""

    context = context_of(inputs, options)
    if options.target is not None:
        context = CompileContext(find_target(options.target), options, Trace("joint"))
    # Weights packed for a library are opaque, and no file could hold them.
    context = replace(context, target=replace(context.target, libraries=False))

    def compile_one(graph: fx.GraphModule, _: Sequence[Any], *, name: str, trace: Trace) -> Any:
        _move_graph(graph, torch.device(context.target.device))
        _guard_places(graph)
        values = pytree.tree_leaves([node.meta.get("val") for node in graph.graph.nodes])
        seen.conditions += not_empty(values)
        seen.recipe = _take_constants(graph)
        if seen.recipe is not None:
            places = enumerate(graph.graph.find_nodes(op="placeholder"))
            seen.unread = frozenset(k for k, node in places if _is_unread(node))
        native: Addition | None = None
        if options.native:
            asked = shape_guards(graph)
            native = Addition(repr(asked), partial(add_native, asked))
        with unset_fake_temporarily():  # kernels are timed with real tensors
            compile_entry(graph, name, options, trace, native)
        return _not_here(name)

    start = Start(gm, "", options)
    compile_with(gm, inputs, start.noting(compile_one), context)
    seen.convention, seen.parts = packed(start)
    seen.traced = _traced(gm.graph.find_nodes(op="placeholder"))
    if any(isinstance(value, torch.SymInt) for value in _traced(gm.graph.output_node().args)):
        raise UsageError("a result that is a size, which is another in each call: leave it out.")

    def run(*args: Any) -> Any:
        seen.given, seen.returned = args, tuple(gm.forward(*args))
        return seen.returned

    return run


def _guard_places(gm: fx.GraphModule) -> None:
    """Guard that axes kept by ``squeeze`` have not one element, and that places are on their axes.

    A trace for sizes of any value guesses: ``x[:, -3:]`` begins at ``T - 3``.
    """
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target not in (*_SQUEEZES, *_PLACES):
            continue
        args = [part.meta["val"] if isinstance(part, fx.Node) else part for part in node.args]
        shape, rest = args[0].shape, args[_PLACES.get(node.target, 1) :]
        if node.target in _SQUEEZES:
            axes = rest[0] if rest else range(len(shape))
            for axis in (axes,) if isinstance(axes, int) else axes:
                bool(shape[axis] != 1)
        elif len(rest) > 1 and rest[1] is not None:
            place, extent = rest[1], shape[rest[0]]
            bool(place < extent if place >= 0 else place + extent >= 0)


def _is_unread(node: fx.Node) -> bool:
    """Return True for a tensor without consumers. (Shapes use sizes without consuming them.)"""
    return not node.users and isinstance(node.meta["val"], torch.Tensor)


def _traced(nodes: Any) -> tuple[Any, ...]:
    """Return the values that Dynamo traced for some nodes, nested or not."""
    leaves = pytree.tree_leaves(nodes)
    return tuple(node.meta.get("example_value") for node in leaves if isinstance(node, fx.Node))


def _move_graph(gm: fx.GraphModule, device: torch.device) -> None:
    """Move a graph that was traced without a GPU to a GPU.

    Raises:
        UsageError: for an operation of CPUs alone, which a trace on a GPU would not contain.
    """
    here = torch.device("cpu")
    if device == here:
        return

    def moved(value: Any) -> Any:
        if isinstance(value, FakeTensor) and value.device == here:
            with value.fake_mode, torch.no_grad():
                strides = value.stride()
                return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=device)
        return device if value == here and isinstance(value, torch.device) else value

    for node in gm.graph.nodes:
        if any(word in str(node.target) for word in ("for_cpu", "mkldnn")):
            raise UsageError(
                f"{node.target} is of CPUs alone: for {device.type}, build with a torch for CUDA."
            )
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), moved)
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(moved, node.meta["val"])
    gm.recompile()


def _not_here(name: str) -> BoxedCall:
    def call(args: list[Any]) -> Any:
        raise Unsupported(f"graph {name!r} was built for a file; load that to run it")

    return call


def faked(
    tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device, moved: dict[int, Any]
) -> torch.Tensor:
    """Return a tensor's fake copy on a device; always the same one."""
    found = moved.get(id(tensor))
    if found is not None:
        made: torch.Tensor = found[1]
        return made
    fake: torch.Tensor = tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)
    if fake.device.type != device.type:
        with torch.no_grad():
            strides = fake.stride()
            other = torch.empty_strided(fake.shape, strides, dtype=fake.dtype, device=device)
        parameter = isinstance(tensor, nn.Parameter)
        fake = nn.Parameter(other, tensor.requires_grad) if parameter else other
    moved[id(tensor)] = tensor, fake  # kept alive, so that no other tensor gets its id
    return fake


def fake_module(
    fn: Callable[..., Any], mode: FakeTensorMode, move: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., Any]:
    """Return a copy of a module whose tensors are fake, on another device; a function as it is."""
    if not isinstance(fn, nn.Module):
        return fn
    with FakeCopyMode(mode):
        made = copy.deepcopy(fn)
    for part in made.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers, vars(part))
        for table in tables:
            for name, value in table.items():
                if isinstance(value, torch.Tensor):
                    table[name] = move(value)
    return made


def mapped(move: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return nested arguments with each tensor moved."""
    match value:
        case torch.Tensor():
            return move(value)
        case tuple() | list():
            return type(value)(mapped(move, part) for part in value)
        case dict():
            return {key: mapped(move, part) for key, part in value.items()}
        case _:
            return value


def name_sizes(
    seen: Seen, sizes: Mapping[int, tuple[str | None, ...]], *, may_fix: bool
) -> dict[str, str]:
    """Rename the symbols of a trace to the names of its inputs' extents; return the new names.

    Args:
        sizes: names of extents by the identity of a given tensor.
        may_fix: as in ``Call``.
    Raises:
        UsageError: for a name whose extent the model fixes.
    """
    names: dict[str, str] = {}
    for given, traced in zip(seen.given, seen.traced, strict=True):
        for axis, name in enumerate(sizes.get(id(given), ())):
            symbol = str(traced.shape[axis])
            if name is not None and symbol.isdigit() and not may_fix:
                raise UsageError(f"the model runs for {name} = {symbol} alone: write the number.")
            if name is not None and symbol.isidentifier():
                names[symbol] = name
    seen.parts = [_named(part, k == 0, seen, names) for k, part in enumerate(seen.parts)]
    return names


def _named(part: Packed, is_first: bool, seen: Seen, names: Mapping[str, str]) -> Packed:
    """Return a graph with its sizes renamed.

    A backward keeps the conditions on sizes that it takes: its forward has checked the others.

    Raises:
        Unsupported: as ``renamed`` does.
    """
    unread = seen.unread if is_first else ()
    arguments = tuple(
        None if k in unread else renamed_spec(spec, names) for k, spec in enumerate(part.arguments)
    )
    asked = dict.fromkeys((*seen.conditions, *part.conditions))
    conditions = tuple(renamed(condition, names) for condition in asked)
    if not is_first:
        known = _names_bound_by(arguments)
        used = (n for spec in arguments for size in formulas_in(spec) for n in names_in(size))
        for name in used:
            if name not in known:
                raise Unsupported(f"a backward that is not told the size {name}")
        conditions = tuple(c for c in conditions if known.issuperset(names_in(c)))
    return replace(part, arguments=arguments, conditions=conditions)


def _names_bound_by(specs: Iterable[Spec]) -> frozenset[str]:
    """Return the names that arguments bind: of a size, or of an extent that is a name alone."""
    known = ((spec[1],) if len(spec) == 2 else spec[1] for spec in specs if spec is not None)
    return frozenset(n for formulas in known for n in formulas if isinstance(n, str))


def _take_constants(gm: fx.GraphModule) -> Recipe | None:
    """Make the constants of a graph its last inputs, in place, so that the caller holds them.

    Returns:
        Their recipe; None if the graph has no constants.
    """
    recipe: Recipe | None = gm.meta.pop(RECIPE, None)
    for node in recipe.constants if recipe is not None else ():
        last = gm.graph.find_nodes(op="placeholder")[-1]
        with gm.graph.inserting_after(last):
            given = gm.graph.placeholder(str(node.target))
        given.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(given)
        gm.graph.erase_node(node)
    gm.recompile()
    return recipe
