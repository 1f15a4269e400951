"""Print indices as C++: a scalar in 64 bits, or a vector with an index for each lane.

Quotients and remainders of sizes are named once, before all loops: nested ones without names would
double the length of the text with each division. An index that was read from memory is checked
where it is used, unless a check before a loop has named it (``safe``).

Worked example, lanes ``l`` of 16: ``4096*m + 16*c + l`` is ``(i_m * 4096LL + i_c * 16LL)`` and a
stride of 1 along the lanes.
"""

from __future__ import annotations

from collections.abc import Callable

from fusec.errors import InternalError
from fusec.ir.dtype import I64, DType
from fusec.ir.expr import Expr
from fusec.ir.index import Atom, Axis, FloorDiv, Index, Mod, Runtime, Size, index, product


class IndexPrinter:
    """Prints the indices of one program.

    Attributes:
        name: axis or size -> its name.
        operand: (value, whether it gets lanes) -> its text.
        lane: the program's vectorized axis, if it has one.
        calls: divisions of vectors are calls, which compile faster than what is inlined.
        safe: gather -> the name of its index, which was checked.
        quotients: quotient or remainder of sizes -> its name and its text.
    """

    def __init__(
        self,
        name: Callable[[Axis | Size], str],
        operand: Callable[[Expr, bool], str],
        lane: Axis | None,
        *,
        calls: bool,
    ) -> None:
        self.name, self.operand, self.lane, self.calls = name, operand, lane, calls
        self.safe: dict[Runtime, str] = {}
        self.quotients: dict[Atom, tuple[str, str]] = {}

    def along_lane(self, offset: Index) -> tuple[Index, Index | None]:
        """Split an offset into its lane-free part and its lane stride, None if not uniform."""
        if self.lane is None or self.lane not in offset.axes:
            return offset, index(0)
        by = offset.coefficient(self.lane)
        if by is None or by.axes:
            return offset, None
        return offset - by * index(self.lane), by

    def definitions(self) -> list[str]:
        """Return the definitions of the quotients that were printed so far.

        Where a divisor is 0, the result is 0: the code that uses it never runs.
        """
        return [f"const long long {name} = {text};" for name, text in self.quotients.values()]

    def scalar(self, value: Index) -> str:
        """Return an index without lanes."""
        parts: list[str] = []
        for monomial, coefficient in value.terms:
            factors = [self._scalar_atom(atom) for atom in monomial]
            if coefficient != 1:
                factors.append(f"{coefficient}LL")
            parts.append(" * ".join(factors))
        if value.const or not parts:
            wide = parts or abs(value.const) >= 2**31
            parts.append(f"{value.const}LL" if wide else str(value.const))
        return f"({' + '.join(parts)})" if len(parts) > 1 else parts[0]

    def _scalar_atom(self, atom: object) -> str:
        match atom:
            case Axis() | Size():
                return self.name(atom)
            case FloorDiv() | Mod() if atom in self.quotients:
                return self.quotients[atom][0]
            case FloorDiv() | Mod():
                function = "floordiv" if isinstance(atom, FloorDiv) else "mod"
                a, b = self.scalar(atom.dividend), self.scalar(atom.divisor)
                text = f"fusec_{function}({a}, {b})"
                if any(isinstance(inner, Axis | Runtime) for inner in index(atom).atoms()):
                    return text
                name = f"q_{len(self.quotients)}"
                text = text if atom.divisor.is_constant else f"{b} ? {text} : 0"
                self.quotients[atom] = name, text
                return name
            case Runtime():
                return self.safe.get(atom) or f"(long long){self.operand(atom.expr, False)}"
            case _:
                raise InternalError(atom, stage="codegen.cpp")

    def vector(self, value: Index, dtype: DType) -> str:
        """Return an index with lanes as a vector of i64 or i32."""
        kind = _kind(dtype)
        base, by = self.along_lane(value)
        if by is index(0):
            return self._broadcast(value, dtype)
        if by is not None:
            iota = _iota(dtype)
            lanes = iota if by is index(1) else f"{iota} * {self._broadcast(by, dtype)}"
            return lanes if base is index(0) else f"({self._broadcast(base, dtype)} + {lanes})"
        parts: list[str] = []
        plain = index(value.const)
        for monomial, coefficient in value.terms:
            if self.lane is None or not any(self.lane in atom.axes for atom in monomial):
                plain = plain + coefficient * product(index(a) for a in monomial)
                continue
            factors = [self._vector_atom(atom, dtype) for atom in monomial]
            if coefficient != 1:
                factors.append(f"v_{kind}({coefficient})")
            parts.append(" * ".join(factors))
        if plain is not index(0):
            parts.append(self._broadcast(plain, dtype))
        return f"({' + '.join(parts)})"

    def _broadcast(self, value: Index, dtype: DType) -> str:
        """Return a vector with a scalar index in each lane."""
        return f"v_{_kind(dtype)}({'' if dtype is I64 else '(int)'}({self.scalar(value)}))"

    def _vector_atom(self, atom: object, dtype: DType) -> str:
        match atom:
            case Axis() if atom is self.lane:
                return _iota(dtype)
            case FloorDiv() | Mod() if self.lane in atom.axes:
                a, b = self.vector(atom.dividend, dtype), self.vector(atom.divisor, dtype)
                name = "floordiv" if isinstance(atom, FloorDiv) else "remainder"
                return f"{'called' if self.calls and dtype is I64 else 'f'}_{name}({a}, {b})"
            case Runtime() if self.lane is not None and self.lane in atom.expr.axes:
                text = self.operand(atom.expr, True)
                return text if atom.expr.dtype is dtype else f"to_{_kind(dtype)}({text})"
            case _:
                return f"v_{_kind(dtype)}({self._scalar_atom(atom)})"


def _kind(dtype: DType) -> str:
    return "i64" if dtype is I64 else "i32"


def _iota(dtype: DType) -> str:
    return "v_iota()" if dtype is I64 else "to_i32(v_iota())"
