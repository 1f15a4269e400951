"""What the model of a kernel's time says, beside what was measured: no GPU is needed.

    python -m bench.gpu_model                        # the launches that are kept in bench/results
    python -m bench.gpu_model build/bench/gpu.json   # the kernels of a run's rows

Each launch is built for sm_90 in the plan that it was measured in, and modelled for a device with
the memory that the record names (`tools/report/kernel_time.py`). The model reads machine code, so
Triton has to be the version that was measured. A record of launches names each launch's plan
(`launches-*.json`). In a run's record, kernels are found by name, those of a race in the
configuration that won: it has to be a run of this version, for plans have numbers there.

Printed are, for each launch, measured and modelled microseconds, their ratio, and what the model
says the time is lost to; then the error of each family: the geometric mean of the ratios, and the
median and the worst of |ratio - 1|, whichever of ratio and 1/ratio is greater.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton

from bench import workloads
from bench.offline import TARGET
from bench.workload import Workload
from fusec.codegen.targets import Target, find_target
from fusec.ir.graph import FlatKernel
from fusec.ir.machine import Machine
from fusec.options import Options
from fusec.passes.schedule.plan import Plan, print_plan
from fusec.tools.report.kernel_time import Expectation
from fusec.tools.report.observe import new_fake_mode, observe
from fusec.tools.report.stages import Staged, take_through
from fusec.tools.report.static_report import check_kernels
from fusec.tools.report.static_rules import SHORT_US

KEPT = Path(__file__).parent / "results" / "launches-h100-2026-11-26.json"


@dataclass(frozen=True)
class Launch:
    """Kernels that were measured together.

    Attributes:
        graph: "inference", "forward" or "backward"; "" for a row, in which any may be meant.
        kernels: steps of the graph, or names of functions.
        plan: as `plan_text` has it; "" for the first that is offered.
    """

    family: str
    name: str
    mode: str
    graph: str
    kernels: tuple[str, ...]
    plan: str
    us: float


@dataclass(frozen=True)
class Modelled:
    """A launch, the modelled time of its kernels, and the cause of what the longest one loses."""

    launch: Launch
    us: float
    cause: str

    @property
    def ratio(self) -> float:
        return self.us / self.launch.us


def plan_text(plan: Plan) -> str:
    """Return the tiles of a plan and its tunables: "128x256x64 warps=8 stages=3 descriptors"."""
    tiles = "x".join(str(b.tile) for b in plan.bindings if b.tile > 1)
    _, _, tunables = print_plan("k", plan).partition("warps=")
    return f"{tiles} warps={tunables}" + ("" if "stages=" in tunables else " stages=1")


def launches_of(data: Mapping[str, Any]) -> list[Launch]:
    """Return the launches of a record, of either kind."""
    if data["kind"] == "launches":
        fields = Launch.__dataclass_fields__
        made = ({k: v for k, v in one.items() if k in fields} for one in data["launches"])
        return [Launch(**{**one, "kernels": tuple(one["kernels"])}) for one in made]
    return [launch for row in data["results"] for launch in _of_row(row)]


def _of_row(row: Mapping[str, Any]) -> Iterator[Launch]:
    """Yield the kernels of a row; a plan by its number where one race decided all of them."""
    races = row.get("races", ())
    winner = races[0]["winner"].removeprefix("fused ") if len(races) == 1 else ""
    for name, us in row.get("kernel_us", {}).items():
        yield Launch(row["group"], row["name"], row["mode"], "", (name,), winner, us)


def choosing(target: Target, plan: str) -> Target:
    """Return a target that offers one plan of each kernel, by text or number ("#2")."""
    theirs = target.codegen.plans

    def plans(kernel: FlatKernel, machine: Machine) -> tuple[Plan, ...]:
        offered = theirs(kernel, machine)
        if plan.startswith("#"):
            return offered[: int(plan[1:]) + 1][-1:]
        return tuple(one for one in offered if plan_text(one) == plan)[:1] or offered[:1]

    return replace(target, codegen=replace(target.codegen, plans=plans)) if plan else target


Found = dict[tuple[str, str], tuple[str, Expectation]]
"""Graph, and step or function -> the plan's text and the expected time."""


def compiled_graphs(workload: Workload, target: Target) -> Iterator[Staged]:
    """Yield a workload's graphs, fused wherever they can be; nothing is built."""
    torch._dynamo.reset()
    mode, options = new_fake_mode(), Options(race="fused", autotune=False, cache=False)
    with mode:
        case = workload.case("cpu")
    seen = observe(
        case.call, case.inputs, train=workload.train, mode=mode, options=options, target=target
    )
    for one in seen:
        staged = take_through(one, target, options)
        staged.check()
        yield staged


def expectations(workload: Workload, plan: str, target: Target) -> Found:
    """Return what the model says of each kernel of a workload."""
    found: Found = {}
    for staged in compiled_graphs(workload, choosing(target, plan)):
        assert staged.compiled is not None
        for kernel in check_kernels([staged]).kernels:
            if kernel.expected is None:
                continue
            compiled, name = staged.compiled, kernel.name
            taken = plan_text(compiled.plans[name])
            found[staged.name, name] = taken, kernel.expected
            found["", compiled.programs[name].name] = taken, kernel.expected
    return found


def model(launches: Sequence[Launch], target: Target) -> Iterator[Modelled]:
    """Yield launches with their modelled time; those of which a kernel or a plan is gone, without.

    Kernels whose bytes take less than a microsecond are left out, and so are those by a library.
    """
    made: dict[tuple[str, str, str], Found] = {}
    for launch in launches:
        key = launch.name, launch.mode, launch.plan
        workload = workload_of(launch.name, launch.mode)
        if workload is None:
            continue
        if key not in made:
            made[key] = expectations(workload, launch.plan, target)
        found = [made[key].get((launch.graph, kernel)) for kernel in launch.kernels]
        parts = [one for one in found if one is not None]
        if len(parts) < len(found) or not _in_plan(launch, parts):
            continue
        longest = max((part for _, part in parts), key=lambda part: part.us)
        if longest.floor_us >= SHORT_US:
            yield Modelled(launch, sum(part.us for _, part in parts), longest.cause)


def workload_of(name: str, mode: str) -> Workload | None:
    """Return the workload of a row, or None if none has that name now."""
    found = (w for w in workloads.gpu() if (w.name, w.train) == (name, mode == "training"))
    return next(found, None)


def _in_plan(launch: Launch, parts: Sequence[tuple[str, Expectation]]) -> bool:
    by_text = launch.plan and not launch.plan.startswith("#")
    return not by_text or any(taken == launch.plan for taken, _ in parts)


def error(ratio: float) -> float:
    """Return how far a ratio is from one, the same for its inverse."""
    return max(ratio, 1 / ratio) - 1


def summary(found: Sequence[Modelled]) -> list[tuple[str, int, float, float, float]]:
    """Return family, launches, geometric mean of the ratios, median and worst error; "all" last."""
    families = dict.fromkeys(one.launch.family for one in found)
    groups = {name: [x.ratio for x in found if x.launch.family == name] for name in families}
    groups["all"] = [one.ratio for one in found]
    return [
        (
            *(name, len(ratios), math.exp(statistics.fmean(map(math.log, ratios)))),
            *(statistics.median(map(error, ratios)), max(map(error, ratios))),
        )
        for name, ratios in groups.items()
        if ratios
    ]


def target_of(data: Mapping[str, Any]) -> Target:
    """Return the target of a record's device: a copy moved so many bytes there."""
    copied = data.get("ceilings", {}).get("start", {}).get("copy_bytes_per_s", 0.0)
    return find_target(TARGET, bytes_per_us=copied / 1e6)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_model", description=__doc__)
    parser.add_argument("record", nargs="?", type=Path, default=KEPT, help="default %(default)s")
    parser.add_argument("--only", default="", help="launches whose family or name contain this")
    options = parser.parse_args(argv)
    data = json.loads(options.record.read_text())
    launches = [x for x in launches_of(data) if options.only in f"{x.family} {x.name}"]
    found = []
    measured_with = data.get("versions", {}).get("triton")
    print(f"Triton {triton.__version__}; measured with {measured_with}")
    print("measured  modelled  ratio")
    for one in model(launches, target_of(data)):
        found.append(one)
        what = f"{one.launch.name} {one.launch.mode} {'+'.join(one.launch.kernels)}"
        print(f"{one.launch.us:8.1f} {one.us:9.1f} {one.ratio:6.2f}  {what} {one.launch.plan}")
        print(f"{'':27}{one.cause}")
    print(f"\n{'family':24} launches  mean  median error  worst")
    for name, count, mean, median, worst in summary(found):
        print(f"{name:24} {count:8} {mean:5.2f} {median:13.1%} {worst:6.1%}")
    print(f"{len(launches) - len(found)} of {len(launches)} are not modelled")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
