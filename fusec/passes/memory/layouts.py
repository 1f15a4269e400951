"""Lay out values between kernels as the kernels walk them: which axis is contiguous in memory.

Spec: ``schedule -> schedule``. A value that only kernels touch has no caller who asked for its
strides. Each kernel has an axis along which most of its other traffic is contiguous; the one that
moves most bytes of the value becomes the value's last in memory, the others stay in order. Values
are judged one by one, beside all others as they lay before. Products of matrices are left out: they
read tiles in either order.

Worked example: ``h[c, t] = f(x[t, c])`` and ``y[t, c] = g(h[c, t])`` with row-major x and y. Both
kernels walk c; in memory h becomes ``h[t, c]``, and nothing is transposed. A convolution along time
between two linears has this form (Mamba's).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

from fusec.ir.buffer import Buffer
from fusec.ir.contraction import factors
from fusec.ir.dtype import NumberForm
from fusec.ir.expr import Load
from fusec.ir.graph import Kernel, Schedule, Store, kernel_nodes
from fusec.ir.index import Axis, index
from fusec.ir.rewrite import reading, rewrite
from fusec.ir.strides import contiguous_strides
from fusec.passes.dag import count_readers
from fusec.passes.schedule.access import count, fastest_axis


def choose_layouts(schedule: Schedule) -> Schedule:
    """Return the schedule with the values between its kernels laid out as these walk them."""
    new: dict[Buffer, Buffer] = {}
    for buffer, kernels in _between_kernels(schedule).items():
        votes = sum((_votes(kernel, buffer) for kernel in kernels), Counter[int]())
        present = {k for k, step in enumerate(buffer.strides) if step is index(1)}
        wanted = max(votes, key=votes.__getitem__, default=None)
        if wanted is not None and votes[wanted] > max(map(votes.__getitem__, present), default=0):
            new[buffer] = _contiguous_along(buffer, wanted)
    return schedule.map_kernels(lambda kernel: (_moved(kernel, new),)) if new else schedule


def _between_kernels(schedule: Schedule) -> dict[Buffer, list[Kernel]]:
    """Return buffer -> its maker and its readers, of buffers that only kernels touch."""
    readers: dict[Buffer, list[Kernel]] = {}
    makers = Counter(buffer for step in schedule.steps for buffer in step.writes)
    products = {k for k in schedule.kernels if any(map(factors, kernel_nodes(k)))}
    for kernel in schedule.kernels:
        for buffer in kernel.reads:
            readers.setdefault(buffer, []).append(kernel)
    asked = count_readers(schedule)
    found: dict[Buffer, list[Kernel]] = {}
    for kernel in schedule.kernels:
        for buffer in kernel.writes:
            touch = [kernel, *readers.get(buffer, ())]
            alone = makers[buffer] == 1 and len(touch) == asked[buffer] + 1
            plain = buffer.is_row_major and buffer.form is NumberForm.PLAIN
            ours = alone and plain and buffer not in schedule.graph.inputs
            if ours and products.isdisjoint(touch):
                found[buffer] = touch
    return found


def _votes(kernel: Kernel, buffer: Buffer) -> Counter[int]:
    """Return dimension -> bytes that a kernel moves along it in the order of its other accesses."""
    votes: Counter[int] = Counter()
    lane = fastest_axis(kernel, kernel.axes, besides=buffer)
    if lane is None:
        return votes
    places: list[Load | Store] = [*kernel.stores, *kernel.loads]
    for indices in (place.indices for place in places if place.buffer is buffer):
        points = count(frozenset[Axis]().union(*(at.axes for at in indices)))
        for k, at in enumerate(indices):
            step = at.coefficient(lane)
            if step is not None and step in (index(1), index(-1)):
                votes[k] += points * buffer.dtype.itemsize
    return votes


def _contiguous_along(buffer: Buffer, k: int) -> Buffer:
    """Return a plain buffer of the same shape that is contiguous along one dimension."""
    order = [*(i for i in range(len(buffer.shape)) if i != k), k]
    steps = contiguous_strides(tuple(buffer.shape[i] for i in order))
    strides = tuple(steps[order.index(i)] for i in range(len(order)))
    return Buffer(buffer.name, buffer.shape, strides, buffer.dtype)


def _moved(kernel: Kernel, new: dict[Buffer, Buffer]) -> Kernel:
    """Return a kernel that stores and loads some buffers in others of their shapes."""
    if new.keys().isdisjoint((*kernel.reads, *kernel.writes)):
        return kernel
    made = kernel.map(partial(rewrite, rule=reading(new)))
    stores = (replace(s, buffer=new.get(s.buffer, s.buffer)) for s in made.stores)
    defs = tuple(new.get(buffer, buffer) for buffer in made.defs)
    return replace(made, stores=tuple(stores), defs=defs)
