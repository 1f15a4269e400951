"""What a GPU's kernel reads from memory more than once: sweeps over slices that no cache keeps.

A value that needs a whole reduction is computed in a sweep behind it, which reads again what the
reduction has read: ``y[c, i] = x[c, i] - sum(i: x[c, i])`` reads x twice. The second sweep finds
it in registers or in the second-level cache, if that keeps the slices of all programs that run at
the same time (``RowTuning.kept_bytes``); else it comes from memory again, and counts again.

Worked example, a BatchNorm of 256 x 256 x 56 x 56 in bf16: mean, variance and result are three
sweeps over 411 MB, of which the programs of 256 channels hold all. They read 1233 MB.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from fusec.ir.contraction import factors
from fusec.ir.expr import Buffer, Expr, Load, Reduce, children, loads, postorder, reach, reductions
from fusec.ir.graph import Kernel, kernel_nodes
from fusec.ir.machine import Machine
from fusec.ir.online import find_row_maxima
from fusec.passes.schedule.access import count


def sweeps_again(kernel: Kernel, machine: Machine) -> Mapping[Buffer, int]:
    """Return buffer -> how many sweeps over it read it from memory again; on CPUs {}.

    Loops of products are left out: they have tiles, which are shared otherwise.
    """
    sums = kernel.reductions
    if machine.is_cpu or not sums or any(factors(node) is not None for node in sums):
        return {}
    loaded = sum(count(n.axes) * n.dtype.itemsize for n in kernel.loads)
    if loaded <= machine.rows.kept_bytes:
        return {}
    maxima = find_row_maxima(s.expr for s in kernel.stores)
    depth = _depths(kernel, maxima)
    read = {node: _slices(node) for node in sums}
    slices: dict[int, dict[Buffer, int]] = {}  # sweep -> what it reads again -> bytes of a program
    swept = [node.bodies for node in sums if node not in maxima]  # others share a maximum's sweep
    for exprs in (*swept, *((s.expr,) for s in kernel.stores)):
        level = max(depth[e] for e in exprs)
        before = [n for n in postorder(exprs) if isinstance(n, Reduce) and depth[n] <= level]
        for buffer in {x.buffer for x in _loads(exprs) if not x.axes.issubset(kernel.grid)}:
            size = max((read[n].get(buffer, 0) for n in before), default=0)
            found = slices.setdefault(level, {})
            found[buffer] = max(size, found.get(buffer, 0))
    programs = math.prod(a.extent.hint() for a in kernel.grid)
    again = Counter[Buffer]()
    for found in slices.values():
        if held_bytes(sum(found.values()), programs, machine) > machine.rows.kept_bytes:
            again.update(buffer for buffer, size in found.items() if size)
    return again


def _slices(reduction: Reduce) -> dict[Buffer, int]:
    """Return buffer -> the bytes that a reduction, with those inside it, reads for one result."""
    over = {axis for n in reductions(reduction) for axis in n.over}
    found: dict[Buffer, int] = {}
    for load in loads((reduction,)):
        if swept := load.axes & over:
            size = count(swept) * load.dtype.itemsize
            found[load.buffer] = max(size, found.get(load.buffer, 0))
    return found


def held_bytes(size: int, programs: int, machine: Machine) -> int:
    """Return the bytes of slices that all programs hold that run at the same time."""
    return size * min(programs, machine.rows.concurrent * machine.units)


def _depths(kernel: Kernel, maxima: Mapping[Reduce, Reduce]) -> dict[Expr, int]:
    """Return expression -> sweeps before it. Sums share the sweep of the maximum they refer to."""
    found: dict[Expr, int] = {}
    for node in kernel_nodes(kernel):
        below = max((found[c] for c in children(node)), default=0)
        if isinstance(node, Reduce) and node in maxima:
            found[node] = found[maxima[node]]
        else:
            found[node] = below + isinstance(node, Reduce)
    return found


def _loads(exprs: Iterable[Expr]) -> list[Load]:
    """Return the loads of a sweep: without those of the reductions that it needs."""
    inside = reach(exprs, lambda node: () if isinstance(node, Reduce) else children(node))
    return [node for node in inside if isinstance(node, Load)]
