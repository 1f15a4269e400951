"""The peak memory of a graph, by the plan of its call."""

from __future__ import annotations

from fusec.ir.expr import Buffer
from fusec.ir.extern import Alias
from fusec.ir.graph import Extern
from fusec.ir.host import Allocation, FreeBuffers, HostLoop, HostProgram
from fusec.ir.memory import bytes_of


def peak_bytes(program: HostProgram) -> int:
    """Return the peak bytes of the buffers that a program computes, at the hints of sizes.

    Inputs and constants are not counted, nor the workspace of eager kernels, which is unknown.
    """
    given = set(program.graph.inputs)
    held: dict[Buffer, int] = {}
    most = 0
    for statement in program.statements:
        inside = 0
        match statement:
            case Allocation(buffer, over):
                held.pop(over, None)  # type: ignore[arg-type]
                held[buffer] = bytes_of(buffer)
            case FreeBuffers(buffers):
                for buffer in buffers:
                    held.pop(buffer, None)
            case HostLoop():
                inside = peak_bytes(statement.body)
            case Extern() if not isinstance(statement.effect, Alias):
                held.update((b, bytes_of(b)) for b in statement.writes if b not in given)
        most = max(most, sum(held.values()) + inside)
    return most
