"""Name launches in traces: a range of torch's profiler around each call of a printed wrapper.

A wrapper is printed in two forms, and the second, in which launches have names, is bound when a
profiler first runs. Each call of the graph checks once which of them to run, so that a launch costs
nothing more while no profiler runs. On a GPU the range is around the launch, which the trace joins
to its kernel. ``emit_nvtx`` and ``emit_itt`` of ``torch.autograd.profiler`` set the same flag as a
profiler, and get the ranges by the same callbacks: they become NVTX ranges.

Worked example, a line of the second form, which a trace calls "h.3.ln_2: add + layer_norm"::

    named("k3", k0, mm, b, y)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from fusec.runtime.interior import is_profiling, profiler_range

BoxedFunction: TypeAlias = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Ranges:
    """The names of one graph's launches.

    Attributes:
        graph: the name of the range around all of them.
        source: the form of the wrapper in which launches have names.
        titles: returns the names of launches in traces, by their names in the source.
    """

    graph: str
    source: str
    titles: Callable[[], Mapping[str, str]]

    def around(
        self, call: BoxedFunction, bind: Callable[[str, Callable[..., Any]], BoxedFunction]
    ) -> BoxedFunction:
        """Return a callable that runs ``call``, or under a profiler the form with names.

        Args:
            bind: returns the callable of a source, given its function ``named``.
        """
        bound: list[BoxedFunction] = []

        def run(args: list[Any]) -> Any:
            if not is_profiling():
                return call(args)
            if not bound:
                with profiler_range("fusec: names of launches"):
                    bound.append(bind(self.source, launcher(self.titles())))
            with profiler_range(self.graph):
                return bound[0](args)

        return run


def launcher(titles: Mapping[str, str]) -> Callable[..., Any]:
    """Return the function ``named`` of a wrapper, which calls its argument within a range."""

    def named(name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with profiler_range(titles.get(name, name)):
            return call(*args, **kwargs)

    return named
