"""Simplify expressions by algebraic rules that keep every value, except for implicit roundings.

Spec: ``expr -> expr``; same value of each element, except that a rounding to 16 bits between two
f32 operations of one kernel is dropped (`round_*` operations mark the roundings that must stay:
explicit casts, comparisons, values that are also stored). The rules do not depend on the target.

The lists are at the end and in ``docs/rules.md``; ``tests/ir/test_rules.py`` has their examples.
Rules of reductions stand in ``reduction_rules.py``.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeGuard

from fusec.ir.dtype import BOOL, F32, HALF, I32, I64, INT32_MAX
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
    axes_in,
    both,
    cast,
    index_exprs,
    index_of,
    is_op,
    op,
    postorder,
    select,
    substitute,
)
from fusec.ir.graph import Graph, Line, RowLoop
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
from fusec.ir.magnitude import may_wrap
from fusec.ir.ranges import fits, holds
from fusec.ir.rewrite import Normalizer, Rules, is_checked, rewrite
from fusec.ir.scalar import ROUND
from fusec.passes.graph.reduction_rules import AXIS_RULES, REDUCTION_RULES


def simplify(graph: Graph) -> Graph:
    """Return the graph with each definition's expression simplified."""
    return graph.map(simplifier(AXIS_RULES))


def simplifier(*more: Rules) -> Normalizer:
    """Return a memoising simplifier: subexpressions that its arguments share stay shared.

    Args:
        more: rules that hold only where it is used, after ``VALUE_RULES``.
    """
    return Normalizer(Rules(*VALUE_RULES.rows, *(row for rules in more for row in rules.rows)))


def rounding_dropper() -> Callable[[tuple[Expr, ...]], tuple[Expr, ...]]:
    """Return a memoising rewrite that drops roundings which loads and stores repeat.

    Apply it only when every load reads memory: a load that is still to be replaced by its producer
    is not rounded unless a ``round_*`` operation says so.
    """
    marked = Normalizer(LOAD_RULES)
    return lambda roots: tuple(map(_unrounded, marked(roots)))


def round_as_eager(graph: Graph) -> Graph:
    """Return the graph with every 16-bit value rounded between two operations, as in eager.

    It runs once, after capture, for ``precision="eager"``. ``simplify`` keeps ``round_*`` when the
    producer is substituted; in kernels, the roundings of loaded values are dropped again.
    """
    graph = graph.map(lambda exprs: rewrite(exprs, EAGER_RULES))
    bodies: dict[Line, Line] = {}
    for line in graph.nodes:
        match line:
            case RowLoop():
                bodies[line] = replace(line, body=round_as_eager(line.graph))
    return replace(graph, nodes=tuple(bodies.get(n, n) for n in graph.nodes)) if bodies else graph


def _unrounded(root: Expr) -> Expr:
    """``bf16(round_bf16(e))`` is ``bf16(e)``."""
    if isinstance(root, Cast) and is_op(root.arg, ROUND.get(root.dtype)):
        return Cast(root.arg.args[0], root.dtype)
    return root


def _is_number(node: Expr, value: float) -> TypeGuard[Const]:
    return isinstance(node, Const) and node.value == value and node.dtype is not BOOL


# -- casts and roundings ---------------------------------------------------------------------------

_ROUNDED = {name: kind for kind, name in ROUND.items()}


def implicit_rounding(node: Cast) -> Expr:
    """``f32(bf16(x))`` of an f32 x is x: between two operations nobody asked for the rounding."""
    match node.arg:
        case Cast(arg=value, dtype=kind) if node.dtype is value.dtype is F32 and kind in HALF:
            return value
    return node


def fitting_integer(node: Cast) -> Expr:
    """``f32(i8(x))`` is ``f32(x)``, where an int8 holds all that an integer x may be: a nibble."""
    match node.arg:
        case Cast(arg=value, dtype=kind) if kind.is_integer and fits(kind, value):
            return cast(value, node.dtype)
    return node


def known_integer(node: Cast) -> Expr:
    """``i32(4:u8)`` is 4, of a number or an index without axes."""
    match node.arg:
        case Const(value=value, dtype=kind) if kind.is_integer:
            number = Const(value, I64)
        case IndexValue(index=at) if at.is_constant:
            number = Const(at.const, I64)
        case _:
            return node
    known = node.dtype.is_integer and fits(node.dtype, number)
    return Const(number.value, node.dtype) if known else node


def chosen_truth(node: Cast) -> Expr:
    """``bool(where(c, 0, 5))`` is ``not(c)``: of two numbers, one of which is 0."""
    match node:
        case Cast(arg=Select(condition=c, then=Const(value=a), other=Const(value=b)), dtype=kind):
            # Smaller numbers may be 0 in the type of the selection.
            if kind is BOOL and min(abs(a), abs(b)) == 0 and max(abs(a), abs(b)) >= 1:
                return op("not", c) if a == 0 else c
    return node


def own_type(node: Cast) -> Expr:
    """``bool(x)`` of a bool x is x."""
    return node.arg if node.arg.dtype is node.dtype else node


def repeated_rounding(node: Op) -> Expr:
    """``round_bf16(x)`` is x, where x is rounded already."""
    (inner,) = node.args
    return inner if is_op(inner, node.name) else node


def rounded_integer(node: Op) -> Expr:
    """``round_bf16(x)`` is x, where bf16 holds x: an int8, a nibble, a mask, a scaled float8."""
    (inner,) = node.args
    return inner if holds(_ROUNDED[node.name], inner) else node


def loaded_rounding(node: Op) -> Expr:
    """``round_bf16(f32(x))`` is ``f32(x)`` where x is bf16."""
    (inner,) = node.args
    rounded = isinstance(inner, Cast) and ROUND.get(inner.arg.dtype) == node.name
    return inner if rounded else node


def eager_rounding(node: Cast) -> Expr:
    """``f32(x)`` of a bf16 x is ``round_bf16(f32(x))``."""
    widens = node.dtype is F32 and node.arg.dtype in ROUND
    return Op(ROUND[node.arg.dtype], (node,)) if widens else node


# -- comparisons and conditions --------------------------------------------------------------------


def decided_comparison(node: Op) -> Expr:
    """``i < 8`` is true where i is below 8, ``x == x`` where x is no float, which may be NaN."""
    left, right = node.args
    if left is right and not left.dtype.is_float and not any(map(is_checked, postorder((left,)))):
        return Const(node.name in ("ge", "le", "eq"), BOOL)
    a, b = index_of(left), index_of(right)
    if a is None or b is None:
        return node
    # a >= b and a < b depend on the sign of a - b, the others on that of b - a.
    difference = a - b if node.name in ("ge", "lt") else b - a
    least_is_0 = is_nonnegative(difference)
    if node.name in ("eq", "ne"):
        known = least_is_0 and is_nonnegative(-difference)
    else:
        known = least_is_0 or is_nonnegative(-difference - 1)
    return Const(least_is_0 is (node.name in ("ge", "le", "eq")), BOOL) if known else node


def narrow_comparison(node: Op) -> Expr:
    """``i < n`` is compared in 32 bits, where both fit."""
    a, b = map(index_of, node.args)
    if a is None or b is None or node.args[0].dtype is not I64:
        return node
    narrow = _fits_32_bits(a) and _fits_32_bits(b)
    return Op(node.name, (IndexValue(a, I32), IndexValue(b, I32))) if narrow else node


def _fits_32_bits(value: Index) -> bool:
    low, high = least(value), most(value)
    return low is not None and high is not None and low >= -INT32_MAX and high <= INT32_MAX


def random_comparison(node: Op) -> Expr:
    """``f32(random(...)) * 2^-24 < p`` compares the 24 bits with p * 2^24, rounded up: integers."""
    match node.args:
        case (
            Op(name="mul", args=(Cast(arg=Op(name="random") as bits, dtype=kind), scale)),
            Const(value=bound),
        ) if kind is F32 and _is_number(scale, 2.0**-24) and -1 <= bound <= 2:
            nearest = struct.unpack("f", struct.pack("f", bound))[0]
            return Op(node.name, (bits, Const(math.ceil(nearest * 2**24), I32)))
    return node


def known_condition(node: Op) -> Expr:
    """``c & c`` and ``c & true`` are c, ``c & false`` is false; ``or`` the other way round."""
    if node.dtype is not BOOL:
        return node
    a, b = node.args
    if a is b:
        return a
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Const):
            return y if x.value is (node.name == "and") else x
    return node


def double_negation(node: Op) -> Expr:
    """``-(-x)`` and ``not(not(x))`` are x."""
    (inner,) = node.args
    return inner.args[0] if is_op(inner, node.name) else node


def negation(node: Op) -> Expr:
    """``not(a < b)`` is ``a >= b``, for integers; ``not(true)`` is false."""
    match node.args:
        case (Const(value=value, dtype=kind),) if kind is BOOL:
            return Const(not value, BOOL)
        case (Op(name=name, args=args),) if name in OPPOSITE and not args[0].dtype.is_float:
            return Op(OPPOSITE[name], args)
    return node


# -- arithmetic ------------------------------------------------------------------------------------


def index_arithmetic(node: Op) -> Expr:
    """``i + 1`` of an index i is one index; so is a difference, or a constant multiple.

    Not where 64 bits wrap, as those of a hash do: an index has as many as it takes.
    """
    if node.dtype is not I64 or not any(isinstance(x, IndexValue) for x in node.args):
        return node
    a, b = map(index_of, node.args)
    if a is None or b is None or (node.name == "mul" and not (a.is_constant or b.is_constant)):
        return node
    found = getattr(operator, node.name)(a, b)
    return node if may_wrap(found, 64) else IndexValue(found)


_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}


def neutral_operand(node: Op) -> Expr:
    """``x * 1``, ``x / 1`` and ``x - 0`` are x; ``x + 0`` is for integers: -0.0 + 0 is 0."""
    a, b = node.args
    if node.name == "add" and node.dtype.is_float:
        return node
    if _is_number(b, _NEUTRAL[node.name]) and repr(b.value) != "-0.0":
        return a
    return b if node.name == "mul" and _is_number(a, 1) else node


def masked_number(node: Op) -> Expr:
    """``f32(mask) * c`` is ``where(mask, c, 0)`` with a zero of c's sign, if c is finite."""
    match node.args:
        case (Cast(arg=mask), Const(value=value, dtype=kind) as factor) if (
            mask.dtype is BOOL and kind.is_float and math.isfinite(value)
        ):
            return Select(mask, factor, Const(math.copysign(0.0, value), kind))
    return node


def power_of_two_divisor(node: Op) -> Expr:
    """``x / 8`` is ``x * 0.125``, exactly."""
    a, b = node.args
    if not isinstance(b, Const) or not b.dtype.is_float or not math.isfinite(b.value):
        return node
    mantissa, exponent = math.frexp(abs(b.value))
    exact = mantissa == 0.5 and abs(exponent) < 120
    return Op("mul", (a, Const(1.0 / b.value, b.dtype))) if exact else node


# -- selections ------------------------------------------------------------------------------------


def known_selection(node: Select) -> Expr:
    """``where(true, a, b)`` is a."""
    if not isinstance(node.condition, Const):
        return node
    return node.then if node.condition.value else node.other


def equal_branches(node: Select) -> Expr:
    """``where(c, a, a)`` is a, unless c has a check: that may end the call, whatever is chosen."""
    if node.then is not node.other or any(map(is_checked, postorder((node.condition,)))):
        return node
    return node.then


def nested_selection(node: Select) -> Expr:
    """``where(c, where(c, a, b), d)`` is ``where(c, a, d)``; likewise in the other branch."""
    condition, then, other = node.condition, node.then, node.other
    known = _where_true(condition, then)
    if isinstance(other, Select) and other.condition is condition:
        other = other.other
    return node if known is then and other is node.other else Select(condition, known, other)


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


def place_in_range(node: Op) -> Expr:
    """``within(i, n)`` of an index i is i, where its bounds say that it is in range."""
    known, length = map(index_of, node.args)
    in_range = known is not None and length is not None and is_in_range(known, length)
    return node.args[0] if in_range else node


# -- guards of loads -------------------------------------------------------------------------------


def guard_of_other_axes(node: Load) -> Expr:
    """``x[i] if j < 4`` is ``where(j < 4, x[i], 0)``, if i is in range or the guard is constant.

    An index that is read from memory is in range only once the load has checked it.
    """
    guard = node.guard
    if guard is None or not axes_in(node.indices).isdisjoint(guard.axes):
        return node
    known = not any(True for i in node.indices for _ in index_exprs(i))
    in_range = known and all(map(is_in_range, node.indices, node.buffer.shape))
    if not in_range and not isinstance(guard, Const):
        return node
    return select(guard, Load(node.buffer, node.indices), 0)


def guarded_indices(node: Load) -> Expr:
    """``x[i // 8] if i < 8`` is ``x[0] if i < 8``: the guard's bounds hold in the indices."""
    if node.guard is None or not any(map(has_division, node.indices)):
        return node
    indices = node.indices
    for axis, low, high in _bounds_by_guard(node.guard):
        if low is index(0) and high is axis.extent:
            continue
        narrow = Axis(axis.name, high - low)
        there = {axis: index(narrow) + low}
        back = {narrow: index(axis) - low}
        indices = tuple(substitute(substitute(i, there), back) for i in indices)
    return Load(node.buffer, indices, node.guard)


def _bounds_by_guard(guard: Expr) -> list[tuple[Axis, Index, Index]]:
    """Return (axis, low, high), high exclusive, for each axis that a guard's comparisons bound."""
    found: dict[Axis, tuple[Index, Index]] = {}
    for value in edges_when(guard, True):
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


# -- the lists -------------------------------------------------------------------------------------

VALUE_RULES = Rules(
    (implicit_rounding, Cast),
    (fitting_integer, Cast),
    (known_integer, Cast),
    (chosen_truth, Cast),
    (own_type, Cast),
    (repeated_rounding, *ROUND.values()),
    (rounded_integer, *ROUND.values()),
    (decided_comparison, *OPPOSITE),
    (narrow_comparison, *OPPOSITE),
    (random_comparison, "lt", "ge"),
    (known_condition, "and", "or"),
    (double_negation, "neg", "not"),
    (negation, "not"),
    (index_arithmetic, "add", "sub", "mul"),
    (neutral_operand, *_NEUTRAL),
    (masked_number, "mul"),
    (power_of_two_divisor, "div"),
    (known_selection, Select),
    (equal_branches, Select),
    (nested_selection, Select),
    (place_in_range, "within"),
    (guard_of_other_axes, Load),
    (guarded_indices, Load),
    *REDUCTION_RULES.rows,
)
"""Rules that hold in every expression."""

LOAD_RULES = Rules((loaded_rounding, *ROUND.values()))
"""Rules that hold where every load reads memory."""

EAGER_RULES = Rules((eager_rounding, Cast))
"""Rules for ``precision="eager"``, applied once."""
