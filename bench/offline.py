"""A workload's kernels for a GPU that is not here: traced at full size without memory, and built.

What `fusec check --static` does for a model: each kernel is compiled down to machine code and held
to the rules of docs/performance.md.
"""

from __future__ import annotations

import time
from typing import Any

from bench import workloads
from bench.workload import Workload
from fusec.codegen.targets import find_target
from fusec.options import Options
from fusec.tools.report.observe import new_fake_mode, observe
from fusec.tools.report.stages import take_through
from fusec.tools.report.static_report import check_kernels
from fusec.tools.report.static_rules import CheckedKernel

TARGET = "sm_90"
WORKLOADS = [w for w in workloads.gpu() if "fusec" in w.peers and "tuned" not in w.group]
"""What is built here: the rows of `bench.gpu` that fusec compiles by rule."""
_STATIC = ("registers", "blocks", "spill_bytes", "wide_share", "barriers")


def build(workload: Workload, *, race: str = "fused") -> dict[str, Any]:
    """Return what became of a workload: its kernels, its eager kernels, faults, and seconds.

    Args:
        race: which way of running products is built.
    Raises:
        Exception: what stopped the compile of a graph.
    """
    start = time.perf_counter()
    target, options = find_target(TARGET), Options(race=race, autotune=False, cache=False)
    mode = new_fake_mode()
    with mode:
        case = workload.case("cpu")
    seen = observe(
        case.call, case.inputs, train=workload.train, mode=mode, options=options,
        target=target,
    )  # fmt: skip
    staged = [take_through(one, target, options) for one in seen]
    for one in staged:
        if one.failure is not None:
            raise one.failure
    verdict = check_kernels(staged)
    unbuilt = [f"{k.graph} {k.name}: {k.problem}" for k in verdict.kernels if k.static is None]
    if unbuilt:
        raise RuntimeError("; ".join(unbuilt))
    return {
        "target": TARGET,
        "kernels": len(verdict.kernels),
        "eager_kernels": sum(len(graph.externs) for graph in verdict.graphs),
        "faults": [f"{f.graph} {f.kernel} {f.rule}: {f.seen}" for f in verdict.faults],
        "facts": [_facts(kernel) for kernel in verdict.kernels],
        "seconds": round(time.perf_counter() - start, 1),
    }


def _facts(kernel: CheckedKernel) -> dict[str, Any]:
    """Return what the report of a run says of a kernel beside its time."""
    names = ("graph", "name", "kind", "programs", "bytes", "floor_us", "instructions_per_byte")
    found = {name: getattr(kernel, name) for name in names}
    return found | {name: getattr(kernel.static, name) for name in _STATIC}
