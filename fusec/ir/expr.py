"""Scalar expressions: the value of one element at one point of the iteration space.

Grammar of the printed form::

    expr ::= buffer '[' index, ... ']' ['if' expr]      Load, 0 where its guard is false
           | number | '(' index ')' ':' dtype           Const, IndexValue
           | expr op expr | op '(' expr, ... ')'        Op
           | dtype '(' expr ')'                         Cast
           | 'where' '(' expr, expr, expr ')'           Select
           | monoid '(' axis, ... ':' expr, ... ')'     Reduce
           | monoid '_scan(' axis, ... ':' expr, ... ')'  Scan (flat kernels and programs only)
           | name                                       Var (programs only)
           | 'dot' '(' axis ':' expr, expr, ... ')'     Dot (programs only)

Nodes are interned: equal expressions are one object, so sharing costs nothing and a memo table
keyed by the node is a correct common-subexpression elimination. ``axes`` of a node are its free
axes.

Worked example, the mean of a row: ``sum(c: x[m, c]) / 768`` has the free axes ``{m}``.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeGuard

from fusec.errors import InternalError, InvalidIR
from fusec.ir.buffer import Buffer as Buffer
from fusec.ir.dtype import BOOL, F4X2, F8, F32, F64, I8, I32, I64, DType
from fusec.ir.index import (
    Atom,
    Axis,
    FloorDiv,
    Index,
    IntoIndex,
    Mod,
    Monomial,
    Runtime,
    floordiv,
    index,
    is_in_range,
    is_nonnegative,
    mod,
    sum_of_terms,
)
from fusec.ir.intern import Node
from fusec.ir.magnitude import may_wrap
from fusec.ir.monoid import Monoid
from fusec.ir.reach import reach as reach
from fusec.ir.scalar import SCALAR_OPS

_NO_AXES: frozenset[Axis] = frozenset()
_RESULTS = {"bool": BOOL, "i32": I32, "f32": F32}


def _operator(name: str) -> Callable[[Any, Expr | float], Expr]:
    """Return the method of a scalar operation on two expressions, or an expression and a number."""
    return lambda self, other: op(name, self, other)


class _Expr(Node):
    """Base of all expressions.

    Attributes:
        axes: the free axes.
        children: the direct sub-expressions, including those inside indices.
        named: the axes that the node itself mentions or binds, without those of its children.
    """

    __slots__ = ("axes", "children", "dtype", "named")
    axes: frozenset[Axis]
    children: tuple[Expr, ...]
    dtype: DType
    named: Collection[Axis]

    def __repr__(self) -> str:
        from fusec.ir.text import print_expr  # local: text imports the node classes

        return print_expr(self)  # type: ignore[arg-type]

    def substitute(self, mapping: Mapping[Axis, Index]) -> Expr:
        """Return this expression with axes replaced by indices; see ``substitute_all``."""
        return substitute_all((self,), mapping)[0]  # type: ignore[arg-type]

    # Arithmetic, as ``op`` does it; of a product, a factor of exactly one is left out.
    __add__ = _operator("add")
    __sub__ = _operator("sub")
    __truediv__ = _operator("div")
    __and__ = _operator("and")
    __or__ = _operator("or")

    def __rsub__(self: Any, other: float) -> Expr:
        return op("sub", other, self)

    def __neg__(self: Any) -> Expr:
        return op("neg", self)

    def __mul__(self: Any, other: Expr | float) -> Expr:
        product = op("mul", self, other)
        for one, factor in (product.children, product.children[::-1]):
            if isinstance(one, Const) and one.value == 1:
                return factor
        return product


class Load(_Expr):
    """``buffer[indices]``; where ``guard`` is given and false, 0 without touching memory.

    ``gathers`` are the expressions inside the indices.
    """

    __slots__ = ("buffer", "gathers", "guard", "indices")

    def __init__(
        self, buffer: Buffer, indices: tuple[Index, ...], guard: Expr | None = None
    ) -> None:
        if len(indices) != len(buffer.shape):
            raise InvalidIR(f"{buffer.name} has {len(buffer.shape)} axes, indexed by {indices}")
        self.buffer = buffer
        self.indices = indices
        self.guard = guard
        self.gathers = tuple(e for i in indices for e in index_exprs(i))
        self.children = self.gathers if guard is None else (*self.gathers, guard)
        self.dtype = buffer.dtype
        self.named = axes = axes_in(indices)
        self.axes = axes if guard is None else axes | guard.axes

    @classmethod
    def intern_key(cls, *fields: Any) -> tuple[Any, ...]:
        return fields if len(fields) == 3 else (*fields, None)


class Const(_Expr):
    """A number. Interned by its printed form, so that 0.0, -0.0 and NaN stay distinct."""

    __slots__ = ("value",)

    def __init__(self, value: float | int | bool, dtype: DType) -> None:
        self.value = _coerce(value, dtype)
        self.children = ()
        self.named = ()
        self.dtype = dtype
        self.axes = _NO_AXES

    @classmethod
    def intern_key(cls, *fields: Any) -> tuple[Any, ...]:
        value, dtype = fields
        return (repr(_coerce(value, dtype)), dtype.name)


class IndexValue(_Expr):
    """The value of an index, as a number: arange, masks, positions."""

    __slots__ = ("gathers", "index")

    def __init__(self, value: Index, dtype: DType = I64) -> None:
        self.index = value
        self.children = self.gathers = tuple(index_exprs(value))
        self.dtype = dtype
        self.named = self.axes = value.axes

    @classmethod
    def intern_key(cls, *fields: Any) -> tuple[Any, ...]:
        return fields if len(fields) == 2 else (*fields, I64)


class Op(_Expr):
    """A scalar operation of ``scalar.SCALAR_OPS``; all arguments have one type."""

    __slots__ = ("args", "name")

    def __init__(self, name: str, args: tuple[Expr, ...]) -> None:
        row = SCALAR_OPS.get(name)
        if row is None or row.arity != len(args):
            raise InvalidIR(f"no scalar operation {name} of {len(args)} arguments")
        if any(a.dtype is not args[0].dtype for a in args):
            raise InvalidIR(f"{name}: arguments of types {[a.dtype for a in args]}")
        self.name = name
        self.children = self.args = args
        self.named = ()
        self.dtype = _RESULTS.get(row.result) or args[-1].dtype
        self.axes = axes_in(args)


class Cast(_Expr):
    """Conversion to another type: floats to integers truncate, anything to bool is ``!= 0``."""

    __slots__ = ("arg",)

    def __init__(self, arg: Expr, dtype: DType) -> None:
        self.arg = arg
        self.children = (arg,)
        self.named = ()
        self.dtype = dtype
        self.axes = arg.axes


class Select(_Expr):
    """``then`` where ``condition``, else ``other``; a NaN in the other branch has no effect."""

    __slots__ = ("condition", "other", "then")

    def __init__(self, condition: Expr, then: Expr, other: Expr) -> None:
        if condition.dtype is not BOOL or then.dtype is not other.dtype:
            raise InvalidIR(f"where({condition.dtype}, {then.dtype}, {other.dtype})")
        self.condition = condition
        self.then = then
        self.other = other
        self.children = (condition, then, other)
        self.named = ()
        self.dtype = then.dtype
        self.axes = condition.axes | then.axes | other.axes


class Reduce(_Expr):
    """The reduction of ``bodies`` by ``monoid`` over bound axes ``over``, in the bodies' types.

    Attributes:
        bodies: one for each value that the monoid combines; the last one's type is the result's.
    """

    __slots__ = ("bodies", "monoid", "over")

    def __init__(self, monoid: Monoid, over: tuple[Axis, ...], *bodies: Expr) -> None:
        if len(bodies) != len(monoid.fields):
            raise InvalidIR(f"{monoid} of {len(bodies)} values")
        self.monoid = monoid
        self.named = self.over = over
        self.children = self.bodies = bodies
        self.dtype = bodies[-1].dtype
        self.axes = self.inner - frozenset(over)

    @property
    def inner(self) -> frozenset[Axis]:
        """The axes of the bodies."""
        return axes_in(self.bodies)

    @property
    def body(self) -> Expr:
        """The only body. With more it raises AttributeError, so that patterns do not match."""
        if len(self.bodies) != 1:
            raise AttributeError(f"{self.monoid} has {len(self.bodies)} bodies")
        return self.bodies[0]


class Scan(_Expr):
    """The reduction of ``bodies`` by ``monoid`` over the points of the free axes ``over`` so far.

    In a program: of the lanes so far, and before them of the last ones of ``start``.
    """

    __slots__ = ("bodies", "monoid", "over", "start")

    def __init__(self, monoid: Monoid, over: tuple[Axis, ...], *values: Expr) -> None:
        count = len(monoid.fields)
        if len(values) not in (count, 2 * count):
            raise InvalidIR(f"{monoid} of {len(values)} values")
        self.monoid = monoid
        self.named = self.over = over
        self.children, self.bodies, self.start = values, values[:count], values[count:]
        self.dtype = self.bodies[-1].dtype
        self.axes = axes_in(values) | frozenset(over)


class Var(_Expr):
    """A named value of a program, equal to no other; ``axes`` are its lanes."""

    __slots__ = ("name",)
    _made = itertools.count()

    @classmethod
    def intern_key(cls, *fields: Any) -> tuple[Any, ...]:
        return (next(cls._made),)

    def __init__(self, name: str, dtype: DType, lanes: frozenset[Axis]) -> None:
        self.name = name
        self.children = ()
        self.named = ()
        self.dtype = dtype
        self.axes = lanes


class Dot(_Expr):
    """``into + sum(over: left * right)`` of tiles: what tensor cores do, in f32, or i32 of int8.

    ``left`` and ``right`` have one type, and both have the lane axes ``over``; each other lane axis
    belongs to one of them. Under ``tf32`` operands in f32 are rounded to 10 bits of mantissa. Those
    of 8 bits may have two types; their terms may be added with 14 bits (``COARSE_TERMS``).

    With ``scales`` an operand is of 8 bits, or has pairs of 4 bits; then its lane counts pairs, and
    ``over`` has the lanes of both operands. Each scale has its operand's other lane and one of
    blocks: an operand's terms in order, as many to each block, are multiplied by it.
    """

    __slots__ = ("into", "left", "over", "right", "scales", "tf32")

    def __init__(
        self,
        left: Expr,
        right: Expr,
        over: tuple[Axis, ...],
        into: Expr | None,
        tf32: bool,
        scales: tuple[Expr, ...] = (),
    ) -> None:
        narrow = {left.dtype, right.dtype} <= {*F8, *([F4X2] if scales else [])}
        if left.dtype is not right.dtype and not narrow:
            raise InvalidIR(f"dot of {left.dtype} and {right.dtype}")
        self.left = left
        self.right = right
        self.named = self.over = over
        self.into = into
        self.tf32 = tf32
        self.scales = scales
        self.children = (left, right, *scales, *([] if into is None else [into]))
        self.dtype = I32 if left.dtype is I8 else F32
        self.axes = (left.axes | right.axes) - frozenset(over)

    @classmethod
    def intern_key(cls, *fields: Any) -> tuple[Any, ...]:
        return fields if len(fields) == 6 else (*fields, ())

    @property
    def blocks(self) -> frozenset[Axis]:
        """The lane axis that the scales share; none without them."""
        return frozenset.intersection(*(s.axes for s in self.scales)) if self.scales else _NO_AXES


Expr: TypeAlias = Load | Const | IndexValue | Op | Cast | Select | Reduce | Scan | Var | Dot


def axes_in(nodes: Iterable[Any]) -> frozenset[Axis]:
    """Return the free axes of some expressions, or the axes of some indices."""
    axes = _NO_AXES
    for node in nodes:
        if node.axes is not axes:
            axes = axes | node.axes if axes else node.axes
    return axes


def _coerce(value: float | int | bool, dtype: DType) -> float | int | bool:
    if dtype.is_float:
        return float(value)
    return bool(value) if dtype is BOOL else int(value)


def op(name: str, *args: Expr | float) -> Expr:
    """Return the operation ``name`` of ``args``; a number is a constant of the others' type."""
    nodes = [arg for arg in args if isinstance(arg, _Expr)]
    if len(nodes) < len(args):
        kind = nodes[0].dtype
        nodes = [arg if isinstance(arg, _Expr) else Const(arg, kind) for arg in args]
    return Op(name, tuple(nodes))


def select(condition: Expr, then: Expr | float, other: Expr | float) -> Expr:
    """Return ``then`` where the condition is true, else ``other``; one of them may be a number."""
    if isinstance(then, float | int):
        then = Const(then, other.dtype)  # type: ignore[union-attr]
    other = Const(other, then.dtype) if isinstance(other, float | int) else other
    return Select(condition, then, other)


def is_op(node: Expr, *names: str | None) -> TypeGuard[Op]:
    """Return True for one of the operations ``names``."""
    return isinstance(node, Op) and node.name in names


def cast(arg: Expr, dtype: DType) -> Expr:
    """Return ``arg`` as ``dtype``; the same object if it has that type already."""
    if arg.dtype is dtype:
        return arg
    if isinstance(arg, Const) and _folds(arg, dtype):
        return Const(arg.value, dtype)
    bits = 8 * dtype.itemsize
    if isinstance(arg, IndexValue) and dtype in (I32, I64) and not may_wrap(arg.index, bits):
        return IndexValue(arg.index, dtype)
    return Cast(arg, dtype)


def _folds(arg: Const, want: DType) -> bool:
    """Return True if a cast of a constant to ``want`` may be folded into the constant."""
    if arg.dtype not in (F64, I64, BOOL) or want not in (F32, F64, I64, I32):
        return False
    if want is I32 and not -(2**31) <= arg.value < 2**31:
        return False
    return want.is_float or not arg.dtype.is_float


def in_range(value: IntoIndex, low: IntoIndex | None, high: IntoIndex | None) -> Expr | None:
    """Return the guard ``low <= value < high`` without provable parts; None if nothing is left."""
    value = index(value)
    guard: Expr | None = None
    if low is not None and not is_nonnegative(value - low):
        guard = Op("ge", (IndexValue(value), IndexValue(index(low))))
    if high is not None and not is_nonnegative(index(high) - 1 - value):
        below = Op("lt", (IndexValue(value), IndexValue(index(high))))
        guard = below if guard is None else Op("and", (guard, below))
    return guard


def both(a: Expr | None, b: Expr | None) -> Expr | None:
    """Return the conjunction of two guards, where None is true."""
    if a is None or a is b:
        return b
    return a if b is None else Op("and", (a, b))


def index_exprs(value: Index) -> Iterator[Expr]:
    """Yield the expressions inside an index (of gathers)."""
    return (atom.expr for atom in value.atoms() if isinstance(atom, Runtime))


children: Callable[[Expr], tuple[Expr, ...]] = operator.attrgetter("children")
"""Return the direct sub-expressions of a node, including those inside its indices."""


def postorder(roots: Iterable[Expr]) -> list[Expr]:
    """Return the distinct nodes of the expressions ``roots``, children before parents."""
    given = tuple(roots)
    if len(given) != 1:
        return reach(given, children)
    (root,) = given
    below = _below.get(root)
    if below is None:
        below = _below[root] = tuple(reach(given, children)[:-1])
    return [*below, root]


_below: weakref.WeakKeyDictionary[Expr, tuple[Expr, ...]] = weakref.WeakKeyDictionary()
"""Node -> the nodes below it, while the node lives: these walks take 7 % of the passes' time."""


def loads(roots: Iterable[Expr]) -> list[Load]:
    """Return the distinct loads below ``roots``, in post-order."""
    return [node for node in postorder(roots) if isinstance(node, Load)]


@functools.lru_cache(maxsize=1 << 13)
def reductions(root: Expr) -> tuple[Reduce, ...]:
    """Return the distinct reductions in an expression, in post-order; memoised."""
    return tuple(node for node in postorder((root,)) if isinstance(node, Reduce))


def rebuild(node: Expr, new: Mapping[Expr, Expr], indices: Mapping[Axis, Index] | None) -> Expr:
    """Return ``node`` with its children looked up in ``new`` and its indices substituted."""
    match node:
        case Op():
            return Op(node.name, tuple(new[a] for a in node.args))
        case Cast():
            return cast(new[node.arg], node.dtype)
        case Select():
            return Select(new[node.condition], new[node.then], new[node.other])
        case Reduce():
            over = replace_bound(node.over, indices)
            _check_capture(node, over, indices)
            bodies = [new[body] for body in node.bodies]
            return Reduce(node.monoid, over, *bodies) if over else bodies[-1]
        case Scan():
            over = replace_bound(node.over, indices)
            return Scan(node.monoid, over, *(new[value] for value in node.children))
        case Dot():
            into = None if node.into is None else new[node.into]
            over = replace_bound(node.over, indices)
            scales = tuple(new[scale] for scale in node.scales)
            return Dot(new[node.left], new[node.right], over, into, node.tf32, scales)
        case Load():
            guard = None if node.guard is None else new[node.guard]
            read = new.__getitem__ if node.gathers else None
            where = tuple(substitute(i, indices or {}, read) for i in node.indices)
            return Load(node.buffer, where, guard)
        case IndexValue():
            read = new.__getitem__ if node.gathers else None
            return IndexValue(substitute(node.index, indices or {}, read), node.dtype)
        case _:
            return node


def replace_bound(over: tuple[Axis, ...], indices: Mapping[Axis, Index] | None) -> tuple[Axis, ...]:
    """Rename, split or merge bound axes: each becomes the axes of the index that it maps to."""
    if not indices:
        return over
    renamed: list[Axis] = []
    for axis in over:
        target = indices.get(axis)
        if target is None:
            renamed.append(axis)
        else:
            renamed.extend(sorted(target.axes, key=lambda a: a.serial))
    return tuple(dict.fromkeys(renamed))


def _check_capture(
    node: Reduce, over: tuple[Axis, ...], indices: Mapping[Axis, Index] | None
) -> None:
    """Raise InternalError if an index that replaces a free axis varies along a bound one."""
    for axis, target in (indices or {}).items():
        if axis in node.axes and not target.axes.isdisjoint(over):
            raise InternalError(f"{node.monoid} over {over} would bind {axis} -> {target}")


def read_index(value: Expr, extent: Index) -> Index:
    """Return a value as an index below ``extent``, without a gather where that is provable.

    ``bias[h]`` of a position ``h`` is an ordinary load, which can be vectorised. A number that is
    not provably in range becomes a gather, because the load at that index may never run.
    """
    known = index_of(value)
    if known is not None and is_in_range(known, extent):
        return known
    return index(Runtime(value, extent))


def as_value(extent: Index) -> Expr:
    """Return an index as an expression, a ``Const`` if it is constant."""
    return IndexValue(extent) if extent.terms else Const(extent.const, I64)


def index_of(node: Expr) -> Index | None:
    """Return the index in an ``IndexValue`` or integer ``Const``; None for anything else."""
    if isinstance(node, IndexValue):
        return node.index
    if isinstance(node, Const) and node.dtype in (I32, I64):
        return index(int(node.value))
    return None


def substitute(
    value: Index, mapping: Mapping[Axis, Index], gather: Callable[[Expr], Expr] | None = None
) -> Index:
    """Return ``value`` with axes replaced; division atoms are rebuilt and simplified.

    Args:
        gather: maps the expression of a gather to its replacement; by default, the expression
            with its axes replaced.
    """
    if gather is None and (not value.axes or mapping.keys().isdisjoint(value.axes)):
        return value
    terms: list[tuple[Monomial, int]] = []
    const = value.const
    for monomial, coefficient in value.terms:
        product = _substitute_atom(monomial[0], mapping, gather)
        for atom in monomial[1:]:
            product = product * _substitute_atom(atom, mapping, gather)
        terms += [(m, c * coefficient) for m, c in product.terms]
        const += product.const * coefficient
    return sum_of_terms(terms, const)


def _substitute_atom(
    atom: Atom, mapping: Mapping[Axis, Index], gather: Callable[[Expr], Expr] | None
) -> Index:
    match atom:
        case Axis():
            return mapping.get(atom) or index(atom)
        case FloorDiv() | Mod():
            dividend = substitute(atom.dividend, mapping, gather)
            divisor = substitute(atom.divisor, mapping, gather)
            if dividend is atom.dividend and divisor is atom.divisor:
                return index(atom)
            operation = floordiv if isinstance(atom, FloorDiv) else mod
            return operation(dividend, divisor)
        case Runtime():
            expr = atom.expr.substitute(mapping) if gather is None else gather(atom.expr)
            return read_index(expr, atom.extent)
        case _:
            return index(atom)


def substitute_all(
    roots: tuple[Expr, ...], mapping: Mapping[Axis, Index], known: Mapping[Expr, Expr] | None = None
) -> tuple[Expr, ...]:
    """Replace axes by indices, which may rename, split or merge bound axes of reductions.

    Nodes that the expressions share stay shared.

    Args:
        known: node -> its result; nodes below it are not visited.
    """
    if not mapping:
        return roots
    new = dict(known or {})
    moved = mapping.keys()
    nodes = reach(roots, lambda n: () if n in known else n.children) if known else postorder(roots)
    for node in nodes:
        if node not in new:
            stays = moved.isdisjoint(node.named) and all(new[c] is c for c in node.children)
            new[node] = node if stays else rebuild(node, new, mapping)
    return tuple(new[root] for root in roots)
