"""The stages from a program to the form printed as C++: tiles become arrays and vectors.

Programs without matrix products are printed as lowered.
"""

from __future__ import annotations

from fusec.codegen.cpp.vector_tiles import vector_tiles
from fusec.passes.stage import Stage

CPP_FORM = (
    Stage(
        "vector_tiles",
        "turn tiles into arrays, lanes into vector loops, a `Dot` into a product in memory (CPU)",
        lambda program, context: vector_tiles(program, context.target.machine.vector),
        "Program",
        "Program",
        needs=("parametrize",),
    ),
)
"""The stages from a program to the program that ``codegen/cpp/printer.py`` prints."""
