"""The judges that measure: the ways to run a product are built and timed on the device.

``DeviceJudge``. A group (``passes/fusion/contract.py``) is a graph of its own. Its ways are the
library's calls with fused kernels around them, one kernel in each configuration that its schedule
offers, and the calls of another library that has all of its products. The race in
``runtime/race/autotune.py`` times them as wholes and checks what each computes; the verdict is kept
in the cache under the group's structure, the device and all versions.

``LibraryJudge``. A product that stays a call of a library may be called in another one: both are
timed on this machine's CPU, a long product on fewer rows and columns (``TIMED_PRODUCT``). The
verdict is kept under the product's types, shapes and strides, the processor, the threads and torch.

Symbolic sizes are timed at their hints, and a key has the classes of these (``size_class``). So a
batch of any size asks for a race once a class; what stands in a reason is the size that was timed.

``FormatJudge``. A convolution is timed with images that are contiguous and channels-last, a long
one on fewer images of its batch, in so many rounds whatever they take. Formats are decided at each
start, before a graph is looked up in the cache, so what was found is kept even if it is not
certain.

On a CPU it is counted what a graph races for, so that the same graph makes the same choices at each
start: no product that is a small part of the graph (``passes/fusion/libraries.py``), a few groups,
the convolutions that matter most (``frontend/fx_passes/memory_formats.py``). Time is left for all
of them, but on a busy machine. Where it is spent, or nothing could be timed, the cost model
decides. The ranks of a process group agree on each verdict (``runtime/race/ranks.py``), on that
none was found, too.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from filelock import FileLock, Timeout
from torch import Tensor, fx

from fusec.driver.pipeline import Compiled, flat_kernels, generate
from fusec.driver.stages import CompileContext, offered_plans
from fusec.frontend.fx_passes.channels_last import images_of
from fusec.frontend.fx_passes.fx_nodes import hint_of
from fusec.frontend.fx_passes.memory_formats import Gain
from fusec.frontend.fx_passes.packing import (
    PACKS,
    convolve_packed,
    linear_packs,
    packed_weight,
    panels_of,
)
from fusec.frontend.shapes import to_torch_dtype
from fusec.ir.dtype import DType
from fusec.ir.expr import Buffer
from fusec.ir.graph import Argument, Extern, Graph, Kernel, Schedule, View
from fusec.ir.index import Index, Size, index
from fusec.passes.fusion.contract import Choice, FuseGraph, Group, decompose_calls, judge_by_model
from fusec.passes.fusion.libraries import (
    ATEN,
    Answer,
    Chooser,
    choose_libraries,
    describe_call,
    extents,
)
from fusec.runtime.cache.store import Cache, fingerprint
from fusec.runtime.race.autotune import Candidate, race
from fusec.runtime.race.ranks import Ranks
from fusec.runtime.race.rehearsal import TensorSpec
from fusec.runtime.race.stopwatch import warm_stopwatch
from fusec.runtime.race.verdicts import NO_TIME, CandidateTime, Verdict, load_verdict, store_verdict

logger = logging.getLogger("fusec.race")

LIBRARY, FUSED = "library", "fused #"
CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels-last"
TIMED_PRODUCT = 1 << 28
"""Multiply-adds of a product that is timed, some 4 ms: rows and columns are halved down to it. Of a
quarter of that, another library was fastest than of the whole in three of eight products (2026-11).
"""
TIMED_IMAGES = 1 << 26
"""Multiply-adds of a convolution that is timed: its batch is halved down to it."""
CLEAR = 2.0
"""How far apart the modelled times of a group's ways are where a CPU races for it no more."""
VARIES = 0.1
"""How much the reference's times may vary, beside their median, for a verdict to be kept."""
FORMAT_ROUNDS = 5
"""Rounds in which a convolution is timed: a network has tens of them."""
FEW = 4
"""Configurations of a kernel that a short race tries; a long one (``WIDE_S``) tries all, and one on
a CPU that nobody gave time tries the first."""
RACED_GROUPS = 4
"""Groups of a graph for which a CPU races that nobody gave time: the first. The model has others.
"""
WIDE_S = 120.0

Prepare: TypeAlias = Callable[[Compiled], Callable[[list[Any]], Sequence[Tensor]]]
"""Builds and loads what was generated, and returns its call."""


@dataclass(slots=True)
class Races:
    """The races of one graph: what they may take together, and where verdicts are kept.

    One process a machine races at a time: others would be measured with it.

    Attributes:
        left_s: seconds that are left for them.
        salt: names the device, and the versions of libraries, that times depend on.
        cache: where verdicts are kept; None for nowhere.
        ranks: with whom verdicts are shared; None for nobody.
        keeps_all: keep also what was not steady, or not measured for want of time.
    """

    device: torch.device
    left_s: float
    salt: str
    cache: Cache | None
    ranks: Ranks | None = None
    keeps_all: bool = False

    def verdict(self, key: str, reference: str, run: Callable[[float], Verdict]) -> Verdict:
        """Return the verdict under a key: another rank's, the cache's, or what ``run`` measures.

        One without times, for the reference, if the time of races is spent.
        """
        key = f"{self.salt} {key}"
        verdict = self.ranks.published(key) if self.ranks is not None else None
        if verdict is None:
            verdict = self._own(key, reference, run)
            if self.ranks is not None:
                verdict = self.ranks.agree(key, verdict)
        return verdict

    def _own(self, key: str, reference: str, run: Callable[[float], Verdict]) -> Verdict:
        verdict = load_verdict(self.cache, key) if self.cache is not None else None
        if verdict is not None:
            return verdict
        started = time.monotonic()
        try:
            with _lock(self.device).acquire(timeout=max(self.left_s, 0.0)):
                left = self.left_s - (time.monotonic() - started)
                verdict = run(left) if left > 0 else None
        except (Timeout, OSError):  # others race, or there is no place for a lock
            verdict = None
        self.left_s -= time.monotonic() - started
        if verdict is None:
            verdict = Verdict(
                reference, (CandidateTime(reference, dropped=NO_TIME),), exhausted=True
            )
        if self.cache is not None and (self.keeps_all or _is_kept(verdict, reference)):
            store_verdict(self.cache, key, verdict)
        return verdict


def _lock(device: torch.device) -> FileLock:
    """Return the lock of this user's races on a kind of device; a thread may take it again."""
    path = Path(tempfile.gettempdir()) / f"fusec-race-{os.getuid()}-{device.type}.lock"
    return FileLock(path, is_singleton=True)


def _is_kept(verdict: Verdict, reference: str) -> bool:
    """Return True for a verdict that a later compile may rely on: its reference ran steadily."""
    laps = {lap.name: lap for lap in verdict.laps}
    first = laps[reference]
    if not verdict.compared:
        return False
    if first.us is None or first.p20 is None or first.p80 is None:
        return not verdict.exhausted
    return first.p80 - first.p20 <= VARIES * first.us


class DeviceJudge:
    """Chooses between the ways of groups by racing them on a device.

    On a CPU a race is for what the model leaves open (``CLEAR``): a build takes half a second.

    Args:
        cut: the passes from a graph to kernels.
        context: of the compile; races leave no record.
        prepare: builds and loads what was generated.
    """

    def __init__(
        self, cut: FuseGraph, context: CompileContext, prepare: Prepare, races: Races
    ) -> None:
        self.cut = cut
        self.context = context
        self.options = context.options
        self.prepare = prepare
        self.races = races
        self.by_model = judge_by_model(cut, context.target.machine)
        self.wide = self.options.race_seconds(races.device.type) >= WIDE_S
        self.brief = races.device.type == "cpu" and self.options.race_budget_s is None
        self.groups = set[str]()

    def __call__(self, group: Group) -> Choice:
        """Return the way that won: on another rank, from the cache, or by a race."""
        modelled = functools.cache(lambda: self.by_model(group))
        if self.races.device.type == "cpu" and not self._is_worth(group, modelled):
            return modelled()
        forced = f"descriptors={self.options.descriptors} roles={self.options.roles}"
        key = f"{fingerprint()} {forced}\n{group.signature}"
        run = functools.partial(self.race, group)
        verdict = self.races.verdict(key, LIBRARY, run)
        pairs = zip(group.sizes, verdict.sizes, strict=False)
        return self.choice(verdict, modelled, ", ".join(f"{size}={n}" for size, n in pairs))

    def _is_worth(self, group: Group, modelled: Callable[[], Choice]) -> bool:
        """Return True for groups for which a CPU races; their number does not depend on time."""
        if not 1 / CLEAR < modelled().ratio < CLEAR:
            return False
        if self.brief and group.signature not in self.groups:
            if len(self.groups) == RACED_GROUPS:
                return False
            self.groups.add(group.signature)
        return True

    def choice(self, verdict: Verdict, modelled: Callable[[], Choice], at: str) -> Choice:
        """Return a verdict as the choice of a way, the model's where nothing was measured.

        Args:
            at: the sizes at which it was measured.
        """
        times = verdict.times
        library, best = times.get(LIBRARY), times.get(verdict.winner)
        if library is None or best is None or not verdict.compared:
            return modelled()
        fused = verdict.winner.startswith(FUSED)
        own = [us for name, us in times.items() if name.startswith(FUSED)]
        libraries = min(us for name, us in times.items() if not name.startswith(FUSED))
        rival = best if fused else min(own, default=libraries)
        configuration = int(verdict.winner.rpartition("#")[2]) if fused else 0
        return Choice(fused, configuration, _measured(verdict, at), libraries - rival)

    def race(self, group: Group, budget_s: float) -> Verdict:
        """Return what a race of the group's ways measured."""
        device = self.races.device
        verdict = race(
            self.candidates(group),
            functools.partial(random_inputs, group, device),
            reference=LIBRARY,
            budget_s=budget_s,
            device=device,
            timer=warm_stopwatch if device.type == "cpu" else None,
            quiet=device.type == "cpu",
        )
        return replace(verdict, sizes=tuple(size.hint for size in group.sizes))

    def candidates(self, group: Group) -> list[Candidate]:
        """Return the library's way, one for each configuration of the fused kernel, and others.

        Products that the library loses to a kernel another library may win.
        """
        separate = self.cut(group.graph)
        candidates = [Candidate(LIBRARY, functools.partial(self._prepare, separate))]
        fused = self.cut(decompose_calls(group.graph, group.decomposed))
        kernels = [step for step in fused.steps if isinstance(step, Kernel)]
        if len(kernels) < len(fused.steps):
            return candidates
        flat = flat_kernels(kernels, self.context)
        count = max(len(offered_plans(kernel, self.context)) for kernel in flat.values())
        if not self.wide:
            count = min(count, 1 if self.brief else FEW)
        for number in range(count):
            steps = tuple(replace(kernel, configuration=number) for kernel in kernels)
            run = functools.partial(self._prepare, replace(fused, steps=steps))
            candidates.append(Candidate(f"{FUSED}{number}", run))
        for library in _unpacked(group, self.context.target.libraries):
            said = Answer(library, "to be timed")
            taken = choose_libraries(separate, frozenset((library,)), 0, _always(said))
            candidates.append(Candidate(library, functools.partial(self._prepare, taken)))
        return candidates

    def _prepare(self, schedule: Schedule) -> Callable[[list[Any]], Sequence[Tensor]]:
        return self.prepare(generate(schedule, self.context))


class LibraryJudge:
    """Chooses the library of products by racing those that have them on this machine's CPU."""

    def __init__(self, races: Races) -> None:
        self.races = races

    def __call__(self, call: Extern) -> Answer:
        """Return the library that won: on another rank, from the cache, or by a race."""
        run = functools.partial(self.race, call)
        verdict = self.races.verdict(describe_call(call), ATEN, run)
        times = verdict.times
        if ATEN not in times or len(times) == 1:
            lost = "no time for a race" if verdict.exhausted else f"no race was run: {verdict}"
            return Answer(None, f"by rule: {lost}")
        rival = min(us for name, us in times.items() if name != ATEN)
        winner = None if verdict.winner == ATEN else verdict.winner
        at = " x ".join(map(str, verdict.sizes))
        return Answer(winner, _measured(verdict, at), times[ATEN] - rival)

    def race(self, call: Extern, budget_s: float) -> Verdict:
        """Return what a race of the libraries measured."""
        timed = _fewer(call)
        given = tuple(timed.views)
        candidates = {ATEN: timed, **timed.others}

        def inputs() -> list[Any]:
            made = [_random_view(view, self.races.device) for view in given]
            *_, a, b = made
            packs = linear_packs(b).items()
            packed = {name: pack(b.t(), len(a)) for name, pack in packs if name in candidates}
            return [*made, packed]

        verdict = race(
            [
                Candidate(name, functools.partial(_caller, name, candidate, given))
                for name, candidate in candidates.items()
            ],
            inputs,
            reference=ATEN,
            budget_s=budget_s,
            device=self.races.device,
            timer=warm_stopwatch,
            quiet=True,
        )
        return replace(verdict, sizes=extents(timed))


class FormatJudge:
    """Says what convolutions gain by channels-last images, by timing both on this machine's CPU.

    Args:
        by_rule: says it where nothing was measured.
    """

    def __init__(self, races: Races, by_rule: Callable[[fx.Node], Gain]) -> None:
        self.races = races
        self.by_rule = by_rule
        self.known: dict[str, Verdict] = {}

    def __call__(self, convolution: fx.Node) -> Gain:
        """Return what is gained: measured here or on another rank, from the cache, or by rule."""
        batch, share = timed_batch(convolution)
        packed = " packed" if convolution.meta.get(PACKS) else ""
        key = f"{convolution.target} {batch} images {describe_arguments(convolution)}{packed}"
        if key not in self.known:
            run = functools.partial(self.race, convolution, batch)
            self.known[key] = self.races.verdict(key, CONTIGUOUS, run)
        verdict = self.known[key]
        times = verdict.times
        if len(times) < 2:
            return self.by_rule(convolution)
        saved_us = (times[CONTIGUOUS] - times[CHANNELS_LAST]) * share
        reason = f"measured with {batch} images: {verdict}"
        return Gain(saved_us, reason, times[CONTIGUOUS] * share)

    def race(self, convolution: fx.Node, batch: int, budget_s: float) -> Verdict:
        """Return what a race of the two formats measured."""
        images = images_of(convolution)
        weights = [tensor for tensor in tensors_of(convolution) if tensor not in images]
        packs = convolution.meta.get(PACKS, False)

        def inputs() -> list[Any]:
            planes = [_random(image, self.races.device, batch) for image in images]
            last = [plane.contiguous(memory_format=torch.channels_last) for plane in planes]
            others = [_random(weight, self.races.device) for weight in weights]
            settings = convolution.args[3:]
            packed = [packed_weight(others[0], list(x.shape), *settings) for x in last if packs]
            return [*planes, *last, *others, tuple(packed)]  # opaque: no race compares them

        def candidate(first: int) -> Callable[[list[Any]], Sequence[Tensor]]:
            def call(tensors: list[Any]) -> Sequence[Tensor]:
                own = tensors[first : first + len(images)], tensors[2 * len(images) :]
                given = dict(zip((*images, *weights), (*own[0], *own[1]), strict=False))
                args: Any = fx.map_arg(convolution.args, given.__getitem__)
                if first and packs:
                    image, _, bias, *settings = args
                    (packed,) = tensors[-1]
                    return [convolve_packed(image, packed, bias, *settings)]
                made = convolution.target(*args)  # type: ignore[operator]
                return [made] if isinstance(made, Tensor) else [m for m in made if m is not None]

            return call

        return race(
            [
                Candidate(CONTIGUOUS, lambda: candidate(0)),
                Candidate(CHANNELS_LAST, lambda: candidate(len(images))),
            ],
            inputs,
            reference=CONTIGUOUS,
            budget_s=budget_s,
            device=self.races.device,
            timer=warm_stopwatch,
            quiet=True,
            rounds=FORMAT_ROUNDS,
        )


def tensors_of(convolution: fx.Node) -> list[fx.Node]:
    """Return the tensors that a convolution takes: images, weights, a bias."""
    nodes = [a for a in convolution.args if isinstance(a, fx.Node)]
    return list(dict.fromkeys(n for n in nodes if isinstance(n.meta["val"], Tensor)))


def timed_batch(convolution: fx.Node) -> tuple[int, float]:
    """Return how many images of a convolution are timed, and how many times that it has."""
    images = images_of(convolution)
    weight: Any = convolution.args[len(images)]
    whole = hint_of(images[0].meta["val"].shape[0])
    batch = max(whole, 1)
    values = [image.meta["val"] for image in images]
    places = max(hint_of(v.shape[2]) * hint_of(v.shape[3]) for v in values)
    while batch > 1 and batch * places * hint_of(weight.meta["val"].numel()) > TIMED_IMAGES:
        batch //= 2
    return batch, whole / batch


def describe_arguments(convolution: fx.Node) -> str:
    """Return what a convolution's time depends on beside the number of its images."""
    images = images_of(convolution)

    def described(node: fx.Node) -> str:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):  # a size: groups that the weight's shape gives
            return str(hint_of(value))
        shape = [hint_of(n) for n in value.shape[1 if node in images else 0 :]]
        return f"{value.dtype}{shape}"

    return str([described(a) if isinstance(a, fx.Node) else a for a in convolution.args])


def _measured(verdict: Verdict, at: str) -> str:
    """Return a verdict as a reason, with the sizes at which it was measured."""
    return f"measured at {at}: {verdict}" if at else f"measured: {verdict}"


def _random(node: fx.Node, device: torch.device, batch: int | None = None) -> Tensor:
    """Return random numbers for a tensor of a graph, with the strides that were traced.

    Args:
        batch: of an image, which is contiguous then.
    """
    value = node.meta["val"]
    shape, strides = ([hint_of(n) for n in numbers] for numbers in (value.shape, value.stride()))
    if batch is not None:
        return torch.randn([batch, *shape[1:]], device=device).to(value.dtype)
    made = torch.randn(shape, device=device).to(value.dtype)
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=device).copy_(made)


def _fewer(call: Extern) -> Extern:
    """Return a product with its rows and columns halved until it is soon timed.

    Matrices without gaps stay so: a window of a weight is another thing to a library (``_linear``
    in ``frontend/effects.py``).
    """
    *_, a, b = call.views
    rows, columns = a.shape[0].hint(), b.shape[1].hint()
    while rows * columns * a.shape[1].hint() > TIMED_PRODUCT and max(rows, columns) > 1:
        rows, columns = (rows, columns // 2) if columns > rows else (rows // 2, columns)

    def cut(view: View) -> View:
        extents = {a: (index(rows), a.shape[1]), b: (b.shape[0], index(columns))}
        shape = extents.get(view, (index(columns),))
        if len(shape) < 2:
            return replace(view, shape=shape)
        # A step over a whole row, or column, is one over a shorter one.
        longer = zip(view.strides, view.shape[::-1], shape[::-1], strict=True)
        steps = tuple(new if step is old else step for step, old, new in longer)
        return replace(view, shape=shape, strides=steps)

    return call.map_views(cut)


def _caller(
    library: str, call: Extern, given: tuple[View, ...]
) -> Callable[[list[Any]], Sequence[Tensor]]:
    """Return what makes a library's call with tensors in the places of its views.

    What it takes beside these is the weight packed for it; all of these come behind the tensors.
    """
    function: Any = functools.reduce(getattr, call.target.split("."), torch.ops)

    def argument(value: Argument, tensors: list[Any]) -> Any:
        match value:
            case View() if value in given:
                return tensors[given.index(value)]
            case View() if value.transposed in given:
                return tensors[given.index(value.transposed)].t()
            case View():
                return tensors[-1][library]
            case tuple():
                return list(value)
            case _:
                return value

    return lambda tensors: [function(*(argument(value, tensors) for value in call.args))]


def _random_view(view: View, device: torch.device) -> Tensor:
    return _spec(view.shape, view.strides, view.buffer.dtype).random(device)


def _always(answer: Answer) -> Chooser:
    return lambda call: answer


def _unpacked(group: Group, libraries: frozenset[str]) -> list[str]:
    """Return the libraries that all products of a group may go to as their weights lie."""
    calls = [call for call in group.graph.externs if call.node in group.decomposed]
    offered = [
        {name for name in call.others if name in libraries and call.packed_for(name) is None}
        for call in calls
    ]
    return sorted(set.intersection(*offered)) if offered else []


def random_inputs(group: Group, device: torch.device) -> list[Any]:
    """Return arguments for a group: normal numbers, integers 0 (in range of any gather), sizes.

    Weights in panels are those that the group's calls read.
    """
    specs = argument_specs(group.graph)
    made = [one.random(device) if isinstance(one, TensorSpec) else one for one in specs]
    inputs = [item for item in group.graph.inputs if isinstance(item, Size | Buffer)]
    tensors = {k: t for k, t in zip(inputs, made, strict=True) if isinstance(t, Tensor)}
    for call in group.graph.externs:
        if call.product and call.product.panels:
            weight = call.views[1]
            where = (_hints(weight.shape), _hints(weight.strides), weight.offset.hint())
            matrix = tensors[weight.buffer].as_strided(*where)
            tensors[call.product.panels.buffer].copy_(panels_of(matrix.t()))
    return made


def argument_specs(graph: Graph) -> list[TensorSpec | int]:
    """Return what a graph's arguments are, at the hints of sizes."""
    return [
        item.hint if isinstance(item, Size) else _spec(item.shape, item.strides, item.dtype)
        for item in graph.inputs
        if isinstance(item, Size | Buffer)
    ]


def _spec(extents: Sequence[Index], steps: Sequence[Index], kind: DType) -> TensorSpec:
    return TensorSpec(tuple(_hints(extents)), tuple(_hints(steps)), to_torch_dtype(kind))


def _hints(extents: Sequence[Index]) -> list[int]:
    return [extent.hint() for extent in extents]
