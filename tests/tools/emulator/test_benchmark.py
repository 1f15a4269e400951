"""The benchmark's kernels at full size: the emulator knows each of their instructions.

They are compiled and decoded, and do not run: that would take days.
"""

from __future__ import annotations

import pytest

from bench.gpu_model import compiled_graphs
from bench.offline import WORKLOADS
from bench.workload import Workload
from fusec.codegen.targets import find_target
from fusec.driver.build import triton_source
from fusec.tools.emulator.launch import Compiled


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.label)
def test_each_instruction_of_a_benchmark_is_known(workload: Workload, target: str) -> None:
    kernels = 0
    for staged in compiled_graphs(workload, find_target(target)):
        assert staged.compiled is not None
        for code in staged.compiled.distinct:
            Compiled.of(triton_source(staged.compiled, code), target)
            kernels += 1
    assert kernels
