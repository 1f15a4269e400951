"""The interface of a foreach kernel's program, which runs for each row of a table.

A launch passes three arrays: the addresses of each row's buffers, the sizes of each row, and for
each block its *place*: the row, and the block's number in the row. A block is one iteration of the
program's grid, numbered with the last axis fastest. ``Program.table`` marks these programs.

Worked example: rows of 3000 and 100 elements in blocks of 1024 have the places (0, 0), (0, 1),
(0, 2), (1, 0).
"""

from __future__ import annotations

from fusec.codegen.host.wrapper import print_size
from fusec.ir.index import product
from fusec.ir.program import Program


def print_blocks(program: Program) -> str:
    """Return a row's number of blocks as a Python expression over its sizes ``s0``, ``s1``..."""
    names = {size: f"s{position}" for position, size in enumerate(program.sizes)}
    return print_size(product(axis.extent for axis in program.grid), names.__getitem__)
