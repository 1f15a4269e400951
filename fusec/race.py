"""The judge that measures: both ways of a group are built and timed on the device.

A group (``passes/contract.py``) is a graph of its own. Its ways are the library's calls with fused
kernels around them, and one kernel in each configuration that its schedule offers. The race in
``runtime/autotune.py`` times them as wholes and checks what each computes; the verdict is kept in
the cache under the group's structure, the device and all versions.

Where the time of a graph's races is spent, or nothing could be timed, the cost model decides. The
ranks of a process group agree on each verdict (``runtime/ranks.py``), on that none was found, too.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusec.frontend.shapes import to_torch_dtype
from fusec.ir.expr import Buffer
from fusec.ir.graph import Kernel, Schedule
from fusec.ir.index import Index, Size
from fusec.passes.contract import Choice, Cut, Group, judge_by_model, open_calls
from fusec.pipeline import Compiled, flat_kernels, generate
from fusec.runtime.autotune import NO_TIME, Way, race
from fusec.runtime.cache import Cache
from fusec.runtime.ranks import Ranks
from fusec.runtime.verdicts import Lap, Verdict, load_verdict, store_verdict
from fusec.stages import Context, offered_plans

logger = logging.getLogger("fusec.race")

LIBRARY = "library"
FEW = 3
"""Configurations of a kernel that a short race tries; a long one (``WIDE_S``) tries all."""
WIDE_S = 120.0

Prepare: TypeAlias = Callable[[Compiled], Callable[[list[Any]], Sequence[Tensor]]]
"""Builds and loads what was generated, and returns its call."""


class DeviceJudge:
    """Chooses between the ways of groups by racing them on a device.

    Args:
        cut: the passes from a graph to kernels.
        context: of the compile; races leave no record.
        prepare: builds and loads what was generated.
        salt: names the device and all versions that times depend on.
        cache: where verdicts are kept; None for nowhere.
        ranks: with whom verdicts are shared; None for nobody.
    """

    def __init__(
        self,
        cut: Cut,
        context: Context,
        device: torch.device,
        prepare: Prepare,
        salt: str,
        cache: Cache | None,
        ranks: Ranks | None = None,
    ) -> None:
        self.cut = cut
        self.context = context
        self.options = context.options
        self.device = device
        self.prepare = prepare
        self.salt = salt
        self.cache = cache
        self.ranks = ranks
        self.by_model = judge_by_model(cut, context.target.machine)
        self.left_s = context.options.race_budget_s

    def __call__(self, group: Group) -> Choice:
        """Return the way that won: on another rank, from the cache, or by a race."""
        key = f"{self.salt} descriptors={self.options.descriptors}\n{group.signature}"
        verdict = self.ranks.published(key) if self.ranks is not None else None
        if verdict is None:
            verdict = self.own_verdict(group, key)
            if self.ranks is not None:
                verdict = self.ranks.agree(key, verdict)
        return self.choice(group, verdict)

    def own_verdict(self, group: Group, key: str) -> Verdict:
        """Return the verdict that the cache has under a key, or a race's; one without laps if the
        time of races is spent."""
        verdict = load_verdict(self.cache, key) if self.cache is not None else None
        if verdict is not None:
            return verdict
        if self.left_s <= 0:
            return Verdict(LIBRARY, (Lap(LIBRARY, dropped=NO_TIME),), exhausted=True)
        verdict = self.race(group)
        measured = any(lap.us is not None for lap in verdict.laps)
        if self.cache is not None and (measured or not verdict.exhausted):
            store_verdict(self.cache, key, verdict)
        return verdict

    def choice(self, group: Group, verdict: Verdict) -> Choice:
        """Return a verdict as the choice of a way."""
        times = {lap.name: lap.us for lap in verdict.laps if lap.us is not None}
        library, best = times.get(LIBRARY), times.get(verdict.winner)
        if library is None or best is None:
            return self.by_model(group)
        fused = verdict.winner != LIBRARY
        others = [us for name, us in times.items() if name != LIBRARY]
        rival = best if fused else min(others, default=library)
        configuration = int(verdict.winner.rpartition("#")[2]) if fused else 0
        return Choice(fused, configuration, f"measured: {verdict}", library - rival)

    def race(self, group: Group) -> Verdict:
        """Return what a race of the group's ways measured."""
        started = time.monotonic()
        verdict = race(
            self.ways(group),
            functools.partial(random_inputs, group, self.device),
            reference=LIBRARY,
            budget_s=self.left_s,
            device=self.device,
        )
        self.left_s -= time.monotonic() - started
        return verdict

    def ways(self, group: Group) -> list[Way]:
        """Return the library's way and one for each configuration of the fused kernel."""
        separate = self.cut(group.graph)
        ways = [Way(LIBRARY, functools.partial(self._prepare, separate))]
        fused = self.cut(open_calls(group.graph, group.opened))
        kernels = [step for step in fused.steps if isinstance(step, Kernel)]
        if len(kernels) < len(fused.steps):
            return ways
        flat = flat_kernels(kernels, self.context)
        count = max(len(offered_plans(kernel, self.context)) for kernel in flat.values())
        if self.options.race_budget_s < WIDE_S:
            count = min(count, FEW)
        for number in range(count):
            steps = tuple(replace(kernel, configuration=number) for kernel in kernels)
            run = functools.partial(self._prepare, replace(fused, steps=steps))
            ways.append(Way(f"fused #{number}", run))
        return ways

    def _prepare(self, schedule: Schedule) -> Callable[[list[Any]], Sequence[Tensor]]:
        return self.prepare(generate(schedule, self.context))


def random_inputs(group: Group, device: torch.device) -> list[Any]:
    """Return arguments for a group: normal numbers, integers 0 (in range of any gather), sizes."""
    return [
        item.hint if isinstance(item, Size) else _random(item, device)
        for item in group.graph.inputs
        if isinstance(item, Size | Buffer)
    ]


def _random(buffer: Buffer, device: torch.device) -> Tensor:
    shape, strides = _hints(buffer.shape), _hints(buffer.strides)
    length = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    dtype = to_torch_dtype(buffer.dtype)
    if dtype is torch.bool:
        flat = torch.rand(length, device=device) > 0.5
    elif dtype.is_floating_point:
        flat = torch.randn(length, device=device, dtype=torch.float32).to(dtype)
    else:
        flat = torch.zeros(length, device=device, dtype=dtype)
    return flat.as_strided(shape, strides)


def _hints(extents: tuple[Index, ...]) -> list[int]:
    return [extent.hint() for extent in extents]
