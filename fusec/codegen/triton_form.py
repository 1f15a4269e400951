"""The form in which a program is printed as a Triton kernel: all rewrites before the printer.

Everything here keeps what a program means, and decides nothing that a plan has not.

Worked example: in ``y = x @ w`` values move to their first use, all tiles get rows and columns, and
the loads of x and w may become copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusec.codegen.base_two import base_two
from fusec.codegen.descriptors import Copies, Descriptor, find_copies
from fusec.codegen.one_sum import one_sum
from fusec.codegen.orient import has_dots, orient
from fusec.codegen.precision import rounded_to_16_bits
from fusec.codegen.sink import sink
from fusec.ir.expr import Var
from fusec.ir.index import Axis
from fusec.ir.program import Program


@dataclass(frozen=True, slots=True)
class Form:
    """A program ready to be printed.

    Attributes:
        dimension: of each lane axis in every tile that has it.
        cheap: values that may be computed with 16-bit accuracy.
        copies: loads and stores of whole tiles by descriptor.
    """

    program: Program
    dimension: Mapping[Axis, int]
    cheap: frozenset[Var]
    copies: Copies

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """What the copies refer to, each once, in the order of first use."""
        return tuple(dict.fromkeys(copy.descriptor for copy in self.copies.values()))


def form(program: Program, cheap: frozenset[Var] | None = None) -> Form:
    """Return the form of a program.

    Args:
        cheap: see ``Form``; by default the values that only ever reach memory rounded to 16 bits.
    """
    if has_dots(program):
        likely = rounded_to_16_bits(program) if cheap is None else cheap
        program = base_two(program, likely)
    program = sink(program)
    dimension = {axis: position for position, axis in enumerate(program.lanes)}
    copies: Copies = {}
    if has_dots(program):
        program, dimension = orient(one_sum(program))
        if program.descriptors:
            program, copies = find_copies(program, dimension)
    if cheap is None:
        cheap = rounded_to_16_bits(program)
    return Form(program, dimension, cheap, copies)


def by_pointers(program: Program) -> Program:
    """Return the program that prints the same kernel without descriptors."""
    return replace(program, descriptors=False)
