"""The structures that stages take and return: each has a verifier, and a printed form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

from fusec.codegen.parametrize import Functions, print_functions, verify_functions
from fusec.codegen.triton.form import Form, print_form, verify_form
from fusec.driver.partition import Joint
from fusec.errors import InternalError, InvalidIR
from fusec.ir import text
from fusec.ir.graph import FlatKernel, Graph, Kernel, Schedule
from fusec.ir.host import HostProgram, print_host, verify_host
from fusec.ir.program import Program, print_program
from fusec.ir.verify import verify_graph, verify_kernel, verify_schedule
from fusec.ir.verify_program import verify_program
from fusec.passes.schedule.plan import Plan, print_plan, verify_plan


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


def printed(structure: Any) -> Callable[[], str]:
    """Return a function that prints a structure; FX graphs, which stages mutate, print at once."""
    match structure:
        case Graph():
            return partial(text.print_graph, structure)
        case Schedule():
            return partial(text.print_schedule, structure)
        case Kernel():
            return partial(text.print_kernel, structure)
        case HostProgram():
            return partial(print_host, structure)
        case Planned():
            return partial(print_plan, structure.kernel.name, structure.plan)
        case Program():
            return partial(print_program, structure)
        case Form():
            return partial(print_form, structure)
        case Functions():
            return partial(print_functions, structure)
        case fx.GraphModule():
            now = structure.print_readable(print_output=False)
            return lambda: now
        case Mapping():
            return partial(_joined, [printed(one) for one in structure.values()])
        case tuple():
            return partial(_joined, [printed(one) for one in structure])
        case Joint():
            return printed(structure.module)
        case _:
            raise InternalError(structure, stage="dump")


def _joined(prints: list[Callable[[], str]]) -> str:
    return "\n\n".join(one() for one in prints)
