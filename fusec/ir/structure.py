"""The structure of a program: a text that is equal for programs that differ in names alone.

The blocks of a deep model make the same kernels over other buffers; one piece of machine code
serves them all. Axes, buffers, values and sizes are numbered in the order in which a walk meets
them.
"""

from __future__ import annotations

from fusec.errors import InternalError
from fusec.ir.expr import (
    Cast,
    Const,
    Dot,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Select,
    Var,
    children,
)
from fusec.ir.index import Axis, FloorDiv, Index, Mod, Runtime, Size
from fusec.ir.program import Carry, For, Let, Program, Put, Scratch, Statement, Update


def structure(program: Program) -> str:
    """Return a text that programs share only if the code of one is right for the other."""
    return _Structure().program(program)


class _Structure:
    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}

    def number(self, thing: object) -> int:
        return self.numbers.setdefault(thing, len(self.numbers))

    def program(self, program: Program) -> str:
        buffers = [f"{self.number(b)}:{b.dtype}" for b in program.buffers]
        written = [str(self.number(b)) for b in program.writes]
        sizes = [str(self.number(s)) for s in program.sizes]
        grid = [f"{self.number(a)}:{self.index(a.extent)}" for a in program.grid]
        lanes = [f"{self.number(a)}:{self.index(a.extent)}" for a in program.lanes]
        work = "" if program.work is None else self.index(program.work)
        head = [
            buffers,
            written,
            sizes,
            grid,
            lanes,
            [
                f"{program.warps},{program.stages},{program.group},{program.descriptors},{program.table}",
                work,
            ],
        ]
        return "\n".join([*map(" ".join, head), self.block(program.body)])

    def block(self, body: tuple[Statement, ...]) -> str:
        return "{" + ";".join(map(self.statement, body)) + "}"

    def statement(self, statement: Statement) -> str:
        match statement:
            case Let():
                return f"{self.expr(statement.var)}={self.expr(statement.value)}"
            case Carry():
                return f"carry {self.expr(statement.var)}={self.expr(statement.initial)}"
            case Update():
                return f"{self.expr(statement.var)}:={self.expr(statement.value)}"
            case Put():
                guard = "" if statement.guard is None else self.expr(statement.guard)
                at = f"{self.number(statement.buffer.base)}[{self.index(statement.offset)}]"
                return f"put {at}={self.expr(statement.value)} if {guard}"
            case Scratch():
                array = statement.buffer
                length = self.index(statement.length)
                return f"scratch {self.number(array)}:{array.dtype}[{length}]"
            case For():
                stops = ",".join(map(self.index, statement.stops))
                bounds = f"{self.index(statement.start)}..{stops}"
                return f"for {self.number(statement.axis)} {bounds}{self.block(statement.body)}"
            case _:
                raise InternalError(statement, stage="ir.structure")

    def expr(self, node: Expr) -> str:
        """Return a value of a program: one node over names and constants."""
        match node:
            case Var():
                lanes = ",".join(str(self.number(a)) for a in sorted(node.axes, key=_serial))
                return f"v{self.number(node)}:{node.dtype}<{lanes}>"
            case Const():
                return f"{node.value!r}:{node.dtype}"
            case IndexValue():
                return f"({self.index(node.index)}):{node.dtype}"
            case Load():
                guard = "" if node.guard is None else self.expr(node.guard)
                return f"load {self.number(node.buffer.base)}[{self.index(node.indices[0])}]{guard}"
            case Op():
                return f"{node.name}({','.join(map(self.expr, node.args))})"
            case Cast():
                return f"{node.dtype}({self.expr(node.arg)})"
            case Select():
                parts = (node.condition, node.then, node.other)
                return f"where({','.join(map(self.expr, parts))})"
            case Reduce():
                over = ",".join(str(self.number(a)) for a in node.over)
                return f"{node.monoid}({over}:{self.expr(node.body)})"
            case Dot():
                over = ",".join(str(self.number(a)) for a in node.over)
                return f"dot{node.tf32}({over}:{','.join(map(self.expr, children(node)))})"
            case _:
                raise InternalError(node, stage="ir.structure")

    def index(self, value: Index) -> str:
        terms = [f"{c}*{'*'.join(map(self.atom, monomial))}" for monomial, c in value.terms]
        return "+".join([*terms, str(value.const)])

    def atom(self, atom: object) -> str:
        match atom:
            case Axis() | Size():
                return f"a{self.number(atom)}"
            case FloorDiv():
                return f"({self.index(atom.dividend)})//({self.index(atom.divisor)})"
            case Mod():
                return f"({self.index(atom.dividend)})%({self.index(atom.divisor)})"
            case Runtime():
                return f"[{self.expr(atom.expr)}<{self.index(atom.extent)}]"
            case _:
                raise InternalError(atom, stage="ir.structure")


def _serial(axis: Axis) -> int:
    return axis.serial
