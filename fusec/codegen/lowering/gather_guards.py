"""Mask gathers whose index is out of range, for kernels that cannot report an error.

On CPUs the printer checks an index that was loaded from memory and reports it (``cpp/printer.py``).
A GPU kernel cannot return an error, so its load is masked, and the value is 0.

Worked example: ``v = x[[k]*64 + c]`` with k below 40 becomes::

    low = k >= 0;  high = k < 40;  inside = low & high;  v = x[[k]*64 + c] if inside
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fusec.ir.dtype import I64
from fusec.ir.expr import Cast, Const, Expr, IndexValue, Load, Op, Var, as_value, substitute
from fusec.ir.index import Index, Runtime, index
from fusec.ir.names import Names
from fusec.ir.program import Carry, Let, Program, Statement, Update, map_statements, statements


def guard_gathers(program: Program) -> Program:
    """Return the program with each gather masked where an index loaded from memory is invalid."""
    if not any(map(_gathers, statements(program.body))):
        return program
    return replace(program, body=map_statements(program.body, _Guards(program).guarded))


def _gathers(statement: Statement) -> bool:
    load = statement.value if isinstance(statement, Let | Update) else None
    return isinstance(load, Load) and any(_places(load.indices))


def _places(indices: Iterable[Index]) -> dict[Runtime, None]:
    """Return the run-time values in some indices, each once."""
    return {a: None for i in indices for a in i.atoms() if isinstance(a, Runtime)}


class _Guards:
    def __init__(self, program: Program) -> None:
        named = [s.var for s in statements(program.body) if isinstance(s, Let | Carry)]
        self.serial = max((var.serial for var in named), default=0)
        self.names = Names(var.name for var in named)
        self.lets: list[Let] = []

    def guarded(self, statement: Statement) -> tuple[Statement, ...]:
        """Return a statement, preceded by the definitions of its load's guard if it gathers."""
        if not isinstance(statement, Let | Update) or not isinstance(statement.value, Load):
            return (statement,)
        load, self.lets = statement.value, []
        guard = load.guard
        for place in _places(load.indices):
            inside = self.inside(place)
            guard = inside if guard is None else self.let("inside", Op("and", (guard, inside)))
        if not self.lets:
            return (statement,)
        where = tuple(substitute(i, {}, self.named) for i in load.indices)
        value = Load(load.buffer, where, guard)
        return (*self.lets, replace(statement, value=value))

    def inside(self, place: Runtime) -> Var:
        """Define and return the mask ``0 <= index < extent``."""
        value, extent = self.named(place.expr), as_value(place.extent)
        value = value if value.dtype is I64 else self.let("i", Cast(value, I64))
        limit = extent if isinstance(extent, Const) else self.let("n", extent)
        low = self.let("low", Op("ge", (value, Const(0, I64))))
        high = self.let("high", Op("lt", (value, limit)))
        return self.let("inside", Op("and", (low, high)))

    def named(self, value: Expr) -> Expr:
        """Return a value as an operand: a constant, which may be out of range, is named first."""
        if not isinstance(value, Const):
            return value
        known = next((s.var for s in self.lets if s.value is _number(value)), None)
        return known or self.let("i", _number(value))

    def let(self, name: str, value: Expr) -> Var:
        self.serial += 1
        self.lets.append(
            Let(Var(self.names.new(f"v_{name}"), value.dtype, value.axes, self.serial), value)
        )
        return self.lets[-1].var


def _number(value: Const) -> IndexValue:
    return IndexValue(index(int(value.value)), I64)
