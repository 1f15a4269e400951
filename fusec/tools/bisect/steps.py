"""Record each stage's input and output during a compile, to find the first stage that is wrong.

An observer of the context (``CompileContext.observe``) keeps each run that changed something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fusec.driver.backend import compile_with
from fusec.driver.partition import Joint
from fusec.driver.pipeline import compile_to_source
from fusec.driver.stages import CompileContext
from fusec.driver.trace import Trace
from fusec.frontend.fx_passes.dynamo_graph import copied
from fusec.passes.stage import Observe, Stage
from fusec.tools.records import printed


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


def recording(
    steps: list[Step], graph: str, captured: fx.GraphModule | None, inputs: list[Any]
) -> Observe:
    """Return an observer that appends each run of a stage that changed something to ``steps``."""

    def observe(stage: Stage, structure: Any) -> Callable[[Any], None]:
        before, text = structure, printed(structure)()
        if isinstance(structure, fx.GraphModule) and structure is not captured:
            # Stages before capture change it in place.
            before = copied(structure)
        elif isinstance(structure, Joint):
            before = copied(structure.module)

        def done(made: Any) -> None:
            if stage.takes != stage.gives or printed(made)() != text:
                steps.append(Step(stage.name, graph, before, made, text, captured, inputs))

        return done

    return observe


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
    joint = replace(context, observe=(recording(found, context.trace.name, None, []),))

    def compile_one(gm: fx.GraphModule, _: Any, *, name: str) -> Callable[..., Any]:
        given: list[Any] = []
        observe = recording(found, name, gm, given)
        compile_to_source(gm, replace(context, trace=Trace(name), observe=(observe,)))

        def call(args: list[Any]) -> Any:
            given[:] = [a.clone() if isinstance(a, Tensor) else a for a in args]
            return gm(*args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    torch.compiler.reset()
    compiled = torch.compile(
        fn,
        backend=lambda gm, inputs: compile_with(gm, inputs, compile_one, joint),
        dynamic=dynamic,
    )
    with torch.set_grad_enabled(train):
        result = compiled(*inputs)
    if train:
        result.float().sum().backward()
    return tuple(found)
