"""Programs as the Triton kernels that a runtime builds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fusec.codegen.host.wrapper import print_blocks
from fusec.codegen.triton.arguments import (
    divisible_by_16,
    print_descriptors,
    print_grid,
    signature,
)
from fusec.codegen.triton.gluon import print_kernel
from fusec.ir.expr import Var
from fusec.ir.program import Let, Program
from fusec.runtime.kernels.triton_kernel import TileDescriptor, TritonSource
from tests.codegen.programs import form_of


def triton_source(
    program: Program,
    *,
    unaligned: Collection[int] = (),
    approximate: frozenset[Var] | None = None,
    warps: int | None = None,
) -> TritonSource:
    form, pointers = (form_of(program, descriptors=wanted) for wanted in (True, False))
    if approximate is not None:
        form, pointers = (
            replace(form, approximate=approximate),
            replace(pointers, approximate=approximate),
        )
    descriptors = tuple(TileDescriptor(*fields) for fields in print_descriptors(form))
    unpromised = print_kernel(pointers) if descriptors else ""
    return TritonSource(
        program.name,
        print_kernel(form),
        tuple(signature(form).items()),
        tuple(k for k in divisible_by_16(program) if k not in unaligned),
        print_grid(program),
        program.warps if warps is None else warps,
        program.stages,
        descriptors,
        print_kernel(form, aligned=False) if program.table else unpromised,
        print_blocks(program) if program.table else None,
        program.registers,
    )


def named_values(program: Program) -> frozenset[Var]:
    """Return the values of a program without loops."""
    return frozenset(s.var for s in program.body if isinstance(s, Let))
