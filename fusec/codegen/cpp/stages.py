"""The stages that the C++ target has beside those of every target."""

from __future__ import annotations

from functools import partial

from fusec.codegen.cpp.vector_tiles import vector_tiles
from fusec.ir.graph import FlatKernel
from fusec.passes.kernel.group_factors import factor_groups
from fusec.passes.kernel.scans import check_order, run_scans
from fusec.passes.kernel.unroll_pairs import unroll_pairs
from fusec.passes.kernel.unroll_terms import unroll_terms
from fusec.passes.kernel.unroll_windows import unroll_windows
from fusec.passes.stage import Stage, alone

_on_flat = partial(Stage, takes="FlatKernel", gives="FlatKernel", needs=("coalesce",))
CPP_FLAT = (
    _on_flat(
        "factor_groups",
        "multiply sums of groups of integer weights by their scales: terms are exact in bf16 (CPU)",
        lambda flat, context: factor_groups(flat, context.machine),
    ),
    _on_flat(
        "unroll_pairs",
        "unroll an axis of two, or join it: pairs, and halves of a byte, are read together (CPU)",
        lambda flat, context: unroll_pairs(flat, context.machine),
    ),
    _on_flat(
        "unroll_windows",
        "unroll neighbouring results of sums over windows, which share elements (CPU)",
        lambda flat, context: unroll_windows(flat, context.machine),
    ),
    _on_flat(
        "unroll_terms",
        "write out short sums with constant factors, with the axes of these factors (CPU)",
        alone(unroll_terms),
    ),
    _on_flat(
        "scans",
        "run scans in the loop that they scan along, one step for each point (CPU)",
        lambda flat, context: FlatKernel(check_order(run_scans(flat))),
    ),
)
"""The stages on a flat kernel before it is planned."""

CPP_FORM = (
    Stage(
        "vector_tiles",
        "turn tiles into arrays, lanes into vector loops; mark functions with a shorter form (CPU)",
        lambda program, context: vector_tiles(program, context.target.machine.vector),
        "Program",
        "Program",
        needs=("parametrize",),
    ),
)
"""The stages from a program to the program that ``codegen/cpp/printer.py`` prints."""
