"""``fusec build``: a model as one file, which ``fusec.load`` calls without compiling.

The model is traced on fake tensors, once for each target, by Dynamo, which has to see one graph: it
takes arguments of any nesting and the module's tensors as the graph's arguments, and AOTAutograd
makes of the graph what it makes of any other, gradients and written buffers included. (An exported
graph, ``torch.export``, is one of ATen, in which fusec's rewrites of Dynamo's graphs find nothing.)
What is what is then known by identity: an argument of the graph *is* a tensor of the call or of the
module, and a tensor of the result *is* one that the graph returned.

What is written down: ``runtime/model.py``, which reads it.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from fusec.archive import Packed, pack
from fusec.backend import compile_with, context_of
from fusec.codegen.native import SIGNATURE
from fusec.codegen.targets import Target, find_target
from fusec.compiler import compile_entry
from fusec.errors import FusecError, ModelError, Unsupported, UsageError, describe_failure
from fusec.frontend.freezing import Recipe, take_constants
from fusec.native_names import NAMES, describe_native
from fusec.options import Options
from fusec.report.arguments import fitting, signature_of
from fusec.report.breaks import break_lines, merge_breaks, read_break
from fusec.report.observe import new_fake_mode, observe
from fusec.report.watching import watch
from fusec.runtime import trees
from fusec.runtime.convention import Convention
from fusec.runtime.entry import encode
from fusec.runtime.executable import BoxedCall
from fusec.runtime.loading import Spec, spec_of
from fusec.runtime.model import CALLING, HELD, KEY, named_tensors
from fusec.runtime.processor import needed_features
from fusec.runtime.sizes import Condition
from fusec.size_formulas import not_empty, renamed, renamed_spec
from fusec.stages import Context
from fusec.torch_interior import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    TorchDynamoException,
    forgetting_code,
    maybe_mark_dynamic,
    pytree,
    sizes_of_any_value,
    unset_fake_temporarily,
    whole_backward,
)
from fusec.trace import Trace
from fusec.warm import Start

_BY = {
    inspect.Parameter.POSITIONAL_ONLY: "order",
    inspect.Parameter.VAR_POSITIONAL: "order",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "either",
    inspect.Parameter.KEYWORD_ONLY: "name",
    inspect.Parameter.VAR_KEYWORD: "name",
}


_SQUEEZES = {getattr(torch.ops.aten.squeeze, name) for name in ("default", "dim", "dims")}
_PLACES = {
    torch.ops.aten.slice.Tensor: 1,
    torch.ops.aten.slice_scatter.default: 2,
    torch.ops.aten.select.int: 1,
    torch.ops.aten.select_scatter.default: 2,
}
"""Operations at a place of an axis, and which of their arguments the axis is; the place is next."""


@dataclass(frozen=True, slots=True)
class Call:
    """How a model is called: by order, by name, and whether results have gradients.

    Attributes:
        sizes: tensors among the arguments, and names for those of their extents that calls choose.
        may_fix: a name whose extent the model fixes is no error.
    """

    args: tuple[Any, ...]
    named: Mapping[str, Any] = field(default_factory=dict)
    train: bool = False
    sizes: Sequence[tuple[torch.Tensor, tuple[str | None, ...]]] = ()
    may_fix: bool = False


@dataclass(slots=True)
class _Seen:
    """What was compiled, and with what it was called.

    Attributes:
        traced: the graph's arguments, with sizes as symbols.
        given, returned: its arguments and results, of the call that was traced.
        recipe: how what was frozen is computed, which are its last arguments.
        unread: the positions of arguments that nothing reads any more.
        conditions: what has to hold of sizes so that no tensor of the graph is empty.
    """

    convention: Convention | None = None
    parts: list[Packed] = field(default_factory=list)
    traced: tuple[Any, ...] = ()
    recipe: Recipe | None = None
    unread: frozenset[int] = frozenset()
    conditions: tuple[Condition, ...] = ()
    given: tuple[Any, ...] = ()
    returned: tuple[Any, ...] = ()


def build(
    fn: Callable[..., Any],
    call: Call,
    targets: Sequence[Options],
    mode: FakeTensorMode | None = None,
) -> bytes:
    """Return the archive of a module or function.

    Args:
        targets: the options of a compile for each; the first that runs on a machine is taken, of
            several for CPUs the one that uses most of it.
        mode: to which the module's tensors belong, if they are fake.
    Raises:
        UsageError: for arguments and results that are no data, and a graph break: it lists lines.
        Unsupported: for what cannot be saved.
        ModelError: what the model itself raised.
    """
    _arguments(fn, call.args, call.named)
    variants: dict[str, bytes] = {}
    for options in _preferred(targets):
        name, content = _variant(fn, call, options, mode or new_fake_mode())
        variants[name] = content
    return encode(KEY, variants)


def _preferred(targets: Sequence[Options]) -> Iterator[Options]:
    """Yield targets in the order in which they are tried: of CPUs the one with most features."""
    cpus = [one for one in targets if _target_of(one).device == "cpu"]
    cpus.sort(key=lambda one: -len(needed_features(_target_of(one).name).split()))
    best = iter(cpus)
    for options in targets:
        yield next(best) if options in cpus else options


def _target_of(options: Options) -> Target:
    return find_target(options.target or "cpu")


def weights_of(fn: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return what ``--with-weights`` writes: parameters and buffers by their first names."""
    if not isinstance(fn, nn.Module):
        return {}
    first: dict[int, str] = {}
    named = named_tensors(fn)
    for name, tensor in named.items():
        first.setdefault(id(tensor), name)
    weights: dict[str, torch.Tensor] = {}
    places: set[int] = set()
    for name in first.values():
        tensor = named[name].detach().contiguous()
        place = tensor.untyped_storage().data_ptr()
        weights[name] = tensor.clone() if place in places else tensor  # the file has no views
        places.add(place)
    return weights


def _variant(
    fn: Callable[..., Any], call: Call, options: Options, mode: FakeTensorMode
) -> tuple[str, bytes]:
    """Return a target's name, and the archive of its graph."""
    if isinstance(fn, nn.Module):
        fn.train(call.train)
    target = _target_of(options)
    traced = target.device if torch.cuda.is_available() else "cpu"
    move = partial(_faked, mode=mode, device=torch.device(traced), moved={})
    seen = _Seen()
    with _tracing(mode, call):
        fake = _fake_module(fn, mode, move)
        args, named = _mapped(move, list(call.args)), _mapped(move, dict(call.named))
        sizes = {id(move(tensor)): names for tensor, names in call.sizes}
        for tensor, names in call.sizes:
            for axis in (k for k, name in enumerate(names) if name is not None):
                maybe_mark_dynamic(move(tensor), axis)
        compiled = torch.compile(
            fake, backend=partial(_compile, seen, options), fullgraph=True, dynamic=False
        )
        try:
            result = compiled(*args, **named)
        except TorchDynamoException as error:
            inner = getattr(error, "inner_exception", None)
            if isinstance(inner, FusecError):
                raise inner from error
            _explain(fn, call, error, mode)
            raise
    if seen.convention is None:
        raise UsageError("the model computes nothing with tensors.")
    _name_sizes(seen, sizes, may_fix=call.may_fix)
    calling, held = _describe(fn, fake, (args, named), result, seen, sizes)
    beside = {CALLING: json.dumps(calling).encode(), **held}
    if options.native:
        beside[NAMES] = _names(calling, seen, target)
    return target.name, pack(seen.convention, seen.parts, target, beside)


@contextmanager
def _tracing(mode: FakeTensorMode, call: Call) -> Iterator[None]:
    """Trace in a mode; a size that a call chooses is not taken for another than 1.

    ``_compile`` asks for what this leaves unasked: no tensor is empty. NNPACK, which torch takes
    for 16 images and up, would make a condition of that.
    """
    with (
        sizes_of_any_value(),
        torch.backends.nnpack.flags(enabled=False),
        mode,
        torch.set_grad_enabled(call.train),
        forgetting_code(),
        whole_backward(),
    ):
        yield


def _names(calling: dict[str, Any], seen: _Seen, target: Target) -> bytes:
    signature = seen.parts[0].blobs[SIGNATURE].decode()
    needed = needed_features(target.name)
    return describe_native(calling, signature, len(seen.returned), needed).encode()


# -- tracing ---------------------------------------------------------------------------------------


def _compile(
    seen: _Seen, options: Options, gm: fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Compile Dynamo's graph, and return what runs it on fake tensors."""

    context = context_of(inputs, options)
    if options.target is not None:
        context = Context(find_target(options.target), options, Trace("joint"))
    # What is packed for a library has no elements that a file could hold.
    context = replace(context, target=replace(context.target, libraries=frozenset()))

    def compile_one(graph: fx.GraphModule, _: Sequence[Any], *, name: str, trace: Trace) -> Any:
        _move_graph(graph, torch.device(context.target.device))
        _guard_places(graph)
        values = pytree.tree_leaves([node.meta.get("val") for node in graph.graph.nodes])
        seen.conditions = not_empty(values)
        seen.recipe = take_constants(graph)
        if seen.recipe is not None:
            places = enumerate(graph.graph.find_nodes(op="placeholder"))
            seen.unread = frozenset(k for k, node in places if not node.users)
        with unset_fake_temporarily():  # kernels are timed with real tensors
            compile_entry(graph, name, options, trace)
        return _not_here(name)

    start = Start(gm, "", options)
    compile_with(gm, inputs, start.noting(compile_one), context)
    seen.convention, seen.parts = start.packed()
    seen.traced = _traced(gm.graph.find_nodes(op="placeholder"))
    if any(isinstance(value, torch.SymInt) for value in _traced(gm.graph.output_node().args)):
        raise UsageError("a result that is a size, which is another in each call: leave it out.")

    def run(*args: Any) -> Any:
        seen.given, seen.returned = args, tuple(gm.forward(*args))
        return seen.returned

    return run


def _guard_places(gm: fx.GraphModule) -> None:
    """Guard that what is not squeezed has not one element, and that places are on their axes.

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
    """Return what Dynamo traced in some nodes, nested or not."""
    leaves = pytree.tree_leaves(nodes)
    return tuple(node.meta.get("example_value") for node in leaves if isinstance(node, fx.Node))


def _name_sizes(seen: _Seen, sizes: Mapping[int, tuple[str | None, ...]], *, may_fix: bool) -> None:
    """Give the symbols of a trace the names that the extents of its inputs have.

    Args:
        sizes: names by the identity of a tensor that was given.
        may_fix: as of ``Call``.
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
    seen.parts = [
        replace(
            part,
            arguments=tuple(
                None if k in seen.unread else renamed_spec(spec, names)
                for k, spec in enumerate(part.arguments)
            ),
            conditions=tuple(
                renamed(condition, names)
                for condition in dict.fromkeys((*seen.conditions, *part.conditions))
            ),
        )
        for part in seen.parts
    ]


def _move_graph(gm: fx.GraphModule, device: torch.device) -> None:
    """Make a graph that was traced without a GPU one of a GPU's tensors.

    Raises:
        UsageError: for a kernel of CPUs, which tracing on a GPU would not have chosen.
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


def _explain(fn: Callable[..., Any], call: Call, error: Exception, mode: FakeTensorMode) -> None:
    """Raise the error for a model that is not one graph."""
    with watch() as watched:
        try:
            inputs = fitting(fn, call.args, call.named)
            observe(fn, inputs, train=call.train, mode=mode)
        except ModelError:
            raise
        except Exception:  # what is known is said
            pass
    breaks = watched.seen.breaks or merge_breaks([read_break(str(error))])
    if not any(one.place.path for one in breaks):
        raise UsageError(f"the model is not one graph: {describe_failure(error)}") from error
    lines = "\n".join(break_lines(breaks))
    raise UsageError(f"the model is not one graph, which an archive needs.\n{lines}") from error


def _faked(
    tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device, moved: dict[int, Any]
) -> torch.Tensor:
    """Return a tensor without memory on a device: one for each."""
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
    moved[id(tensor)] = tensor, fake  # which keeps the id
    return fake


def _fake_module(
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


def _mapped(move: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return nested arguments with each tensor moved."""
    match value:
        case torch.Tensor():
            return move(value)
        case tuple() | list():
            return type(value)(_mapped(move, part) for part in value)
        case dict():
            return {key: _mapped(move, part) for key, part in value.items()}
        case _:
            return value


# -- what it is called with, as data ---------------------------------------------------------------


def _describe(
    fn: Callable[..., Any],
    fake: Callable[..., Any],
    given: tuple[list[Any], dict[str, Any]],
    result: Any,
    seen: _Seen,
    sizes: Mapping[int, tuple[str | None, ...]],
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return how the graph is called, as ``runtime.model.read_calling`` reads it.

    Also the values of buffers that no ``state_dict`` has, by name.
    """
    taken = seen.parts[0].arguments[: len(seen.given)]
    specs = {id(argument): spec for argument, spec in zip(seen.given, taken, strict=True)}
    tensors: list[tuple[str, torch.Tensor]] = []

    def leaf(tensor: torch.Tensor, path: str) -> trees.Tree:
        tensors.append((path, tensor))
        return {"tensor": len(tensors) - 1}

    arguments = [
        {"name": name, "by": by, "tree": trees.describe(value, name, leaf)}
        for name, by, value in _arguments(fn, *given)
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
    """Return what a tensor is that the graph does not take."""
    dtype, extents, strides = spec_of(tensor)
    if not any(names):
        return dtype, extents, strides
    shape = [name or extent for name, extent in zip(names, extents, strict=True)]
    dense = [("*", 1, 1, *shape[axis + 1 :]) for axis in range(len(shape))]
    return dtype, tuple(shape), tuple(dense)


def _taken(positions: Mapping[int, int], seen: _Seen, k: int, spec: Spec) -> Any:
    """Return what the graph's argument is: a size, a position, or None if nothing reads it."""
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


def _arguments(
    fn: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
) -> list[tuple[str, str, Any]]:
    """Return (name, how it may be given, value) of each argument.

    Raises:
        UsageError: if they do not fit the signature.
    """
    parameters = signature_of(fn)
    if not parameters:
        return [(f"argument {k}", "order", value) for k, value in enumerate(args)]
    try:
        bound = inspect.Signature(list(parameters.values())).bind(*args, **named)
    except TypeError as error:
        raise UsageError(f"the inputs do not fit ({', '.join(parameters)}): {error}.") from error
    found: list[tuple[str, str, Any]] = []
    for name, value in bound.arguments.items():
        by = _BY[parameters[name].kind]
        match parameters[name].kind:
            case inspect.Parameter.VAR_POSITIONAL:
                found += [(f"{name}[{k}]", by, part) for k, part in enumerate(value)]
            case inspect.Parameter.VAR_KEYWORD:
                found += [(key, by, part) for key, part in value.items()]
            case _:
                found.append((name, by, value))
    return found


def _weights(
    fn: Callable[..., Any], fake: Callable[..., Any], seen: _Seen
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
        if id(tensor) in fixed:  # exchanged, it would not be what was frozen
            own = [f"frozen {own[0]}"]
        kept = not any(name in saved for name in own)
        if kept:
            held[f"{HELD}{own[0]}"] = _content(own[0], value)
        parameter = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        row = {"names": own, "spec": spec_of(tensor), "parameter": parameter, "held": kept}
        rows.append((tensor, row))
    return rows, held


def _frozen(
    fn: Callable[..., Any], fake: Callable[..., Any], seen: _Seen
) -> list[tuple[dict[str, Any], bytes]]:
    """Return what was computed once, of the weights as they are: rows of weights, and values."""
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
    """Return a tensor's elements."""
    if isinstance(tensor, FakeTensor):
        raise UsageError(
            f"{name} is in no state_dict, so that the archive holds its value, and the model was "
            "built without memory: give --with-weights."
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""
