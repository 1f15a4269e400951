"""The events of a kernel's warps, in the order of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusec.tools.emulator import engine
from fusec.tools.emulator.decode import FIELDS
from fusec.tools.emulator.launch import Arguments, Code, launch
from fusec.tools.emulator.vocabulary import OPERATIONS


@dataclass(frozen=True, slots=True)
class Event:
    """An instruction that starts or ends asynchronous work, or synchronises with other warps.

    Attributes:
        block: of the grid, counted along its first axis first.
        operation: "bulk_load", "bulk_store", "cp_async", "wgmma", "wait_group", "mbarrier_arrive",
            "mbarrier_wait" (when it ends), "bar" (when it is reached) or "set_registers".
        line: of the PTX, from 1.
    """

    block: int
    warp: int
    operation: str
    line: int


def trace(
    code: Code, grid: Sequence[int], arguments: Arguments, seed: int, room: int = 1 << 18
) -> tuple[Event, ...]:
    """Run a kernel and return the first ``room`` events of its warps, in the order of this run.

    Two events have the same order in every run only if something orders them: try several seeds.

    Raises:
        EmulationError: for the kernel's first fault.
    """
    records = (engine.EventRecord * room)()
    count = launch(code, grid, arguments, seed, events=records).events
    program = code.program
    return tuple(
        Event(
            one.block,
            one.warp,
            OPERATIONS[program.instructions[FIELDS * one.instruction]],
            program.kernel.instructions[one.instruction].line,
        )
        for one in records[:count]
    )
