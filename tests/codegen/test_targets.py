"""Targets: names are checked where a user types them, devices get the nearest row."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from fusec.codegen.targets import GPUS, TARGETS, find_target, target_of_device
from fusec.driver.compiler import gpu_features, salt_of, target_for
from fusec.errors import UsageError
from fusec.ir.dtype import BF16, F16, F32, DType
from fusec.options import Options
from fusec.passes.fusion.cost import kernel_cost
from fusec.passes.schedule.plan import LoopKind, Plan
from fusec.processors import PROCESSORS
from tests.passes.schedule.flat import attention, products
from tests.support import on_processor, threads


def test_a_device_between_two_rows_takes_the_older_one_under_its_own_name():
    target = target_of_device("sm_89")
    assert target.name == "sm_89"
    assert target.machine == find_target("sm_80").machine
    assert target_of_device("sm_90").machine == find_target("sm_90").machine


def test_unknown_names_and_devices_too_old_are_usage_errors():
    for find in (find_target, target_of_device):
        with pytest.raises(UsageError, match="sm_80"):
            find("sm_70")
    with pytest.raises(UsageError):
        find_target("sm_91")


@pytest.mark.parametrize(
    ("name", "gigahertz"), [("sm_80", 1.41), ("sm_90", 1.755), ("sm_100", 1.85), ("sm_120", 2.4)]
)
def test_the_issue_budget_follows_from_the_row_that_it_is_in(name: str, gigahertz: float) -> None:
    machine = find_target(name).machine
    issued = 128 * machine.units * gigahertz * 1e3
    assert machine.sm.issue_budget == pytest.approx(issued / machine.bytes_per_us, rel=0.02)


def test_another_gpu_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the multiprocessors, a third of the shared memory: the plan has fewer stages."""
    row = TARGETS["sm_80"]
    machine = replace(row.machine, units=54, sm=replace(row.machine.sm, shared_bytes=49152))
    monkeypatch.setitem(TARGETS, "sm_86", replace(row, name="sm_86", machine=machine))
    kernel = products(4096, 4096, 512)
    stages = [find_target(name).plans(kernel)[0].stages for name in ("sm_80", "sm_86")]
    assert stages == [3, 2]
    assert target_of_device("sm_87").machine.units == 54


def launched(plan: Plan) -> int:
    """Return how many programs a plan launches."""
    return math.prod(
        -(-b.axis.extent.hint() // b.tile) for b in plan.bindings if b.kind is LoopKind.GRID
    )


@pytest.mark.sampled(7)
@pytest.mark.parametrize("tf32", (False, True))
@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("dtype", (BF16, F32), ids=("bf16", "f32"))
def test_a_kernel_is_priced_with_the_programs_that_its_plan_launches(
    name: str, dtype: DType, tf32: bool
) -> None:
    target = find_target(name, tf32=tf32)
    shapes = ((4096, 4096, 512), (512, 1024, 1024), (16, 4096, 1024), (130, 300, 70))
    kernels = [products(*shape, dtype=dtype) for shape in shapes]
    kernels += [products(4096, 4096, 512, count=count, dtype=dtype) for count in (2, 3)]
    kernels += [attention(32, 1024, 1024, depth, dtype) for depth in (32, 64, 128, 256)]
    kernels += [attention(32, queries, 4096, 128, dtype) for queries in (1, 16, 100)]
    for kernel in kernels:
        if target.accepts(kernel):
            spread = kernel_cost(kernel, target.machine).spread
            assert spread is not None
            assert spread.programs == launched(target.plans(kernel)[0]), kernel


def test_a_processor_by_name_has_the_vectors_of_its_level() -> None:
    targets = {name: find_target(name, 16, bf16="tiles") for name in PROCESSORS}
    assert [t.machine.vector for t in targets.values()] == [4, 8, 16, 16]
    assert [BF16 in t.machine.widened for t in targets.values()] == [True, True, True, False]
    torch._dynamo.reset()
    options = {"target": "cpu:avx2", "strict": True}
    with (
        on_processor(PROCESSORS["cpu:sse4"].features),
        pytest.raises(Exception, match="'cpu:avx2' does not run here: the processor lacks abm"),
    ):
        torch.compile(torch.sin, backend="fusec", options=options)(torch.ones(3))


def test_a_cpu_with_tiles_widens_f16_alone() -> None:
    assert find_target("cpu").machine.widened == {F16, BF16}
    assert find_target("cpu", bf16="tiles").machine.widened == {F16}
    assert not find_target("sm_90", bf16="tiles").machine.widened


@pytest.mark.parametrize(
    ("flags", "how"),
    [
        ("amx_bf16 avx512_bf16", "tiles"),
        ("avx512_bf16 sse4a", "pairs"),  # AMD's
        ("avx512_bf16", "widened"),
        ("amx_int8", "widened"),
    ],
)
def test_this_machine_s_target_multiplies_bf16_as_its_cpu_does(flags: str, how: str) -> None:
    with on_processor(f"x86_64 avx512f avx512bw avx512dq avx512vl {flags}"):
        target = target_for(torch.device("cpu"), Options())
    assert target.machine.bf16 == how
    assert (BF16 in target.machine.widened) is (how == "widened")
    assert (F16 in target.machine.slow_types) is (how != "tiles")


def test_this_machine_s_target_has_torch_s_threads() -> None:
    device, options = torch.device("cpu"), Options()
    with threads(7):
        target = target_for(device, options)
    assert target.machine.threads == 7
    fewer = find_target("cpu", threads=1)
    assert salt_of(device, target, options) != salt_of(device, fewer, options)


@dataclass
class Properties:
    """Of a device, as torch reports them: kHz and bits of its memory."""

    multi_processor_count: int
    memory_clock_rate: int
    memory_bus_width: int


def test_a_device_has_its_own_multiprocessors_and_memory() -> None:
    """Programs that stay are as many as multiprocessors: 132 would take two waves of 114."""
    found = {
        name: find_target("sm_90", **gpu_features(facts))
        for name, facts in (
            ("H100 SXM", Properties(132, 2619000, 5120)),
            ("H100 PCIe", Properties(114, 1593000, 5120)),
            ("unknown memory", Properties(132, 0, 0)),
        )
    }
    large, small, other = (target.machine for target in found.values())
    assert (large.units, small.units) == (132, 114)
    assert large.bytes_per_us == pytest.approx(3.02e6, rel=0.01)
    assert small.bytes_per_us == pytest.approx(1.83e6, rel=0.01)
    assert small.products_per_us / large.products_per_us == pytest.approx(114 / 132)
    assert other.bytes_per_us == find_target("sm_90").machine.bytes_per_us
    plan, *_ = found["H100 PCIe"].plans(products(8192, 16384, 4096))
    assert plan.roles and plan.programs == 114
    device, options = torch.device("cpu"), Options(autotune=False)
    salts = {salt_of(device, target, options) for target in found.values()}
    assert len(salts) == 3
