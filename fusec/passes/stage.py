"""``Stage``: one rewrite of one structure, as data; ``fold`` runs a list of them.

The lists are in ``fusec/driver/stages.py``. Around each stage the context runs the structure's
verifier and tells observers, such as the one that keeps printed texts for ``fusec dump``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

LEVELS = ("fx", "graph", "kernels", "plan", "program", "source", "wrapper")
"""The structures of a compile, each after the last stage that changes it."""
ASSEMBLY = ("ttir", "ttgir", "llir", "ptx", "sass")
"""What Triton makes of a kernel."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One rewrite of one structure.

    Attributes:
        name: the argument of ``fusec dump --stage``.
        does: one sentence, for docs/design.md.
        run: (structure, context) -> structure; the same object where nothing changes.
        takes, gives: the kinds of the structure before and after.
        only: whether a compile runs the stage, by its target and options.
        needs: stages that must have run before.
        inner: the list that the stage runs, once for each graph that it considers.
        check: raises InvalidIR where the result breaks a promise that its verifier does not know.
    """

    name: str
    does: str
    run: Callable[[Any, Any], Any]
    takes: str
    gives: str
    only: Callable[[Any], bool] = lambda context: True
    needs: tuple[str, ...] = ()
    inner: tuple[Stage, ...] = ()
    check: Callable[[Any], None] = lambda made: None


def alone(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the ``run`` of a stage that needs its structure alone."""
    return lambda structure, context: function(structure)


Observe: TypeAlias = Callable[[Stage, Any], Callable[[Any], None]]
"""Is called before a run of a stage with its input; what it returns is called with its output."""


class StageContext(Protocol):
    """Runs single stages with a compile's target and options; verifies the results."""

    def apply(self, stage: Stage, structure: Any) -> Any:
        """Return the result of a stage on a structure."""

    def apply_each(self, stage: Stage, structures: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the result of a stage on each of several structures, by name."""


def fold(stages: Iterable[Stage], structure: Any, context: StageContext) -> Any:
    """Return the result of running the stages on a structure, one after another."""
    for stage in stages:
        if stage.only(context):
            structure = context.apply(stage, structure)
    return structure


def fold_each(
    stages: Iterable[Stage], structures: Mapping[str, Any], context: StageContext
) -> Mapping[str, Any]:
    """Return structures by name after the stages: each stage runs on all, then the next."""
    for stage in stages:
        if stage.only(context):
            structures = context.apply_each(stage, structures)
    return structures
