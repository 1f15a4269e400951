"""Print indices as Triton expressions: in 32 bits where their bounds fit, else in 64.

A symbolic size is at most ``MAX_SIZE``, which the launch checks, or less if it has a known bound.
Sums are printed with the lane-free terms first, so that ``pointer + offset`` adds the scalar part
to a scalar pointer.

Worked example: ``m*4096 + c`` with ``m < M`` and lanes ``c`` is ``m.to(tl.int64) * 4096 + c``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fusec.codegen.triton.operations import STAGE
from fusec.errors import InternalError
from fusec.ir.dtype import BOOL, F32, I32, I64, INT32_MAX
from fusec.ir.expr import Cast, Const, Expr, IndexValue, Load, Var, children, is_op
from fusec.ir.index import Atom, Axis, FloorDiv, Index, Mod, Monomial, Runtime, Size, is_nonnegative
from fusec.ir.magnitude import magnitude
from fusec.ir.program import Let, Program, Put, Update, statements

_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))


def lane_extent(axis: Axis) -> int:
    extent = axis.extent.const if axis.extent.is_constant else 0
    if extent < 1 or extent & (extent - 1):
        raise InternalError(f"lane axis {axis} has extent {axis.extent}", stage=STAGE)
    return extent


def fits_32_bits(value: Index) -> bool:
    """Return True if the index and each of its partial sums fit a signed 32-bit integer."""
    return magnitude(value) <= INT32_MAX


class IndexText:
    """Prints indices.

    Attributes:
        name: axis, size or value -> its name.
        lanes: the program's lane axes.
        used: the axes printed so far.
        needs: names in ``operations.FUNCTIONS`` that the text calls.
        loops: axes that are loop variables; Triton's interpreter has plain integers there.
    """

    def __init__(self, name: Callable[[Any], str], lanes: frozenset[Axis]) -> None:
        self.name = name
        self.lanes = lanes
        self.used: set[Axis] = set()
        self.needs: set[str] = set()
        self.loops: set[Axis] = set()

    def text(self, value: Index) -> str:
        """Return ``value`` as a sum: terms without lanes, the constant, terms with lanes."""
        scalar = tuple(t for t in value.terms if not self._has_lanes(t[0]))
        tiled = tuple(t for t in value.terms if self._has_lanes(t[0]))
        if not scalar and not tiled:
            return str(value.const)
        inner = 0 if scalar else value.const
        parts = self._terms(scalar, value.const - inner, wide=not fits_32_bits(value))
        parts += self._terms(tiled, inner, wide=not fits_32_bits(Index(tiled, inner)))
        return _sum(parts)

    def points(self, extent: Index) -> str:
        """Return a number of grid iterations as a 32-bit operand, like a launch's grid.

        Quotients and remainders by it then have 32 bits, as positions of descriptors require.
        """
        if extent.is_constant:
            return str(extent.const)
        return self._wrapped(extent, _sum(self._terms(extent.terms, extent.const, wide=False)))

    def factor(self, value: Index) -> str:
        """Return ``value`` as an operand of a product, a division or a remainder."""
        return self._wrapped(value, self.text(value))

    def _wrapped(self, value: Index, text: str) -> str:
        simple = value.is_constant and value.const >= 0
        if not simple and len(value.terms) == 1 and not value.const:
            monomial, coefficient = value.terms[0]
            simple = (
                coefficient == 1 and len(monomial) == 1 and isinstance(monomial[0], Axis | Size)
            )
        return text if simple else f"({text})"

    def _has_lanes(self, monomial: Monomial) -> bool:
        return any(not self.lanes.isdisjoint(atom.axes) for atom in monomial)

    def _terms(
        self, terms: tuple[tuple[Monomial, int], ...], const: int, *, wide: bool
    ) -> list[tuple[bool, str]]:
        """Return the terms as (is negative, text)."""
        parts = []
        for monomial, coefficient in terms:
            first, *rest = sorted(monomial, key=lambda atom: isinstance(atom, Size))
            factors = [self._atom(first, wide), *(self._atom(atom, False) for atom in rest)]
            if abs(coefficient) != 1:
                factors.append(str(abs(coefficient)))
            parts.append((coefficient < 0, " * ".join(factors)))
        if const:
            parts.append((const < 0, str(abs(const))))
        return parts

    def _atom(self, atom: Atom, wide: bool) -> str:
        match atom:
            case Axis():
                self.used.add(atom)
                text = self.name(atom)
                if wide and atom in self.loops:
                    return f"tl.cast({text}, tl.int64)"
            case Size():
                text = self.name(atom)
            case Runtime():
                return f"{self.name(atom.expr)}.to({'tl.int64' if wide else 'tl.int32'})"
            case FloorDiv():
                text = self._divide(atom, "//")
            case Mod():
                text = self._divide(atom, "%")
            case _:
                raise InternalError(atom, stage=STAGE)
        return f"{text}.to(tl.int64)" if wide else text

    def _divide(self, atom: FloorDiv | Mod, operator: str) -> str:
        """Return a floored quotient or its remainder; Triton's own operators round to zero."""
        if is_nonnegative(atom.dividend) and is_nonnegative(atom.divisor):
            return f"({self.factor(atom.dividend)} {operator} {self.factor(atom.divisor)})"
        function = "_floor_div" if operator == "//" else "_remainder"
        self.needs.add(function)
        return f"{function}({self.text(atom.dividend)}, {self.text(atom.divisor)})"


def _sum(parts: list[tuple[bool, str]]) -> str:
    text = " ".join(f"{'-' if negative else '+'} {body}" for negative, body in parts)
    return text[2:] if text.startswith("+ ") else f"-{text[2:]}"


# -- values in 32 bits ----------------------------------------------------------------------------


def is_plain(value: Const) -> bool:
    """Return True if a bare literal is equivalent to a typed constant in every operation.

    Triton types a bare float as f32 if it is zero or normal in f32, and a bare integer by its size.
    """
    number = value.value
    if value.dtype is F32:
        return not math.isfinite(number) or number == 0 or 2**-126 <= abs(number) < 2**128
    return value.dtype is BOOL or (value.dtype in (I32, I64) and -(2**31) <= number < 2**31)


def narrow_values(program: Program) -> frozenset[Var]:
    """Return the i64 index values that can be computed in 32 bits: they fit, and all uses allow it.

    Such uses are comparisons, casts, a random number's index, and indices of gathers, which are
    cast where used.
    """
    fitting: set[Var] = set()
    blocked: set[Expr] = set()
    for statement in statements(program.body):
        match statement:
            case Let() | Update():
                value = statement.value
                if isinstance(statement, Let) and isinstance(value, IndexValue):
                    if value.dtype is I64 and fits_32_bits(value.index):
                        fitting.add(statement.var)
                elif not (_allows_32_bits(value) or isinstance(value, Cast | Load)):
                    blocked.update(children(value))
            case Put():
                blocked.add(statement.value)
    return frozenset(fitting - blocked)


def _allows_32_bits(value: Expr) -> bool:
    """Return True for a random number, and for a comparison with plain constants."""
    if not is_op(value, *_COMPARISONS):
        return is_op(value, "random")
    return all(is_plain(arg) for arg in value.args if isinstance(arg, Const))
