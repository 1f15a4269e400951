"""A GPT-2 block is cut where it must be: no kernel stands beside one that it could share.

For each two neighbours in the schedule (one reads what the other makes, or both read one tensor, or
one follows the other) the merge is tried again: it must be impossible, by a path through a third
step or by ``unify``, or dearer than the two apart; and ``fusec.explain`` must say so.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import fusec
from fusec.ir.expr import Buffer, loads
from fusec.ir.graph import Def, Extern, Kernel
from fusec.passes.dag import find_uses
from fusec.passes.fusion.cost import kernel_cost
from fusec.passes.fusion.fuse import DETOUR
from fusec.passes.fusion.unify import Rejection, unify
from fusec.tools.report.stages import Staged
from tests.planted import recode

transformers = pytest.importorskip("transformers")
WIDTH = 256

Step = Kernel | Extern


class Block(nn.Module):
    """One block of GPT-2 without dropout: its first output."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block  # after the check above

        config = transformers.GPT2Config(
            n_layer=1, n_head=4, n_embd=WIDTH, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            attn_implementation=attention,
        )  # fmt: skip
        self.block = GPT2Block(config, layer_idx=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.block(x)
        return out[0] if isinstance(out, tuple) else out


@functools.cache
def staged(attention: str, target: str, *, fusion: bool = True) -> Staged:
    """Return the block's compile with its kernels as fusion leaves them: no loop is split after."""
    x = torch.empty(2, 64, WIDTH)
    with pytest.MonkeyPatch.context() as patch:
        recode(patch, target, split=lambda kernel, machine: None)
        patch.setenv("FUSEC_FUSION", str(int(fusion)))
        return fusec.kernels(Block(attention).eval(), x, target=target)[0].staged


def reads(step: Step) -> set[Buffer]:
    if isinstance(step, Extern):
        return {v.buffer for v in step.views}
    return {n.buffer.base for n in loads(s.expr for s in step.stores)}


def writes(step: Step) -> set[Buffer]:
    if isinstance(step, Extern):
        return {b for b in step.outputs if b is not None}
    return {s.buffer.base for s in step.stores}


def neighbours(steps: tuple[Step, ...]) -> Iterator[tuple[Kernel, Kernel]]:
    for (i, a), (j, b) in itertools.combinations(enumerate(steps), 2):
        if isinstance(a, Kernel) and isinstance(b, Kernel):
            near = writes(a) & reads(b) or reads(a) & reads(b) or j == i + 1
            if near:
                yield a, b


def has_detour(steps: tuple[Step, ...], a: Kernel, b: Kernel) -> bool:
    """Return True if a third step needs a's result, or what is made of it, and makes b's input."""
    waiting = [s for s in steps if s not in (a, b) and writes(a) & reads(s)]
    seen: list[Step] = []
    while waiting:
        step = waiting.pop()
        if step is b:
            return True
        if step not in seen:
            seen.append(step)
            waiting += [s for s in steps if s is not a and writes(step) & reads(s)]
    return False


def why_apart(one: Staged, a: Kernel, b: Kernel) -> str | None:
    """Return why two kernels cannot or should not be one, or None if they should."""
    schedule, target = one.compiled.schedule, one.target
    if has_detour(schedule.steps, a, b) or has_detour(schedule.steps, b, a):
        return DETOUR
    inner = {*a.defs, *b.defs}
    nodes = schedule.graph.nodes
    defs = tuple(n for n in nodes if isinstance(n, Def) and n.buffer in inner)
    stored = writes(a) | writes(b)
    others = set().union(*(reads(s) for s in schedule.steps if s not in (a, b)))
    needed = stored & (others | find_uses(schedule.graph).live_out)
    try:
        merged = unify(defs, frozenset(needed))
    except Rejection as rejection:
        return rejection.reason
    if not target.accepts(merged):
        return "no schedule of the target runs both as one kernel"
    machine = target.machine
    saved = (
        kernel_cost(a, machine).us + kernel_cost(b, machine).us - kernel_cost(merged, machine).us
    )
    return "modelled slower than two kernels" if saved <= 0 else None


def standing_apart(one: Staged) -> dict[tuple[str, str], str | None]:
    steps = one.compiled.schedule.steps
    return {(a.name, b.name): why_apart(one, a, b) for a, b in neighbours(steps)}


@pytest.mark.sampled(7)  # a diagonal
@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_kernel_of_the_forward_stands_beside_one_it_could_share(
    attention: str, target: str
) -> None:
    found = standing_apart(staged(attention, target))
    assert found, "a block of one kernel: what is tested here?"
    assert [pair for pair, reason in found.items() if reason is None] == []


@pytest.mark.sampled(7)  # a diagonal
@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_explanation_says_why_a_kernel_and_its_reader_are_two(
    attention: str, target: str
) -> None:
    x = torch.empty(2, 64, WIDTH)
    (graph,) = fusec.explain(Block(attention).eval(), x, target=target).graphs
    rejected = {
        frozenset(part for side in (d.a, d.b) for part in side.split("+")): d.reason
        for d in graph.decisions
        if not d.taken
    }
    one = staged(attention, target)
    for a, b in neighbours(one.compiled.schedule.steps):
        if not writes(a) & reads(b):
            continue
        names = {buffer.name for buffer in writes(a) | writes(b)}
        said = [reason for parts, reason in rejected.items() if names <= parts]
        assert said and all(said), f"nothing is said of {a.name} and {b.name}: {names}"


def test_without_fusion_there_would_be_kernels_to_share() -> None:
    found = standing_apart(staged("eager", "cpu", fusion=False))
    assert None in found.values()
