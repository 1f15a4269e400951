"""Observers are asked at each compile that they look at, and of no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fusec.driver.observers import (
    OBSERVERS,
    Around,
    CompileHooks,
    Observer,
    observers_of,
    observing,
)
from fusec.driver.pipeline import Compiled
from fusec.driver.trace import Trace
from fusec.options import Options
from fusec.passes.stage import Stage
from fusec.runtime.calls.executable import BoxedCall, CallHooks
from tests.support import values


class Log(Observer):
    """Looks at graphs without a cache, and notes what it is asked and what is called."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def looks(self, options: Options) -> bool:
        return not options.cache

    def noting(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.said.append(what)
            return call(*args)

        return run

    def watch_trace(
        self,
        traced: fx.GraphModule,
        rewritten: fx.GraphModule,
        outputs: int | None,
        names: Sequence[str],
        options: Options,
    ) -> Around:
        self.said.append(f"traced with {outputs} outputs, of {', '.join(names)}")

        def around(call: BoxedCall, gm: fx.GraphModule, name: str) -> BoxedCall:
            return self.noting(f"call of the trace's {name}", call)

        return around

    def watch_calls(self, gm: fx.GraphModule, name: str, options: Options) -> CallHooks:
        self.said.append(f"bound {name}")
        return CallHooks(
            lambda call: self.noting(f"call of {name}", call),
            lambda launch, call: self.noting(f"launch of {launch}", call),
        )

    def watch_compile(self, options: Options, trace: Trace) -> CompileHooks:
        def code(compiled: Compiled) -> None:
            self.said.append(f"generated {', '.join(compiled.programs)} of {trace.name}")

        def stages(stage: Stage, structure: Any) -> Callable[[Any], None]:
            if stage.name == "fuse":
                self.said.append(f"fuse of {trace.name}")
            return lambda made: None

        return CompileHooks(code, stages)

    def compiled(self, gm: fx.GraphModule, options: Options, trace: Trace) -> None:
        self.said.append(f"compiled {trace.name}")


def said(*, cache: bool, strict: bool = True) -> list[str]:
    torch._dynamo.reset()
    with observing(Log()) as log:
        options = {"cache": cache, "strict": strict}
        compiled = torch.compile(lambda x: x.sin() * 2, backend="fusec", options=options)
        compiled(values(4, 3).requires_grad_()).sum().backward()
    assert log not in OBSERVERS
    return log.said


def test_an_observer_is_asked_in_the_order_of_a_compile() -> None:
    assert said(cache=False) == [
        "traced with 1 outputs, of x",
        "fuse of forward",
        "generated k0 of forward",
        "bound forward",
        "compiled forward",
        "call of the trace's forward",
        "call of forward",
        "launch of k0",
        "fuse of backward",
        "generated k0 of backward",
        "bound backward",
        "compiled backward",
        "call of the trace's backward",
        "call of backward",
        "launch of k0",
    ]


def test_one_that_does_not_look_at_a_compile_is_not_asked() -> None:
    assert said(cache=True) == []


def test_verify_is_an_observer_of_its_own_compiles_alone() -> None:
    assert observers_of(Options.from_compile(None, {"verify": False})) == []
    assert len(observers_of(Options.from_compile(None, {"verify": True}))) == 1
