"""Find where lanes that diverge at a branch reconverge: the first block on all paths to the exit.

That is the branch's immediate postdominator, found on the reversed graph of blocks (Cooper, Harvey,
Kennedy: A Simple, Fast Dominance Algorithm, 2001). The order of blocks in the text does not tell:
LLVM places blocks so that they fall through.
"""

from __future__ import annotations

from bisect import bisect_right

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
    following: list[set[int]] = []
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else count
        following.append(_following(kernel, targets, starts, exit_, start, end))
    meeting = _postdominators(following, exit_)
    found = {}
    for at, to in targets.items():
        if to and (kernel.instructions[at].guard or len(to) > 1):
            block = meeting[bisect_right(starts, at) - 1]
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


def _postdominators(following: list[set[int]], exit_: int) -> list[int]:
    """Return the immediate postdominator of each block; ``exit_`` is a virtual exit block."""
    before: list[list[int]] = [[] for _ in range(exit_ + 1)]
    for block, others in enumerate(following):
        for other in others:
            before[other].append(block)
    order = _postorder(before, exit_)
    rank = {block: number for number, block in enumerate(order)}
    meeting: dict[int, int] = {exit_: exit_}
    changed = True
    while changed:
        changed = False
        for block in reversed(order[:-1]):
            known = [other for other in following[block] if other in meeting]
            new = known[0]
            for other in known[1:]:
                new = _common(new, other, meeting, rank)
            if meeting.get(block) != new:
                meeting[block] = new
                changed = True
    return [meeting.get(block, exit_) for block in range(exit_)]


def _postorder(before: list[list[int]], root: int) -> list[int]:
    order, seen, waiting = [], {root}, [(root, iter(before[root]))]
    while waiting:
        block, rest = waiting[-1]
        following = next((other for other in rest if other not in seen), None)
        if following is None:
            order.append(block)
            waiting.pop()
        else:
            seen.add(following)
            waiting.append((following, iter(before[following])))
    return order


def _common(a: int, b: int, meeting: dict[int, int], rank: dict[int, int]) -> int:
    while a != b:
        while rank[a] < rank[b]:
            a = meeting[a]
        while rank[b] < rank[a]:
            b = meeting[b]
    return a
