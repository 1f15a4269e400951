"""Bytes and multiply-adds of one launch: each tensor's elements, for each sweep that reads memory.

Worked example: ``k0 -> add, gelu`` of f32[8, 128] reads x and r and writes two: 4 * 4096 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusec.errors import InternalError
from fusec.ir.extern import AddProduct, WriteInto
from fusec.ir.graph import Extern, ForeachKernel, Kernel, View, kernel_nodes
from fusec.ir.machine import Machine
from fusec.passes.fusion.cost import (
    buffer_bytes,
    call_cost,
    kernel_cost,
    moved_bytes,
    multiplied,
    numel,
)

GATHERS = {"embedding", "index", "index_select", "gather", "take", "_unsafe_index"}
"""Operations that read at most as many elements of their first argument as they return."""


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """Traffic, arithmetic and modelled time of one launch, from its shapes.

    Attributes:
        bytes: bytes read and written.
        multiplied: multiply-adds of matrix products by the type of their operands, masked ones
            included; empty for eager kernels.
        us: modelled time, as fusion uses it; None for an eager kernel without a decomposition.
    """

    bytes: int
    multiplied: dict[str, int]
    us: float | None


def work_of(launch: Kernel | ForeachKernel | Extern, machine: Machine) -> LaunchCost:
    """Return the traffic, arithmetic and modelled time of a launch."""
    match launch:
        case Extern():
            us = call_cost(launch, machine).us if launch.decomposition else None
            return LaunchCost(extern_bytes(launch), {}, us)
        case Kernel() | ForeachKernel():
            kernels = launch.kernels
            products = multiplied(node for kernel in kernels for node in kernel_nodes(kernel))
            moved = sum(moved_bytes(kernel, machine) for kernel in kernels)
            us = sum(kernel_cost(kernel, machine).us for kernel in kernels)
            once = us - (len(kernels) - 1) * machine.launch_us
            return LaunchCost(moved, {t.name: n for t, n in products.items()}, once)
        case _:
            raise InternalError(launch, stage="codegen")


def extern_bytes(extern: Extern) -> int:
    """Return the bytes that an eager kernel reads and writes: nothing for a view."""
    if not extern.is_launch:
        return 0
    written = sum(map(buffer_bytes, extern.writes))
    views = list(dict.fromkeys(extern.views))
    match extern.effect:
        case WriteInto() as part:
            changed, *views = views
            written += part.moved.hint() * changed.buffer.dtype.itemsize
        case AddProduct():
            total, *views = views
            written += 2 * view_bytes(total)
    reads = [view_bytes(view) for view in views]
    if extern.title.partition(".")[0] in GATHERS and reads:
        reads[0] = min(reads[0], written)
    return written + sum(reads)


def view_bytes(view: View) -> int:
    """Return the bytes of a view's distinct elements."""
    return numel(view) * view.buffer.dtype.itemsize
