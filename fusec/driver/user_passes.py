"""Passes of the user: functions over index notation that run as stages, right behind ``capture``.

A function is registered under a name, and ``options={"passes": "name, another"}`` says which of
them a compile runs, in this order. Worked example::

    @fusec.register_pass("no_clamp", version="1")
    def no_clamp(graph: Graph) -> Graph:
        return graph.map(lambda roots: rewrite(roots, without_clamp))

What a pass returns is always verified, and has to take and return the same tensors as what it was
given. The version, which its author declares, is part of each cache key; without one nothing that
the pass had a part in is kept.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fusec.driver.context import CompileContext
from fusec.driver.stages import all_stages
from fusec.errors import InvalidIR, PassError, StageError, UsageError, describe_frame
from fusec.ir.argument import OwnTensor, View, argument_indices
from fusec.ir.definition import by_name, sizes_in
from fusec.ir.expr import Buffer
from fusec.ir.graph import Graph
from fusec.ir.index import Size
from fusec.ir.text import print_type
from fusec.ir.verify import verify_graph
from fusec.options import Options
from fusec.passes.stage import ASSEMBLY, LEVELS, Stage

_Function = TypeVar("_Function", bound=Callable[[Graph], Graph])


@dataclass(frozen=True, slots=True)
class UserPass:
    """A registered function.

    Attributes:
        version: changes whenever the function does other than before; None: nobody knows.
    """

    name: str
    function: Callable[[Graph], Graph]
    version: str | None

    @property
    def origin(self) -> tuple[str, str, str]:
        """Name, module and file of the function: what is defined again is the same pass."""
        code = getattr(self.function, "__code__", None)
        kind = type(self.function)
        name = getattr(self.function, "__qualname__", kind.__qualname__)
        module = getattr(self.function, "__module__", kind.__module__)
        return name, str(module), getattr(code, "co_filename", "")


REGISTERED: dict[str, UserPass] = {}
"""All passes of this process, by name."""


def register_pass(name: str, *, version: str | None = None) -> Callable[[_Function], _Function]:
    """Register the decorated function, from ``Graph`` to ``Graph``, as a pass of this name.

    Compiles whose options name it, ``options={"passes": "name"}``, run it behind ``capture``, as a
    stage of this name. A function that is defined again, as a cell of a notebook, replaces itself.

    Args:
        version: a text that changes whenever the function does other than before. It is part of
            the cache's keys; without it, graphs that are compiled with the pass are not cached.
    Raises:
        UsageError: for a name that is none or is taken, and for what cannot be called with a graph.
    """
    _check_name(name)
    if not isinstance(version, str | None):
        raise UsageError(f"pass {name!r}: version {version!r} is no text; give one, as '1'.")

    def register(function: _Function) -> _Function:
        _check_callable(name, function)
        made = UserPass(name, function, version)
        known = REGISTERED.get(name)
        if known is not None and not _is_same(known, made):
            raise UsageError(
                f"pass {name!r} is registered already, by {_described(known)}: choose another name "
                f"for {_described(made)}."
            )
        REGISTERED[name] = made
        return function

    return register


def chosen_passes(options: Options) -> tuple[UserPass, ...]:
    """Return the passes that options name, in order.

    Raises:
        UsageError: for a name that is not registered, or stands twice.
    """
    names = options.pass_names
    for name in names:
        if name not in REGISTERED and REGISTERED:
            raise UsageError.unknown("pass", name, REGISTERED)
        if name not in REGISTERED:
            raise UsageError(
                f"unknown pass {name!r}: none is registered. Import the module that calls "
                f"fusec.register_pass({name!r}) before the model is compiled."
            )
        if names.count(name) > 1:
            raise UsageError(f"option 'passes': {name!r} stands twice; a compile runs it once.")
    return tuple(REGISTERED[name] for name in names)


def stages_of(options: Options) -> tuple[Stage, ...]:
    """Return the stages that run the passes which options name."""
    return tuple(
        Stage(one.name, f"a pass of the user: {_described(one)}", _running(one), "Graph", "Graph")
        for one in chosen_passes(options)
    )


def versions_of(options: Options) -> str:
    """Return the versions of the passes that options name, for cache keys."""
    return ",".join(f"{one.name}={one.version!r}" for one in chosen_passes(options))


def may_be_cached(options: Options) -> bool:
    """Return True if each pass says which version it is: else what it does may have changed."""
    return all(one.version is not None for one in chosen_passes(options))


# -- a run of a pass -------------------------------------------------------------------------------


def _running(one: UserPass) -> Callable[[Graph, CompileContext], Graph]:
    """Return the ``run`` of a pass's stage."""

    def run(graph: Graph, context: CompileContext) -> Graph:
        context.trace.passes[one.name] = 0
        try:
            made: Any = one.function(graph)
        except Exception as problem:
            place = describe_frame(problem)
            text = problem.args[0] if isinstance(problem, StageError) else problem
            said = f"raised {type(problem).__name__}: {text}{f', at {place}' if place else ''}"
            # With its frames: from these it is told which line of the graph was at hand.
            raise PassError(one.name, said).with_traceback(problem.__traceback__) from problem
        checked = _checked(one.name, graph, made)
        before = frozenset(graph.nodes)
        context.trace.passes[one.name] = sum(line not in before for line in checked.nodes)
        return checked

    return run


def _checked(name: str, graph: Graph, made: Any) -> Graph:
    """Return what a pass has returned.

    Raises:
        PassError: if it is no legal graph, or takes, returns or writes other than the one before.
    """
    if not isinstance(made, Graph):
        kind = "None" if made is None else f"an object of type {type(made).__name__}"
        raise PassError(
            name, f"returned {kind}: return a Graph, the given one where there is nothing to do"
        )
    if made is graph:  # as in most graphs of a program
        return made
    try:
        verify_graph(made)
    except InvalidIR as error:
        raise PassError(name, f"returned a graph that is not legal: {error.args[0]}") from None
    except Exception as error:  # parts of it are no parts of a graph
        said = f"{type(error).__name__}: {error}"
        raise PassError(name, f"returned a graph that cannot be read: {said}") from error
    names = Counter(b.name for line in made.nodes for b in line.writes)
    names.update(item.name for item in made.inputs if isinstance(item, Buffer))
    problem = (
        _other_inputs(graph, made)
        or _other_results(graph, made)
        or _other_effects(graph, made)
        or _unknown_sizes(graph, made)
        or next((f"two buffers named {n!r}" for n, count in names.items() if count > 1), "")
    )
    if problem:
        raise PassError(name, f"returned a graph with {problem}")
    return made


def _other_inputs(graph: Graph, made: Graph) -> str:
    if len(made.inputs) != len(graph.inputs):
        return f"{len(made.inputs)} inputs of {len(graph.inputs)}: make it by replace(graph, ...)"
    pairs = zip(graph.inputs, made.inputs, strict=True)
    other = [getattr(given, "name", "None") for given, now in pairs if given is not now]
    return f"another object for the input {other[0]!r}: inputs stay as they are" if other else ""


def _other_results(graph: Graph, made: Graph) -> str:
    """Return which result has another type, layout or memory, or ""."""
    if len(made.outputs) != len(graph.outputs):
        return f"{len(made.outputs)} results of {len(graph.outputs)}"
    before, now = _Results(graph), _Results(made)
    for k, (given, new) in enumerate(zip(graph.outputs, made.outputs, strict=True)):
        one, other = before.described(given), now.described(new)
        if one == other:
            continue
        types = _type(given), _type(new)
        if types[0] != types[1]:
            return f"result {k} of type {types[1]}, where it was {types[0]}"
        return f"result {k} in other memory: it shares that with an input, or another result"
    return ""


def _type(argument: Any) -> str:
    match argument:
        case View(buffer=buffer, form=form):
            return print_type(Buffer("", argument.shape, argument.strides, buffer.dtype, form))
        case OwnTensor():
            return _type(argument.view)
        case _:
            return repr(argument)


class _Results:
    """The results of a graph as its caller sees them, whatever the buffers behind them."""

    def __init__(self, graph: Graph) -> None:
        buffers = (item for item in graph.inputs if isinstance(item, Buffer))
        self.places: dict[Buffer, Any] = {buffer: f"input {buffer}" for buffer in buffers}

    def described(self, argument: Any) -> Any:
        """Return a result's type, window and memory: an input, or the number of a new buffer."""
        match argument:
            case View(buffer=buffer):
                place = self.places.setdefault(buffer.base, len(self.places))
                window = argument.shape, argument.strides, argument.offset, argument.form
                return (place, buffer.dtype, *window)
            case OwnTensor():
                return self.described(argument.view), argument.detached, argument.number
            case tuple():
                return tuple(map(self.described, argument))
            case _:
                return argument


def _other_effects(graph: Graph, made: Graph) -> str:
    """Return which call that writes, or talks to other ranks, is missing or moved, or ""."""
    before, now = (
        [(line.node, line.target, line.written and line.written.buffer) for line in one.externs
         if line.impure]
        for one in (graph, made)
    )  # fmt: skip
    if before == now:
        return _other_calls(graph, made)
    lost = [call for call in before if call not in now]
    what = f"no call of {lost[0][1]}" if lost else "other calls that have effects"
    return f"{what}: these stay, in their order"


def _other_calls(graph: Graph, made: Graph) -> str:
    """Return which eager kernel or constant is none of the program's nodes, or ""."""
    new = [target for node, target in made.called.items() if node not in graph.called]
    return f"a call of {new[0]} that no node of the program makes" if new else ""


def _unknown_sizes(graph: Graph, made: Graph) -> str:
    """Return which symbolic size is needed though no input and no line has it any more, or ""."""

    def unknown(one: Graph) -> set[Size]:
        needed = sizes_in(i for arg in one.outputs for i in argument_indices(arg))
        return needed.union(*(line.sizes for line in one.nodes)).difference(one.sizes)

    lost = by_name(unknown(made) - unknown(graph))
    return f"the size {lost[0].name}, which no input and no line defines" if lost else ""


# -- what is registered ----------------------------------------------------------------------------


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise UsageError(
            f"{getattr(name, '__qualname__', name)!r} is no name: write "
            "@fusec.register_pass('a_name') above the function."
        )
    if not name.isidentifier():
        raise UsageError(f"{name!r} is no name of a pass: letters, digits and _ make one.")
    if name in (*LEVELS, *ASSEMBLY, *(stage.name for stage in all_stages())):
        raise UsageError(f"{name!r} is the name of a stage of fusec's own: choose another one.")


def _check_callable(name: str, function: Any) -> None:
    if not callable(function):
        raise UsageError(
            f"pass {name!r}: {function!r} is no function; a pass takes a Graph and returns one."
        )
    try:
        inspect.signature(function).bind(None)
    except TypeError as problem:
        raise UsageError(
            f"pass {name!r}: {_described(UserPass(name, function, None))}"
            f"{inspect.signature(function)} cannot be called with a graph alone: {problem}."
        ) from None
    except ValueError:  # a callable without a signature
        return


def _is_same(one: UserPass, other: UserPass) -> bool:
    (name, module, file), (again, here, there) = one.origin, other.origin
    return one.function is other.function or (
        name == again and (module == here or file == there != "")
    )


def _described(one: UserPass) -> str:
    name, module, _ = one.origin
    return f"{module}.{name}"
