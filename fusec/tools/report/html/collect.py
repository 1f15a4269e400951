"""Collect the graphs that a program compiles while it runs, for a report of them.

The compiler passes on each graph to its observers, those from the cache, too. Once the
program is done, they are taken through the pipeline once more, which times nothing and runs
nothing: the result is what ran, as races return their earlier verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from fusec.codegen.targets import find_target
from fusec.driver.compiler import target_for
from fusec.driver.launches import graph_id
from fusec.driver.observers import Observer
from fusec.driver.trace import Trace
from fusec.errors import Unsupported, describe_failure
from fusec.frontend.capture import main_device
from fusec.options import Options
from fusec.tools.report.eager_cost import graph_cost
from fusec.tools.report.html.document import Document, Timing, document_of
from fusec.tools.report.html.drawn import DrawnStep
from fusec.tools.report.html.machine_code import judge_code
from fusec.tools.report.observe import Observed
from fusec.tools.report.run_report import Seen
from fusec.tools.report.stages import Staged, take_through


@dataclass(slots=True, eq=False)
class Collected(Observer):
    """Graphs that were compiled, each with its id and the options of its compile."""

    graphs: list[tuple[fx.GraphModule, str, Options]] = field(default_factory=list)

    def compiled(self, gm: fx.GraphModule, options: Options, trace: Trace) -> None:
        self.graphs.append((gm, graph_id(trace.name), options))

    def document(self, seen: Seen) -> Document:
        """Return the report of what was collected and seen."""
        staged = [_staged(*one) for one in self.graphs]
        times, layers = _times(seen), seen.layers

        def measured(one: Staged, step: DrawnStep) -> Timing | None:
            what = step.code or (step.computes[0], layers.folded(step.module))
            calls, seconds = times.get((one.name, what), (0, 0.0))
            return Timing(seconds / calls * 1e6, "measured") if calls else None

        targets = ", ".join(dict.fromkeys(one.target.name for one in staged))
        judged = judge_code(staged, lambda _: None)
        return document_of(seen.what, targets, staged, seen, judged=judged, measured=measured)


def _staged(graph: fx.GraphModule, name: str, options: Options) -> Staged:
    observed = Observed(name, graph, graph_cost(graph), {})
    try:
        target = target_for(main_device(graph), options)
    except Unsupported as problem:
        return Staged(observed, find_target("cpu"), Trace(name), None, problem.reason)
    made = take_through(observed, target, options)
    if made.failure is None:
        return made
    return Staged(observed, target, made.trace, None, describe_failure(made.failure))  # as it ran


def _times(seen: Seen) -> Mapping[tuple[str, object], tuple[int, float]]:
    """Return (calls, seconds) by (graph, code), and of eager kernels by (graph, (op, module)).

    Launches of one code share its time.
    """
    found: dict[tuple[str, object], tuple[int, float]] = {}
    for launch in seen.launches:
        code = launch.name.partition(":")[0]
        key = launch.graph, ((launch.name, launch.module) if launch.eager else code)
        calls, seconds = found.get(key, (0, 0.0))
        found[key] = calls + launch.calls, seconds + launch.seconds
    return found
