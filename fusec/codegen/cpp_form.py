"""The form in which programs are printed as C++ kernels: tiles become arrays and vectors.

Programs without products of matrices are printed as they are lowered, those that are alike but for
numbers by one function.
"""

from __future__ import annotations

from fusec.codegen.generalise import generalise
from fusec.codegen.vector_tiles import vector_tiles
from fusec.passes.stage import Stage

CPP_FORM = (
    Stage(
        "vector_tiles",
        "tiles become arrays, their lanes loops over vectors, a `Dot` a product in memory (CPU)",
        lambda program, context: vector_tiles(program, context.target.machine.vector),
        "Program",
        "Program",
        needs=("lower",),
    ),
)
"""From a program to the one that ``codegen/cpp.py`` prints."""

CPP_FUNCTIONS = (
    Stage(
        "generalise",
        "programs whose numbers lie on a line run one function (CPU)",
        lambda functions, context: generalise(functions),
        "Functions",
        "Functions",
        needs=("vector_tiles",),
    ),
)
"""From the programs of a graph to its functions."""
