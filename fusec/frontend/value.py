"""A tensor during capture: a scalar expression over the tensor's own axes.

Views emit nothing: they substitute other indices for the axes. A tensor in memory is the special
case of one unguarded ``Load``.

Worked example: with x a buffer of shape [B, T, C], ``x.view(B*T, C)`` is the value with the axes
(i0, i1) and the expression ``x[i0//T, i0%T, i1]``; read at (m, 0) it is ``x[m//T, m%T, 0]``.

A complex tensor is two of them, its parts (``forms.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from fusec.errors import Unsupported
from fusec.ir.dtype import DType
from fusec.ir.expr import Buffer, Const, Expr, Load, both
from fusec.ir.index import Axis, Index, index, is_in_range
from fusec.ir.rewrite import is_index_only, with_guard

ONE = index(1)
ZERO = index(0)


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """``expr`` over ``axes``, one for each extent of ``shape``; of type ``dtype`` when stored."""

    shape: tuple[Index, ...]
    dtype: DType
    axes: tuple[Axis, ...]
    expr: Expr

    @property
    def buffer(self) -> Buffer | None:
        """The buffer this value is a window of, or None if it is computed or guarded."""
        if isinstance(self.expr, Load) and self.expr.guard is None:
            return self.expr.buffer
        return None

    @property
    def exprs(self) -> tuple[Expr, ...]:
        return (self.expr,)

    @property
    def reads_memory(self) -> bool:
        return not (isinstance(self.expr, Const) or is_index_only(self.expr))

    def at(self, indices: tuple[Index, ...], guard: Expr | None = None) -> Expr:
        """Return the element at ``indices``; where a ``guard`` is false, 0 and no access."""
        expr = self.expr.substitute(dict(zip(self.axes, indices, strict=True)))
        if isinstance(expr, Load):
            return Load(expr.buffer, expr.indices, both(expr.guard, guard))
        return with_guard(expr, guard)


@dataclass(frozen=True, slots=True, eq=False)
class ComplexValue:
    """A complex tensor: its real and its imaginary part, of one shape and type."""

    re: Value
    im: Value

    @property
    def shape(self) -> tuple[Index, ...]:
        return self.re.shape

    @property
    def exprs(self) -> tuple[Expr, ...]:
        return (self.re.expr, self.im.expr)

    @property
    def reads_memory(self) -> bool:
        return self.re.reads_memory or self.im.reads_memory


TensorValue: TypeAlias = Value | ComplexValue


@dataclass(frozen=True, slots=True, eq=False)
class Number:
    """A symbolic float: a number that depends on sizes alone. Promotes as a Python float does."""

    expr: Expr


def make_axes(shape: tuple[Index, ...], letter: str = "i") -> tuple[Axis, ...]:
    """Return fresh axes named by position: i0, i1, ..."""
    return tuple(Axis(f"{letter}{k}", extent) for k, extent in enumerate(shape))


def positions(axes: tuple[Axis, ...]) -> tuple[Index, ...]:
    """Return the axes as indices; an axis of one element is 0."""
    return tuple(ZERO if a.extent is ONE else index(a) for a in axes)


def whole(buffer: Buffer) -> Value:
    """Return all of a buffer as a value."""
    axes = make_axes(buffer.shape)
    return Value(buffer.shape, buffer.dtype, axes, Load(buffer, tuple(map(index, axes)), None))


def is_whole(value: Value) -> bool:
    """Return True if the value is all of a buffer, index for index."""
    buffer = value.buffer
    if buffer is None or buffer.shape != value.shape or not isinstance(value.expr, Load):
        return False
    return value.expr.indices == tuple(map(index, value.axes))


def broadcast(indices: tuple[Index, ...], shape: tuple[Index, ...]) -> tuple[Index, ...]:
    """Return the indices at which a tensor of ``shape`` is read when it is broadcast.

    Raises:
        Unsupported: for sizes whose equality is only known at run time.
    """
    aligned = indices[len(indices) - len(shape) :]
    for i, extent in zip(aligned, shape, strict=True):
        axis = None if extent.is_constant else i.as_axis()
        if axis is not None and axis.extent is not extent and not is_in_range(i, extent):
            raise Unsupported("sizes whose equality is known only at run time")
    return tuple(ZERO if e is ONE else i for i, e in zip(aligned, shape, strict=True))
