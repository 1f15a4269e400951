"""The interface of a program that runs for each row of a table (``Program.table``).

A launch passes three arrays: the addresses of each row's buffers, the sizes of each row, and for
each instance of the body its *place*: the row, and which of the row's blocks. A block is a point of
the program's grid, numbered with the last axis fastest.

Worked example: rows of 3000 and 100 elements in blocks of 1024 have the places (0, 0), (0, 1),
(0, 2), (1, 0).
"""

from __future__ import annotations

from fusec.codegen.host.wrapper import print_size
from fusec.ir.index import product
from fusec.ir.program import Program


def print_blocks(program: Program) -> str:
    """Return how many blocks a row has: a Python expression over its sizes ``s0``, ``s1``..."""
    names = {size: f"s{position}" for position, size in enumerate(program.sizes)}
    return print_size(product(axis.extent for axis in program.grid), names.__getitem__)
