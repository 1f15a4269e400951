"""What makes the difference for a reduced excerpt: which options, which merge, which stage.

Options come first: each is one run of the file. If the fault is gone without fusion, a bisection
over ``merge_limit`` finds the merge that introduces it. If results are wrong, the interpreters find
the first stage whose output differs in value from its input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fusec.driver.backend import compile_with, context_of
from fusec.driver.compiler import context_for, target_for
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import compile_to_source
from fusec.driver.trace import Trace
from fusec.errors import FusecError
from fusec.frontend.capture import main_device
from fusec.options import Options
from fusec.tools.bisect.excerpt import Excerpt, TensorType, alive, static
from fusec.tools.bisect.interpret import differs, record_steps
from fusec.tools.bisect.source import WRONG, Fault, Finding, as_file, functions, plain_name
from fusec.tools.bisect.trial import AGREES, Died

if TYPE_CHECKING:
    from fusec.tools.bisect.hunt import Hunt


WITHOUT_PASSES = "passes=''"
"""The option that helps where the user's passes are at fault."""


# -- which options, merge and stage ----------------------------------------------------------------


_MOST_MERGES = 1024
_EXACT = 1e-3
_ROUNDED = 2e-2
"""Relative tolerance of two stages' results; ``_ROUNDED`` where there are 16-bit values."""
BEHIND = "print, build or launch"
"""The stage that is reported where all interpreters agree."""
_FEW = 4
"""Operations that a report names."""

Gone = Callable[[Mapping[str, Any]], bool]
"""Whether a fault is gone under some options."""


def answer(
    hunt: Hunt, finding: Finding, excerpt: Excerpt, fault: Fault, helps: tuple[str, ...] | None
) -> Finding:
    """Complete a finding with the options, the merge and the stage that matter.

    Args:
        helps: the options that help the user's program, where they were tried on that.
    """
    gone = partial(_is_gone, hunt, excerpt, fault)
    helps = helping(gone, excerpt, fault.options) if helps is None else helps
    limit = guilty_merge(gone) if "fusion=False" in helps else 0
    options = {**fault.options, "merge_limit": limit}
    merge = _asked(hunt, last_merge, excerpt, options) if limit else ""
    stage = finding.stage
    if fault.kind == WRONG and not (excerpt.trains or fault.saved):
        stage = _asked(hunt, first_wrong_stage, excerpt, fault.options)
    found = replace(finding, helps=helps, merge=merge, stage=stage)
    if len(excerpt.lines) <= _FEW:
        names = (plain_name(line.target) for line in excerpt.lines)
        op = ", ".join(name for name in names if name != "getitem")
        found = replace(found, op=op, line=excerpt.lines[-1].where or found.line)
    return replace(found, source=as_file(excerpt, replace(fault, title=found.title)))


def _is_gone(hunt: Hunt, excerpt: Excerpt, fault: Fault, more: Mapping[str, Any]) -> bool:
    """Return True if an excerpt's fault is gone under more options."""
    text = as_file(excerpt, replace(fault, options={**fault.options, **more}))
    return hunt.attempt(text).kind == AGREES


def helping(gone: Gone, excerpt: Excerpt, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the options under which the fault is gone, as "fusion=False"."""
    return tuple(f"{n}={v!r}" for n, v in candidates(excerpt, given).items() if gone({n: v}))


def candidates(excerpt: Excerpt, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that may make a difference, the narrowest in effect first."""
    kinds = excerpt.types.values()
    on_gpu = any(isinstance(kind, TensorType) and kind.device != "cpu" for kind in kinds)
    convolves = any("conv" in line.target for line in excerpt.lines)
    asked: dict[str, Any] = {"channels_last": False} if convolves and not on_gpu else {}
    asked |= {"race": "library", "autotune": False, "fusion": False}
    asked |= {"descriptors": "never", "roles": "never"} if on_gpu else {}
    return {name: value for name, value in asked.items() if given.get(name) != value}


# -- which merge -----------------------------------------------------------------------------------


def guilty_merge(gone: Gone) -> int:
    """Bisect over ``merge_limit``: return the fewest merges with the fault, or 0 if not found."""

    def sound(limit: int) -> bool:
        return gone({"merge_limit": limit})

    if not sound(0):
        return 0
    low, high = 0, 1
    while sound(high):
        low, high = high, 2 * high
        if high > _MOST_MERGES:
            return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sound(middle) else (low, middle)
    return high


def last_merge(excerpt: Excerpt, options: Mapping[str, Any]) -> str:
    """Return the last merge that is taken under some options, as "a with b"."""
    chosen = Options.from_compile(None, options)
    taken: list[str] = []

    def compile_one(gm: fx.GraphModule, _: Any, *, name: str) -> Callable[..., Any]:
        context = context_for(gm, target_for(main_device(gm), chosen), chosen, Trace(name))
        decisions = compile_to_source(gm, context).decisions
        taken.extend(f"{d.a} with {d.b}" for d in decisions if d.taken and d.is_merge)
        return gm

    made = functions(excerpt)
    args = made["inputs"]()
    context = context_of(args, chosen)
    torch.compile(
        made["f"],
        backend=lambda gm, given: compile_with(gm, given, compile_one, context),  # type: ignore
        dynamic=excerpt.dynamic,
    )(*args)
    return taken[-1] if taken else ""


# -- which stage -----------------------------------------------------------------------------------


def first_wrong_stage(excerpt: Excerpt, options: Mapping[str, Any]) -> str:
    """Return the first stage whose output differs in value from its input, by interpreters.

    ``BEHIND`` if all stages agree. Only for excerpts without a backward.
    """
    excerpt = alive(static(excerpt))
    made = functions(excerpt)
    args = made["inputs"]()
    chosen = Options.from_compile(None, options)
    context = CompileContext(context_of(args, chosen).target, chosen, Trace("joint"))
    kinds = excerpt.types.values()
    rounded = any(isinstance(kind, TensorType) and kind.dtype.itemsize < 4 for kind in kinds)
    for step in record_steps(made["f"], args, context):
        if differs(step, step.after, _ROUNDED if rounded else _EXACT) is not None:
            return step.stage
    return BEHIND


def _asked(hunt: Hunt, work: Callable[..., str], *args: Any) -> str:
    """Call a function in a separate process; return its result, or "" if it fails."""
    try:
        said: str = hunt.apart(work, *args)
        return said
    except (Died, FusecError, RuntimeError):
        return ""
