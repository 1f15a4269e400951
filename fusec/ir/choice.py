"""A choice among candidates that compute the same values, and the decision that a judge takes.

Which candidate is fastest depends on the machine. So a pass only states the choice: kernels or the
library (``passes/fusion/contract.py``), which library (``passes/fusion/libraries.py``), which
memory format (``frontend/fx_passes/memory_formats.py``). A *judge* decides it: by the cost model or
a rule (``Choice.by_rule``), by a race on this machine (``driver/race.py``), or as a lock file says
(``tools/report/lock_file.py``).

Worked example: a product of f32 matrices of 512 x 768 and 768 x 3072 has the kind "product", the
reference "ATen" and the candidates "ATen", "oneDNN" and "MKL". The race on one processor returned
``Decided("oneDNN", "measured at 512 x 768 x 3072: ...", saved_us=7800.0)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Decided:
    """The candidate that a choice takes.

    Attributes:
        candidate: its name.
        reason: the rule, or what was modelled or measured, for the decision log.
        saved_us: microseconds that the best alternative saves beside the best other candidate,
            negative where it loses; None where neither was modelled or measured.
        reference_us: microseconds of the reference; 0 where unknown.
        pinned: whether a lock file names the candidate, whatever it saves.
    """

    candidate: str
    reason: str
    saved_us: float | None = None
    reference_us: float = 0.0
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """Candidates that compute the same values.

    Attributes:
        kind: "group", "product" or "convolution": what ``subject`` is.
        describe: returns the choice as one line, the same in every process; a key of lock files.
        subject: what is decided about: a group of kernels, a library call, an FX node.
        candidates: names of the candidates that are known beforehand, the reference first. It is
            taken where nothing is known, and the others must agree with it.
        alternative: names with this prefix are alternatives to the reference (``fused #``); with
            "" every other name is.
        by_rule: decides without measuring.
    """

    kind: str
    describe: Callable[[], str]
    subject: Any
    candidates: tuple[str, ...]
    by_rule: Callable[[], Decided]
    alternative: str = ""

    @property
    def reference(self) -> str:
        """The candidate that is taken where nothing is known."""
        return self.candidates[0]

    def is_alternative(self, name: str) -> bool:
        """Return True if a candidate is of another kind than the reference."""
        return name != self.reference and name.startswith(self.alternative)

    def offers(self, name: str) -> bool:
        """Return True if a candidate of this name may be taken here.

        With a prefix not all names are known: other libraries race against kernels, too.
        """
        return bool(self.alternative) or name in self.candidates

    def saved_us(self, times: Mapping[str, float]) -> float:
        """Return what the best alternative saves beside the best other candidate, by their times.

        It is 0 if no alternative was timed.
        """
        others = [us for name, us in times.items() if not self.is_alternative(name)]
        alternatives = [us for name, us in times.items() if self.is_alternative(name)]
        return min(others) - min(alternatives) if others and alternatives else 0.0


Judge: TypeAlias = Callable[[Choice], Decided]


def judge_by_rule(choice: Choice) -> Decided:
    """Return what the cost model, or a rule, decides."""
    return choice.by_rule()
