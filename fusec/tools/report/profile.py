"""Divide a step's time: each launch with its time, bytes, floor and modelled time, and the rest.

A launch is a kernel of fusec's or an eager kernel in a graph of fusec's. The time outside of
launches has rows of its own: the Python between launches of a graph, the optimizer, and all else
(Python, guards, autograd, what is not compiled). Seconds are means over the middle half of the
steps by duration, so that rows add up to the step, which medians of each row would not.

A step of a script ends with ``Optimizer.step`` of its first optimizer; where none runs, it begins
when the graph that was called first is called again. The latest steps are kept, each as one ``Lap``
of the clock, except those that warm up, compile something, or are traced.

The floor is the least time by the machine's peak rates, measured once a process: PyTorch's copy of
as many bytes (reads and writes together; a copy that stays in a CPU's cache is faster, so there is
one rate for each size, the next power of four, 1 MB at least), and its product of square matrices
of each type. The predicted time is that of fusion's cost model, which eager kernels other than
products do not have.

The JSON form, schema 1, is stable: fields are added, never renamed or removed::

    {"schema": 1, "what", "device", "threads", "steps", "step_seconds",
     "copy_bytes_per_second": {bytes: rate}, "multiply_adds_per_second": {type: rate},
     "launches": [{"graph", "name", "where", "layers", "computes", "eager", "source": [line],
                   "calls", "seconds", "bytes", "multiplied": {type: n},
                   "floor_seconds", "predicted_seconds"}],
     "rest": [{"name", "seconds"}], "cold": true if no step was warm}

``calls``, seconds, ``bytes`` and ``multiplied`` are those of one step.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import profile as torch_profile

from fusec.errors import UsageError
from fusec.tools.clock import COLLECTION, Clock, Lap, Spent
from fusec.tools.report.arguments import Arguments, Given, leaf_of
from fusec.tools.report.layers import Layers
from fusec.tools.report.watching import watch
from fusec.tools.summary import ExternSummary, GraphSummary
from fusec.tools.terminal import Report, alike, fitted_table, format_bytes, format_seconds
from fusec.torch_interior import tensors_in

# -- the rates of a machine ------------------------------------------------------------------------


_LEAST_BYTES, _MOST_BYTES = 1 << 20, {"cpu": 1 << 28, "cuda": 1 << 30}
_SIDE = {"cpu": 1024, "cuda": 8192}
_TIMES = 15
"""Runs of which the best counts."""
_BATCH = {"cpu": 1, "cuda": 10}
"""Calls of one run: a GPU's are asynchronous, and timed several at once."""
_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}


@dataclass(slots=True)
class Ceilings:
    """The rates of one device, each measured on first use.

    Attributes:
        copies: bytes -> bytes a second, reads and writes together.
        products: type -> multiply-adds a second.
    """

    device: torch.device
    copies: dict[int, float] = field(default_factory=dict)
    products: dict[str, float] = field(default_factory=dict)

    def floor_seconds(self, moved: int, multiplied: dict[str, int]) -> float:
        """Return the least time for so many bytes and multiply-adds: the longer of both."""
        copied = moved / self.copy_rate(moved) if moved else 0.0
        return max(copied, sum(n / self.product_rate(dtype) for dtype, n in multiplied.items()))

    def copy_rate(self, moved: int) -> float:
        """Return the bytes a second of a copy of about that size."""
        size = _LEAST_BYTES
        while size < min(moved, _MOST_BYTES[self.device.type]):
            size *= 4
        if size not in self.copies:
            source = torch.ones(size // 8, dtype=torch.float32, device=self.device)
            target = torch.empty_like(source)
            self.copies[size] = size / self._best(lambda: target.copy_(source))
        return self.copies[size]

    def product_rate(self, dtype: str) -> float:
        """Return the multiply-adds a second of a product of matrices of a type."""
        if dtype not in self.products:
            side = _SIDE[self.device.type]
            kind = _DTYPES.get(dtype, torch.float32)
            operand = torch.ones(side, side, dtype=kind, device=self.device)
            self.products[dtype] = side**3 / self._best(lambda: torch.mm(operand, operand))
        return self.products[dtype]

    def _best(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call, the best of several."""
        batch, best = _BATCH[self.device.type], float("inf")
        for _ in range(_TIMES):
            self._wait()
            start = time.perf_counter()
            for _ in range(batch):
                call()
            self._wait()
            best = min(best, (time.perf_counter() - start) / batch)
        return best

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# -- steps -----------------------------------------------------------------------------------------


WARMUP = 2
"""Steps that do not count, after everything is compiled."""
_KEPT = 64
_TRACED = 2
OPTIMIZER = ("", "optimizer.step")
"""The key of an optimizer's steps in a lap."""


class Steps:
    """The laps of a program's steps.

    Attributes:
        laps: the latest of those that count.
        cold: the latest warm-up step, in case no others follow.
        traced: whether a trace was written.
    """

    def __init__(self, clock: Clock, trace: Path | None = None) -> None:
        self.laps: deque[Lap] = deque(maxlen=_KEPT)
        self.cold: Lap | None = None
        self.traced = False
        self._clock, self._trace = clock, trace
        self._warm, self._left = 0, _TRACED
        self._profiler: Any = None
        self._first_graph = ""
        self._optimizer: object = None

    def end(self) -> None:
        """End a step."""
        lap = self._clock.lap()
        if lap.compiled or self._warm < WARMUP:
            self._warm += not lap.compiled
            self.cold = self.cold if lap.compiled else lap
        elif self._trace is not None:
            self._record(self._trace)
        else:
            self.laps.append(lap)

    def _record(self, file: Path) -> None:
        """Run a profiler for some steps, which do not count."""
        if self._profiler is None:
            self._profiler = torch_profile()
            self._profiler.start()
        elif self._left > 1:
            self._left -= 1
        else:
            self.close()
            self._profiler.export_chrome_trace(str(file))
            self.traced, self._trace = True, None
            self._clock.lap()

    def close(self) -> None:
        """Stop the profiler, if it runs."""
        if self._profiler is not None and self._trace is not None:
            self._profiler.stop()

    @contextmanager
    def found_in_a_script(self) -> Iterator[None]:
        """Find the steps of a script that runs in a block."""
        started = [0.0]

        def before(*_: object) -> None:
            started[0] = time.perf_counter()

        def after(optimizer: object, *_: object) -> None:
            spent = self._clock.spent.setdefault(OPTIMIZER, Spent())
            spent.seconds += time.perf_counter() - started[0]
            spent.calls += 1
            spent.timed += 1
            if self._optimizer is None:
                self._optimizer = optimizer
                self.laps.clear()
            if optimizer is self._optimizer:
                self.end()

        hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
        self._clock.at_graph = self._begins
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._clock.at_graph = lambda graph: None
            self.close()

    def _begins(self, graph: str) -> None:
        """End a step if the first graph is called; it includes recompiles for other sizes."""
        name = graph.partition("/")[0]
        self._first_graph = self._first_graph or name
        if name == self._first_graph and self._optimizer is None:
            self.end()


# -- a profile -------------------------------------------------------------------------------------


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
class Profile(Report):
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

    def to_dict(self) -> dict[str, Any]:
        document = asdict(self)
        document["copy_bytes_per_second"] = document.pop("copies")
        document["multiply_adds_per_second"] = document.pop("products")
        return document

    def text(self, *, whole: bool = False) -> str:
        return profile_page(self)


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
    entries = [
        _entry(some[0][0], [(one, share) for _, one, share in some])
        for some in alike(rows, lambda row: row[0])
    ]
    return sorted(entries, key=lambda entry: -entry.seconds)


def _entry(name: str, rows: Sequence[tuple[Launched, float]]) -> Entry:
    modelled = [share * one.predicted_seconds for one, share in rows if one.predicted_seconds]
    return Entry(
        name,
        sum(share * one.seconds for one, share in rows),
        sum(share * one.calls for one, share in rows),
        sum(share * one.bytes for one, share in rows),
        sum(share * one.floor_seconds for one, share in rows),
        sum(modelled) if len(modelled) == len(rows) else None,
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
    for one in graph.launches:
        calls, seconds = _mean((graph.id, one.name), laps)
        if not calls:
            continue
        floor = ceilings.floor_seconds(one.bytes, dict(one.multiplied))
        yield Launched(
            graph.id,
            one.name,
            f"{one.module}{again}".strip(),
            f"{layers.folded(one.module)}{again}".strip(),
            one.computes,
            isinstance(one, ExternSummary),
            one.source,
            calls,
            seconds,
            one.bytes * calls,
            {dtype: n * calls for dtype, n in one.multiplied.items()},
            floor * calls,
            None if one.us is None else one.us * calls / 1e6,
        )


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
    args = Arguments.of(inputs).mapped(partial(leaf_of, train=train))
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


def _backward(output: Any) -> None:
    wanted = [v for v in tensors_in(output) if v.requires_grad]
    wanted = [v for v in wanted if v.dim() == 0] or wanted
    torch.autograd.backward(wanted, [torch.ones_like(v) for v in wanted])


# -- its text --------------------------------------------------------------------------------------


_ROWS = 24
"""Rows of the table; the JSON form has all."""
_HEADER = ("time", "step", "calls", "bytes", "floor", "predicted", "")
_TITLES = {"kernel": "kernels", "module": "modules", "line": "lines"}


def profile_page(profile: Profile, by: str = "kernel") -> str:
    """Return a profile as text, one row for each kernel, module or line of the user's."""
    entries = VIEWS[by](profile)
    shown, more = entries[:_ROWS], entries[_ROWS:]
    rows = [_HEADER, *(_row(entry, profile.step_seconds) for entry in shown)]
    if more:
        others = Entry(f"{len(more)} more, which --json lists", sum(e.seconds for e in more))
        rows.append(_row(others, profile.step_seconds))
    rows += [_row(Entry(r.name, r.seconds), profile.step_seconds) for r in profile.rest]
    rows.append(_row(Entry("the step", profile.step_seconds), profile.step_seconds))
    table = fitted_table(rows, right=range(6), indent=2)
    return "\n".join([*_head(profile), "", f"{_TITLES[by]}, by time", *table, "", *_rates(profile)])


def _head(profile: Profile) -> list[str]:
    launched = sum(one.seconds for one in profile.launches)
    floor = sum(one.floor_seconds for one in profile.launches)
    of = "one step, not warm" if profile.cold else f"the mean of the middle half of {profile.steps}"
    threads = f", {profile.threads} thread{'s' * (profile.threads != 1)}"
    device = profile.device + threads * profile.device.startswith("cpu")
    calls = sum(one.calls for one in profile.launches)
    return [
        f"{profile.what} on {device}: {format_seconds(profile.step_seconds)} a step ({of})",
        f"{calls:.0f} launch{'es take' if calls != 1 else ' takes'} {format_seconds(launched)}, "
        f"of which their floor is {format_seconds(floor)}",
    ]


def _row(entry: Entry, step: float) -> tuple[str, ...]:
    measured = entry.calls > 0
    return (
        format_seconds(entry.seconds),
        f"{entry.seconds / step:.1%}",
        _times(entry.calls) if measured else "",
        format_bytes(round(entry.bytes)) if measured else "",
        f"{entry.floor_seconds / entry.seconds:.0%}" if measured and entry.seconds else "",
        "" if entry.predicted_seconds is None else format_seconds(entry.predicted_seconds),
        entry.name,
    )


def _times(calls: float) -> str:
    return f"{calls:.0f} x" if calls == int(calls) else f"{calls:.1f} x"


def _rates(profile: Profile) -> list[str]:
    """Return the rates that the floor was computed from."""
    copies = [f"{format_bytes(size)} at {rate / 1e9:.3g} GB/s"
              for size, rate in profile.copies.items()]  # fmt: skip
    products = [f"{dtype} at {2 * rate / 1e9:.3g} GFLOP/s"
                for dtype, rate in profile.products.items()]  # fmt: skip
    lines = ["floor: the share of the time that PyTorch's own copy of as many bytes, or product,"]
    lines.append("takes on this machine; predicted: its time by the cost model")
    return [*lines, *(f"  {', '.join(part)}" for part in (copies, products) if part)]
