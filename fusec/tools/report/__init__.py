"""What fusec does with a model, without running it: ``fusec.explain`` and ``fusec.kernels``.

Worked example::

    >>> print(fusec.explain(torch.nn.LayerNorm(768), torch.randn(8, 768)))
    >>> fusec.kernels(torch.nn.LayerNorm(768), torch.randn(8, 768), target="sm_90")[0].source
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from fusec.errors import UsageError
from fusec.ir import text
from fusec.ir.graph import all_launches
from fusec.options import Options
from fusec.tools.report.arguments import fitting
from fusec.tools.report.explanation import (
    Expected,
    Explanation,
    OutsideReport,
    report_graph,
)
from fusec.tools.report.observe import observe
from fusec.tools.report.run_report import Seen
from fusec.tools.report.stages import (
    Staged,
    assemble,
    check_assembly,
    choose_target,
    take_each,
    take_through,
)
from fusec.tools.report.watching import watch

__all__ = ["Explanation", "KernelText", "explain", "kernels"]


@dataclass(frozen=True, slots=True)
class KernelText:
    """One generated kernel.

    Attributes:
        graph: the compiled graph it belongs to: "forward", "backward" or "inference".
        notation: what it computes, in index notation.
        source: what is compiled.
        language: of the source: "cpp" or "triton".
        staged: the compile it comes from.
    """

    name: str
    graph: str
    notation: str
    source: str
    language: str
    staged: Staged = field(repr=False)

    def __str__(self) -> str:
        return self.source

    def assembly(self, stage: str) -> str:
        """Return a stage below the source: "ttir", "ttgir", "llir", "ptx", "sass".

        Raises:
            UsageError: for a stage that the target does not have.
        """
        check_assembly(stage, self.staged.target)
        return assemble(self.staged, self.name).text(self.staged.target.assembly[stage])


class KernelTexts(list[KernelText]):
    """Generated kernels, in order; a notebook shows their names, which open to their texts."""

    def _repr_html_(self) -> str:
        return "\n".join(
            f"<details><summary>{escape(one.graph)} {escape(one.name)}</summary>"
            f"<pre>{escape(one.notation)}\n\n{escape(one.source)}</pre></details>"
            for one in self
        )


def explain(
    fn: Callable[..., Any],
    *inputs: Any,
    train: bool = False,
    target: str | None = None,
    dynamic: bool = False,
    race: str | None = None,
    options: Mapping[str, Any] | None = None,
    **named: Any,
) -> Explanation:
    """Return what fusec makes of ``fn(*inputs, **named)``: printable, and ``to_json()``.

    Nothing is computed: a module's weights, state and gradients stay as they are.

    Args:
        fn: a module or function.
        train: the forward and the backward; floating inputs then require gradients.
        dynamic: with symbolic sizes.
        target: "cpu", "sm_90"...; this machine's if not given.
        race: "fused" or "library" forces one way to run matrix products; by default the cost model
            decides here, where nothing is timed.
        options: of the compile, as those of ``torch.compile``: ``{"freeze": True}``.
    Raises:
        ModelError: if the model itself fails with these inputs.
    """
    with watch() as watched:
        staged = stage_call(fn, inputs, named, train, target, dynamic, race, options)
    return explanation(choose_target(target).name, staged, watched.seen)


def explanation(
    target: str, staged: Iterable[Staged], seen: Seen, expected: Expected | None = None
) -> Explanation:
    """Return the report on graphs, and on what was seen while they were traced."""
    graphs = tuple(report_graph(one, expected) for one in staged)
    outside = tuple(
        OutsideReport(one.summary.outside, str(one.place), one.summary.reason)
        for one in seen.graphs
        if one.summary.outside
    )
    return Explanation(target, graphs, seen.breaks, seen.unseen, seen.recompiles, outside)


def kernels(
    fn: Callable[..., Any],
    *inputs: Any,
    train: bool = False,
    target: str | None = None,
    dynamic: bool = False,
    race: str | None = None,
    options: Mapping[str, Any] | None = None,
    **named: Any,
) -> KernelTexts:
    """Return the kernels that fusec generates for ``fn(*inputs, **named)``, as of ``explain``."""
    return KernelTexts(
        KernelText(
            step.name,
            staged.name,
            text.print_step(step),
            staged.compiled.sources[step.name],
            staged.target.language,
            staged,
        )
        for staged in stage_call(fn, inputs, named, train, target, dynamic, race, options)
        if staged.compiled is not None
        for step in all_launches(staged.compiled.schedule)
    )


def stage_call(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    named: Mapping[str, Any],
    train: bool,
    target: str | None,
    dynamic: bool,
    race: str | None,
    options: Mapping[str, Any] | None = None,
) -> list[Staged]:
    """Return the graphs of ``fn(*inputs, **named)``, compiled to source text, as of ``explain``."""
    own = {
        "target": (target, str | None),
        "race": (race, str | None),
        "train": (train, bool),
        "dynamic": (dynamic, bool),
        "options": (options, Mapping | None),
    }
    for name, (value, kind) in own.items():
        if not isinstance(value, kind):
            raise UsageError(
                f"{name}= is an option of fusec's, not the model's argument: that is given in its "
                "place, or in a function around the model."
            )
    row = choose_target(target)
    forced = {} if race is None else {"race": race}
    chosen = Options.from_compile(None, {**(options or {}), **forced})
    given = fitting(fn, inputs, named, tuple(own)) if named else inputs
    seen = observe(fn, given, train=train, dynamic=dynamic, options=chosen, target=row)
    staged = take_each(seen, lambda one: take_through(one, row, chosen))
    for one in staged:
        one.check()
    return staged
