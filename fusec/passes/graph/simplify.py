"""Simplify expressions by algebraic rules that keep every value, except for implicit roundings.

Spec: ``expr -> expr``; same value of each element, except that a rounding to 16 bits between two
f32 operations of one kernel is dropped (`round_*` operations mark the roundings that must stay:
explicit casts, comparisons, values that are also stored). The rules do not depend on the target.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from typing import TypeGuard

from fusec.ir.dtype import BOOL, F32, I32, I64, INT32_MAX
from fusec.ir.edges import OPPOSITE, edges_when
from fusec.ir.expr import (
    Cast,
    Const,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Select,
    both,
    cast,
    index_of,
    postorder,
    substitute,
)
from fusec.ir.graph import Graph
from fusec.ir.index import (
    Axis,
    FloorDiv,
    Index,
    Mod,
    Quotient,
    index,
    is_in_range,
    is_nonnegative,
    least,
    most,
)
from fusec.ir.monoid import ALL, ANY, MAX, MIN, PROD, SUM, Monoid
from fusec.ir.rewrite import Rewriter, is_checked, rewrite
from fusec.ir.scalar import ROUND

_COMPARE = {"eq", "ne", "lt", "le", "gt", "ge"}


def simplify(graph: Graph) -> Graph:
    """Return the graph with each definition's expression simplified."""
    return graph.map(simplifier())


def simplifier() -> Rewriter:
    """Return a memoising simplifier: subexpressions that its arguments share stay shared."""
    return Rewriter(_rule)


def rounding_dropper() -> Callable[[tuple[Expr, ...]], tuple[Expr, ...]]:
    """Return a memoising rewrite that drops roundings which loads and stores repeat.

    Apply it only when every load reads memory: a load that is still to be replaced by its producer
    is not rounded unless a ``round_*`` operation says so.
    """
    marked = Rewriter(_loaded_rounded)
    return lambda roots: tuple(map(_unrounded, marked(roots)))


def _loaded_rounded(node: Expr) -> Expr:
    """``round_bf16(f32(x))`` is ``f32(x)`` where x is bf16."""
    if not isinstance(node, Op) or node.name not in ROUND.values():
        return node
    inner = node.args[0]
    rounded = isinstance(inner, Cast) and ROUND.get(inner.arg.dtype) == node.name
    return inner if rounded else node


def _unrounded(root: Expr) -> Expr:
    """``bf16(round_bf16(e))`` is ``bf16(e)``."""
    if isinstance(root, Cast) and _is_op(root.arg, ROUND.get(root.dtype)):
        return Cast(root.arg.args[0], root.dtype)
    return root


def _is_op(node: Expr, name: str | None) -> TypeGuard[Op]:
    return isinstance(node, Op) and node.name == name


def _rule(node: Expr) -> Expr:
    match node:
        case Cast():
            return _cast(node)
        case Op():
            return _op(node)
        case Select():
            return _select(node)
        case Reduce() if not node.inner.issuperset(node.over):
            return repeated(node)
        case Reduce(monoid=monoid, body=body, over=(axis,)) if monoid is SUM:
            return _steady_and_one_hot_sum(node, axis, body)
        case Reduce(monoid=monoid, body=body) if monoid in (ANY, ALL):
            return _of_extreme(node, body)
        case Load() if node.guard is not None:
            return _guarded_load(node, node.guard)
        case _:
            return node


def _cast(node: Cast) -> Expr:
    inner = node.arg
    if isinstance(inner, Cast) and node.dtype is inner.arg.dtype is F32 and inner.dtype in ROUND:
        return inner.arg  # Cast(f32, Cast(bf16, e)): an implicit rounding between two operations
    if isinstance(inner, Cast) and inner.dtype is BOOL and inner.arg.dtype is node.dtype is BOOL:
        return inner.arg
    return node


def _op(node: Op) -> Expr:
    if node.name in ROUND.values():
        inner = node.args[0]
        exact = isinstance(inner, Cast) and inner.arg.dtype is BOOL
        return inner if exact or _is_op(inner, node.name) else node
    if node.name in _COMPARE:
        return _compare(node)
    if len(node.args) != 2:
        return _unary(node)
    a, b = node.args
    if node.dtype is I64 and (found := _index_arithmetic(node)) is not None:
        return found
    match node.name:
        case "and" | "or" if node.dtype is BOOL:
            return _logic(node.name, a, b, node)
        case "mul" if _is_number(b, 1):
            return a
        case "mul" if _is_number(a, 1):
            return b
        case "mul" if isinstance(a, Cast) and isinstance(b, Const) and a.arg.dtype is BOOL:
            return _masked_number(a.arg, b, node)
        case "sub" if _is_number(b, 0) and not _is_negative_zero(b):
            return a
        case "add" if node.dtype.is_integer and _is_number(b, 0):
            return a
        case "div" if isinstance(b, Const) and node.dtype.is_float:
            return _divide_by_constant(a, b, node)
        case _:
            return node


def _unary(node: Op) -> Expr:
    """Remove a double negation; turn ``not`` of an integer comparison into the opposite one."""
    inner = node.args[0]
    if not isinstance(inner, Op) or node.name not in ("neg", "not"):
        return node
    if inner.name == node.name:
        return inner.args[0]
    if node.name == "not" and inner.name in OPPOSITE and not inner.args[0].dtype.is_float:
        return Op(OPPOSITE[inner.name], inner.args)
    return node


def _index_arithmetic(node: Op) -> Expr | None:
    """Return a sum, difference or constant multiple of indices as one index, or None."""
    a, b = (index_of(x) for x in node.args)
    if a is None or b is None or not any(isinstance(x, IndexValue) for x in node.args):
        return None
    match node.name:
        case "add":
            return IndexValue(a + b)
        case "sub":
            return IndexValue(a - b)
        case "mul" if a.is_constant or b.is_constant:
            return IndexValue(a * b)
        case _:
            return None


def _logic(name: str, a: Expr, b: Expr, node: Expr) -> Expr:
    if a is b:
        return a
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Const):
            return y if x.value is (name == "and") else x
    return node


def _masked_number(mask: Expr, factor: Const, node: Expr) -> Expr:
    """``f32(mask) * c`` is c or a zero of its sign, if c is finite."""
    if not factor.dtype.is_float or not math.isfinite(factor.value):
        return node
    return Select(mask, factor, Const(math.copysign(0.0, factor.value), factor.dtype))


def _divide_by_constant(a: Expr, b: Const, node: Expr) -> Expr:
    """``a / 2**k`` is ``a * 2**-k``, exactly."""
    value = float(b.value)
    if value == 1.0:
        return a
    mantissa, exponent = math.frexp(abs(value)) if math.isfinite(value) and value else (0.0, 0)
    if mantissa == 0.5 and abs(exponent) < 120:
        return Op("mul", (a, Const(1.0 / value, b.dtype)))
    return node


def _select(node: Select) -> Expr:
    if isinstance(node.condition, Const):
        return node.then if node.condition.value else node.other
    if node.then is node.other and not any(map(is_checked, postorder((node.condition,)))):
        return node.then  # a check in the condition may end the call, whichever branch is taken
    then, other, condition = node.then, node.other, node.condition
    known = _where_true(condition, then)
    if known is not then:
        return Select(condition, known, other)
    if isinstance(other, Select) and other.condition is condition:
        return Select(condition, then, other.other)
    return node


def _guarded_load(node: Load, guard: Expr) -> Expr:
    """Simplify the indices by the bounds that the guard implies; hoist a guard on other axes."""
    if isinstance(guard, Const):
        return Load(node.buffer, node.indices, None) if guard.value else Const(0, node.dtype)
    axes = frozenset(a for i in node.indices for a in i.axes)
    if axes.isdisjoint(guard.axes) and all(
        is_in_range(i, n) for i, n in zip(node.indices, node.buffer.shape, strict=True)
    ):
        plain = Load(node.buffer, node.indices, None)
        return Select(guard, plain, Const(0, node.dtype))
    if not any(has_division(i) for i in node.indices):
        return node
    indices = node.indices
    for axis, low, high in _bounds_by_guard(guard):
        if low is index(0) and high is axis.extent:
            continue
        narrow = Axis(axis.name, high - low)
        there = {axis: index(narrow) + low}
        back = {narrow: index(axis) - low}
        indices = tuple(substitute(substitute(i, there), back) for i in indices)
    return Load(node.buffer, indices, guard)


def _bounds_by_guard(guard: Expr) -> list[tuple[Axis, Index, Index]]:
    """Return (axis, low, high), high exclusive, for each axis that a guard's comparisons bound."""
    found: dict[Axis, tuple[Index, Index]] = {}
    for value in (edge.value for edge in edges_when(guard, True)):
        (axis, *others) = value.axes or (None,)
        step = None if axis is None or others else value.coefficient(axis)
        if axis is None or step is None or axis.limit is not None:
            continue
        low, high = found.get(axis, (index(0), axis.extent))
        if step is index(1):  # axis + rest <= 0
            end = index(axis) - value + 1
            high = end if is_nonnegative(high - end) else high
        elif step is index(-1):  # rest - axis <= 0
            start = index(axis) + value
            low = start if is_nonnegative(start - low) else low
        found[axis] = (low, high)
    return [
        (axis, low, high) for axis, (low, high) in found.items() if is_nonnegative(high - low - 1)
    ]


def has_division(value: Index) -> bool:
    """Return True if an index contains a division or a remainder."""
    atoms = (atom for monomial, _ in value.terms for atom in monomial)
    return any(isinstance(a, FloorDiv | Mod) and not isinstance(a, Quotient) for a in atoms)


def repeated(node: Reduce) -> Expr:
    """Return a reduction without the axes that its body lacks: ``sum(c: x)`` becomes ``x * C``."""
    if node.monoid is PROD or node.inner.issuperset(node.over):
        return node
    limits = frozenset(b for a in node.over if a.limit is not None for b in a.limit.axes)
    over = frozenset(node.over)
    repeats = [
        a
        for a in node.over
        if a not in node.inner | limits and (a.limit is None or over.isdisjoint(a.limit.axes))
    ]
    if not repeats:
        return node
    rest = tuple(a for a in node.over if a not in repeats)
    value = _rule(Reduce(node.monoid, rest, *node.bodies)) if rest else node.bodies[-1]
    for axis in repeats:
        value = _repeat(node.monoid, axis, value)
    return value


def _repeat(monoid: Monoid, axis: Axis, value: Expr) -> Expr:
    """Return the reduction of a constant along an axis, which is empty if its limit is below 1."""
    times = cast(IndexValue(axis.extent), value.dtype)
    if axis.limit is not None:
        runs = (IndexValue(axis.limit), IndexValue(axis.extent))
        times = cast(Op("minimum", runs), value.dtype)
    elif axis.extent.is_constant:
        times = Const(axis.extent.const, value.dtype)
    result = Op("mul", (value, times)) if monoid is SUM else value
    if axis.limit is None or is_nonnegative(axis.limit - 1):
        return result
    some = Op("gt", (IndexValue(axis.limit), Const(0, I64)))
    return Select(some, result, Const(monoid.identity(value.dtype), value.dtype))


def _steady_and_one_hot_sum(node: Expr, axis: Axis, body: Expr) -> Expr:
    """``sum(r: a + one-hot)`` is ``a * n`` plus the one-hot sum, if a does not vary along r.

    The gradient of a cross-entropy with label smoothing has this form.
    """
    if not isinstance(body, Op) or body.name != "add" or axis.limit is not None:
        return _one_hot_sum(node, axis, body)
    for steady, varying in (body.args, body.args[::-1]):
        rest = Reduce(SUM, (axis,), varying)
        found = _one_hot_sum(rest, axis, varying)
        if axis not in steady.axes and found is not rest:
            times = cast(IndexValue(axis.extent, I64), body.dtype)
            return Op("add", (Op("mul", (steady, times)), found))
    return node


def _of_extreme(node: Reduce, body: Expr) -> Expr:
    """``any(r: x != -inf)`` is ``max(r: x) != -inf``, ``all(r: x == -inf)`` its opposite.

    Likewise +inf with ``min``. A NaN propagates through ``max`` and ``min`` and is not infinite, so
    the result is the same; over no elements, the extreme is that infinity. A softmax that tests
    whether a row is fully masked computes the maximum of the row anyway.
    """
    opposite = node.monoid is ANY
    if opposite and _is_op(body, "not"):
        body, name = body.args[0], "eq"
    else:
        name = "ne" if opposite else "eq"
    if not _is_op(body, name):
        return node
    value, bound = body.args
    if not isinstance(bound, Const) or not bound.dtype.is_float or not math.isinf(bound.value):
        return node
    extreme = Reduce(MAX if bound.value < 0 else MIN, node.over, value)
    equal = Op("eq", (extreme, bound))
    return Op("not", (equal,)) if opposite else equal


def _one_hot_sum(node: Expr, axis: Axis, body: Expr) -> Expr:
    """``sum(r: where(r == k, a, 0) * b)`` is ``a * b`` where k is in range, if only r varies.

    The gradient of a cross-entropy selects one class by comparing the label with all classes.
    """
    factor: Expr | None = None
    if isinstance(body, Op) and body.name == "mul":
        left, right = body.args
        body, factor = (left, right) if isinstance(left, Select) else (right, left)
    if not isinstance(body, Select) or not _is_number(body.other, 0):
        return node
    if axis in body.then.axes or (factor is not None and axis in factor.axes):
        return node
    condition = body.condition
    if not isinstance(condition, Op) or condition.name != "eq":
        return node
    here, wanted = condition.args
    if not isinstance(here, IndexValue):
        here, wanted = wanted, here
    if not isinstance(here, IndexValue) or here.index is not index(axis) or axis in wanted.axes:
        return node
    value = body.then if factor is None else Op("mul", (body.then, factor))
    low = Op("ge", (wanted, Const(0, wanted.dtype)))
    high = Op("lt", (wanted, IndexValue(axis.extent, wanted.dtype)))
    return Select(Op("and", (low, high)), value, Const(0, value.dtype))


NEAR = 48
"""Most nodes of a ``Select`` branch that are searched for selections by the same condition."""


def _where_true(condition: Expr, then: Expr) -> Expr:
    """Return ``then`` with nested selections by the same ``condition`` replaced by their branch."""
    nodes = postorder((then,))
    if len(nodes) > NEAR or not _selects_by(condition, nodes):
        return then
    if any(isinstance(n, Reduce) and not condition.axes.isdisjoint(n.over) for n in nodes):
        return then  # inside such a reduction the condition's axis is the bound one
    if any(is_checked(n) and _selects_by(condition, postorder(n.args)) for n in nodes):
        return then  # a check is evaluated where the condition is false, too, and may end the call

    before = frozenset(nodes)

    def decide(node: Expr) -> Expr:
        if isinstance(node, Select) and node.condition is condition:
            return node.then
        if isinstance(node, Load) and node not in before:
            # The removed selection kept the index in range; a load is executed in both branches.
            return Load(node.buffer, node.indices, both(node.guard, condition))
        return node

    return rewrite((then,), decide)[0]


def _selects_by(condition: Expr, nodes: Iterable[Expr]) -> bool:
    return any(isinstance(n, Select) and n.condition is condition for n in nodes)


def _is_number(node: Expr, value: float) -> bool:
    return isinstance(node, Const) and node.value == value and node.dtype is not BOOL


def _is_negative_zero(node: Expr) -> bool:
    return isinstance(node, Const) and repr(node.value) == "-0.0"


def _compare(node: Op) -> Expr:
    """Decide comparisons of indices by their bounds; compare in 32 bits where both sides fit."""
    a, b = (index_of(x) for x in node.args)
    if a is None or b is None:
        return _compare_random(node)
    # a >= b and a < b depend on the sign of a - b, the others on that of b - a.
    difference = a - b if node.name in ("ge", "lt") else b - a
    least_is_0 = is_nonnegative(difference)
    if node.name in ("eq", "ne"):
        known = least_is_0 and is_nonnegative(-difference)
    else:
        known = least_is_0 or is_nonnegative(-difference - 1)
    if known:
        return Const(least_is_0 is (node.name in ("ge", "le", "eq")), BOOL)
    if node.args[0].dtype is I64 and all(_fits_32_bits(x) for x in (a, b)):
        return Op(node.name, (IndexValue(a, I32), IndexValue(b, I32)))
    return node


def _compare_random(node: Op) -> Expr:
    """``f32(random(...)) * 2^-24 < p`` compares the 24 bits with p * 2^24, rounded up: integers."""
    match node.args:
        case (
            Op(name="mul", args=(Cast(arg=Op(name="random") as bits, dtype=kind), scale)),
            Const(value=bound),
        ) if node.name in ("lt", "ge") and kind is F32 and _is_number(scale, 2.0**-24):
            if -1 <= bound <= 2:
                nearest = struct.unpack("f", struct.pack("f", bound))[0]
                return Op(node.name, (bits, Const(math.ceil(nearest * 2**24), I32)))
    return node


def _fits_32_bits(value: Index) -> bool:
    low, high = least(value), most(value)
    return low is not None and high is not None and low >= -INT32_MAX and high <= INT32_MAX
