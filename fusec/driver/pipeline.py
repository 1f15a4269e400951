"""``compile_to_source``: an FX graph through all stages (``fusec/driver/stages.py``) up to source
text.

FX graph -> Graph -> Schedule of kernels -> Programs -> sources, and the wrapper that calls them.
Building, binding and the cache are in ``compiler.py``: the cache's key is computed from the FX
graph, so a warm start runs none of this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import fx

from fusec.codegen.cpp import printer as cpp
from fusec.codegen.cpp.prelude import prelude_of
from fusec.codegen.host import wrapper
from fusec.codegen.host.runs import RunCode, print_run, run_codes
from fusec.codegen.parametrize import FUNCTIONS, Functions, one_each
from fusec.codegen.triton.form import by_pointers
from fusec.driver.context import CompileContext
from fusec.driver.invariance import check_invariance
from fusec.driver.launches import describe_launches
from fusec.driver.stages import CAPTURE, KERNEL, LOWER, MEMORY, PASSES
from fusec.driver.structures import verify
from fusec.driver.user_passes import stages_of
from fusec.ir import text
from fusec.ir.canonical import canonical
from fusec.ir.decision import Decision
from fusec.ir.expr import Buffer
from fusec.ir.extern import NodeOfBuffer
from fusec.ir.graph import (
    FlatKernel,
    ForeachKernel,
    Kernel,
    Schedule,
    all_launches,
    launched_externs,
)
from fusec.ir.host import HostProgram, overlaid
from fusec.ir.machine import Machine
from fusec.ir.names import function_name
from fusec.ir.program import Program
from fusec.passes.schedule.plan import Plan
from fusec.passes.stage import fold, fold_each
from fusec.passes.traffic import work_of


@dataclass(frozen=True, slots=True)
class Compiled:
    """A graph after codegen, before anything is built.

    Attributes:
        schedule: kernels and externs in order, with the decisions that led there.
        host: the statements of the graph's call.
        plans, programs: by kernel name.
        code: kernel name -> name of the first kernel of the same structure, whose code it runs.
        functions: the functions that these run; a parametrized one is run with several numbers.
        forms: the form of each function that is printed, by its name.
        pointers: the same without descriptors, of kernels that take tensor descriptors.
        sources: kernel name -> source text of its code.
        wrapper: the Python source of ``call``.
        statements: returns those of ``call``, as JSON, for who watches it.
        runs: the functions that launch several kernels.
        added: C++ that follows the kernels, in the same unit.
    """

    schedule: Schedule
    host: HostProgram
    plans: Mapping[str, Plan]
    programs: Mapping[str, Program]
    code: Mapping[str, str]
    functions: Functions
    forms: Mapping[str, Any]
    pointers: Mapping[str, Any]
    sources: Mapping[str, str]
    wrapper: str
    statements: Callable[[], str]
    runs: tuple[RunCode, ...] = ()
    added: str = ""

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions of all passes, with their reasons."""
        return self.schedule.decisions

    @property
    def distinct(self) -> dict[str, Program]:
        """The programs that are built: one of each structure."""
        return {name: p for name, p in self.programs.items() if self.code[name] == name}


def generate(
    schedule: Schedule, context: CompileContext, held: NodeOfBuffer | None = None
) -> Compiled:
    """Return plans, programs and sources of every kernel, and the wrapper.

    Args:
        held: the nodes whose values buffers hold; read under ``verify``.
    """
    launches = {launch.name: launch for launch in all_launches(schedule)}
    codegen = context.target.codegen
    flat = fold_each(codegen.flat, flat_kernels(launches.values(), context), context)
    planned = fold_each(LOWER[:1], flat, context)
    programs = fold_each(LOWER[1:], planned, context)
    programs = {name: _titled(programs[name], launch) for name, launch in launches.items()}
    first: dict[object, str] = {}
    code = {name: first.setdefault(canonical(p).form, name) for name, p in programs.items()}
    host = context.apply(MEMORY, schedule)
    verify(host)  # always: a wrapper that fails at run time has no fallback
    programs = _with_overlaid(programs, code, overlaid(host))
    distinct = {name: program for name, program in programs.items() if code[name] == name}
    functions = fold(FUNCTIONS, one_each(distinct), context)
    forms = fold_each(codegen.form, functions.functions, context)
    copied = {name: by_pointers(p) for name, p in distinct.items() if p.copies_tiles}
    pointers = fold_each(codegen.form, copied, context.quiet())
    printed = codegen.print_functions(functions, forms)
    watched = held if context.options.verify and held is not None else {}
    runs = run_codes(host, programs, code)
    return Compiled(
        schedule,
        host,
        {name: one.plan for name, one in planned.items()},
        programs,
        code,
        functions,
        forms,
        pointers,
        {name: printed[code[name]] for name in programs},
        wrapper.print_wrapper(host, programs, code),
        partial(wrapper.print_statements, host, programs, code, watched),
        tuple({run.name: run for run in runs.values()}.values()),
    )


def _with_overlaid(
    programs: Mapping[str, Program],
    code: Mapping[str, str],
    buffers: Mapping[str, frozenset[Buffer]],
) -> dict[str, Program]:
    """Return programs with the buffers that share memory with others in any launch."""
    places: dict[str, set[int]] = {}
    for name, shared in buffers.items():
        found = {k for k, b in enumerate(programs[name].buffers) if b in shared}
        places.setdefault(code[name], set()).update(found)
    return {
        name: replace(p, overlaid=tuple(p.buffers[k] for k in sorted(places.get(code[name], ()))))
        for name, p in programs.items()
    }


def flat_kernels(
    launches: Iterable[Kernel | ForeachKernel], context: CompileContext
) -> Mapping[str, FlatKernel]:
    """Return the flat kernels of some launches, by name."""
    kernels = {k.name: k for k in launches if isinstance(k, Kernel)}
    flat = fold_each(KERNEL, kernels, context)
    return {
        launch.name: replace(launch.template, name=launch.name)
        if isinstance(launch, ForeachKernel)
        else flat[launch.name]
        for launch in launches
    }


def _titled(program: Program, launch: Kernel | ForeachKernel) -> Program:
    """Return a program named by its operations, with its index notation on top."""
    named = replace(program, name=function_name(launch.name, launch.origin.ops))
    if isinstance(launch, ForeachKernel):
        notation = tuple(text.print_template(launch).splitlines())
        return replace(named, notation=notation, table=True)
    return replace(named, notation=tuple(text.print_kernel(launch).splitlines()))


def compile_to_source(gm: fx.GraphModule, context: CompileContext) -> Compiled:
    """Run an FX graph through all stages up to source text; the trace has its name.

    Raises:
        Unsupported: if all of it has to run as eager kernels.
        InvalidIR: under ``verify``, naming the stage that made something illegal.
        PassError: from a pass of the user.
        UsageError: under ``batch_invariant``, naming calls that add in an order that is not known.
    """
    trace = context.trace
    captured = context.observed(CAPTURE, gm)
    with trace.timed("capture"):
        graph, held = CAPTURE.run(gm, context)
    context.verify(graph, CAPTURE)
    captured(graph)
    with trace.timed("passes"):
        graph = fold(stages_of(context.options), graph, context)
        schedule = fold(PASSES, graph, context)
    with trace.timed("codegen"):
        compiled = generate(schedule, context, held)
    if context.options.batch_invariant:
        check_invariance(gm, compiled.schedule, compiled.programs)
    return compiled


def kernel_rows(compiled: Compiled) -> list[dict[str, Any]]:
    """Return the manifest's row of each kernel, for the loader."""
    rows = []
    for name, p in compiled.distinct.items():
        blocks = wrapper.print_blocks(p) if p.table else None
        rows.append((name, p.name, len(p.buffers), len(p.sizes), blocks, [_part(p)]))
    for run in compiled.runs:
        parts = [_part(compiled.programs[name]) for name in run.kernels]
        rows.append((run.name, run.name, len(run.buffers), run.numbers, None, parts))
    fields = ("name", "function", "buffers", "sizes", "blocks", "parts")
    return [dict(zip(fields, row, strict=True)) for row in rows]


def _part(program: Program) -> tuple[str, str]:
    """Return a kernel's function and the user's line, for error messages."""
    return program.name, program.source[-1] if program.source else "compiled graph"


def cpp_units(compiled: Compiled, width: int, most: int, least_text: int) -> list[str]:
    """Return C++ translation units that together have all kernels of a graph.

    Args:
        width: lanes of a vector.
        most: the most units; fewer where there is less to compile.
        least_text: characters of kernels that are worth a unit of their own.
    """
    parts = _parts(compiled, 1 if compiled.added else most, least_text)
    launching = [print_run(run, compiled.programs) for run in compiled.runs]
    launching += [compiled.added] * bool(compiled.added)
    if launching and len(parts) > 1:
        elsewhere = [name for part in parts[1:] for name in part]
        launching[:0] = [f"{cpp.CppPrinter(compiled.programs[k]).head()};" for k in elsewhere]
    return [
        prelude_of(width, (compiled.programs[name] for name in part))
        + "\n".join([*(compiled.sources[name] for name in part), *(launching if k == 0 else ())])
        for k, part in enumerate(parts)
    ]


def _parts(compiled: Compiled, most: int, least_text: int) -> list[list[str]]:
    """Return the kernels of each unit, in order; a function's kernels are in one unit."""
    families: dict[str, list[str]] = {}
    for name in compiled.distinct:
        families.setdefault(compiled.functions.calls[name].function, []).append(name)
    sizes = {f: sum(len(compiled.sources[k]) for k in names) for f, names in families.items()}
    count = max(1, min(most, sum(sizes.values()) // least_text))
    parts: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for family in sorted(sizes, key=lambda f: sizes[f], reverse=True):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[family]
        parts[lightest] += families[family]
    order = {name: k for k, name in enumerate(compiled.distinct)}
    return [sorted(part, key=lambda name: order[name]) for part in parts]


def manifest(compiled: Compiled, machine: Machine, passes: Mapping[str, int]) -> bytes:
    """Return the cache entry's description of its kernels, as JSON.

    Args:
        machine: models the cost of kernels.
        passes: of the user, as of ``Trace``.
    """
    launches = [*all_launches(compiled.schedule), *launched_externs(compiled.schedule)]
    work = {launch: asdict(work_of(launch, machine)) for launch in launches}
    described = {
        "kernels": kernel_rows(compiled),
        "summary": describe_launches(compiled.schedule, compiled.code, work),
        "taken": wrapper.taken(compiled.host),
        "passes": [name for name, rewritten in passes.items() if rewritten],
    }
    return json.dumps(described, sort_keys=True).encode()
