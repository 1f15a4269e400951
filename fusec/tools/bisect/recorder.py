"""The backend under which ``fusec bisect`` runs a program: it logs events as they happen.

It compiles as ``fusec`` does, strictly. Events go to a file one by one, so that the last one tells
where the process was when it died. A fault of the wanted kind ends the program (``Enough``).

    WRONG   compare each kernel, and each graph, with eager (``tools/verify``)
    CRASH   catch an exception of a compile or a launch; the file's reader detects a signal
    SLOWER  time each graph and eager in turn, and each kernel; of the whole program, optimizer
            included, time the steps from one call of a graph to the next
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import fx

from fusec.driver.backend import compile_one_graph, context_of, splitting
from fusec.driver.blame import blame
from fusec.driver.compiler import RECENT
from fusec.driver.launches import graph_id
from fusec.errors import EnvironmentProblem, Unsupported, WrongGraph, WrongKernel
from fusec.frontend.aliasing.overlap import writes_to_shared_memory
from fusec.frontend.aot.only_eager import only_for_eager
from fusec.frontend.fx_passes.dynamo_graph import copied
from fusec.options import Options
from fusec.tools.bisect.excerpt import (
    Excerpt,
    Input,
    NotPlain,
    TensorType,
    from_graph,
    launch_slices,
    node_of,
    slice_of,
)
from fusec.tools.bisect.source import CRASH, SLOWER, WRONG, Fault, Finding, functions
from fusec.tools.bisect.trial import Outcome, outcome_of, silent
from fusec.tools.clock import Clock, clock_running, differentiated, time_in_turn
from fusec.tools.verify.kernels import copy_of
from fusec.torch_interior import (
    FakeTensor,
    TorchDynamoException,
    unset_fake_temporarily,
)

_ROUNDS = 15
_WARMUP, _LEAST_GAPS = 2, 3
"""The steps that are skipped, and the fewest that a step's time is taken from."""
_MOST_KERNELS = 24
"""The number of a graph's slowest kernels that are compared with eager."""

_KEPT_BYTES = 1 << 26
"""The most bytes of a graph's arguments that are saved beside the program that shows a fault."""


class Enough(BaseException):
    """Ends the user's program: the fault is found."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A graph that is about to be compiled.

    Attributes:
        number: 0, 1, ... in the order of compiles, of AOTAutograd's and Dynamo's graphs.
        name: "forward", "backward", "inference"; "Dynamo" for Dynamo's.
        excerpt: None for a graph that cannot be written in plain torch.
        options: that the user gave.
    """

    number: int
    name: str
    excerpt: Excerpt | None
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Called:
    """A compiled graph is about to run.

    Attributes:
        most: one more than the largest integer in its arguments.
        values: as in ``Culprit``; only of the last call, in a search for a crash.
    """

    number: int
    most: int
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ended:
    """A graph's compile, or a call of it, has ended."""

    number: int


@dataclass(frozen=True, slots=True)
class Culprit:
    """The graph at fault and, if known, its kernel.

    Attributes:
        finding: what is known of it.
        outcome: of a file that shows the fault.
        excerpts: that may show it, the smallest first.
        fault: as a file shows it, under the user's options.
        asked: graphs from which the options to try follow, where ``excerpts`` is empty.
        values: the tensors that the graph was called with, by name; empty if they are too large.
        passes: the user's passes that rewrote the graph, or failed; excerpts are without them.
    """

    finding: Finding
    outcome: Outcome
    excerpts: tuple[Excerpt, ...]
    fault: Fault
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    asked: tuple[Excerpt, ...] = ()
    passes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of a call of a graph, or of a kernel ("" is the graph).

    Attributes:
        library: the call in an eager kernel's place: "mkldnn._linear_pointwise.default".
    """

    graph: str
    kernel: str
    eager_us: float
    fusec_us: float
    excerpts: tuple[Excerpt, ...]
    options: Mapping[str, Any]
    library: str = ""

    @property
    def lost_us(self) -> float:
        """How much longer than eager a call takes."""
        return self.fusec_us - self.eager_us


@dataclass(frozen=True, slots=True)
class Stepped:
    """Microseconds of a step of the program, optimizer included: the lower quartile.

    A step is the time between two calls of the graph that is called most.
    """

    us: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A compile or a launch failed in a search for another kind of fault."""

    said: str


Event = Begun | Called | Ended | Culprit | Timing | Stepped | Failed


def read_events(file: Path) -> list[Event]:
    """Return the events that a process has written; the last call gets the values saved for it."""
    events = list(_read(file))
    calls = [place for place, event in enumerate(events) if isinstance(event, Called)]
    if calls and (kept := _values_file(file)).exists():
        call: Any = events[calls[-1]]
        events[calls[-1]] = replace(call, values=torch.load(kept))
    return events


def _read(file: Path) -> Iterator[Event]:
    with file.open("rb") as stream, suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(stream)


def _values_file(file: Path) -> Path:
    return file.with_suffix(".pt")


def pace(run: Callable[[Any], Any], file: Path, more: Mapping[str, Any] | None) -> None:
    """Run a program once more, silently, to time its steps and graphs.

    Args:
        more: options on top of the user's; None: nothing is compiled, graphs run eagerly.
    """
    recorder = Recorder(SLOWER, file, more=more)
    with silent():
        run(recorder.backend)
    recorder.finish()


def record(run: Callable[[Any], Any], kind: str, file: Path) -> None:
    """Run a program under the recorder; called in a separate process.

    Args:
        run: runs the user's program with a backend in fusec's place.
    """
    with clock_running() if kind == SLOWER else nullcontext() as clock:
        recorder = Recorder(kind, file, clock)
        try:
            run(recorder.backend)
        except Enough:
            return
        recorder.finish()


class Recorder:
    """The backend, and the log of its events."""

    def __init__(
        self,
        kind: str,
        file: Path,
        clock: Clock | None = None,
        more: Mapping[str, Any] | None = MappingProxyType({}),
    ) -> None:
        """Args: more: options on top of the user's; None: graphs run eagerly."""
        self._kind, self._file, self._clock, self._more = kind, file, clock, more
        self._calls: dict[int, list[float]] = {}
        self._numbers = itertools.count()
        self._graphs: list[tuple[Begun, fx.GraphModule, bytes, str]] = []

    def tell(self, event: Event) -> None:
        """Write an event to the file."""
        with self._file.open("ab") as stream:
            pickle.dump(event, stream)

    def backend(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile a graph of Dynamo, as ``fusec.backend.fusec`` does."""
        if only_for_eager(gm) or writes_to_shared_memory(gm):  # fusec leaves these to eager
            return gm.forward
        if self._more is None:
            return self._stepping(gm.forward, next(self._numbers))
        options = {**(options or {}), **self._more}
        given = dict(options) | ({"cudagraphs": True} if mode == "reduce-overhead" else {})
        chosen = replace(Options.from_compile(mode, options), **self._settings())
        if chosen.deterministic:
            given["deterministic"] = True  # torch's setting is none of an excerpt's
        if chosen.passes:
            given["passes"] = ""  # what shows without them is no fault of theirs
        dynamo = Begun(next(self._numbers), "Dynamo", _excerpt(gm, trains=_trains(gm)), given)
        eager, values = copied(gm), _values(gm, example_inputs)
        self.tell(dynamo)

        def compile_one(
            graph: fx.GraphModule, inputs: Sequence[Any], *, name: str
        ) -> Callable[..., Any]:
            return self._compile(graph, inputs, name, chosen, dynamo, values)

        context = context_of(example_inputs, chosen)
        try:
            compiled = splitting(compile_one, context).compile(gm, example_inputs)
        except (TorchDynamoException, Unsupported, EnvironmentProblem):
            raise  # for Dynamo to handle
        except Exception as error:
            self._failed(error, dynamo, None, values)
            raise
        self.tell(Ended(dynamo.number))
        if self._kind != SLOWER:
            return compiled
        return self._stepping(self._timed(eager, compiled, dynamo), dynamo.number)

    def _settings(self) -> dict[str, Any]:
        """Return the options that differ from the user's."""
        if self._kind != WRONG:
            return {"strict": True}
        return {"strict": True, "verify": True, "cudagraphs": False}

    # -- a graph of AOTAutograd --------------------------------------------------------------------

    def _compile(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        name: str,
        options: Options,
        dynamo: Begun,
        values: Mapping[str, torch.Tensor],
    ) -> Callable[..., Any]:
        graph = Begun(next(self._numbers), name, _excerpt(gm), dynamo.options)
        self.tell(graph)
        try:
            call = compile_one_graph(gm, inputs, name=name, options=options)
        except Exception as error:
            self._failed(error, graph, dynamo, values)
            raise
        self.tell(Ended(graph.number))
        trace = next(trace for trace in reversed(RECENT) if trace.name == name)
        self._graphs.append((graph, gm, trace.manifest, graph_id(name)))
        if self._kind == SLOWER:
            return call

        def run(args: list[Any]) -> Any:
            self.tell(Called(graph.number, _most(args)))
            given = [copy_of(arg) for arg in args] if self._kind == WRONG else []
            kept = self._keep(gm, args) if self._kind == CRASH else {}
            try:
                made = call(args)
            except (WrongKernel, WrongGraph) as error:
                self._wrong(error, gm, graph, dynamo, given)
            except Exception as error:
                self._failed(error, graph, dynamo, kept)
                raise
            self.tell(Ended(graph.number))
            return made

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _keep(self, gm: fx.GraphModule, args: Sequence[Any]) -> Mapping[str, torch.Tensor]:
        """Save the values of a call before it runs, as a signal leaves no time, and return them."""
        values = {name: copy_of(value) for name, value in _values(gm, args).items()}
        file = _values_file(self._file)
        torch.save(values, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)
        return values

    def _failed(
        self,
        error: Exception,
        graph: Begun,
        dynamo: Begun | None,
        values: Mapping[str, torch.Tensor],
    ) -> None:
        if isinstance(error, Unsupported | EnvironmentProblem):
            return
        if self._kind != CRASH:
            self.tell(Failed(f"graph {graph.name!r} fails: {type(error).__name__}: {error}"))
            raise Enough from error
        found, outcome = blame(error), outcome_of(error)
        excerpts = _all(graph.excerpt, None if dynamo is None else dynamo.excerpt)
        with unset_fake_temporarily():  # fake mode is on while a graph is compiled
            copies = {name: copy_of(value) for name, value in values.items()}
        said = f"{outcome.cause}: {outcome.said}"
        known = Finding(CRASH, graph.name, "", outcome.stage, found.op, found.line, said)
        fault, passes = Fault(CRASH, options=graph.options), RECENT[-1].passes if RECENT else ()
        self.tell(Culprit(known, outcome, excerpts, fault, copies, passes=tuple(passes)))
        raise Enough from error

    def _wrong(
        self,
        wrong: WrongKernel | WrongGraph,
        gm: fx.GraphModule,
        graph: Begun,
        dynamo: Begun,
        given: Sequence[Any],
    ) -> NoReturn:
        *_, op, seen, source = wrong.args
        kernel = ""
        own: Excerpt | None = None
        if isinstance(wrong, WrongKernel):
            kernel = wrong.args[0]
            with suppress(NotPlain):
                stored = [node_of(gm, held) for held in wrong.stored]
                own = slice_of(gm, [node_of(gm, wrong.held)], stored)
        line, fault = next(iter(source), ""), Fault(WRONG, options=graph.options)
        known = Finding(WRONG, graph.name, kernel, "", op, line, f"{op}: {seen}")
        excerpts, values = _all(own, graph.excerpt, dynamo.excerpt), _values(gm, given)
        self.tell(Culprit(known, Outcome(WRONG), excerpts, fault, values, passes=wrong.passes))
        raise Enough from wrong

    # -- times -------------------------------------------------------------------------------------

    def _timed(
        self, eager: fx.GraphModule, compiled: Callable[..., Any], graph: Begun
    ) -> Callable[..., Any]:
        first = True

        def run(*args: Any) -> Any:
            nonlocal first
            made = compiled(*args)
            if first:
                first = False
                calls = [differentiated(fn, [*map(_leaf, args)]) for fn in (compiled, eager)]
                time_in_turn(calls, 1)  # the backward is compiled, caches are warm
                self._forget_times()
                ours, theirs = time_in_turn(calls, _ROUNDS)
                excerpts = _all(graph.excerpt)
                self.tell(Timing("Dynamo", "", theirs, ours, excerpts, graph.options))
            return made

        return run

    def _stepping(self, call: Callable[..., Any], number: int) -> Callable[..., Any]:
        """Wrap a graph's callable so that the times of its calls are kept."""
        called = self._calls.setdefault(number, [])

        def run(*args: Any) -> Any:
            called.append(time.perf_counter())
            return call(*args)

        return run

    def _forget_times(self) -> None:
        spent = self._clock.spent.values() if self._clock is not None else ()
        for one in spent:
            one.calls, one.timed, one.seconds = 0, 0, 0.0

    def finish(self) -> None:
        """Log the step time, and compare the slowest kernels of the graphs with eager."""
        times = max(self._calls.values(), key=len, default=[])
        gaps = [after - before for before, after in itertools.pairwise(times)][_WARMUP:]
        if len(gaps) >= _LEAST_GAPS:
            quick = sorted(gaps)[len(gaps) // 4]  # other load on the machine only adds
            self.tell(Stepped(quick * 1e6))
        if self._clock is None:
            return
        for graph, gm, manifest, name in self._graphs:
            totals = self._clock.totals(name)
            spent = {launch: s / calls * 1e6 for launch, (calls, s) in totals.items()}
            found = sorted(launch_slices(gm, manifest), key=lambda row: -spent.get(row[0], 0.0))
            for launch, library, excerpt in found[:_MOST_KERNELS]:
                made = functions(excerpt)
                args = made["inputs"]()
                (theirs,) = time_in_turn([partial(made["f"], *args)], _ROUNDS)
                ours = spent.get(launch, 0.0)
                row = (graph.name, launch, theirs, ours, (excerpt,), graph.options, library)
                self.tell(Timing(*row))


def _leaf(arg: Any) -> Any:
    return copy_of(arg).requires_grad_(arg.requires_grad) if isinstance(arg, torch.Tensor) else arg


# -- graphs as excerpts ----------------------------------------------------------------------------


def _all(*excerpts: Excerpt | None) -> tuple[Excerpt, ...]:
    return tuple(excerpt for excerpt in excerpts if excerpt is not None)


def _excerpt(gm: fx.GraphModule, *, trains: bool = False) -> Excerpt | None:
    try:
        return from_graph(gm, trains=trains)
    except NotPlain:
        return None


def _trains(gm: fx.GraphModule) -> bool:
    values = (node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder"))
    grads = any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
    return grads and torch.is_grad_enabled()


def _values(gm: fx.GraphModule, given: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the tensors that a graph was called with, by name; none where they are too large."""
    nodes = gm.graph.find_nodes(op="placeholder")
    found = {
        n.name: v
        for n, v in zip(nodes, given, strict=True)
        if isinstance(v, torch.Tensor) and not isinstance(v, FakeTensor)
    }
    size = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    return found if size <= _KEPT_BYTES else {}


def _most(args: Sequence[Any]) -> int:
    """Return one more than the largest integer in the arguments."""
    integers = [a for a in args if isinstance(a, torch.Tensor) and _is_whole(a) and a.numel()]
    return max((int(arg.max()) + 1 for arg in integers), default=2)


def drawn_below(excerpt: Excerpt, most: int) -> Excerpt:
    """Return an excerpt whose int64 inputs are drawn below ``most``."""

    def below(given: Input) -> Input:
        whole = isinstance(given.type, TensorType) and given.type.dtype is torch.int64
        return replace(given, most=max(most, 1)) if whole else given

    return replace(excerpt, inputs=tuple(map(below, excerpt.inputs)))


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
