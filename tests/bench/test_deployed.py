"""What is measured beside the runtimes of others."""

from __future__ import annotations

import pytest
import torch

from bench.workload import as_tuple
from bench.workloads import deployed

SHRINK = 8


def test_the_core_has_16_cases_and_at_least_14_further_ones_are_beside_it() -> None:
    rows = deployed.rows()
    forward = [w for w in rows if not w.train]
    assert sum(w.group == "core" for w in forward) == 16
    assert sum(w.group == "further" for w in forward) >= 14
    assert len({w.label for w in rows}) == len(rows)
    assert {"openvino", "onnxruntime", "fusec-freeze"} <= set.intersection(
        *(set(w.peers) for w in forward)
    )


def test_each_case_but_decoding_is_trained_too() -> None:
    rows = deployed.rows()
    trained = {w.name for w in rows if w.train}
    assert {w.name for w in rows} - trained == {"llama decoding step 4x1024"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "workload", [w for w in deployed.rows() if not w.train], ids=lambda w: w.name
)
def test_each_case_runs_small_and_its_result_depends_on_its_input(workload) -> None:
    case = workload.case(shrink=SHRINK)
    with torch.no_grad():
        before = as_tuple(case.call(*case.inputs))
        for x in case.inputs:
            x.copy_(x.roll(1, 0) if x.shape[0] > 1 else x.roll(1, -1))
        after = as_tuple(case.call(*case.inputs))
    assert all(torch.isfinite(out).all() for out in before)
    assert (before[0] - after[0]).abs().max() > 1e-3 * before[0].abs().max()
