"""Call each product in the library that computes it fastest.

Spec: ``schedule -> schedule``. A product that is kept as a call may be computed by other libraries
as well (``Extern.alternatives``). Which is fastest depends on the processor: a choice
(``ir/choice.py``), one for all calls of equal types, shapes and strides. Those with the most
multiply-adds in all come first: the time for races is spent where it gains most. Products below
``RaceTuning.product``, and those that have less than ``product_share`` of the graph's
multiply-adds, go by rule to the library that they name. So the products that are raced do not
depend on how long races take.

Worked example: on a processor where MKL takes its AVX2 path, ``mm(x, w.t())`` of 512 x 768 by
768 x 3072 becomes ``mkldnn._linear_pointwise(x, w, None, "none", [], "")``: 12.8 ms, not 20.6.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from fusec.ir.atoms import size_class
from fusec.ir.choice import Choice, Decided, Judge
from fusec.ir.decision import Decision
from fusec.ir.expr import Buffer
from fusec.ir.graph import Extern, RowLoop, Schedule, Step, View, launched_externs
from fusec.ir.index import Index
from fusec.ir.machine import RaceTuning

ATEN = "ATen"
"""The library that a call names."""


def choose_libraries(schedule: Schedule, tuning: RaceTuning, judge: Judge) -> Schedule:
    """Return the schedule with each product called in the library that the judge decides for."""
    equal: dict[str, list[Extern]] = {}
    for call in launched_externs(schedule):
        if call.alternatives:
            equal.setdefault(describe_call(call), []).append(call)
    decided: dict[str, Decided] = {}
    least = tuning.product_share * sum(map(_work, equal.values()))
    for key, calls in sorted(equal.items(), key=lambda row: -_work(row[1])):
        if multiply_adds(calls[0]) < tuning.product:
            decided[key] = _by_rule("small products go to the library that they name")
        elif _work(calls) < least:
            decided[key] = _by_rule("too small a part of the graph's products")
        else:
            decided[key] = judge(library_choice(calls[0]))
    log = tuple(
        Decision(
            call.title,
            " or ".join(call.alternatives) if made.candidate == ATEN else made.candidate,
            made.candidate != ATEN,
            made.reason,
            made.saved_us,
            ATEN,
        )
        for key, made in decided.items()
        for call in equal[key]
    )
    chosen = {key: made.candidate for key, made in decided.items() if made.candidate != ATEN}
    taken = _take(schedule, chosen) if chosen else schedule
    return replace(taken, decisions=(*taken.decisions, *log)) if log else taken


def library_choice(call: Extern) -> Choice:
    """Return the choice between the libraries that have a product."""
    by_rule = partial(_by_rule, "the library that it names")
    candidates = (ATEN, *call.alternatives)
    return Choice("product", lambda: f"product {describe_call(call)}", call, candidates, by_rule)


def _by_rule(why: str) -> Decided:
    return Decided(ATEN, f"by rule: {why}")


def _take(schedule: Schedule, chosen: dict[str, str]) -> Schedule:
    steps: list[Step] = []
    packed = set[Buffer]()
    for step in schedule.steps:
        match step:
            case Extern() if step.alternatives:
                library = chosen.get(describe_call(step), "")
                weight = step.packed_for(library)
                if weight is not None and weight.buffer not in packed:
                    packed.add(weight.buffer)
                    steps.append(weight)
                steps.append(step.alternatives.get(library, step))
            case RowLoop():
                steps.append(replace(step, body=_take(step.schedule, chosen)))
            case _:
                steps.append(step)
    return replace(schedule, steps=tuple(steps))


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
    offered = [library for library in call.alternatives if call.packed_for(library)]
    return " ".join((call.title, *map(_describe_view, call.views), *offered))


def _describe_view(view: View) -> str:
    shape, strides = (",".join(map(_extent, e)) for e in (view.shape, view.strides))
    return f"{view.buffer.dtype}[{shape}]({strides})"


def _extent(value: Index) -> str:
    if value.is_constant:
        return str(value.const)
    return f"<={size_class(value.hint())}"
