"""The context of a compile: how it runs a stage, verifies what it makes and tells observers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from fusec.codegen.targets import Target
from fusec.driver.structures import verify
from fusec.driver.trace import Trace
from fusec.errors import StageError, note_stage
from fusec.frontend.call import GraphBuilder
from fusec.ir.choice import Judge, judge_by_rule
from fusec.ir.machine import Machine
from fusec.ir.verify import collect_unproven
from fusec.options import Options
from fusec.passes.fusion.fuse import EstimateMemo
from fusec.passes.stage import Observe, Stage

logger = logging.getLogger("fusec.verify")


@dataclass(frozen=True, slots=True)
class CompileContext:
    """The context of a compile: what stages know beside their structure.

    Attributes:
        trace: has the graph's name.
        judge: decides each choice among candidates; by default the cost model and rules do.
        observe: are called before each run of a stage, and what they return with the output.
        judged: fusion's memo of groups, shared by the graphs that are tried.
    """

    target: Target
    options: Options
    trace: Trace
    judge: Judge = judge_by_rule
    observe: tuple[Observe, ...] = ()
    judged: EstimateMemo = field(default_factory=EstimateMemo, compare=False)

    def __post_init__(self) -> None:
        if self.options.by_rule:  # no sum may depend on which program is the first to add its part
            object.__setattr__(self, "target", self.target.in_order())

    @property
    def machine(self) -> Machine:
        return self.target.machine

    def observed(self, stage: Stage, structure: Any) -> Callable[[Any], None]:
        """Give observers a stage's input; return a function that gives them its output."""
        told = [observe(stage, structure) for observe in self.observe]

        def made(structure: Any) -> None:
            for tell in told:
                tell(structure)

        return made

    def apply(self, stage: Stage, structure: Any) -> Any:
        """Run a stage on a structure; verify the output under ``verify``.

        Raises:
            InvalidIR: naming the stage.
        """
        observed = self.observed(stage, structure)
        try:
            made = stage.run(structure, self)
        except Exception as error:
            note_stage(error, stage.name)
            raise
        self.verify(made, stage)
        observed(made)
        return made

    def verify(self, made: Any, stage: Stage) -> None:
        """Verify what a stage has made, under ``verify``.

        An access that is proven for the traced sizes alone is an error where options are strict.

        Raises:
            InvalidIR: naming the stage.
        """
        if not self.options.verify:
            return
        proven = nullcontext(()) if self.options.strict else collect_unproven()
        try:
            with proven as problems:
                verify(made)
                stage.check(made)
        except StageError as error:
            raise error.in_stage(stage.name) from None
        for problem in problems:
            logger.info("stage %s: only for the traced sizes: %s", stage.name, problem)

    def apply_each(self, stage: Stage, structures: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run a stage on each of some structures; see ``apply``."""

        def run(given: Mapping[str, Any], context: CompileContext) -> Mapping[str, Any]:
            return {name: stage.run(one, context) for name, one in given.items()}

        def check(several: Mapping[str, Any]) -> None:
            for one in several.values():
                stage.check(one)

        return dict(self.apply(replace(stage, run=run, check=check), structures))

    def empty_graph(self) -> GraphBuilder:
        options, machine, device = self.options, self.machine, self.target.device
        eager = options.precision == "eager" and not options.alone
        return GraphBuilder(options.alone, device, machine.fusion, machine.slow_types, eager)

    def quiet(self) -> CompileContext:
        """Return the context of a trial run, which nobody observes."""
        return replace(self, observe=())
