"""Without a race, each kernel that a device measured in several plans gets the fastest, or nearly.

Products of few rows get a plan that a model alone has judged; the one that was measured is offered.

Times are of an H100 (2026-11-26, torch 2.11, Triton 3.6; ``launches-h100-2026-11-26.json`` in
bench/results): of each group of kernels that a race timed in several plans.
"""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from bench.gpu_model import (
    KEPT,
    compiled_graphs,
    launches_of,
    plan_text,
    target_of,
    workload_of,
)
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.kernel.online_softmax import online_softmax

NEAR = 1.02
"""Time by rule over the fastest lap; p80 of a lap is 1.01 of p20 in the median."""
RECORD = json.loads(KEPT.read_text())


def laps() -> dict[tuple[str, str, str], dict[str, float]]:
    """Return microseconds by plan for each graph that was measured in several."""
    found: dict[tuple[str, str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for launch in launches_of(RECORD):
        if launch.plan:
            found[launch.name, launch.mode, launch.graph][launch.plan] += launch.us
    return {case: times for case, times in found.items() if len(times) > 1}


LAPS = laps()


@pytest.mark.parametrize("case", LAPS, ids=" ".join)
def test_the_plan_by_rule_is_near_the_fastest_that_was_measured(case: tuple[str, str, str]) -> None:
    name, mode, graph = case
    workload = workload_of(name, mode)
    assert workload is not None
    (staged,) = (s for s in compiled_graphs(workload, target_of(RECORD)) if s.name == graph)
    assert staged.compiled is not None
    plans = [plan_text(plan) for plan in staged.compiled.plans.values()]
    if "rows 16" in name:
        assert LAPS[case].keys().isdisjoint(plans)
        kernels = map(online_softmax, staged.compiled.schedule.kernels)
        offered = [target_of(RECORD).plans(coalesce(kernel)) for kernel in kernels]
        plans = [plan_text(found[3]) for found in offered if len(found) > 3]
    (taken,) = {plan for plan in plans if plan in LAPS[case]}
    assert LAPS[case][taken] <= NEAR * min(LAPS[case].values()), (taken, LAPS[case])


def test_sixteen_groups_of_kernels_were_measured_in_several_plans() -> None:
    assert (len(LAPS), sum(map(len, LAPS.values()))) == (16, 61)
