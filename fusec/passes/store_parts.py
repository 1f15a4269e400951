"""Store the parts of a joined tensor where they belong, instead of joining them in another kernel.

Spec: ``schedule -> schedule``. A kernel that does nothing but put tensors one behind the other goes
if one kernel before it makes all of them: that stores each at its place in the whole. Legal if

1. nothing else reads a part, and the kernel that makes the parts does not, either;
2. along one axis the parts cover the whole, each element once; the other axes are theirs.

What is cheap is computed in the joining kernel (``inline``), and never comes here.

Worked example: ``a[i, j] = x*2; b[i, j] = x*3`` and ``c[i, k] = where(k < 8, a[i, k] if k < 8,
b[i, k - 8] if k >= 8)`` become ``c[i, j] = x*2; c[i, j + 8] = x*3``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusec.ir.contraction import factors
from fusec.ir.expr import Buffer, Load, Select, loads
from fusec.ir.graph import Kernel, Schedule, Step, Store, argument_views, kernel_nodes
from fusec.ir.index import Axis, Index, index
from fusec.passes.dag import step_reads
from fusec.passes.simplify import simplify_exprs


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor and its parts.

    Attributes:
        axis: position of the axis along which parts lie behind each other.
        starts: part -> where it begins along that axis.
    """

    buffer: Buffer
    axis: int
    starts: dict[Buffer, Index]


def store_parts(schedule: Schedule) -> Schedule:
    """Return the schedule without kernels that join parts which one kernel could store in place."""
    steps: dict[int, Step] = dict(enumerate(schedule.steps))
    maker = {
        store.buffer: k
        for k, step in steps.items()
        if isinstance(step, Kernel)
        for store in step.stores
    }
    readers: dict[Buffer, int] = {v.buffer: 2 for v in argument_views(schedule.graph.outputs)}
    for step in schedule.steps:
        for buffer in step_reads(step):
            readers[buffer] = readers.get(buffer, 0) + 1
    for position, step in tuple(steps.items()):
        whole = _joined(step)
        if whole is None or any(readers[part] > 1 for part in whole.starts):
            continue
        makers = {maker.get(part) for part in whole.starts}
        made_by = makers.pop()
        if made_by is None or makers:
            continue
        kernel = steps[made_by]
        assert isinstance(kernel, Kernel) and isinstance(step, Kernel)
        if not any(factors(node) for node in kernel_nodes(kernel)):  # tiles end where tensors end
            steps[made_by] = _with_parts(kernel, step, whole)
            maker[whole.buffer] = made_by
            del steps[position]
    if len(steps) == len(schedule.steps):
        return schedule
    return replace(schedule, steps=tuple(steps.values()))


def _joined(step: Step) -> _Whole | None:
    """Return what a kernel joins, if it does nothing else."""
    if not isinstance(step, Kernel) or step.inside or len(step.stores) != 1:
        return None
    (store,) = step.stores
    parts = tuple(dict.fromkeys(load.buffer for load in loads((store.expr,))))
    if not isinstance(store.expr, Select) or len(parts) < 2:
        return None
    axes = [next(iter(place.axes), None) for place in store.indices]
    if any(a is not None and index(a) is not p for a, p in zip(axes, store.indices, strict=True)):
        return None
    for position, axis in enumerate(axes):
        starts = None if axis is None else _starts(store, parts, position, axis)
        if starts is not None:
            return _Whole(store.buffer, position, starts)
    return None


def _starts(
    store: Store, parts: tuple[Buffer, ...], position: int, axis: Axis
) -> dict[Buffer, Index] | None:
    """Return where each part begins along an axis, if there they are and cover the whole."""
    starts: dict[Buffer, Index] = {}
    end = index(0)
    while len(starts) < len(parts):
        left = (part for part in parts if part not in starts)
        following = next((p for p in left if _begins(store, p, position, axis, end)), None)
        if following is None:
            return None
        starts[following] = end
        end = end + following.shape[position]
    return starts if end is store.buffer.shape[position] else None


def _begins(store: Store, part: Buffer, position: int, axis: Axis, start: Index) -> bool:
    """Return True if a store copies a part, as it is, to where ``start`` is along an axis."""
    shapes = zip(part.shape, store.buffer.shape, strict=False)
    if part.dtype is not store.buffer.dtype or len(part.shape) != len(store.indices):
        return False
    if any(a is not b for n, (a, b) in enumerate(shapes) if n != position):
        return False
    within = Axis(axis.name, part.shape[position])
    (found,) = simplify_exprs((store.expr.substitute({axis: start + index(within)}),))
    place = list(store.indices)
    place[position] = index(within)
    return found is Load(part, tuple(place))


def _with_parts(kernel: Kernel, joining: Kernel, whole: _Whole) -> Kernel:
    """Return a kernel that stores parts into the whole, in place of one that joins them."""

    def placed(store: Store) -> Store:
        start = whole.starts.get(store.buffer)
        if start is None:
            return store
        place = list(store.indices)
        place[whole.axis] = place[whole.axis] + start
        return Store(whole.buffer, tuple(place), store.expr)

    return replace(
        kernel,
        stores=tuple(map(placed, kernel.stores)),
        origin=kernel.origin + joining.origin,
        defs=(*kernel.defs, *joining.defs),
    )
