"""Trace a model's one graph on fake tensors, compile it for a file, and describe how it is called.

The description is data that ``archive/model.py`` reads.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from fusec.archive import trees
from fusec.archive.graph import Spec, formulas_in, spec_of
from fusec.archive.model import HELD, named_tensors, refuse_shared
from fusec.archive.sizes import SizeCondition, names_in
from fusec.codegen.targets import find_target
from fusec.driver.backend import compile_with, context_of
from fusec.driver.compiler import Addition, compile_entry
from fusec.driver.context import CompileContext
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
from fusec.tools.report.arguments import signature_of
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

# -- the graph -------------------------------------------------------------------------------------


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
            # Shapes use sizes without consuming them.
            tensors = [place for place in places if isinstance(place[1].meta["val"], torch.Tensor)]
            seen.unread = frozenset(k for k, node in tensors if not node.users)
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


def alike(fake: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """Return a fake tensor like another, in memory of its own."""
    with mode, torch.no_grad():
        made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return made.requires_grad_(fake.requires_grad)


def fake_module(
    fn: Callable[..., Any], mode: FakeTensorMode, move: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., Any]:
    """Return a copy of a module whose tensors are fake, on another device; a function as it is.

    Buffers that are expanded are dense in it, as they are in a file of weights.
    """
    if not isinstance(fn, nn.Module):
        return fn
    with FakeCopyMode(mode):
        made = copy.deepcopy(fn)
    dense: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for part in made.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers, vars(part))
        for table in tables:
            for name, value in table.items():
                if isinstance(value, torch.Tensor):
                    whole = value
                    if 0 in value.stride() and not isinstance(value, nn.Parameter):
                        whole = dense.setdefault(id(value), (value.contiguous(), value))[0]
                    table[name] = move(whole)
    return made


def name_sizes(
    seen: Seen, sizes: Mapping[int, tuple[str | None, ...]], *, may_fix: bool
) -> dict[str, str]:
    """Rename the symbols of a trace to the names of its inputs' extents; return the new names.

    Args:
        sizes: names of extents by the identity of a given tensor.
        may_fix: as in ``Call``.
    Raises:
        UsageError: for a name whose extent the model fixes, and what is no name.
    """
    names: dict[str, str] = {}
    for given, traced in zip(seen.given, seen.traced, strict=True):
        for axis, name in enumerate(sizes.get(id(given), ())):
            if name is not None and not (name.isascii() and name.isidentifier()):
                raise UsageError(f"{name!r} is no name of a size: letters, digits and _, as `N`.")
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


# -- the call --------------------------------------------------------------------------------------


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
                is_default = trees.is_plain(value) and trees.is_same(value, parameter.default)
                found.append((name, by, value, is_default))
            case _:  # a default that is no data: later arguments are passed by name
                ordered = False
    return found


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
    if seen.convention is not None:
        written = {id(seen.given[k]) for k in seen.convention.written}
        values = [real[names[key][0]] for key in read]
        if not any(isinstance(value, FakeTensor) for value in values):
            refuse_shared(values, [k for k, key in enumerate(read) if key in written])
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
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""
