"""``Stage``: one rewrite of one structure, as data; ``fold`` runs a list of them.

The lists stand in ``fusec/driver/stages.py``. What all of them share is done once, between two
stages: the structure's verifier runs, and its text is kept for ``fusec dump``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Stage:
    """One rewrite of one structure.

    Attributes:
        name: as ``fusec dump --stage`` has it.
        does: one sentence, for docs/design.md.
        run: (structure, context) -> structure; the same object where nothing changes.
        takes, gives: what the structure is before and after.
        only: whether a compile has the stage, by its target and options.
        needs: stages that must have run before.
        inner: the list that the stage runs, once for each graph that it considers.
        check: raises InvalidIR where what it made lacks what it promises beyond its structure.
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


class StageContext(Protocol):
    """What runs stages: it knows the compile's target and options, checks and records."""

    def apply(self, stage: Stage, structure: Any) -> Any:
        """Return what a stage makes of a structure."""

    def apply_each(self, stage: Stage, structures: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a stage makes of each of some structures."""


def fold(stages: Iterable[Stage], structure: Any, context: StageContext) -> Any:
    """Return what stages make of a structure, one after another."""
    for stage in stages:
        if stage.only(context):
            structure = context.apply(stage, structure)
    return structure


def fold_each(
    stages: Iterable[Stage], structures: Mapping[str, Any], context: StageContext
) -> Mapping[str, Any]:
    """Return what stages make of structures by name: each stage of all, then the next."""
    for stage in stages:
        if stage.only(context):
            structures = context.apply_each(stage, structures)
    return structures
