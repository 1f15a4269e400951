"""The contests: how the candidates of each kind of choice are built and timed.

``GroupContests``. A group (``passes/fusion/contract.py``) is a graph of its own. Its candidates are
the library's calls with fused kernels around them, one kernel in each configuration that its
schedule offers, and the calls of another library that has all of its products.

``product_contest``. A product that is kept as a call may be computed by another library: each is
timed, a long product on fewer rows and columns (``RaceTuning.timed_product``).

``convolution_contest``. A convolution is timed with contiguous and with channels-last images, a
long one on fewer images of its batch, in a fixed number of rounds. Formats are decided at each
start, before a graph is looked up in the cache, so their verdicts are kept even if unsteady.

To add a candidate, see docs/add_a_candidate.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fusec.driver.context import CompileContext
from fusec.driver.pipeline import Compiled, flat_kernels, generate
from fusec.driver.race import Contest
from fusec.driver.stages import offered_plans
from fusec.frontend.fx_passes.channels_last import images_of
from fusec.frontend.fx_passes.fx_nodes import hint_of, tensor_of
from fusec.frontend.fx_passes.memory_formats import CHANNELS_LAST, CONTIGUOUS
from fusec.frontend.fx_passes.packing import (
    PACKS,
    convolve_packed,
    linear_packs,
    packed_weight,
    panels_of,
)
from fusec.frontend.shapes import to_torch_dtype
from fusec.ir.choice import Choice, Decided
from fusec.ir.dtype import DType
from fusec.ir.expr import Buffer
from fusec.ir.graph import Argument, Extern, Graph, Kernel, Schedule, View
from fusec.ir.index import Index, Size, index
from fusec.ir.machine import RaceTuning
from fusec.passes.fusion.contract import FUSED, LIBRARY, Group
from fusec.passes.fusion.libraries import ATEN, choose_libraries, describe_call, extents
from fusec.runtime.cache.store import fingerprint
from fusec.runtime.race.autotune import Candidate
from fusec.runtime.race.rehearsal import TensorSpec

Prepare: TypeAlias = Callable[[Compiled], Callable[[list[Any]], Sequence[Tensor]]]
"""Builds and loads generated code, and returns its call."""


# -- groups ----------------------------------------------------------------------------------------


class GroupContests:
    """The contests of one graph's groups.

    Args:
        context: of the compile; races leave no record.
        prepare: builds and loads generated code.
    """

    def __init__(self, context: CompileContext, prepare: Prepare, device: torch.device) -> None:
        self.context = context
        self.options, self.tuning = context.options, context.target.machine.races
        self.prepare = prepare
        self.device = device
        self.wide = self.options.race_seconds(device.type) >= self.tuning.long_s
        self.brief = device.type == "cpu" and self.options.race_budget_s is None
        self.raced = set[str]()

    def __call__(self, choice: Choice) -> Contest | None:
        """Return a group's contest; None if a CPU does not race for it."""
        group: Group = choice.subject
        if self.device.type == "cpu" and not self._is_open(choice):
            return None
        forced = f"descriptors={self.options.descriptors} roles={self.options.roles}"
        forced += f" dependent_launches={self.options.dependent_launches}"
        forced += f" wide={self.wide} brief={self.brief}"
        names = group.sizes

        def describe(sizes: tuple[int, ...]) -> str:
            return ", ".join(f"{name}={n}" for name, n in zip(names, sizes, strict=False))

        return Contest(
            f"{fingerprint()} {forced}\n{group.signature}",
            functools.partial(self.candidates, group),
            functools.partial(random_inputs, group, self.device),
            tuple(size.hint for size in names),
            describe,
        )

    def _is_open(self, choice: Choice) -> bool:
        """Return True if the model's times are close; limits the raced groups by count.

        A group that a rule decides, without a model, is not raced.
        """
        modelled = choice.by_rule()
        if modelled.saved_us is None:
            return False
        fused_us = modelled.reference_us - modelled.saved_us
        clear = self.tuning.clear
        if not 1 / clear < modelled.reference_us / fused_us < clear:
            return False
        signature = choice.subject.signature
        if self.brief and signature not in self.raced:
            if len(self.raced) == self.tuning.groups:
                return False
            self.raced.add(signature)
        return True

    def candidates(self, group: Group) -> list[Candidate]:
        """Return the library's calls, one kernel in each configuration, and other libraries' calls.

        Another library may beat a kernel that beats the first one.
        """
        separate = group.separate()
        candidates = [Candidate(LIBRARY, functools.partial(self._prepare, separate))]
        fused = group.fused()
        kernels = [step for step in fused.steps if isinstance(step, Kernel)]
        if len(kernels) < len(fused.steps):
            return candidates
        flat = flat_kernels(kernels, self.context)
        count = max(len(offered_plans(kernel, self.context)) for kernel in flat.values())
        if not self.wide:
            count = min(count, 1 if self.brief else self.tuning.configurations)
        for number in range(count):
            steps = tuple(replace(kernel, configuration=number) for kernel in kernels)
            run = functools.partial(self._prepare, replace(fused, steps=steps))
            candidates.append(Candidate(f"{FUSED}{number}", run))
        calls = [call for call in group.graph.externs if call.node in group.decomposed]
        unpacked = [
            {name for name in call.alternatives if not call.packed_for(name)} for call in calls
        ]
        shared = sorted(set.intersection(*unpacked)) if unpacked else []
        for library in shared if self.context.target.libraries else ():
            every = replace(self.tuning, product=0)
            taken = choose_libraries(separate, every, functools.partial(_in_library, library))
            candidates.append(Candidate(library, functools.partial(self._prepare, taken)))
        return candidates

    def _prepare(self, schedule: Schedule) -> Callable[[list[Any]], Sequence[Tensor]]:
        return self.prepare(generate(schedule, self.context))


def _in_library(library: str, choice: Choice) -> Decided:
    return Decided(library, "to be timed") if choice.offers(library) else choice.by_rule()


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
            panels = tensors[call.product.panels.buffer]
            panels.copy_(panels_of(matrix.t(), panels.shape[-1]))
    return made


def argument_specs(graph: Graph) -> list[TensorSpec | int]:
    """Return the types of a graph's arguments, at the hints of sizes; a size is its hint."""
    return [
        item.hint if isinstance(item, Size) else _spec(item.shape, item.strides, item.dtype)
        for item in graph.inputs
        if isinstance(item, Size | Buffer)
    ]


def _spec(extents: Sequence[Index], steps: Sequence[Index], kind: DType) -> TensorSpec:
    return TensorSpec(tuple(_hints(extents)), tuple(_hints(steps)), to_torch_dtype(kind))


def _hints(extents: Sequence[Index]) -> list[int]:
    return [extent.hint() for extent in extents]


# -- products --------------------------------------------------------------------------------------


def product_contest(device: torch.device, tuning: RaceTuning, choice: Choice) -> Contest:
    """Return the contest between the libraries that have a product."""
    call: Extern = choice.subject
    timed = _fewer(call, tuning.timed_product)
    given = tuple(timed.views)
    calls = {ATEN: timed, **timed.alternatives}

    def inputs() -> list[Any]:
        made: dict[View, Tensor] = {}
        for view in given:
            known = made.get(view.transposed) if len(view.shape) == 2 else None
            spec = _spec(view.shape, view.strides, view.buffer.dtype)
            made[view] = spec.random(device) if known is None else known.t()
        tensors = [made[view] for view in given]
        *_, a, b = tensors
        packs = linear_packs(b).items()
        return [*tensors, {name: pack(b.t(), len(a)) for name, pack in packs if name in calls}]

    def candidates() -> list[Candidate]:
        return [
            Candidate(name, functools.partial(_caller, name, one, given))
            for name, one in calls.items()
        ]

    key = f"{describe_call(call)} in {' '.join(sorted(calls))}"
    return Contest(
        key, candidates, inputs, extents(timed), lambda sizes: " x ".join(map(str, sizes))
    )


def _fewer(call: Extern, most: int) -> Extern:
    """Return a product with its rows and columns halved to ``most`` multiply-adds.

    Dense matrices stay dense: a library may have no optimised kernel for a window of a weight
    (``onednn`` in ``frontend/linears.py``).
    """
    *_, a, b = call.views
    rows, columns = a.shape[0].hint(), b.shape[1].hint()
    while rows * columns * a.shape[1].hint() > most and max(rows, columns) > 1:
        rows, columns = (rows, columns // 2) if columns > rows else (rows // 2, columns)

    def cut(view: View, shape: tuple[Index, ...]) -> View:
        if len(shape) < 2:
            return replace(view, shape=shape)
        # A stride that spans a whole row, or column, spans the shorter one.
        longer = zip(view.strides, view.shape[::-1], shape[::-1], strict=True)
        steps = tuple(new if step is old else step for step, old, new in longer)
        return replace(view, shape=shape, strides=steps)

    shapes = ((index(columns),), (index(rows), a.shape[1]), (b.shape[0], index(columns)))
    return replace(call, args=tuple(map(cut, call.views, shapes[-len(call.views) :])))


def _caller(
    library: str, call: Extern, given: tuple[View, ...]
) -> Callable[[list[Any]], Sequence[Tensor]]:
    """Return a function that makes a library's call with given tensors in place of its views.

    A view that is not given is the weight packed for this library, from the dictionary of packed
    weights behind the tensors.
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


# -- convolutions ----------------------------------------------------------------------------------


def convolution_contest(device: torch.device, tuning: RaceTuning, choice: Choice) -> Contest:
    """Return the contest between contiguous and channels-last images."""
    convolution: fx.Node = choice.subject
    batch, share = timed_batch(convolution, tuning.timed_images)
    images = images_of(convolution)
    tensors = dict.fromkeys(n for n in convolution.all_input_nodes if tensor_of(n) is not None)
    weights = [tensor for tensor in tensors if tensor not in images]
    packs = convolution.meta.get(PACKS, False)

    def inputs() -> list[Any]:
        planes = [_random(image, device, batch) for image in images]
        last = [plane.contiguous(memory_format=torch.channels_last) for plane in planes]
        others = [_random(weight, device) for weight in weights]
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

    def candidates() -> list[Candidate]:
        return [
            Candidate(CONTIGUOUS, lambda: candidate(0)),
            Candidate(CHANNELS_LAST, lambda: candidate(len(images))),
        ]

    packed = " packed" if packs else ""
    return Contest(
        f"{convolution.target} {batch} images {describe_arguments(convolution)}{packed}",
        candidates,
        inputs,
        (batch,),
        lambda _: f"{batch} images",
        share,
        tuning.image_rounds,
    )


def timed_batch(convolution: fx.Node, most: int) -> tuple[int, float]:
    """Return how many images of a convolution are timed, and the whole batch over these.

    Args:
        most: multiply-adds down to which the batch is halved.
    """
    images = images_of(convolution)
    weight: Any = convolution.args[len(images)]
    whole = hint_of(images[0].meta["val"].shape[0])
    batch = max(whole, 1)
    values = [image.meta["val"] for image in images]
    places = max(hint_of(v.shape[2]) * hint_of(v.shape[3]) for v in values)
    while batch > 1 and batch * places * hint_of(weight.meta["val"].numel()) > most:
        batch //= 2
    return batch, whole / batch


def describe_arguments(convolution: fx.Node) -> str:
    """Return the types and options of a convolution, without the number of its images."""
    images = images_of(convolution)

    def described(node: fx.Node) -> str:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):  # a size: groups that the weight's shape gives
            return str(hint_of(value))
        shape = [hint_of(n) for n in value.shape[1 if node in images else 0 :]]
        return f"{value.dtype}{shape}"

    return str([described(a) if isinstance(a, fx.Node) else a for a in convolution.args])


def _random(node: fx.Node, device: torch.device, batch: int | None = None) -> Tensor:
    """Return random numbers for a tensor of a graph, with the strides that were traced.

    Args:
        batch: of an image, which is contiguous then.
    """
    value = node.meta["val"]
    shape, strides = ([hint_of(n) for n in numbers] for numbers in (value.shape, value.stride()))
    if batch is not None:
        return torch.randn([batch, *shape[1:]], device=device).to(value.dtype)
    return TensorSpec(tuple(shape), tuple(strides), value.dtype).random(device)
