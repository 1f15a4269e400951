"""Scatters, lowered as gathers: each element of the result combines the sources that target it.

If there is one index for each line along the axis, each element compares its position with it,
whatever the size. Otherwise sources may collide: each element scans all of them, which pays off for
few (``domain.py``); a replacement takes the last one, as in eager's loop on CPUs. Combinations of
many sources run as a loop over these on CPUs (``ir/serial.py``).

Worked example, ``scatter_add`` along the only axis, with m sources::

    y[i] = x[i] + sum(j: where(index[j] == i, source[j], 0))

On CPUs ``index[j]`` is ``within(index[j], n)``, as eager checks indices there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Body, Indices, Scalar, arithmetic_type, read
from fusec.frontend.ops.arithmetic import select
from fusec.frontend.ops.domain import Domain, identity
from fusec.frontend.ops.indexing import MASK, checked, counted_from_front
from fusec.frontend.ops.registry import aten, lowers
from fusec.frontend.ops.views import IntoSize, delinearise, linearise, replaced, wrap
from fusec.frontend.value import ONE, ZERO, Value, broadcast, make_axes, positions
from fusec.ir.dtype import BOOL, F32, F64, I64, DType, compute_type
from fusec.ir.expr import Const, Expr, IndexValue, Reduce, axes_in, both, cast, in_range, op
from fusec.ir.index import Index, Runtime, index, product
from fusec.ir.monoid import MAX, MIN, PROD, SUM, Monoid
from fusec.ir.serial import hits_of

_COLLIDE = "a scatter: elements may collide"


@dataclass(frozen=True, slots=True)
class Updates:
    """The sources of a scatter, as functions of an element of the result.

    Attributes:
        extents: the extents of the axes that number the sources an element scans.
        hits: (element, source's number) -> whether it targets the element, and its guard.
        source: (element, source's number, guard) -> the source's value.
    """

    extents: Indices
    hits: Callable[[Indices, Indices], tuple[Expr, Expr | None]]
    source: Callable[[Indices, Indices, Expr | None], Expr]

    def at(self, at: Indices) -> Domain:
        """Return the domain of the sources that target the element at ``at``."""
        axes = make_axes(self.extents, "j")
        number = positions(axes)
        hits, there = self.hits(at, number)
        return Domain(axes, number, linearise(number, self.extents), there, hits)

    def value(self, at: Indices, number: Indices, kind: DType) -> Expr:
        """Return the value of a source, as ``kind``."""
        return cast(self.source(at, number, self.hits(at, number)[1]), kind)


def element(x: Value, at: Indices) -> Indices:
    """Return the indices into ``x``, which has one axis if the result is a scalar."""
    return at or (ZERO,) * len(x.shape)


# -- replacing and combining ---------------------------------------------------------------------


def replace_last(call: AtenCall, x: Value, updates: Updates) -> Value:
    """Emit each element as the last source that targets it, or unchanged.

    Raises:
        Unsupported: for many sources, unless each element may have one, as in the inverse of a
            permutation, or all are written, as where the rest is 0: eager's kernel moves less.
    """
    extents = updates.extents
    each = product(extents) - product(x.shape)
    whole = each.is_constant and each.const >= 0
    if not (whole or _compares_all(call, x, updates)):
        call.check_steps(extents, _COLLIDE)
    kind = compute_type(call.out.dtype)
    last_of = reduced(call, x, updates, MAX, lambda at, n: IndexValue(linearise(n, extents)))

    def body(at: Indices) -> Expr:
        at = element(x, at)
        last = last_of(at)
        hit = op("ge", last, Const(0, I64))
        place = index(Runtime(select(hit, last, Const(0, I64)), product(extents)))
        number = delinearise(place, extents)
        there = both(updates.hits(at, number)[1], hit)
        return select(hit, cast(updates.source(at, number, there), kind), cast(x.at(at), kind))

    return call.define(body)


def combine(
    call: AtenCall, x: Value, updates: Updates, monoid: Monoid, *, include_self: bool = True
) -> Value:
    """Emit each element combined with all sources that target it.

    Args:
        include_self: if False, an element with sources is their combination alone.
    """
    if x.dtype is BOOL:
        raise Unsupported("a scatter that adds truth values")
    kind = compute_type(call.out.dtype)
    combined = reduced(call, x, updates, monoid, lambda at, n: updates.value(at, n, kind))
    targeted = None if include_self else is_targeted(call, x, updates)

    def body(at: Indices) -> Expr:
        at = element(x, at)
        old, new = cast(x.at(at), kind), combined(at)
        if targeted is not None:
            return select(targeted(at), new, old)
        return new if old is identity(monoid, kind) else op(monoid.combine, old, new)

    return call.define(body)


def average(call: AtenCall, x: Value, updates: Updates, *, include_self: bool) -> Value:
    """Emit means; of integers, by sums and counts that wrap in their own type, as eager's."""
    kind = arithmetic_type(call.out.dtype)
    sums = reduced(call, x, updates, SUM, lambda at, n: updates.value(at, n, kind))
    counts = reduced(call, x, updates, SUM, lambda at, n: Const(1, kind))
    targeted = is_targeted(call, x, updates)

    def body(at: Indices) -> Expr:
        at = element(x, at)
        old, total, count = cast(x.at(at), kind), sums(at), counts(at)
        if include_self:
            total, count = old + total, count + 1
        if not kind.is_float:
            total, count = (cast(cast(n, call.out.dtype), kind) for n in (total, count))
        quotient = total / count if kind.is_float else op("floordiv", total, count)
        return select(targeted(at), quotient, old)

    return call.define(body)


def is_targeted(call: AtenCall, x: Value, updates: Updates) -> Body:
    """Return the condition that some source targets an element."""
    found = reduced(call, x, updates, MAX, lambda at, n: Const(1, I64))
    return lambda at: op("ge", found(at), Const(1, I64))


def reduced(
    call: AtenCall,
    x: Value,
    updates: Updates,
    monoid: Monoid,
    value: Callable[[Indices, Indices], Expr],
) -> Body:
    """Return a reduction over the sources that target an element; of many, by their loop.

    Args:
        value: (element, source's number) -> what is reduced.
    Raises:
        Unsupported: if many sources would be compared with each element.
    """

    def total(at: Indices) -> Expr:
        domain = updates.at(at)
        return domain.reduce(monoid, value(at, domain.where))

    if call.takes_few_steps(updates.extents):
        return total
    axes = make_axes(x.shape)
    found = total(positions(axes))
    if not isinstance(found, Reduce) or not hits_of(found):
        if _compares_all(call, x, updates):
            return total
        raise Unsupported(_COLLIDE)
    shape = tuple(a.extent if a in found.axes else ONE for a in axes)
    made = call.scratch(monoid.name, shape, found.dtype, total)
    return lambda at: made.at(broadcast(at, shape))


def hit(call: AtenCall, here: Index, place: Expr, number: Indices, rows: Indices = ()) -> Expr:
    """Return the condition that a source, given by its number, targets a position along an axis.

    Where many sources are combined on a CPU, each is added where it hits.

    Args:
        rows: the indices of axes around, along which places may vary.
    """
    axes = axes_in(number)
    own = bool(axes) and here.as_axis() is not None and place.axes <= axes | axes_in(rows)
    steady = call.is_cpu and own
    many = not call.takes_few_steps(tuple(a.extent for a in axes))
    return op("hits" if steady and many else "eq", IndexValue(here), place)


def _compares_all(call: AtenCall, x: Value, updates: Updates) -> bool:
    """Return whether all elements are written anyway, and each has few sources to compare."""
    return not x.reads_memory and call.takes_few_terms(updates.extents)


@lowers(aten.histc.default)
def histc(call: AtenCall, x: Value, bins: int = 100, low: float = 0, high: float = 0) -> Value:
    """Emit the number of elements in each of equal intervals, found as eager's kernels do.

    Raises:
        Unsupported: for an interval that depends on data, and for integers.
    """
    kind = call.out.dtype
    if kind not in (F32, F64) or not low < high:
        raise Unsupported(_COLLIDE)

    def bin_of(number: Indices) -> Expr:
        value = cast(x.at(delinearise(number[0], x.shape)), kind)
        inside = op("ge", value, Const(low, kind)) & op("le", value, Const(high, kind))
        place = (value - low) * float(bins) / Const(high - low, kind)
        place = op(
            "minimum", cast(select(inside, place, Const(0, kind)), I64), Const(bins - 1, I64)
        )
        return select(inside, place, Const(-1, I64))

    updates = Updates(
        (product(x.shape),),
        lambda at, number: (hit(call, at[0], bin_of(number), number), None),
        lambda at, number, guard: Const(1, kind),
    )
    return combine(call, call.lazy(lambda at: Const(0, kind)), updates, SUM)


# -- along one axis -------------------------------------------------------------------------------


def updates_along(
    call: AtenCall, x: Value, dim: int, indices: Value, source: Value | Scalar
) -> Updates:
    """Return the updates of a scatter along ``dim``: one source for each index along it."""
    axis = wrap(dim, len(x.shape))

    def hits(at: Indices, number: Indices) -> tuple[Expr, Expr | None]:
        where = replaced(at, axis, number[0])
        guard: Expr | None = None
        for k, (i, extent) in enumerate(zip(where, indices.shape, strict=True)):
            if k != axis:
                guard = both(guard, in_range(i, 0, extent))
        named_here = checked(call, cast(indices.at(where, guard), I64), x.shape[axis])
        return hit(call, at[axis], named_here, number, at[:axis]), guard

    def value(at: Indices, number: Indices, guard: Expr | None) -> Expr:
        if not isinstance(source, Value):
            return read(source, (), compute_type(x.dtype))
        return source.at(replaced(at, axis, number[0]), guard)

    return Updates((indices.shape[axis],), hits, value)


def as_line(x: Value) -> Value:
    """Return a tensor without axes as one of shape [1], any other as it is."""
    return x if x.shape else Value((ONE,), x.dtype, make_axes((ONE,)), x.expr)


def scatter(
    monoid: Monoid | None,
    call: AtenCall,
    x: Value,
    dim: int,
    indices: Value,
    source: Value | Scalar,
) -> Value:
    """Emit a scatter that replaces (``monoid`` None) or combines."""
    line, places = as_line(x), as_line(indices)
    source = as_line(source) if isinstance(source, Value) else source
    axis = wrap(dim, len(line.shape))
    updates = updates_along(call, line, dim, places, source)
    if places.shape == replaced(line.shape, axis, ONE):
        return one_a_line(call, line, updates, monoid)
    if monoid is None:
        return replace_last(call, line, updates)
    return combine(call, line, updates, monoid)


def one_a_line(call: AtenCall, x: Value, updates: Updates, monoid: Monoid | None) -> Value:
    """Emit a scatter of one source for each line along the axis."""
    kind = compute_type(call.out.dtype)
    if monoid is not None and kind is BOOL:
        raise Unsupported("a scatter that adds truth values")

    def body(at: Indices) -> Expr:
        at = element(x, at)
        old, new = cast(x.at(at), kind), updates.value(at, (ZERO,), kind)
        new = new if monoid is None else op(monoid.combine, old, new)
        return select(updates.hits(at, (ZERO,))[0], new, old)

    return call.define(body)


lowers(aten.scatter.value, aten.scatter.src)(partial(scatter, None))
lowers(aten.scatter_add.default)(partial(scatter, SUM))

_MONOIDS = {"sum": SUM, "prod": PROD, "amax": MAX, "amin": MIN}


def reduce_with(
    updates_of: Callable[..., Updates],
    call: AtenCall,
    x: Value,
    dim: int,
    indices: Value,
    source: Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> Value:
    """Emit each element reduced with its sources; ``reduce`` is torch's name for it."""
    line = as_line(x)
    updates = updates_of(call, line, dim, as_line(indices), as_line(source))
    if reduce == "mean":
        return average(call, line, updates, include_self=include_self)
    return combine(call, line, updates, _MONOIDS[reduce], include_self=include_self)


lowers(aten.scatter_reduce.two)(partial(reduce_with, updates_along))


@lowers(aten.embedding_dense_backward.default)
def embedding_gradient(
    call: AtenCall, grad: Value, indices: Value, rows: IntoSize, padding: int, by_frequency: bool
) -> Value:
    """Emit the gradient of a table: the sum, or mean, of the gradients of a row's occurrences."""

    def hits(at: Indices, number: Indices) -> tuple[Expr, Expr | None]:
        row = cast(indices.at(number), I64)
        counts = None if padding < 0 else op("ne", row, Const(padding, I64))
        return hit(call, at[0], checked(call, row, call.out.shape[0]), number), counts

    def value(at: Indices, number: Indices, guard: Expr | None) -> Expr:
        return grad.at((*number, at[1]), guard)

    zero = call.lazy(lambda at: Const(0, compute_type(call.out.dtype)))
    updates = Updates(indices.shape, hits, value)
    if by_frequency:
        return average(call, zero, updates, include_self=False)
    return combine(call, zero, updates, SUM)


# -- slices by an index ---------------------------------------------------------------------------


def updates_of_slices(call: AtenCall, x: Value, dim: int, indices: Value, source: Value) -> Updates:
    if source.shape and not x.shape:
        raise Unsupported("slices of a tensor without axes")  # eager refuses most
    line = as_line(x)
    names: list[Value | None] = [None] * wrap(dim, len(line.shape))
    return updates_at_indices(call, line, [*names, as_line(indices)], as_line(source))


lowers(aten.index_reduce.default)(partial(reduce_with, updates_of_slices))


@lowers(aten.index_add.default)
def index_add(
    call: AtenCall, x: Value, dim: int, indices: Value, source: Value, *, alpha: Scalar = 1
) -> Value:
    kind = compute_type(call.out.dtype)
    factor = read(alpha, (), kind)
    updates = updates_of_slices(call, x, dim, indices, source)

    def scaled(at: Indices, number: Indices, guard: Expr | None) -> Expr:
        return cast(updates.source(at, number, guard), kind) * factor

    return combine(call, as_line(x), replace(updates, source=scaled), SUM)


@lowers(aten.index_copy.default)
def index_copy(call: AtenCall, x: Value, dim: int, indices: Value, source: Value) -> Value:
    return replace_last(call, as_line(x), updates_of_slices(call, x, dim, indices, source))


@lowers(aten.index_put.default)
def index_put(
    call: AtenCall,
    x: Value,
    indices: Sequence[Value | None],
    source: Value,
    accumulate: bool = False,
) -> Value:
    first = indices[0]
    if len(indices) == 1 and first is not None and first.dtype is BOOL:
        return put_masked(call, x, first, source, accumulate)
    updates = updates_at_indices(call, x, indices, source, wraps=True)
    return combine(call, x, updates, SUM) if accumulate else replace_last(call, x, updates)


def put_masked(call: AtenCall, x: Value, mask: Value, source: Value, accumulate: bool) -> Value:
    """Emit ``x`` with one source put, or added, wherever a mask over the first axes is true.

    Raises:
        Unsupported: if each masked position has a source of its own: which one depends on data.
    """
    rest = len(x.shape) - len(mask.shape)
    if len(source.shape) > rest and source.shape[-rest - 1] is not ONE:
        raise Unsupported("a mask as an index: which source goes where depends on data")
    kind = compute_type(call.out.dtype)

    def body(at: Indices) -> Expr:
        where = (ZERO, *at[len(at) - rest :])
        old, new = cast(x.at(at), kind), cast(source.at(broadcast(where, source.shape)), kind)
        new = old + new if accumulate else new
        return select(mask.at(at[: len(at) - rest]), new, old)

    return call.define(body)


@lowers(aten.put.default)
def put(call: AtenCall, x: Value, indices: Value, source: Value, accumulate: bool = False) -> Value:
    """Emit the tensor with elements at flat ``indices`` replaced or added to."""
    count = product(x.shape)

    def hits(at: Indices, number: Indices) -> tuple[Expr, Expr | None]:
        own = IndexValue(linearise(at, x.shape))
        where = delinearise(number[0], indices.shape)
        named_here = counted_from_front(indices.at(where), count)
        return op("eq", cast(own, I64), checked(call, named_here, count)), None

    def value(at: Indices, number: Indices, guard: Expr | None) -> Expr:
        return source.at(delinearise(number[0], source.shape), guard)

    updates = Updates((product(indices.shape),), hits, value)
    return combine(call, x, updates, SUM) if accumulate else replace_last(call, x, updates)


def updates_at_indices(
    call: AtenCall, x: Value, indices: Sequence[Value | None], source: Value, *, wraps: bool = False
) -> Updates:
    """Return the updates to ``x[indices]``: one for each element of the broadcast index tensors.

    Args:
        wraps: whether a negative index counts from the end.
    Raises:
        Unsupported: for a mask.
    """
    used = [(k, i) for k, i in enumerate(indices) if i is not None]
    if not used or any(i.dtype is BOOL for _, i in used):
        raise Unsupported(MASK)
    shape = broadcast_shape([i.shape for _, i in used])
    axes = [k for k, _ in used]
    first = axes[0] if axes == list(range(axes[0], axes[0] + len(axes))) else 0

    def hits(at: Indices, number: Indices) -> tuple[Expr, Expr | None]:
        found: Expr | None = None
        for k, i in used:
            place = cast(i.at(broadcast(number, i.shape)), I64)
            place = counted_from_front(place, x.shape[k]) if wraps else place
            place = checked(call, place, x.shape[k])
            found = both(found, hit(call, at[k], place, number))
        assert found is not None
        return found, None

    def value(at: Indices, number: Indices, guard: Expr | None) -> Expr:
        rest = tuple(i for k, i in enumerate(at) if k not in axes)
        where = (*rest[:first], *number, *rest[first:])
        return source.at(broadcast(where, source.shape), guard)

    return Updates(shape, hits, value)


def broadcast_shape(shapes: Sequence[Indices]) -> Indices:
    """Return the shape to which the shapes broadcast."""
    rank = max(map(len, shapes))
    padded = [(ONE,) * (rank - len(s)) + s for s in shapes]
    return tuple(
        next((e for e in extents if e is not ONE), ONE) for extents in zip(*padded, strict=True)
    )
