"""The output of each stage of a compile, as an observer of its context keeps it.

Structures are printed on demand: printing a graph can cost more than compiling it.

Worked example::

    records = Records()
    compiled = compile_to_source(gm, replace(context, observe=(records.observe,)))
    records.add(compiled)
    print(records.kept["fuse"].text)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from fusec.codegen.parametrize import Functions, print_functions
from fusec.codegen.triton.form import Form, print_form
from fusec.driver.partition import Joint
from fusec.driver.pipeline import Compiled
from fusec.driver.stages import CAPTURE
from fusec.driver.structures import Planned
from fusec.errors import InternalError
from fusec.ir import text
from fusec.ir.graph import Graph, Kernel, Schedule
from fusec.ir.host import HostProgram, print_host
from fusec.ir.program import Program, print_program
from fusec.passes.schedule.plan import print_plan
from fusec.passes.stage import Stage


@dataclass(slots=True, eq=False)
class Record:
    """The output of one stage.

    Attributes:
        print: returns the structure's printed form.
        before: prints the stage's input; None where that is another kind of structure.
    """

    structure: Any
    print: Callable[[], str]
    before: Callable[[], str] | None = None
    _text: str | None = None

    @property
    def text(self) -> str:
        """The structure's printed form."""
        if self._text is None:
            self._text = self.print()
        return self._text

    @property
    def changed(self) -> bool:
        """Whether the stage changed what is printed."""
        return self.before is None or self.before() != self.text


@dataclass(slots=True, eq=False)
class Records:
    """The outputs of stages by name, and the structures between them: ``LEVELS``."""

    kept: dict[str, Record] = field(default_factory=dict)

    def observe(self, stage: Stage, structure: Any) -> Callable[[Any], None]:
        """Keep what a stage makes; a later run replaces an earlier one."""
        before = printed(structure)
        if stage.name == CAPTURE.name:
            self._keep("fx", structure, before)

        def done(made: Any) -> None:
            same = stage.takes == stage.gives
            self._keep(stage.name, made, printed(made), before if same else None)
            if stage.name == CAPTURE.name:
                self._keep("graph", made, printed(made))
            elif stage.gives == "Schedule":
                self._keep("kernels", made, printed(made))

        return done

    def add(self, compiled: Compiled) -> None:
        """Keep what behind all stages has been made."""
        plans, programs, sources = compiled.plans, compiled.programs, compiled.sources
        self._keep("plan", plans, lambda: "\n".join(print_plan(k, p) for k, p in plans.items()))
        self._keep("program", programs, printed(programs))
        self._keep("source", sources, lambda: "\n\n".join(sources[k] for k in compiled.distinct))
        self._keep("wrapper", compiled, lambda: compiled.wrapper)

    def _keep(
        self,
        name: str,
        structure: Any,
        text: Callable[[], str],
        before: Callable[[], str] | None = None,
    ) -> None:
        self.kept.pop(name, None)
        self.kept[name] = Record(structure, text, before)


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
