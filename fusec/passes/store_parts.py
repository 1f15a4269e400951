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
from fusec.ir.graph import Kernel, Schedule, Store, kernel_nodes
from fusec.ir.index import Axis, Index, index
from fusec.passes.dag import count_readers
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
    first = {buffer: kernel for kernel in schedule.kernels for buffer in kernel.writes}
    latest: dict[Kernel, Kernel] = {}  # a kernel, by its first form
    joining: set[Kernel] = set()
    readers = count_readers(schedule)
    for kernel in schedule.kernels:
        whole = _joined(kernel)
        if whole is None or any(readers[part] > 1 for part in whole.starts):
            continue
        makers = {first.get(part) for part in whole.starts}
        maker = makers.pop()
        if maker is None or makers:
            continue
        made = latest.get(maker, maker)
        if not any(factors(node) for node in kernel_nodes(made)):  # tiles end where tensors end
            latest[maker] = _with_parts(made, kernel, whole)
            first[whole.buffer] = maker
            joining.add(kernel)
    return schedule.map_kernels(lambda k: () if k in joining else (latest.get(k, k),))


def _joined(kernel: Kernel) -> _Whole | None:
    """Return what a kernel joins, if it does nothing else."""
    if kernel.inside or len(kernel.stores) != 1:
        return None
    (store,) = kernel.stores
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
