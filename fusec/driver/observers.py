"""Observers: who looks at the graphs that are compiled, and at their calls.

Tools put an observer in a list, and each compile asks those that look at graphs of its options. So
the compiler knows no tool, and does nothing for one where nobody looks. Where one looks, a graph is
traced (``driver/warm.py`` does not start it) and built before its first call, not beside it. An
observer that raises is a fault of the compile: the graph runs as eager kernels. In the order of a
compile::

    watch_trace     what AOTAutograd traced: returns a function around the calls of its graphs,
                    which see what the program passes and gets
    watch_compile   a graph that is compiled: returns hooks for its stages and its code
    watch_calls     a graph that is bound: returns hooks around its call, its launches, its values
    compiled        a graph whose compile has ended, or failed
    kept            what PyTorch runs between compiled graphs, or in place of one

Worked example::

    with observing(Clock()) as clock:
        model(x)
    print(clock.totals("inference 0/0"))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from torch import fx

from fusec.driver.pipeline import Compiled
from fusec.driver.trace import Trace
from fusec.options import Options
from fusec.passes.stage import Observe
from fusec.runtime.calls.executable import BoxedCall, CallHooks

AROUND = "fusec_around"
"""The key of what ``watch_trace`` has returned for a graph, in its ``meta``."""

USER_PASSES = "fusec_passes"
"""The key of the names of the user's passes that rewrote a graph, in its ``meta``."""

Around: TypeAlias = Callable[[BoxedCall, fx.GraphModule, str], BoxedCall]
"""(the call of a compiled graph, the graph, its name) -> the call with something around it."""


@dataclass(frozen=True, slots=True)
class CompileHooks:
    """What an observer is told of a compile.

    Attributes:
        code: takes what was generated, also of a graph in the cache.
        stages: observes each stage.
        anew: compile a graph that the cache has: its entry has no stages to look at. (Code may also
            be generated for ``code`` alone, beside the entry that runs, by the same verdicts.)
    """

    code: Callable[[Compiled], None] | None = None
    stages: Observe | None = None
    anew: bool = False


class Observer:
    """Looks at graphs; a kind of observer defines the methods that it needs."""

    def looks(self, options: Options) -> bool:
        """Return True if it looks at graphs that are compiled with these options."""
        return True

    def watch_trace(
        self,
        traced: fx.GraphModule,
        rewritten: fx.GraphModule,
        outputs: int | None,
        names: Sequence[str],
        options: Options,
    ) -> Around | None:
        """Return a wrapper for each call of the graphs that are compiled from a trace.

        Args:
            traced: a copy of AOTAutograd's graph as it came: of forward and backward, or inference.
            rewritten: the graph that is compiled in its place, or cut in two.
            outputs: how many of its results are the forward's; None: all.
            names: the program's names of the inputs of Dynamo's graph, in order.
        """
        return None

    def watch_compile(self, options: Options, trace: Trace) -> CompileHooks | None:
        """Return hooks for a graph's stages and its code; the trace has its name."""
        return None

    def watch_calls(self, gm: fx.GraphModule, name: str, options: Options) -> CallHooks | None:
        """Return hooks for each call of a compiled graph, and for its launches."""
        return None

    def compiled(self, gm: fx.GraphModule, options: Options, trace: Trace) -> None:
        """Take a graph whose compile has ended; the trace has its name, and why it failed."""

    def kept(self, part: fx.GraphModule, options: Options, trace: Trace) -> None:
        """Take a Dynamo graph, or a part between compiled ones, that PyTorch runs as it is."""


OBSERVERS: list[Observer] = []
"""All observers of this process."""

Some = TypeVar("Some", bound=Observer)


def observers_of(options: Options) -> list[Observer]:
    """Return the observers that look at graphs compiled with these options."""
    return [observer for observer in OBSERVERS if observer.looks(options)]


@contextmanager
def observing(observer: Some) -> Iterator[Some]:
    """Let an observer look at the graphs that are compiled in a block."""
    OBSERVERS.append(observer)
    try:
        yield observer
    finally:
        OBSERVERS.remove(observer)
