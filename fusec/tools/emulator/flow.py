"""Find where lanes that diverge at a branch reconverge: the first block on all paths to the exit.

That is the branch's immediate postdominator: the immediate dominator in the reversed graph of
blocks. The order of blocks in the text does not tell: LLVM places blocks so that they fall through.
"""

from __future__ import annotations

from bisect import bisect_right

import networkx

from fusec.tools.emulator.parse import Instruction, Kernel, Symbol

NOWHERE = -1
"""Lanes that diverge here never reconverge: each path ends by itself."""


def find_meetings(kernel: Kernel) -> dict[int, int]:
    """Map each branch that may diverge to the instruction where lanes reconverge, or to NOWHERE."""
    count = len(kernel.instructions)
    targets = {at: _targets(kernel, one) for at, one in enumerate(kernel.instructions)}
    starts = sorted({0, *kernel.labels.values()} | {at + 1 for at, to in targets.items() if to})
    starts = [start for start in starts if start <= count]
    exit_ = len(starts)
    before: networkx.DiGraph[int] = networkx.DiGraph()
    before.add_node(exit_)
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else count
        following = _following(kernel, targets, starts, exit_, start, end)
        before.add_edges_from((block, number) for block in following)
    meeting = networkx.immediate_dominators(before, exit_)
    found = {}
    for at, to in targets.items():
        if to and (kernel.instructions[at].guard or len(to) > 1):
            block = meeting.get(bisect_right(starts, at) - 1, exit_)  # in an endless loop: nowhere
            found[at] = NOWHERE if block == exit_ else starts[block]
    return found


def _targets(kernel: Kernel, one: Instruction) -> tuple[int, ...]:
    """Return the instructions that an instruction may jump to."""
    if one.opcode[0] not in ("bra", "brx"):
        return ()
    name = one.operands[-1]
    if not isinstance(name, Symbol):
        return ()
    labels = kernel.tables[name.name] if one.opcode[0] == "brx" else (name.name,)
    return tuple(kernel.labels[label] for label in labels if label in kernel.labels)


def _following(
    kernel: Kernel,
    targets: dict[int, tuple[int, ...]],
    starts: list[int],
    exit_: int,
    start: int,
    end: int,
) -> set[int]:
    """Return the successors of a block."""
    if start >= end:
        return {exit_}
    last = kernel.instructions[end - 1]
    found = {bisect_right(starts, to) - 1 for to in targets[end - 1]}
    ends = last.opcode[0] in ("ret", "exit", "trap", "bra", "brx")
    if last.guard is not None or not ends:
        found.add(bisect_right(starts, end) - 1 if end < len(kernel.instructions) else exit_)
    return found or {exit_}
