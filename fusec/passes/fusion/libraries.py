"""Call each product in the library that computes it fastest.

Spec: ``schedule -> schedule``. A product that stayed a call may be made by other libraries as well
(``Extern.others``): which is faster depends on the processor, so a *chooser* says it, by a race on
this machine (``race.py``) or from what an earlier one found. Calls that are alike share an answer.
Those that multiply most all together are asked for first: the time for races is spent where it
gains most. Products below ``Tuning.raced_product``, and those that all together are less than
``LEAST_SHARE`` of what the graph multiplies, go by rule, to the library that they name. So what is
raced does not depend on how long races take.

Worked example: on a processor where MKL takes its AVX2 path, ``mm(x, w.t())`` of 512 x 768 by
768 x 3072 becomes ``mkldnn._linear_pointwise(x, w, None, "none", [], "")``: 12.8 ms, not 20.6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from fusec.ir.atoms import size_class
from fusec.ir.decision import Decision
from fusec.ir.expr import Buffer
from fusec.ir.graph import Extern, RowLoop, Schedule, Step, View
from fusec.ir.index import Index

ATEN = "ATen"

LEAST_SHARE = 0.03
"""Share of a graph's multiply-adds from which alike products are raced: others decide nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Which library a call goes to.

    Attributes:
        library: one of ``call.others``; None for that which the call names.
        reason: what was measured, for the decision log.
        saved_us: time of one call that the choice saves, or would lose.
    """

    library: str | None
    reason: str
    saved_us: float | None = None


Chooser: TypeAlias = Callable[[Extern], Answer]


def choose_libraries(
    schedule: Schedule, libraries: frozenset[str], small: int, choose: Chooser | None
) -> Schedule:
    """Return the schedule with each product called in the library that its chooser names.

    Args:
        libraries: those that the target has.
        small: multiply-adds below which a product goes by rule.
        choose: None where nothing can be timed.
    """
    alike: dict[str, list[Extern]] = {}
    for call in _calls(schedule):
        if libraries.intersection(call.others):
            alike.setdefault(describe_call(call), []).append(call)
    answers: dict[str, Answer] = {}
    least = LEAST_SHARE * sum(map(_work, alike.values()))
    for key, calls in sorted(alike.items(), key=lambda row: -_work(row[1])):
        if multiply_adds(calls[0]) < small:
            answers[key] = Answer(None, "by rule: small products go to the library that they name")
        elif _work(calls) < least:
            answers[key] = Answer(None, "by rule: too small a part of the graph's products")
        elif choose is None:
            answers[key] = Answer(None, "by rule: nothing is timed")
        else:
            answers[key] = choose(calls[0])
    log = tuple(
        Decision(
            call.title,
            answer.library or " or ".join(call.others),
            answer.library is not None,
            answer.reason,
            answer.saved_us,
            ATEN,
        )
        for key, answer in answers.items()
        for call in alike[key]
    )
    chosen = {key: answer.library for key, answer in answers.items() if answer.library is not None}
    taken = _take(schedule, chosen) if chosen else schedule
    return replace(taken, decisions=(*taken.decisions, *log)) if log else taken


def _take(schedule: Schedule, chosen: dict[str, str]) -> Schedule:
    steps: list[Step] = []
    packed = set[Buffer]()
    for step in schedule.steps:
        match step:
            case Extern() if step.others:
                library = chosen.get(describe_call(step), "")
                weight = step.packed_for(library)
                if weight is not None and weight.buffer not in packed:
                    packed.add(weight.buffer)
                    steps.append(weight)
                steps.append(step.others.get(library, step))
            case RowLoop():
                steps.append(replace(step, body=_take(step.schedule, chosen)))
            case _:
                steps.append(step)
    return replace(schedule, steps=tuple(steps))


def _calls(schedule: Schedule) -> Iterator[Extern]:
    for step in schedule.steps:
        match step:
            case Extern():
                yield step
            case RowLoop():
                yield from _calls(step.schedule)


def _work(calls: list[Extern]) -> int:
    return sum(map(multiply_adds, calls))


def multiply_adds(call: Extern) -> int:
    """Return the multiply-adds of a product of two matrices, at the hints of sizes."""
    return math.prod(extents(call))


def extents(call: Extern) -> tuple[int, int, int]:
    """Return the rows, terms and columns of a product of two matrices, at the hints of sizes."""
    *_, a, b = call.views
    return (a.shape[0].hint(), a.shape[1].hint(), b.shape[1].hint())


def describe_call(call: Extern) -> str:
    """Return a call as text that says what its time depends on: ``mm f32[8,4](4,1) f32[4,2](1,4)``.

    A symbolic size is given by the class of its hint.
    """
    offered = [library for library in call.others if call.packed_for(library)]
    return " ".join((call.title, *map(_describe_view, call.views), *offered))


def _describe_view(view: View) -> str:
    shape, strides = (",".join(map(_extent, e)) for e in (view.shape, view.strides))
    return f"{view.buffer.dtype}[{shape}]({strides})"


def _extent(value: Index) -> str:
    if value.is_constant:
        return str(value.const)
    return f"<={size_class(value.hint())}"
