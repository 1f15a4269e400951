"""The targets: one row each. The only place that asks which target code is made for.

A row says what the machine costs (for fusion), how a kernel is scheduled, and which printer writes
it. A new target is one printer, one loader in ``runtime`` and one row here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fusec.codegen import cpp, triton
from fusec.codegen.triton_form import FORM
from fusec.errors import UsageError
from fusec.ir.graph import Kernel
from fusec.passes.cost import Machine
from fusec.passes.online_softmax import online_softmax
from fusec.passes.schedule import accepts_gpu, gpu_plans
from fusec.passes.schedule.plan import Limits, Plan
from fusec.passes.schedule.vector_loops import accepts_vector_loops, plan_vector_loops
from fusec.passes.split_loop import Split, split_loop
from fusec.passes.stage import Stage


@dataclass(frozen=True, slots=True)
class Target:
    """What codegen needs to know of a target.

    Attributes:
        name: as the command line spells it.
        language: "cpp" or "triton": the printer, and the loader in ``runtime``.
        machine: modelled rates.
        plans: schedules of a kernel with flat accesses: the one chosen by rule first, then those
            that a race may prefer.
        algebra: kernel -> kernel, by rules that change rounding, before its axes are flattened.
        accepts: whether a kernel can be scheduled; fusion asks before it merges.
        split: a kernel as a partial and a final one, where its loop is better split.
        form: the stages from a program to what is printed.
        print_kernel: what these make -> source text.
        device: torch's name of the device type.
        assembly: stages below the source, as the command line calls them -> as the compiler does.
    """

    name: str
    language: str
    machine: Machine
    algebra: Callable[[Kernel], Kernel]
    plans: Callable[[Kernel], tuple[Plan, ...]]
    accepts: Callable[[Kernel], bool]
    split: Split
    print_kernel: Callable[[Any], str]
    device: str
    form: tuple[Stage, ...] = ()
    assembly: Mapping[str, str] = field(default_factory=dict)

    @property
    def multiplies(self) -> bool:
        """Whether kernels may compute products of matrices themselves."""
        return self.machine.products_per_us > 0


CPU_MACHINE = Machine(
    bytes_per_us=2.0e4, operations_per_us=6.0e4, launch_us=3.0, units=16, parts=16, tile=1024
)
H200_MACHINE = Machine(
    bytes_per_us=4.3e6,
    operations_per_us=3.0e7,
    launch_us=4.0,
    units=132,
    parts=264,
    tile=128,
    products_per_us=3.95e8,
    chunk_rows=2048,
    part_share=0.01,
)
A100_MACHINE = Machine(
    bytes_per_us=1.7e6,
    operations_per_us=1.9e7,
    launch_us=4.0,
    units=108,
    parts=216,
    tile=128,
    products_per_us=1.4e8,
    chunk_rows=2048,
    part_share=0.01,
)


def _cpu(width: int) -> Target:
    return Target(
        "cpu",
        "cpp",
        CPU_MACHINE,
        lambda kernel: kernel,
        lambda kernel: (plan_vector_loops(kernel, width),),
        accepts_vector_loops,
        lambda kernel: None,
        cpp.print_kernel,
        "cpu",
    )


_NVIDIA = {stage: stage for stage in ("ttir", "ttgir", "llir", "ptx", "sass")}
_AMD = {"ttir": "ttir", "ttgir": "ttgir", "llir": "llir", "ptx": "amdgcn", "sass": "amdgcn"}


H200_LIMITS = Limits(
    shared_bytes=232448, tile_registers=160, from_shared=True, units=132, descriptors=True
)
A100_LIMITS = Limits(shared_bytes=166912, tile_registers=128, units=108)


def _gpu(
    name: str, machine: Machine, limits: Limits, assembly: Mapping[str, str], *, tf32: bool
) -> Target:
    if tf32:
        machine, limits = replace(machine, slow_f32=2), replace(limits, tf32=True)
    return Target(
        name,
        "triton",
        machine,
        online_softmax,
        functools.partial(gpu_plans, limits=limits),
        functools.partial(accepts_gpu, limits=limits),
        functools.partial(split_loop, machine=machine),
        triton.print_kernel,
        "cuda",
        FORM,
        assembly,
    )


GPUS = {
    "sm_80": (A100_MACHINE, A100_LIMITS, _NVIDIA),
    "sm_90": (H200_MACHINE, H200_LIMITS, _NVIDIA),
    "sm_100": (H200_MACHINE, H200_LIMITS, _NVIDIA),
    "sm_120": (
        A100_MACHINE,
        replace(A100_LIMITS, shared_bytes=101376, units=170, descriptors=True),
        _NVIDIA,
    ),
    "gfx942": (H200_MACHINE, replace(A100_LIMITS, shared_bytes=65536, units=304), _AMD),
}
NAMES = ("cpu", *GPUS)


def find_target(name: str, vector_width: int = 16, *, tf32: bool = False) -> Target:
    """Return the row of a target.

    Args:
        vector_width: f32 lanes of a CPU's vector registers: 16, 8 or 4.
        tf32: a GPU's products of f32 may round their operands to 10 bits of mantissa.
    Raises:
        UsageError: if there is no such target.
    """
    if name == "cpu":
        return _cpu(vector_width)
    if name in GPUS:
        return _gpu(name, *GPUS[name], tf32=tf32)
    raise UsageError.unknown("target", name, NAMES)


def target_of_device(name: str, vector_width: int = 16, *, tf32: bool = False) -> Target:
    """Return the row for a device found at run time: its own, or that of the nearest older GPU.

    Args:
        vector_width, tf32: as of ``find_target``.
    Raises:
        UsageError: if there is neither.
    """
    if name in GPUS or not (name.startswith("sm_") and name[3:].isdigit()):
        return find_target(name, vector_width, tf32=tf32)
    versions = {int(known[3:]): known for known in GPUS if known.startswith("sm_")}
    older = [version for version in versions if version <= int(name[3:])]
    if not older:
        raise UsageError.unknown("target", name, NAMES)
    return _gpu(name, *GPUS[versions[max(older)]], tf32=tf32)
