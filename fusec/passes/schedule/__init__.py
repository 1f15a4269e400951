"""Schedules: how each axis of a kernel runs on a target (grid, loop or lanes).

``SCHEDULES`` are tried in order; the first that accepts a kernel plans it. A new schedule is one
module with ``accepts`` and ``plan``, and one entry here: ``by_rule(module.accepts, module.plan)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fusec.errors import InternalError
from fusec.ir.graph import FlatKernel, Kernel
from fusec.ir.machine import Machine
from fusec.ir.transformed import has_transformed
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.kernel.unroll_rows import computes_rows, unrolls_rows
from fusec.passes.schedule import columnwise, contraction, pointwise, rowwise, transformed
from fusec.passes.schedule.access import fastest_axis
from fusec.passes.schedule.nest import nest_order
from fusec.passes.schedule.plan import Plan
from fusec.passes.schedule.vector_loops import accepts_loops, loop_plans


@dataclass(frozen=True, slots=True)
class KernelSchedule:
    """A schedule for one kind of kernels.

    Attributes:
        accepts: whether it can run a kernel.
        plans: the plans that it offers: the one chosen by rule first, then other candidates for a
            race.
    """

    accepts: Callable[[FlatKernel, Machine], bool]
    plans: Callable[[FlatKernel, Machine], tuple[Plan, ...]]


def by_rule(
    accepts: Callable[[FlatKernel], bool], plan: Callable[[FlatKernel, Machine], Plan]
) -> KernelSchedule:
    """Return a schedule that accepts the same kernels on all machines, with one plan for each."""
    return KernelSchedule(
        lambda kernel, machine: accepts(kernel), lambda kernel, machine: (plan(kernel, machine),)
    )


SCHEDULES: tuple[KernelSchedule, ...] = (
    KernelSchedule(contraction.accepts, contraction.plans),
    by_rule(pointwise.accepts, pointwise.plan),
    KernelSchedule(lambda kernel, machine: rowwise.accepts(kernel), rowwise.plans),
    by_rule(columnwise.accepts, columnwise.plan),
)
"""Schedules of GPUs, those with narrower conditions first."""


def gpu_plans(
    kernel: FlatKernel, machine: Machine, schedules: Iterable[KernelSchedule] = SCHEDULES
) -> tuple[Plan, ...]:
    """Return plans of a kernel for a GPU: the one chosen by rule comes first."""
    for schedule in schedules:
        if schedule.accepts(kernel, machine):
            return schedule.plans(kernel, machine)
    raise InternalError(f"no schedule accepts {kernel.name}", stage="passes.schedule")


def accepts_gpu(kernel: Kernel, machine: Machine) -> bool:
    """Return True if a GPU schedule can run the kernel: its loops nest without private arrays."""
    if contraction.contractions(kernel, machine):
        if not contraction.accepts(kernel, machine):
            return False
        # Planning sees the coalesced kernel, whose merged axes may be too long to be lanes.
        return contraction.accepts(coalesce(kernel), machine)
    fast = fastest_axis(kernel, kernel.axes)
    if nest_order(kernel, fast, machine) is None:
        return False
    if fast is None or fast not in kernel.inside:
        return True
    return rowwise.sums_fit(kernel, fast, machine.rows)


def cpu_plans(kernel: FlatKernel, machine: Machine) -> tuple[Plan, ...]:
    """Return plans of a kernel for a CPU: the one chosen by rule comes first."""
    if has_transformed(kernel):
        return transformed.plans(kernel, machine)
    if not unrolls_rows(kernel, machine) and contraction.accepts(kernel, machine):
        return contraction.plans(kernel, machine)
    return loop_plans(kernel, machine)


def accepts_cpu(kernel: Kernel, machine: Machine) -> bool:
    """Return True if a CPU schedule can run the kernel: by loops, or tiles for matrix products."""
    if has_transformed(kernel):
        return transformed.accepts(kernel, machine) and transformed.accepts(
            coalesce(kernel), machine
        )
    if unrolls_rows(kernel, machine):
        return not computes_rows(kernel, machine) and accepts_loops(kernel, machine)
    if machine.multiplies and contraction.contractions(kernel, machine):
        accepted = contraction.accepts(kernel, machine)
        return accepted and contraction.accepts(coalesce(kernel), machine)
    return accepts_loops(kernel, machine)
