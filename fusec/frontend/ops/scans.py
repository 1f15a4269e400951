"""Scans and searches: each element is a reduction over its prefix, or over all boundaries.

Each element is reduced from scratch, in the eager kernel's order, if short (``domain.py``). Long
scans run in their loop on CPUs (``ir/serial.py``). Worked example, ``cumsum`` of a line, and
``searchsorted`` of v in sorted boundaries b::

    y[i] = sum(j: where(j <= i, x[j], 0))
    y[i] = sum(j: where(b[j] < v[i], 1, 0))
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Indices, Scalar, common_type, read_exact, result_type
from fusec.frontend.ops.arithmetic import equal, negate, select
from fusec.frontend.ops.domain import Domain, Extreme, Pick, prefixes, reduction
from fusec.frontend.ops.registry import aten, defines, lowers
from fusec.frontend.ops.views import wrap
from fusec.frontend.value import ONE, ZERO, Value, make_axes, positions
from fusec.ir.dtype import BOOL, F32, F64, I64, DType, compute_type
from fusec.ir.expr import Const, Expr, IndexValue, cast, op
from fusec.ir.index import Axis
from fusec.ir.monoid import ANY, EXPSUM, MAX, MIN, PROD, SUM, Monoid

_SCAN, _SEARCH = "a scan along an axis", "a search"


# -- scans ----------------------------------------------------------------------------------------


def scan(
    monoid: Monoid, call: AtenCall, x: Value, dim: int, *, dtype: torch.dtype | None = None
) -> Value:
    """Emit a cumulative sum or product, in the accumulation type; on CPUs and if long in f64.

    What differences of such sums are read for, such as decays, is far less than the sums.
    """
    kind = I64 if call.out.dtype is BOOL else compute_type(call.out.dtype)
    before, short = prefixes(call, x, dim, _SCAN)
    kind = F64 if kind is F32 and (call.is_cpu or not short) else kind
    return call.define(reduction(before, monoid, lambda p: p.term(x, kind)))


def extreme_scan(monoid: Monoid, call: AtenCall, x: Value, dim: int) -> tuple[Value, Value]:
    """Emit the cumulative extreme, and the position of its last occurrence, or of the last NaN.

    The position in a long line is a scan of its own, the last one so far at which an element is the
    extreme so far: lanes take steps of both, and of a pair they take none (``vector_loops.py``).
    """
    before, short = prefixes(call, x, dim, _SCAN)
    if x.dtype is BOOL:
        raise Unsupported("the greatest truth value so far")
    count = x.shape[wrap(dim, len(x.shape))] if x.shape else ONE
    extreme = Extreme(x, before, monoid, count, Pick.LAST)
    if short:
        return extreme.define(call)
    best = call.define(extreme.value, 0)

    def last(points: Domain) -> Expr:
        value, number = points.exact(x, extreme.kind), IndexValue(points.number, extreme.number)
        found = equal(value, cast(best.at(points.where), extreme.kind))
        if extreme.kind.is_float:
            found = found | op("isnan", value)
        return select(found, number, 0)

    return best, call.define(reduction(before, MAX, last), 1)


lowers(aten.cumsum.default)(partial(scan, SUM))
lowers(aten.cumprod.default)(partial(scan, PROD))
lowers(aten.cummax.default)(partial(extreme_scan, MAX))
lowers(aten.cummin.default)(partial(extreme_scan, MIN))


@lowers(aten.logcumsumexp.default)
def logcumsumexp(call: AtenCall, x: Value, dim: int) -> Value:
    """Emit log(sum(exp(x))) of each prefix, relative to its maximum; a long sum in f64."""
    kind, (before, short) = compute_type(call.out.dtype), prefixes(call, x, dim, _SCAN)
    weight = Const(1.0, kind if short else F64)

    def body(at: Indices) -> Expr:
        points = before(at)
        term = points.read(x, kind)
        total = cast(points.reduce(EXPSUM, term, weight), kind)
        return op("log", total) + points.reduce(MAX, term)

    return call.define(body)


# -- searches -------------------------------------------------------------------------------------


@defines(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    call: AtenCall,
    at: Indices,
    boundaries: Value,
    x: Scalar,
    *,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
    **_: Any,
) -> Expr:
    """Return the number of boundaries below each value; if ``right``, also of those equal to it."""
    if sorter is not None:
        raise Unsupported("a search by another order")
    right = right or side == "right"
    kind = search_type(boundaries, x)
    call.check_steps((boundaries.shape[-1],), _SEARCH)
    value = read_exact(x, at, kind)

    last = op("ne", value, value) if kind.is_float else None  # NaN sorts behind all

    def below(boundary: Expr) -> Expr:
        less = op("le" if right else "lt", boundary, value)
        return cast(less if last is None else op("or", less, last), I64)

    lines = at[:-1] if len(boundaries.shape) > 1 else ()
    axes = (Axis("j", boundaries.shape[-1]),)
    line = Domain(axes, (*lines, *positions(axes)), ZERO)
    return line.reduce(SUM, below(read_exact(boundaries, line.where, kind)))


@lowers(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(
    call: AtenCall, x: Scalar, boundaries: Value, *, right: bool = False, **_: Any
) -> Value:
    return searchsorted(call, boundaries, x, right=right)


@lowers(aten.isin.Tensor_Tensor)
def isin(call: AtenCall, x: Value, wanted: Value, *, invert: bool = False, **_: Any) -> Value:
    kind = search_type(wanted, x)
    call.check_steps(wanted.shape, _SEARCH)
    axes = make_axes(wanted.shape, "j")
    all_of_it = Domain(axes, positions(axes), ZERO)

    def body(at: Indices) -> Expr:
        hit = equal(read_exact(wanted, all_of_it.where, kind), read_exact(x, at, kind))
        found = all_of_it.reduce(ANY, hit)
        return negate(found) if invert else found

    return call.define(body)


def search_type(boundaries: Value, x: Scalar) -> DType:
    """Return the type that values are compared in."""
    return common_type(result_type(boundaries, x))
