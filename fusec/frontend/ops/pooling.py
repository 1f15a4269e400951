"""Pooling: means and maxima over windows, and their gradients, which are gathers too.

The windows of an axis are affine, ``start = o * stride - padding`` with ``kernel`` elements
``dilation`` apart, or adaptive, from ``floor(o * n / outputs)`` to ``ceil((o + 1) * n / outputs)``.
Both map a window to its elements (``place``), and an element to the windows that contain it
(``window``): a gradient sums over these windows, so nothing is scattered.

Worked example, ``avg_pool1d(x, 3, stride=2, padding=1)`` of 8 elements, padding counted::

    y[o] = sum(k: x[2*o + k - 1] if 2*o + k >= 1) / 3.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from fusec.frontend.call import AtenCall, Indices
from fusec.frontend.ops.domain import Domain, Extreme, Pick
from fusec.frontend.ops.registry import aten, defines, lowers
from fusec.frontend.ops.views import linearise
from fusec.frontend.shapes import TensorType
from fusec.frontend.value import ONE, ZERO, Value, positions
from fusec.ir.dtype import I64, DType, compute_type
from fusec.ir.expr import Const, Expr, IndexValue, both, cast, in_range, op
from fusec.ir.index import Axis, Index, index, product
from fusec.ir.monoid import MAX, SUM

GuardedIndex: TypeAlias = "tuple[Index, Expr | None]"


@dataclass(frozen=True, slots=True)
class Affine:
    """Windows that start ``stride`` apart; ``count_pad`` counts the padding in means.

    Attributes:
        divisor: the divisor of a mean over all axes; None: the number of elements of the window.
        places: the largest number of elements of a window.
        around: the largest number of windows that contain an element.
    """

    extent: Index
    outputs: Index
    kernel: int
    stride: int
    padding: int
    dilation: int = 1
    count_pad: bool = False
    divisor: int | None = None

    @property
    def places(self) -> Index:
        return index(self.kernel)

    @property
    def around(self) -> Index:
        return index(self.kernel if self.dilation > 1 else -(-self.kernel // self.stride))

    def place(self, window: Index, k: Index) -> GuardedIndex:
        """Return the position of a window's k-th element, and the guard under which it exists."""
        at = window * self.stride - self.padding + k * self.dilation
        return at, in_range(at, 0, self.extent)

    def window(self, position: Index, k: Index) -> GuardedIndex:
        """Return the k-th window that may contain an element, and the guard under which it does."""
        if self.dilation > 1:
            return self.window_by_place(position, k)
        reach = position + self.padding
        window = reach // self.stride - k
        inside = in_range(reach - window * self.stride, 0, self.kernel)
        return window, both(in_range(window, 0, self.outputs), inside)

    def window_by_place(self, position: Index, k: Index) -> GuardedIndex:
        """Return the window whose k-th element is at a position, and whether one begins there."""
        first = position + self.padding - k * self.dilation
        window, rest = first // self.stride, IndexValue(first % self.stride)
        begins = op("eq", rest, IndexValue(ZERO)) if self.stride > 1 else None
        return window, both(in_range(window, 0, self.outputs), begins)

    def size(self, window: Index) -> Expr:
        """Return the divisor of a mean over the window, an i64."""
        start = IndexValue(window * self.stride - self.padding)
        end = IndexValue(window * self.stride - self.padding + self.kernel)
        if self.count_pad:
            return op("minimum", end, IndexValue(self.extent + self.padding)) - start
        within = op("minimum", end, IndexValue(self.extent))
        return within - op("maximum", start, IndexValue(ZERO))


@dataclass(frozen=True, slots=True)
class Adaptive:
    """``outputs`` windows over ``extent`` elements, of sizes that differ by at most one."""

    extent: Index
    outputs: Index

    @property
    def places(self) -> Index:
        return self._most(self.extent, self.outputs)

    @property
    def around(self) -> Index:
        return self._most(self.outputs, self.extent)

    def _most(self, parts: Index, of: Index) -> Index:
        """Return the most ``parts`` that overlap one of ``of``: 1 + ceil if they do not divide."""
        if (parts % of) is ZERO:
            return parts // of
        return (parts + of - 1) // of + 1

    def _start(self, window: Index) -> Index:
        return window * self.extent // self.outputs

    def _end(self, window: Index) -> Index:
        return ((window + 1) * self.extent + self.outputs - 1) // self.outputs

    def place(self, window: Index, k: Index) -> GuardedIndex:
        at = self._start(window) + k
        return at, both(in_range(at, None, self._end(window)), in_range(at, 0, self.extent))

    def window(self, position: Index, k: Index) -> GuardedIndex:
        window = position * self.outputs // self.extent + k
        inside = in_range(position, self._start(window), self._end(window))
        return window, both(in_range(window, 0, self.outputs), inside)

    def size(self, window: Index) -> Expr:
        return IndexValue(self._end(window) - self._start(window))


Windows: TypeAlias = "Affine | Adaptive"
Ints: TypeAlias = Sequence[int]
PooledAxes: TypeAlias = "Sequence[tuple[Index, Index]]"
"""The extent of each pooled axis, and the number of its windows."""
_AxisWindow: TypeAlias = "tuple[Index, Callable[[Index, Index], GuardedIndex]]"


def pooled_axes(rank: int, extents: Indices, outputs: Indices) -> PooledAxes:
    """Return the last ``rank`` axes of a tensor and of what it is pooled to."""
    return list(zip(extents[-rank:], outputs[-rank:], strict=True))


def over_places(windows: Sequence[Windows], at: Indices) -> Domain:
    """Return the elements of the window at ``at``; a number is the position in the pooled axes."""
    return _domain([(w.places, w.place) for w in windows], [w.extent for w in windows], at)


def over_windows(windows: Sequence[Windows], at: Indices) -> Domain:
    """Return the windows that contain the element at ``at``."""
    return _domain([(w.around, w.window) for w in windows], [w.outputs for w in windows], at)


def over_windows_by_place(windows: Sequence[Affine], at: Indices) -> Domain:
    """Return the same, one for each place of the element in a window."""
    ways = [(w.places, w.window_by_place) for w in windows]
    return _domain(ways, [w.outputs for w in windows], at)


def _domain(ways: Sequence[_AxisWindow], extents: Sequence[Index], at: Indices) -> Domain:
    axes = tuple(Axis(f"k{d}", extent) for d, (extent, _) in enumerate(ways))
    first = len(at) - len(ways)
    where, guard = list(at), None
    for d, (k, (_, step)) in enumerate(zip(positions(axes), ways, strict=True)):
        where[first + d], inside = step(at[first + d], k)
        guard = both(guard, inside)
    number = linearise(tuple(where[first:]), tuple(extents))
    return Domain(axes, tuple(where), number, guard)


# -- means ----------------------------------------------------------------------------------------


@defines()
def mean(call: AtenCall, at: Indices, x: Value, windows: Sequence[Windows]) -> Expr:
    """Return the mean over each window."""
    kind = compute_type(call.out.dtype)
    total = over_places(windows, at).total(x, kind)
    count = _divisor(windows, at, kind)
    return total / count if kind.is_float else op("truncdiv", total, count)


@defines()
def mean_gradient(call: AtenCall, at: Indices, grad: Value, windows: Sequence[Windows]) -> Expr:
    """Return each element's gradient: the sum of its shares of the gradients of its windows."""
    kind = compute_type(call.out.dtype)
    around = over_windows(windows, at)
    share = around.read(grad, kind) / _divisor(windows, around.where, kind)
    return around.reduce(SUM, share)


def _divisor(windows: Sequence[Windows], at: Indices, kind: DType) -> Expr:
    """Return the divisor of a mean: a constant, or the number of elements of the window."""
    match windows[0]:
        case Affine(divisor=int(number)):
            return Const(number, kind)
    sizes = [w.size(at[len(at) - len(windows) + d]) for d, w in enumerate(windows)]
    total = sizes[0]
    for size in sizes[1:]:
        total = total * size
    return cast(total, kind)


def mean_windows(
    axes: PooledAxes, kernel: Ints, stride: Ints = (), padding: Ints = (0,), *settings: Any
) -> list[Affine]:
    """Return the windows of an ``avg_pool``; its last settings are as in ``affine``."""
    return affine(axes, (kernel, stride or kernel, padding, (1,)), *(settings[1:] or (True,)))


def affine(
    axes: PooledAxes, numbers: tuple[Ints, ...], count_pad: bool = False, divisor: int | None = None
) -> list[Affine]:
    """Return the windows of some axes.

    Args:
        numbers: kernel, stride, padding and dilation; a list of one number is for all axes.
    """
    each = zip(*(tuple(n) * len(axes) if len(n) == 1 else n for n in numbers), strict=True)
    return [
        Affine(extent, outputs, kernel, stride, padding, dilation, count_pad, divisor)
        for (extent, outputs), (kernel, stride, padding, dilation) in zip(axes, each, strict=True)
    ]


def adaptive(axes: PooledAxes, _: Any = None) -> list[Windows]:
    """Return the windows of an adaptive pool."""
    found: list[Windows] = []
    for extent, outputs in axes:
        kernel = extent // outputs
        if kernel.is_constant and (extent % outputs) is ZERO:  # then an element lies in one window
            found.append(Affine(extent, outputs, kernel.const, kernel.const, 0))
        else:
            found.append(Adaptive(extent, outputs))
    return found


# -- maxima ---------------------------------------------------------------------------------------


def maximum(call: AtenCall, x: Value, windows: Sequence[Windows]) -> tuple[Value, Value]:
    """Emit the maximum of each window, and its row-major position in the pooled axes.

    That is the first one's among equals, and the last one's among NaNs, as eager's loop leaves it.
    """
    count = product(w.extent for w in windows)
    over = partial(over_places, windows)
    return Extreme(x, over, MAX, count, Pick.FIRST_BUT_LAST_NAN).define(call)


@defines()
def maximum_gradient(
    call: AtenCall, at: Indices, grad: Value, places: Value, windows: Sequence[Windows]
) -> Expr:
    """Return each element's gradient: the sum of ``grad`` over the windows whose maximum it is."""
    kind = compute_type(grad.dtype)
    extents = tuple(w.extent for w in windows)
    own = IndexValue(linearise(at[len(at) - len(windows) :], extents))
    around = over_windows(windows, at)
    chosen = op("eq", around.read(places, I64), own)
    return around.reduce(SUM, around.read(grad, kind), only=chosen)


def max_windows(
    axes: PooledAxes,
    kernel: Ints,
    stride: Ints = (),
    padding: Ints = (0,),
    dilation: Ints = (1,),
    *_: Any,
) -> list[Affine]:
    """Return the windows of a ``max_pool`` from its settings."""
    return affine(axes, (kernel, stride or kernel, padding, dilation))


def one_store_each(call: AtenCall, *_: TensorType) -> str | None:
    """Prefer eager's kernel for the gradient of a 2D maximum, unless channels are last.

    It stores one element per window; the sum over windows reads all windows of each element: 8
    times slower on one core if vector lanes run along a row, faster if along channels.
    """
    rows = call.out.strides[-3] is not ONE
    return "a maximum's gradient: one store for each window" if rows else None


def pool(pool: Pool, rank: int, call: AtenCall, x: Value, *settings: Any) -> Any:
    """Emit a pool of the last ``rank`` axes."""
    axes = pooled_axes(rank, x.shape, call.out.shape)
    return pool.value(call, x, pool.windows(axes, *settings))


def gradient(pool: Pool, rank: int, call: AtenCall, grad: Value, x: Value, *settings: Any) -> Value:
    """Emit a pool's gradient; for a maximum, the last setting is the tensor of positions."""
    places = [s for s in settings if isinstance(s, Value)]
    numbers = settings[: len(settings) - len(places)]
    axes = pooled_axes(rank, x.shape, grad.shape)
    return pool.gradient(call, grad, *places, pool.windows(axes, *numbers))


@dataclass(frozen=True, slots=True)
class Pool:
    """A kind of pool: the functions that return its windows, its value and its gradient."""

    windows: Callable[..., Sequence[Windows]]
    value: Callable[..., Any]
    gradient: Callable[..., Value]


_POOLS = {
    "avg_pool{}d": Pool(mean_windows, mean, mean_gradient),
    "max_pool{}d_with_indices": Pool(max_windows, maximum, maximum_gradient),
    "_adaptive_avg_pool{}d": Pool(adaptive, mean, mean_gradient),
    "adaptive_max_pool{}d": Pool(adaptive, maximum, maximum_gradient),
}

for _rank in (2, 3):
    for _name, _pool in _POOLS.items():
        _target = getattr(aten, _name.format(_rank)).default
        lowers(_target)(partial(pool, _pool, _rank))
        _scatters = _rank == 2 and _pool.windows is max_windows
        _target = getattr(aten, f"{_name.format(_rank)}_backward").default
        lowers(_target, library=one_store_each if _scatters else None)(
            partial(gradient, _pool, _rank)
        )
