"""Name launches in traces: a range of torch's profiler around each launch of a wrapper.

Each call of the graph checks once whether a profiler runs. If so, the wrapper's statements are
interpreted, with a range around each launch; they are bound when a profiler first runs. So a launch
costs nothing more while none runs. On a GPU the range is around the launch, which the trace joins
to its kernel. ``emit_nvtx`` and ``emit_itt`` of ``torch.autograd.profiler`` set the same flag as a
profiler, and get the ranges by the same callbacks: they become NVTX ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from fusec.runtime.interior import is_profiling, profiler_range

BoxedCall: TypeAlias = Callable[[list[Any]], Any]
"""Takes the arguments in one list, which it empties, so that memory is freed early."""
Hook: TypeAlias = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""(a launch's name, the launch) -> the launch with something around it."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """The names of one graph's launches.

    Attributes:
        graph: the name of the range around all of them.
        statements: the wrapper's statements, as JSON, with the names of launches.
        titles: returns the names of launches in traces, by their names in the statements.
    """

    graph: str
    statements: str
    titles: Callable[[], Mapping[str, str]]

    def around(self, call: BoxedCall, interpret: Callable[[Hook], BoxedCall]) -> BoxedCall:
        """Return a callable that runs ``call``, or under a profiler the statements.

        Args:
            interpret: returns the callable of the statements, given a hook for launches.
        """
        bound: list[BoxedCall] = []

        def run(args: list[Any]) -> Any:
            if not is_profiling():
                return call(args)
            if not bound:
                with profiler_range("fusec: names of launches"):
                    bound.append(interpret(launcher(self.titles())))
            with profiler_range(self.graph):
                return bound[0](args)

        return run


def launcher(titles: Mapping[str, str]) -> Hook:
    """Return a hook that puts a range around each launch."""

    def hook(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any) -> Any:
            with profiler_range(titles.get(name, name)):
                return call(*args)

        return launch

    return hook
