"""The structures that stages take and return: each has a verifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from fusec.codegen.parametrize import Functions, verify_functions
from fusec.codegen.triton.form import Form, verify_form
from fusec.driver.partition import Joint
from fusec.errors import InternalError, InvalidIR
from fusec.ir.graph import FlatKernel, Graph, Kernel, Schedule
from fusec.ir.host import HostProgram, verify_host
from fusec.ir.program import Program
from fusec.ir.verify import verify_graph, verify_kernel, verify_schedule
from fusec.ir.verify_program import verify_program
from fusec.passes.schedule.plan import Plan, verify_plan


@dataclass(frozen=True, slots=True)
class Planned:
    """A kernel and the plan by which it runs."""

    kernel: FlatKernel
    plan: Plan


def verify(structure: Any) -> None:
    """Check any structure that a stage makes.

    Raises:
        InvalidIR: if it is not legal; the message says why.
    """
    match structure:
        case Graph():
            verify_graph(structure)
        case Schedule():
            verify_schedule(structure)
        case Kernel():
            verify_kernel(structure)
        case HostProgram():
            verify_host(structure)
        case Planned():
            verify_plan(structure.kernel, structure.plan)
        case Program():
            verify_program(structure)
        case Form():
            verify_form(structure)
        case Functions():
            verify_functions(structure)
        case fx.GraphModule():
            try:
                structure.graph.lint()
            except RuntimeError as error:
                raise InvalidIR(str(error)) from error
        case Mapping():
            for one in structure.values():
                verify(one)
        case tuple():
            for one in structure:
                verify(one)
        case Joint():
            verify(structure.module)
        case _:
            raise InternalError(structure, stage="verify")
