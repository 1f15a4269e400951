"""The form in which programs are printed as C++ kernels: tiles become arrays and vectors.

Programs without products of matrices are printed as they are lowered.
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
"""From a program to the one that ``codegen/cpp/printer.py`` prints."""
