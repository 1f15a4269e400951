"""The table of targets: the only module that depends on which target is compiled for.

A row describes a target's machine (``ir/machine.py``, for fusion and schedules), and how
kernels of its language are scheduled and printed. A new target is one printer, one loader in
``runtime`` and one row here.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fusec.codegen.cpp.stages import CPP_FLAT, CPP_FORM
from fusec.codegen.parametrize import Functions, print_entries
from fusec.codegen.triton import gluon
from fusec.codegen.triton.form import FORM, Form
from fusec.codegen.triton.rules import TRITON_FLAT
from fusec.errors import UsageError
from fusec.ir.dtype import BF16, F16, DType
from fusec.ir.expr import Buffer
from fusec.ir.graph import FlatKernel, Kernel
from fusec.ir.machine import (
    CodeTuning,
    FusionTuning,
    Machine,
    ProductRates,
    Resources,
    RowTuning,
    TileTuning,
)
from fusec.ir.memory import overwritable
from fusec.ir.program import MULTIPLE
from fusec.passes.fusion.split_loop import split_loop
from fusec.passes.schedule import accepts_cpu, accepts_gpu, cpu_plans, gpu_plans
from fusec.passes.schedule.plan import Plan
from fusec.passes.stage import Stage
from fusec.processors import PROCESSORS, Bf16, target_called


@dataclass(frozen=True, slots=True)
class Codegen:
    """How kernels are lowered to source in one language, for any machine that has it.

    Attributes:
        language: "cpp" or "triton": the printer, and the loader in ``runtime``.
        device: torch's name of the device type.
        plans, accepts, split: as of ``Target``, for a machine.
        print_functions: the functions of a graph, their forms by name -> source text by the names
            of programs.
        form: the stages from a function to the form that is printed.
        flat: the stages on a flat kernel before it is planned.
        overwritable: kernel -> result -> operands that it may overwrite in place. Empty on GPUs,
            where a thread may load what another thread has stored already.
        run_bytes: the most that the kernels of a run may allocate (``NativeRun``): below it,
            the time of a kernel is mostly call overhead. 0 where there are no runs.
        multiple: alignment, in elements, that offsets need for wide loads and stores.
        async_build: whether a helper process compiles the kernels while this process continues.
    """

    language: str
    device: str
    plans: Callable[[FlatKernel, Machine], tuple[Plan, ...]]
    accepts: Callable[[Kernel, Machine], bool]
    split: Callable[[Kernel, Machine], tuple[Kernel, Kernel] | None]
    print_functions: Callable[[Functions, Mapping[str, Any]], Mapping[str, str]]
    form: tuple[Stage, ...] = ()
    flat: tuple[Stage, ...] = ()
    overwritable: Callable[[Kernel], Mapping[Buffer, tuple[Buffer, ...]]] = lambda kernel: {}
    run_bytes: int = 0
    multiple: int = 1
    async_build: bool = False


CPP = Codegen(
    "cpp",
    "cpu",
    cpu_plans,
    accepts_cpu,
    lambda kernel, machine: None,
    print_entries,
    CPP_FORM,
    CPP_FLAT,
    overwritable=overwritable,
    run_bytes=1 << 18,
    async_build=True,
)


def _print_each(functions: Functions, forms: Mapping[str, Form]) -> Mapping[str, str]:
    printed = {name: gluon.print_kernel(form) for name, form in forms.items()}
    return {name: printed[call.function] for name, call in functions.calls.items()}


TRITON = Codegen(
    "triton",
    "cuda",
    gpu_plans,
    accepts_gpu,
    split_loop,
    _print_each,
    FORM,
    TRITON_FLAT,
    multiple=MULTIPLE,
)


@dataclass(frozen=True, slots=True)
class Target:
    """One row of the table: a machine, and the code generator of its language.

    Attributes:
        name: as the command line spells it.
        machine: rates and sizes of its processor.
        codegen: how its kernels are lowered to source.
        assembly: stages below the source: the command line's name -> the compiler's name.
        libraries: whether libraries beside ATen's own may compute products on it.
        formats: whether the library's convolutions are faster on channels-last images.
    """

    name: str
    machine: Machine
    codegen: Codegen
    assembly: Mapping[str, str] = field(default_factory=dict)
    libraries: bool = False
    formats: bool = False

    @property
    def language(self) -> str:
        """The language of the target's kernels: "cpp" or "triton"."""
        return self.codegen.language

    @property
    def device(self) -> str:
        """Torch's name of the target's device type."""
        return self.codegen.device

    def in_order(self) -> Target:
        """Return the target without sums in memory, which have no order."""
        sm = replace(self.machine.sm, adds=False)
        return replace(self, machine=replace(self.machine, sm=sm)) if self.machine.sm.adds else self

    def plans(self, kernel: FlatKernel) -> tuple[Plan, ...]:
        """Return a kernel's candidate plans, the default by rule first; a race picks among them."""
        return self.codegen.plans(kernel, self.machine)

    def accepts(self, kernel: Kernel) -> bool:
        """Return True if a kernel can be scheduled; fusion checks this before it merges."""
        return self.codegen.accepts(kernel, self.machine)

    def split(self, kernel: Kernel) -> tuple[Kernel, Kernel] | None:
        """Return a partial and a final kernel where splitting the kernel's loop pays, or None."""
        return self.codegen.split(kernel, self.machine)


CPU_MACHINE = Machine(
    bytes_per_us=2.0e4,
    operations_per_us=6.0e4,
    launch_us=3.0,
    units=16,
    parts=16,
    tile=1024,
    products_per_us=7.0e5,
    slow_exact=4,
    widened=frozenset((F16, BF16)),
    slow_widened=4,
    # Linear layers of an MLP with their GELU: 0.83 to 0.97 of the library's speed (2026-11).
    rates=ProductRates(tiled=0.7, nested=0.9, library_nested=0.7, alone=False),
    cache_bytes=1 << 19,
    skinny_rows=16,
)
GPU_CHUNKS = FusionTuning(chunk_rows=2048, chunk_sum_rows=4096, chunk_recomputed=32)
"""A product takes 2.8 of the 10 ms of a head with its loss, forward and backward, so it runs again
from 4 GiB on (8192 x 4096 x 32000 in bf16, H100, 2026-11-26). A sum of products in f32 takes up to
9 % of the step in chunks of 4096 rows, by its bytes at 3 TB/s: a model that awaits a measurement.
"""
# Products are those of an H100 (2026-11-26, `python -m bench.gpu`): 8192^3 in cuBLAS 680 to 725
# TFLOP/s, limited by power; rates from races between fusec's plans and the library's calls
# (docs/decisions/plans-by-rule.md). Its memory, 4.3 TB/s, is an H200's: a device's own rate, and
# its number of multiprocessors, replace the row's (``find_target``).
HOPPER_MACHINE = Machine(
    bytes_per_us=4.3e6,
    operations_per_us=3.0e7,
    launch_us=4.0,
    units=132,
    parts=264,
    tile=128,
    products_per_us=3.5e8,
    float8=0.5,
    rates=ProductRates(
        tiled=0.72,
        narrow_roles=0.85,
        nested=0.62,
        library_nested=0.80,
        library_biased=0.50,
    ),
    sm=Resources(
        shared_bytes=232448,
        issue_budget=6.9,
        tile_registers=160,
        nested_registers=192,
        from_shared=True,
        coarse=True,
        descriptors=True,
        dependent=True,
        adds=True,
        group_registers=176,
    ),
    part_share=0.01,
    fusion=GPU_CHUNKS,
    # By the model alone (tools/report/kernel_time.py; Triton 3.7.1, 2026-11). Few rows: barriers of
    # an iteration cost more than its products (16 x 4096 -> 14336: 0.86 of the floor, 0.74 with 64
    # terms). Gradients of heads of 128 features take 0.69 of the time (causal, 2x32x4096).
    tiles=TileTuning(small_programs=3, long_rows=16, nested_gradients=((128, 128, 8, 2),)),
    code=CodeTuning(ptx=True, converts_float8=True, asynchronous_rows=64),
)
A100_MACHINE = Machine(
    bytes_per_us=1.7e6,
    operations_per_us=1.9e7,
    launch_us=4.0,
    units=108,
    parts=216,
    tile=128,
    products_per_us=1.4e8,
    sm=Resources(shared_bytes=166912, issue_budget=11.5, tile_registers=128),
    part_share=0.01,
    fusion=GPU_CHUNKS,
    code=CodeTuning(ptx=True),
)
_HOPPER_UNMEASURED = replace(
    HOPPER_MACHINE,
    products_per_us=3.95e8,
    rates=ProductRates(),
    tiles=TileTuning(),
    code=CodeTuning(ptx=True, converts_float8=True),
)
"""As Hopper, without what only an H100 measured."""
# Of what was measured nowhere, memory is 0.9 and products are 0.7 of the data sheets, as on Hopper.
B200_MACHINE = replace(
    _HOPPER_UNMEASURED,
    bytes_per_us=7.2e6,
    units=148,
    parts=296,
    products_per_us=7.9e8,
    sm=replace(
        HOPPER_MACHINE.sm,
        coarse=False,
        scaled=True,
        scaled_tile=(128, 64),
        adds=False,
        group_registers=0,
        tensor_columns=512,
        issue_budget=4.9,
    ),
)
RTX_5090_MACHINE = replace(
    A100_MACHINE,
    bytes_per_us=1.6e6,
    products_per_us=7.3e7,
    float8=0.5,
    units=170,
    parts=340,
    sm=Resources(
        programs=24,
        threads=1536,
        shared_bytes=101376,
        issue_budget=33.0,
        tile_registers=128,
        scaled=True,
        descriptors=True,
        dependent=True,
    ),
    code=CodeTuning(ptx=True, converts_float8=True),
)
_CDNA = Resources(
    registers=131072,
    thread_registers=512,
    warp=64,
    shared_bytes=65536,
    issue_budget=8.5,
    tile_registers=124,
    whole_operands=True,
)
MI300_MACHINE = replace(
    _HOPPER_UNMEASURED,
    bytes_per_us=4.8e6,
    units=304,
    parts=608,
    products_per_us=4.6e8,
    float8=1.0,
    sm=_CDNA,
    rows=RowTuning(thread_values=0),
    tiles=TileTuning(
        nested=(
            *((128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2)),
            *((32, 32, 4, 2), (16, 32, 4, 2)),
        )
    ),
    code=CodeTuning(),
)
MI350_MACHINE = replace(
    MI300_MACHINE,
    bytes_per_us=7.2e6,
    units=256,
    parts=512,
    products_per_us=8.0e8,
    sm=replace(_CDNA, shared_bytes=163840, issue_budget=5.0),
)

_NVIDIA = {stage: stage for stage in ("ttir", "ttgir", "llir", "ptx", "sass")}
_AMD = {"ttir": "ttir", "ttgir": "ttgir", "llir": "llir", "ptx": "amdgcn", "sass": "amdgcn"}

TARGETS = {
    target.name: target
    for target in (
        Target("cpu", CPU_MACHINE, CPP, libraries=True, formats=True),
        Target("sm_80", A100_MACHINE, TRITON, _NVIDIA),
        Target("sm_90", HOPPER_MACHINE, TRITON, _NVIDIA),
        Target("sm_100", B200_MACHINE, TRITON, _NVIDIA),
        Target("sm_120", RTX_5090_MACHINE, TRITON, _NVIDIA),
        Target("gfx942", MI300_MACHINE, TRITON, _AMD),
        Target("gfx950", MI350_MACHINE, TRITON, _AMD),
        *(Target(name, CPU_MACHINE, CPP, formats=True) for name in PROCESSORS),
    )
}
GPUS = tuple(name for name, target in TARGETS.items() if target.codegen is TRITON)


def find_target(
    name: str,
    vector_width: int = 16,
    *,
    bf16: Bf16 = "widened",
    threads: int = 1,
    tf32: bool = False,
    units: int = 0,
    bytes_per_us: float = 0.0,
) -> Target:
    """Return a target's row, adapted to this CPU or GPU and to torch's settings.

    Args:
        vector_width: f32 lanes of this CPU's vector registers: 16, 8 or 4.
        bf16: how this CPU multiplies bf16.
        threads: number of threads of the CPU.
        tf32: whether f32 products on a GPU may round their operands to 10 bits of mantissa.
        units, bytes_per_us: multiprocessors of the GPU and the rate of its memory; 0: the row's.
    Raises:
        UsageError: if there is no such target.
    """
    if name not in TARGETS:
        if (called := target_called(name)) is not None:
            raise UsageError(f"unknown target {name!r}: for that device it is {called!r}.")
        raise UsageError.unknown("target", name, tuple(TARGETS))
    row = TARGETS[name]
    if name in PROCESSORS:
        vector_width, bf16 = PROCESSORS[name].lanes, PROCESSORS[name].bf16
    if row.device == "cpu":
        widened = row.machine.widened - ({BF16} if bf16 != "widened" else set())
        own = replace(
            row.machine,
            vector=vector_width,
            bf16=bf16,
            widened=widened,
            slow_types=_slow_types(name, vector_width, bf16),
            threads=threads,
        )
        return replace(row, machine=own)
    machine = row.machine.sized(units, bytes_per_us)
    return replace(row, machine=replace(machine, sm=replace(machine.sm, tf32=tf32)))


def _slow_types(name: str, vector_width: int, bf16: Bf16) -> frozenset[DType]:
    """Return the 16-bit types that the library of an x86-64 CPU multiplies element by element.

    Elsewhere all are taken to be fast. oneDNN has products of bf16 from AVX-512 on, of f16 for
    processors with AVX512-FP16, which are those with tiles.
    """
    if bf16 == "tiles" or (
        name not in PROCESSORS and platform.machine() not in ("x86_64", "AMD64")
    ):
        return frozenset()
    return frozenset((F16,)) if vector_width == 16 else frozenset((BF16, F16))


def target_of_device(name: str, vector_width: int = 16, **features: Any) -> Target:
    """Return the row for a device found at run time: its own, or the nearest older GPU's.

    Args:
        vector_width, features: as of ``find_target``.
    Raises:
        UsageError: if there is no such row.
    """
    if name in TARGETS or not (name.startswith("sm_") and name[3:].isdigit()):
        return find_target(name, vector_width, **features)
    versions = {int(known[3:]): known for known in TARGETS if known.startswith("sm_")}
    older = [version for version in versions if version <= int(name[3:])]
    if not older:
        raise UsageError.unknown("target", name, tuple(TARGETS))
    return replace(find_target(versions[max(older)], vector_width, **features), name=name)
