"""Divide a step's time: each launch with its time, bytes, floor and modelled time, and the rest.

A launch is a kernel of fusec's or an eager kernel in a graph of fusec's. The time outside of
launches has rows of its own: the Python between launches of a graph, the optimizer, and all else
(Python, guards, autograd, what is not compiled). Seconds are means over the middle half of the
steps by duration, so that rows add up to the step, which medians of each row would not.

The floor is the least time by the machine's measured rates (``ceilings.py``), the predicted time is
that of fusion's cost model, which eager kernels other than products do not have.

The JSON form, schema 1, is stable: fields are added, never renamed or removed::

    {"schema": 1, "what", "device", "threads", "steps", "step_seconds",
     "copy_bytes_per_second": {bytes: rate}, "multiply_adds_per_second": {type: rate},
     "launches": [{"graph", "name", "where", "layers", "computes", "eager", "source": [line],
                   "calls", "seconds", "bytes", "multiplied": {type: n},
                   "floor_seconds", "predicted_seconds"}],
     "rest": [{"name", "seconds"}]}

``calls``, seconds, ``bytes`` and ``multiplied`` are those of one step.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from fusec.errors import UsageError
from fusec.ir.names import operation_words
from fusec.tools.clock import COLLECTION, Lap
from fusec.tools.report.arguments import Arguments, Given
from fusec.tools.report.ceilings import Ceilings
from fusec.tools.report.layers import Layers
from fusec.tools.report.steps import OPTIMIZER, Steps
from fusec.tools.report.watching import watch
from fusec.tools.summary import ExternSummary, GraphSummary, KernelSummary
from fusec.torch_interior import tensors_in

SCHEMA = 1
ELSEWHERE = "Python, guards, autograd, and what is not compiled"
_MODEL = "(the model itself)"
_SPARE = 12
"""Further steps, which do not count: they compile, warm up, or are traced."""


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch of a graph, with the sums of all of its calls in a step.

    Attributes:
        name: of the launch in its graph: "k3", or the node of an eager kernel.
        where: the module, "h.3.ln_2", or "h.3.ln_2 backward"; "" for the model itself.
        layers: the same with repeated layers as one: "h.*.ln_2".
        computes: "add + layer_norm"; "mm, eager" of an eager kernel.
        source: the user's lines.
        predicted_seconds: None where the cost model has no time.
    """

    graph: str
    name: str
    where: str
    layers: str
    computes: str
    eager: bool
    source: tuple[str, ...]
    calls: float
    seconds: float
    bytes: float
    multiplied: Mapping[str, float]
    floor_seconds: float
    predicted_seconds: float | None


@dataclass(frozen=True, slots=True)
class Rest:
    """A part of a step outside of launches."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of a table: the sums of all launches of one kernel, module or line."""

    name: str
    seconds: float
    calls: float = 0.0
    bytes: float = 0.0
    floor_seconds: float = 0.0
    predicted_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """The report of ``fusec profile``.

    Attributes:
        steps: their number, of which the middle half counts.
        cold: only a step that warms up was seen.
    """

    what: str
    device: str
    threads: int
    steps: int
    step_seconds: float
    launches: tuple[Launched, ...]
    rest: tuple[Rest, ...]
    copies: Mapping[int, float] = field(default_factory=dict)
    products: Mapping[str, float] = field(default_factory=dict)
    cold: bool = False

    def by_kernel(self) -> list[Entry]:
        """Return the sums by module and content, those of repeated layers together."""
        return _added((_title(one), one, 1.0) for one in self.launches)

    def by_module(self) -> list[Entry]:
        """Return the sums by module, those of repeated layers together; a backward's are apart."""
        return _added((one.layers or _MODEL, one, 1.0) for one in self.launches)

    def by_line(self) -> list[Entry]:
        """Return the sums by the user's line; a launch of several counts in equal parts."""
        return _added(
            (line, one, 1 / len(one.source or ("",)))
            for one in self.launches
            for line in one.source or ("(no line)",)
        )

    def to_json(self, indent: int | None = 2) -> str:
        """Return the JSON form; the module's docstring has its schema."""
        document = {"schema": SCHEMA, **asdict(self)}
        document["copy_bytes_per_second"] = document.pop("copies")
        document["multiply_adds_per_second"] = document.pop("products")
        return json.dumps(document, indent=indent)


VIEWS: Mapping[str, Callable[[Profile], list[Entry]]] = {
    "kernel": Profile.by_kernel,
    "module": Profile.by_module,
    "line": Profile.by_line,
}
"""The views of a profile: what its rows are."""


def _title(one: Launched) -> str:
    return f"{one.layers}: {one.computes}" if one.layers else one.computes


def _added(rows: Iterable[tuple[str, Launched, float]]) -> list[Entry]:
    """Return the sum of the rows of each name, weighted by their shares, the slowest first."""
    found: dict[str, list[tuple[Launched, float]]] = {}
    for name, one, share in rows:
        found.setdefault(name, []).append((one, share))
    entries = [_entry(name, alike) for name, alike in found.items()]
    return sorted(entries, key=lambda entry: -entry.seconds)


def _entry(name: str, alike: Sequence[tuple[Launched, float]]) -> Entry:
    modelled = [share * one.predicted_seconds for one, share in alike if one.predicted_seconds]
    return Entry(
        name,
        sum(share * one.seconds for one, share in alike),
        sum(share * one.calls for one, share in alike),
        sum(share * one.bytes for one, share in alike),
        sum(share * one.floor_seconds for one, share in alike),
        sum(modelled) if len(modelled) == len(alike) else None,
    )


# -- from laps to a profile ------------------------------------------------------------------------


def profile_of(
    what: str, device: torch.device, graphs: Sequence[GraphSummary], steps: Steps
) -> Profile:
    """Return the profile of a program's steps.

    Args:
        graphs: all that were compiled.
    Raises:
        UsageError: if nothing of fusec's ran twice.
    """
    laps = list(steps.laps) or ([steps.cold] if steps.cold else [])
    if not (laps and graphs):
        raise UsageError(
            f"{what} has no step to profile: nothing is compiled, or what is runs once. "
            "(--all compiles every model that a script calls.)"
        )
    middle = _middle(laps)
    step = statistics.fmean(lap.seconds for lap in middle)
    ceilings = Ceilings(device)
    layers = Layers.of(*(graph.modules for graph in graphs))
    launches = tuple(one for g in graphs for one in _launches(g, layers, middle, ceilings))
    rest = tuple(_rest(graphs, middle, step, sum(one.seconds for one in launches)))
    threads = torch.get_num_threads()
    rates = dict(sorted(ceilings.copies.items())), ceilings.products
    cold = not steps.laps
    return Profile(what, str(device), threads, len(laps), step, launches, rest, *rates, cold)


def _launches(
    graph: GraphSummary, layers: Layers, laps: Sequence[Lap], ceilings: Ceilings
) -> Iterator[Launched]:
    """Yield the launches of a graph in a step."""
    again = " backward" * graph.name.startswith("backward")
    launches: tuple[KernelSummary | ExternSummary, ...] = (*graph.kernels, *graph.externs)
    for one in launches:
        calls, seconds = _mean((graph.id, one.name), laps)
        if not calls:
            continue
        floor = ceilings.floor_seconds(one.bytes, dict(one.multiplied))
        yield Launched(
            graph.id,
            one.name,
            f"{one.module}{again}".strip(),
            f"{layers.folded(one.module)}{again}".strip(),
            _computes(one),
            isinstance(one, ExternSummary),
            one.source,
            calls,
            seconds,
            one.bytes * calls,
            {dtype: n * calls for dtype, n in one.multiplied.items()},
            floor * calls,
            None if one.us is None else one.us * calls / 1e6,
        )


def _computes(one: KernelSummary | ExternSummary) -> str:
    if isinstance(one, KernelSummary):
        return one.computes
    return f"{operation_words((one.op,))[0]}, eager"


def _middle(laps: Sequence[Lap]) -> list[Lap]:
    """Return laps without the fastest and the slowest quarter."""
    ranked = sorted(laps, key=lambda lap: lap.seconds)
    quarter = len(laps) // 4
    return ranked[quarter : len(laps) - quarter]


def _mean(key: tuple[str, str], laps: Sequence[Lap]) -> tuple[float, float]:
    """Return the calls and seconds of a launch in a step."""
    spent = [lap.spent.get(key, (0, 0.0)) for lap in laps]
    return statistics.fmean(n for n, _ in spent), statistics.fmean(s for _, s in spent)


def _rest(
    graphs: Sequence[GraphSummary], laps: Sequence[Lap], step: float, launched: float
) -> Iterator[Rest]:
    """Yield the parts of a step outside of launches."""
    left = step - launched
    whole = sum(_mean((graph.id, ""), laps)[1] for graph in graphs)
    between = min(max(whole - launched, 0.0), max(left, 0.0))
    optimizer = min(_mean(OPTIMIZER, laps)[1], max(left - between, 0.0))
    collected = min(_mean(COLLECTION, laps)[1], max(left - between - optimizer, 0.0))
    yield Rest("between launches of a graph: Python, memory", between)
    if optimizer:
        yield Rest("the optimizer's step", optimizer)
    if collected:
        yield Rest("Python's collections of garbage", collected)
    yield Rest(ELSEWHERE, left - between - optimizer - collected)


# -- a model of the command line -------------------------------------------------------------------


def profile_model(
    what: str,
    fn: Callable[..., Any],
    inputs: Given,
    steps: int,
    *,
    train: bool,
    dynamic: bool,
    options: Mapping[str, Any],
    found: Callable[[Any], Steps],
) -> Profile:
    """Run a module or function some times, and return where a step's time goes.

    A step is a call; in training it is a forward and a backward, from scalars among the results
    (a loss) if there are some, otherwise from all of them with gradients of ones.

    Args:
        found: makes the ``Steps``, which record the ends of steps, from the clock.
    Raises:
        UsageError: if nothing is compiled.
    """
    compiled = torch.compile(fn, backend="fusec", dynamic=dynamic, options=dict(options))
    args = Arguments.of(inputs).mapped(partial(_input, train=train))
    held = tensors_in(list(args))
    held += fn.parameters() if isinstance(fn, torch.nn.Module) else []
    device = held[0].device if held else torch.device("cpu")
    with watch(what) as watched, torch.set_grad_enabled(train):
        ended = found(watched.clock)
        watched.clock.lap()
        for number in range(steps + _SPARE):
            output = args.call(compiled)
            if train:
                _backward(output)
                for tensor in held:
                    tensor.grad = None
            del output
            ended.end()
            if len(ended.laps) == steps or not (number or watched.seen.graphs):
                break
        ended.close()
    graphs = [graph.summary for graph in watched.seen.graphs]
    return profile_of(what, device, graphs, ended)


def _input(value: Any, train: bool) -> Any:
    if train and isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


def _backward(output: Any) -> None:
    wanted = [v for v in tensors_in(output) if v.requires_grad]
    wanted = [v for v in wanted if v.dim() == 0] or wanted
    torch.autograd.backward(wanted, [torch.ones_like(v) for v in wanted])
