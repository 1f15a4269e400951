"""The sizes that the order of a program's sums depends on.

A program adds terms in loops: into a ``Carry``, an array, or by ``Multiply``. How many times these
loops run, and so how the terms are grouped, follows from the sizes in their bounds, and from no
other size: instances of the body share no sum, and lanes have constant extents. Sums that a program
adds to memory (``Program.added``) are apart: their order differs from launch to launch.

Worked example: with rows of the extent u0 in a loop, and 768 terms of each ::

    for m in 0 .. u0:
      carry acc<ki> = 0.0
      for ko in 0 .. 48:
        ...
        acc := acc + v

the sum's loops are those inside of the scope of ``acc``: ko alone, so that it depends on no size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fusec.ir.definition import sizes_in
from fusec.ir.expr import Expr, Reduce, Scan
from fusec.ir.graph import Kernel, kernel_nodes
from fusec.ir.index import Axis, Index, Size
from fusec.ir.program import (
    Carry,
    For,
    Let,
    Multiply,
    Program,
    Put,
    Scratch,
    Statement,
    Update,
    accessed,
    needed_values,
)


@dataclass(frozen=True, slots=True)
class _Known:
    """What a walk has seen.

    Attributes:
        depths: carry or array -> the number of loops around its declaration.
        made: value -> the statement that made it last.
    """

    depths: dict[object, int] = field(default_factory=dict)
    made: dict[Expr, Let | Update] = field(default_factory=dict)

    def adds(self, put: Put) -> bool:
        """Return True if the written value follows from one that the array held."""
        needed = needed_values([put], self.made)
        found = (accessed(self.made[value]) for value in needed if value in self.made)
        return put.buffer.base in found


def sizes_of_sums(program: Program) -> set[Size]:
    """Return the sizes in the bounds of all loops in which a program adds terms."""
    return sizes_in(_bounds(program.body, (), _Known()))


def axes_of_terms(kernels: Iterable[Kernel]) -> tuple[Axis, ...]:
    """Return the axes that kernels reduce, or scan along."""
    nodes = (node for kernel in kernels for node in kernel_nodes(kernel))
    return tuple(dict.fromkeys(a for n in nodes if isinstance(n, Reduce | Scan) for a in n.over))


def _bounds(body: Iterable[Statement], loops: tuple[For, ...], known: _Known) -> Iterator[Index]:
    """Yield the bounds of the loops between each sum's declaration and its additions."""
    for statement in body:
        match statement:
            case Carry(var=var):
                known.depths[var] = len(loops)
            case Scratch(buffer=buffer):
                known.depths[buffer.base] = len(loops)
            case Let(var=var):
                known.made[var] = statement
            case Update(var=var):
                known.made[var] = statement
                yield from _around(loops[known.depths[var] :])
            case Put(buffer=buffer, offset=offset) if known.adds(statement):
                inside = loops[known.depths.get(buffer.base, 0) :]
                yield from _around(loop for loop in inside if loop.axis not in offset.axes)
            case Multiply(into=into, terms=terms):
                yield from terms
                inside = loops[known.depths.get(into.buffer.base, 0) :]
                yield from _around(loop for loop in inside if loop.axis not in into.start.axes)
            case For():
                yield from _bounds(statement.body, (*loops, statement), known)


def _around(loops: Iterable[For]) -> Iterator[Index]:
    for loop in loops:
        yield from (loop.start, *loop.stops)
