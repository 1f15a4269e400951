"""A decoded instruction, and what a rule is: what the modules of rules have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusec.tools.emulator.parse import Instruction, Operand

Kind = Callable[[Operand], str]


@dataclass(frozen=True, slots=True)
class Row:
    """A decoded instruction, before its operands have offsets; see ``engine/program.h``.

    Attributes:
        operands: an integer is a constant.
        target: the label of a branch, or of its table.
    """

    operation: str
    operands: tuple[Operand | int, ...] = ()
    type: int = 0
    source: int = 0
    choice: int = 0
    flags: int = 0
    count: int = 0
    target: str = ""


Rule = Callable[[Instruction, Kind], Row | None]
