"""Record each stage's input and output during a compile, to find the first stage that is wrong.

A ``Recorder`` replaces the context. It keeps each run of a stage that changed something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from fusec.driver.backend import compile_with
from fusec.driver.partition import Joint
from fusec.driver.pipeline import compile_to_source
from fusec.driver.stages import CAPTURE, CompileContext
from fusec.driver.structures import printed
from fusec.driver.trace import Trace
from fusec.frontend.fx_passes.dynamo_graph import copied
from fusec.passes.stage import Stage


@dataclass(frozen=True)
class Step:
    """One run of a stage that changed something.

    Attributes:
        graph: its name: "inference", "forward", "backward"; "joint" before capture.
        text: ``before``, printed before the run: stages change FX graphs in place.
        captured: the FX graph that was captured; None before capture.
        inputs: the arguments of the graph, once it has run.
    """

    stage: str
    graph: str
    before: Any
    after: Any
    text: str
    captured: fx.GraphModule | None
    inputs: list[Any]


@dataclass(frozen=True)
class Recorder:
    """Runs stages as a context does, and keeps those that changed something."""

    context: CompileContext
    steps: list[Step]
    captured: fx.GraphModule | None = None
    inputs: list[Any] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.context, name)

    apply_each = CompileContext.apply_each

    def quiet(self) -> CompileContext:
        return self.context.quiet()

    def apply(self, stage: Stage, structure: Any) -> Any:
        before, text = structure, printed(structure)()
        if isinstance(structure, fx.GraphModule):  # stages change it in place
            before = copied(structure)
        elif isinstance(structure, Joint):
            before = copied(structure.module)
        name = self.context.trace.name
        inner = replace(self, context=replace(self.context, trace=Trace(name)))
        trace = Trace(name, texts=True)
        made = replace(self.context, trace=trace).apply(
            replace(stage, run=lambda given, _: stage.run(given, inner)), structure
        )
        if trace.records[stage.name].changed:
            self.steps.append(
                Step(stage.name, name, before, made, text, self.captured, self.inputs)
            )
        return made


def record_steps(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    context: CompileContext,
    *,
    train: bool = False,
    dynamic: bool | None = False,
) -> tuple[Step, ...]:
    """Return the runs of stages that changed something while a function was compiled.

    Args:
        train: a backward runs, too.
    """
    found: list[Step] = []
    joint = Recorder(context, found)

    def compile_one(gm: fx.GraphModule, _: Any, *, name: str) -> Callable[..., Any]:
        recorder = Recorder(replace(joint.context, trace=Trace(name)), found, gm)
        captured, _ = CAPTURE.run(gm, recorder.context)
        found.append(Step("capture", name, gm, captured, printed(gm)(), gm, recorder.inputs))
        compile_to_source(gm, recorder)  # type: ignore[arg-type]

        def call(args: list[Any]) -> Any:
            recorder.inputs[:] = [a.clone() if isinstance(a, Tensor) else a for a in args]
            return gm(*args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    torch.compiler.reset()
    compiled = torch.compile(
        fn,
        backend=lambda gm, given: compile_with(gm, given, compile_one, joint),  # type: ignore
        dynamic=dynamic,
    )
    with torch.set_grad_enabled(train):
        result = compiled(*inputs)
    if train:
        result.float().sum().backward()
    return tuple(found)
