"""The cost of a launch, by fusion's cost model, and the roofline of a machine.

The operations of a kernel are those that ``passes/fusion/cost.py`` counts, an expensive function as
several, and two for each multiply-add of a matrix product; of a library's kernel only its products
are known. The roof is the machine's highest rate at so many operations a byte: its memory's rate
times these, or the rate of its vector lanes or of its matrix products.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusec.ir.dtype import BF16
from fusec.ir.expr import Expr, postorder
from fusec.ir.graph import Extern, ForeachKernel, Kernel
from fusec.ir.machine import Machine
from fusec.passes.fusion.cost import call_cost, kernel_cost, kernel_operations, multiplied
from fusec.tools.report.html.steps import Launched


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The peak rate of a machine for one kind of operation, a microsecond."""

    name: str
    rate: float


@dataclass(frozen=True, slots=True)
class Roof:
    """A machine's roof: bytes a microsecond, and its ceilings, the highest first."""

    bytes_us: float
    ceilings: tuple[Ceiling, ...]


@dataclass(frozen=True, slots=True)
class Cost:
    """The operations of a launch, and its modelled microseconds."""

    operations: float
    us: float


def roof_of(machine: Machine) -> Roof:
    """Return the roof of a target's machine."""
    wide = machine.slow_widened if BF16 in machine.widened else 1
    found = [Ceiling("lanes", machine.operations_per_us)]
    if machine.multiplies:
        found += [
            Ceiling("products in 16 bits", 2 * machine.products_per_us / wide),
            Ceiling("products in f32", 2 * machine.products_per_us / machine.slow_f32),
        ]
    rates = {ceiling.rate: ceiling for ceiling in reversed(found)}
    return Roof(machine.bytes_per_us, tuple(rates[rate] for rate in sorted(rates, reverse=True)))


def cost_of(step: Launched, machine: Machine) -> Cost:
    """Return the cost of a launch."""
    match step:
        case Kernel():
            products = multiply_adds(store.expr for store in step.stores)
            return Cost(kernel_operations(step) + 2 * products, kernel_cost(step, machine).us)
        case ForeachKernel():
            costs = [cost_of(kernel, machine) for kernel in step.kernels]
            spared = (len(costs) - 1) * machine.launch_us
            return Cost(sum(c.operations for c in costs), sum(c.us for c in costs) - spared)
        case Extern():
            products = multiply_adds(line.expr for line in step.decomposition)
            return Cost(2 * products, call_cost(step, machine).us)


def multiply_adds(roots: Iterable[Expr]) -> float:
    """Return the multiply-adds of the matrix products in expressions."""
    return float(multiplied(postorder(roots)).total())
