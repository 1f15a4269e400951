"""Runs: consecutive kernels, or all steps of a loop, launched by one native call.

A call from Python to a kernel costs some 2 us (its tensors' addresses, ctypes, the lock), as much
as a kernel of a few thousand elements takes. The host program has the runs (``NativeRun``, and
loops whose bodies are kernels alone), since all buffers of a run are allocated before its first
kernel and freed after its last.

Worked example: k0 computes t from x, and k1 computes y from t and a size n::

    extern "C" void k0_to_k1(any b0, any b1, any b2, long long n0, int *status) {
      k0(b0, b1, status);
      if (*status) { return; }
      k1(b1, b2, n0, status);
      if (*status) { *status += 4; return; }
    }

A loop's function takes how many iterations there are, and the bytes from one chunk of rows to the
next. k0 computes ``h = tanh(x[t] + h)``, which goes into b2, the final buffer, and b3 in turn::

    extern "C" void scan(any b0, any b1, any b2, any b3, long long rounds, long long s0,
                         int *status) {
      any f2 = b2;
      for (; rounds > 0; --rounds) {
        b2 = rounds % 2 ? f2 : b3;
        k0(b0, b1, b2, status);
        if (*status) { return; }
        b0.address = (char *)b0.address + s0;
        b1 = b2;
      }
    }

A loop with a condition returns now and then, unfinished, so that Python looks for Ctrl-C. Its state
is in the final buffers then, from which it goes on when it is called again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusec.ir.expr import Buffer
from fusec.ir.graph import RowLoop
from fusec.ir.host import HostLoop, HostProgram, HostStatement, NativeRun
from fusec.ir.index import Index, Size, index
from fusec.ir.program import Program


@dataclass(frozen=True, slots=True)
class RunCode:
    """The function of a run.

    Attributes:
        name: name of the first run with equal ``kernels`` and ``places``.
        kernels: names of the programs whose code it calls, in order.
        buffers, sizes: its parameters, each once; of a loop, those of its body.
        places: for each kernel, positions of its arguments in ``buffers`` and in ``sizes``.
        loop: how a loop moves through the buffers; None for a run of consecutive kernels.
    """

    name: str
    kernels: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    sizes: tuple[Size, ...]
    places: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    loop: LoopPlaces | None = None

    @property
    def numbers(self) -> int:
        """How many numbers it takes."""
        return len(self.sizes) + (0 if self.loop is None else len(self.loop.numbers))


@dataclass(frozen=True, slots=True)
class LoopPlaces:
    """How a loop moves through the buffers of its function, by their positions.

    Attributes:
        moving: buffers of which each iteration takes some rows.
        carried: for each carried value the one that is read and, for the final one and the other,
            the one that is written.
        while_true: as of the loop.
    """

    moving: tuple[int, ...]
    carried: tuple[tuple[int, int, int], ...]
    while_true: bool

    @property
    def numbers(self) -> tuple[str, ...]:
        """The function's parameters that are numbers, besides sizes."""
        if self.while_true:
            return tuple(f"s{read}" for read, _, _ in self.carried)
        return ("rounds", *(f"s{k}" for k in self.moving))


def run_codes(
    program: HostProgram, programs: Mapping[str, Program], code: Mapping[str, str]
) -> dict[HostStatement, RunCode]:
    """Return run -> its function; runs that call the same code on the same pattern share one.

    Args:
        programs: kernel name -> program.
        code: kernel name -> name of the kernel whose code it runs.
    """
    functions: dict[object, str] = {}
    found: dict[HostStatement, RunCode] = {}
    for run in program.statements:
        match run:
            case NativeRun(kernels):
                name, loop = f"{kernels[0].name}_to_{kernels[-1].name}", None
            case HostLoop(native=True):
                name, kernels, loop = run.loop.name, run.body.kernels, run.loop
            case _:
                continue
        own = [programs[kernel.name] for kernel in kernels]
        states = () if loop is None else tuple(b for pair in loop.states for b in pair)
        others = () if loop is None else tuple(one.other for one in loop.carried)
        buffers = tuple(dict.fromkeys((*(b for p in own for b in p.buffers), *states, *others)))
        sizes = tuple(dict.fromkeys(s for p in own for s in p.sizes))
        places = tuple(
            (tuple(map(buffers.index, p.buffers)), tuple(map(sizes.index, p.sizes))) for p in own
        )
        through = None if loop is None else _through(loop, buffers)
        called = tuple(code[kernel.name] for kernel in kernels)
        name = functions.setdefault((called, places, through), name)
        found[run] = RunCode(name, called, buffers, sizes, places, through)
    return found


def _through(loop: RowLoop, buffers: tuple[Buffer, ...]) -> LoopPlaces:
    carried = zip(loop.states, loop.carried, strict=True)
    return LoopPlaces(
        tuple(buffers.index(b) for b in loop.moving if b in buffers),
        tuple(
            (buffers.index(read), buffers.index(made), buffers.index(one.other))
            for (read, made), one in carried
        ),
        loop.while_true,
    )


def loop_numbers(loop: RowLoop, run: RunCode) -> list[Index]:
    """Return the numbers that a loop's function takes.

    Those of a loop with a condition are the bytes of what it carries.
    """
    if loop.while_true:
        held = ((one.final.flat().shape[0], one.final.dtype.itemsize) for one in loop.carried)
        return [*map(index, run.sizes), *(elements * each for elements, each in held)]
    steps = [
        loop.outside[moving].strides[0] * (loop.chunk * moving.dtype.itemsize)
        for moving in loop.moving
        if moving in run.buffers
    ]
    return [*map(index, run.sizes), (loop.rows + (loop.chunk - 1)) // loop.chunk, *steps]


def print_run(run: RunCode, programs: Mapping[str, Program]) -> str:
    """Return the C++ function that calls a run's kernels in order, until one fails.

    Its status is the failed kernel's, plus four times that kernel's position in the run; of a loop
    that is unfinished, 4.
    """
    buffers = [f"any b{k}" for k in range(len(run.buffers))]
    sizes = [f"long long n{k}" for k in range(len(run.sizes))]
    calls: list[str] = []
    for position, (name, places) in enumerate(zip(run.kernels, run.places, strict=True)):
        given = [f"b{k}" for k in places[0]] + [f"n{k}" for k in places[1]]
        calls.append(f"{programs[name].name}({', '.join([*given, 'status'])});")
        moved = f"*status += {4 * position}; " if position else ""
        calls.append(f"if (*status) {{ {moved}return; }}")
    if run.loop is not None:
        sizes += [f"long long {number}" for number in run.loop.numbers]
        calls = _looped(run.loop, calls)
    parameters = ", ".join([*buffers, *sizes, "int *status"])
    head = f'extern "C" void {run.name}({parameters}) {{'
    return "\n".join([head, *(f"  {line}" for line in calls), "}", ""])


def _looped(loop: LoopPlaces, calls: list[str]) -> list[str]:
    """Return the lines of a loop around calls: buffers move on, and carried ones take turns.

    The last iteration writes the final buffer of what is carried.
    """
    lines = [f"any f{written} = b{written};" for _, written, _ in loop.carried]
    if loop.while_true:
        goes_on = " ".join(f"b{read} = b{written};" for read, written, _ in loop.carried)
        lines += [f"if (*status) {{ {goes_on} }}", "*status = 0;"]
        lines.append("const long until = fusec_time(nullptr) + 1;")
        lines.append(f"while (*(const bool *)b{loop.carried[0][0]}.address) {{")
    else:
        lines.append("for (; rounds > 0; --rounds) {")
    for read, written, other in loop.carried:
        is_final = f"b{read}.address != f{written}.address" if loop.while_true else "rounds % 2"
        lines.append(f"  b{written} = {is_final} ? f{written} : b{other};")
    lines += [f"  {call}" for call in calls]
    lines += [f"  b{k}.address = (char *)b{k}.address + s{k};" for k in loop.moving]
    lines += [f"  b{read} = b{written};" for read, written, _ in loop.carried]
    if loop.while_true:
        lines.append("  if (fusec_time(nullptr) > until) { *status = 4; break; }")
    lines.append("}")
    for read, written, _ in loop.carried if loop.while_true else ():
        copied = f"__builtin_memcpy(f{written}.address, b{read}.address, s{read});"
        lines.append(f"if (b{read}.address != f{written}.address) {copied}")
    return lines
