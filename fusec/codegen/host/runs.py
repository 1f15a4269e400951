"""Runs: consecutive kernels, launched by one native call.

A call from Python to a kernel costs some 2 us (its tensors' addresses, ctypes, the lock), as much
as a kernel of a few thousand elements takes. The host program has the runs (``NativeRun``), since
all buffers of a run are allocated before its first kernel and freed after its last.

Worked example: k0 computes t from x, and k1 computes y from t and a size n::

    extern "C" void k0_to_k1(any b0, any b1, any b2, long long n0, int *status) {
      k0(b0, b1, status);
      if (*status) { return; }
      k1(b1, b2, n0, status);
      if (*status) { *status += 4; return; }
    }
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusec.ir.expr import Buffer
from fusec.ir.host import HostProgram, NativeRun
from fusec.ir.index import Size
from fusec.ir.program import Program


@dataclass(frozen=True, slots=True)
class RunCode:
    """The function of a run.

    Attributes:
        name: name of the first run with equal ``kernels`` and ``places``.
        kernels: names of the programs whose code it calls, in order.
        buffers, sizes: its parameters, each once.
        places: for each kernel, positions of its arguments in ``buffers`` and in ``sizes``.
    """

    name: str
    kernels: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    sizes: tuple[Size, ...]
    places: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def run_codes(
    program: HostProgram, programs: Mapping[str, Program], code: Mapping[str, str]
) -> dict[NativeRun, RunCode]:
    """Return run -> its function; runs that call the same code on the same pattern share one.

    Args:
        programs: kernel name -> program.
        code: kernel name -> name of the kernel whose code it runs.
    """
    functions: dict[object, str] = {}
    found = {}
    for run in program.runs:
        names = [kernel.name for kernel in run.kernels]
        own = [programs[name] for name in names]
        buffers = tuple(dict.fromkeys(b for p in own for b in p.buffers))
        sizes = tuple(dict.fromkeys(s for p in own for s in p.sizes))
        places = tuple(
            (tuple(map(buffers.index, p.buffers)), tuple(map(sizes.index, p.sizes))) for p in own
        )
        kernels = tuple(code[name] for name in names)
        name = f"{names[0]}_to_{names[-1]}"
        name = functions.setdefault((kernels, places), name)
        found[run] = RunCode(name, kernels, buffers, sizes, places)
    return found


def print_run(run: RunCode, programs: Mapping[str, Program]) -> str:
    """Return the C++ function that calls a run's kernels in order, until one fails.

    Its status is the failed kernel's, plus four times that kernel's position in the run.
    """
    buffers = [f"any b{k}" for k in range(len(run.buffers))]
    sizes = [f"long long n{k}" for k in range(len(run.sizes))]
    parameters = ", ".join([*buffers, *sizes, "int *status"])
    lines = [f'extern "C" void {run.name}({parameters}) {{']
    for position, (name, places) in enumerate(zip(run.kernels, run.places, strict=True)):
        given = [f"b{k}" for k in places[0]] + [f"n{k}" for k in places[1]]
        lines.append(f"  {programs[name].name}({', '.join([*given, 'status'])});")
        moved = f"*status += {4 * position}; " if position else ""
        lines.append(f"  if (*status) {{ {moved}return; }}")
    return "\n".join([*lines, "}", ""])
