"""Check a model's kernels: the facts of each, and the rules that it breaks, as text and JSON.

The JSON form, schema 1, is stable: fields are added, never renamed or removed::

    {"schema": 1, "target": "sm_90",
     "graphs": [{"name", "eager_kernels", "bytes_moved", "bytes_floor"}],
     "kernels": [{
        "graph", "name", "code", "kind", "problem", "programs", "bytes", "floor_us",
        "registers", "spill_bytes", "shared_bytes", "blocks", "occupancy",
        "widest", "narrowest", "wide_share", "left_out": [{"buffer", "line", "width", "reason"}],
        "wgmma", "mma", "tcgen05", "tma", "copies", "barriers", "convert_layouts",
        "instructions", "instructions_per_byte", "expected_us", "expected_share", "cause"}],
     "faults": [{"graph", "kernel", "rule", "seen", "advice"}],
     "warnings": [the same]}

Facts are null where a kernel does not build; ``instructions_per_byte`` also where it loops, the
last three where the model of ``kernel_time.py`` does not cover the GPU or the kernel.
``code`` names the kernel whose code this one runs, itself or an equal one.

Worked example::

    >>> print(check_kernels([take_through(one, find_target("sm_90"), options) for one in seen]))
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from fusec.driver.pipeline import Compiled
from fusec.errors import BuildError, UsageError
from fusec.ir.expr import Dot, Reduce
from fusec.ir.graph import ForeachKernel, Kernel, all_launches
from fusec.ir.index import product
from fusec.ir.program import Carry, Let, Program, Update, statements
from fusec.passes.fusion.cost import kernel_products
from fusec.passes.fusion.footprint import kernel_traffic
from fusec.tools.assembly import Assembly
from fusec.tools.emulator.decode import unordered
from fusec.tools.emulator.parse import parse
from fusec.tools.report.explanation import GraphReport, report_graph
from fusec.tools.report.kernel_time import (
    MODELLED,
    SMALL,
    Expectation,
    Work,
    added_bytes,
    executed,
    expect,
    section_runs,
)
from fusec.tools.report.role_time import expect_roles, multiplied_by_tiles
from fusec.tools.report.stages import Staged, assemble
from fusec.tools.report.static_rules import (
    SHORT_US,
    Access,
    CheckedKernel,
    Finding,
    find_faults,
    match_accesses,
)
from fusec.tools.report.traffic import step_bytes
from fusec.tools.static_checks import PROCESSORS, StaticReport, inspect_kernel
from fusec.tools.terminal import Report, alike, format_bytes, format_table, indented

_FACTS = (
    "registers", "spill_bytes", "shared_bytes", "blocks", "occupancy", "widest", "narrowest",
    "wide_share", "wgmma", "mma", "tcgen05", "tma", "copies", "barriers", "convert_layouts",
    "instructions",
)  # fmt: skip
"""Fields of ``StaticReport`` in the JSON form."""


@dataclass(frozen=True, slots=True)
class StaticChecks(Report):
    """The report of ``fusec check --static``, and the seconds that it took."""

    target: str
    graphs: tuple[GraphReport, ...]
    kernels: tuple[CheckedKernel, ...]
    seconds: float = 0.0

    @property
    def faults(self) -> tuple[Finding, ...]:
        return find_faults(self.kernels)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return find_faults(self.kernels, fault=False)

    @property
    def expected(self) -> dict[tuple[str, str], Expectation | None]:
        """The modelled time of each kernel, by its graph and its name."""
        return {(kernel.graph, kernel.name): kernel.expected for kernel in self.kernels}

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "graphs": [
                {
                    "name": graph.name,
                    "eager_kernels": len(graph.externs),
                    "bytes_moved": graph.bytes_moved,
                    "bytes_floor": graph.bytes_floor,
                }
                for graph in self.graphs
            ],
            "kernels": [_kernel_dict(kernel) for kernel in self.kernels],
            "faults": [asdict(finding) for finding in self.faults],
            "warnings": [asdict(finding) for finding in self.warnings],
        }

    def text(self, *, whole: bool = False) -> str:
        return "\n".join(_lines(self))


# -- facts ---------------------------------------------------------------------------------------


def check_kernels(
    staged: Sequence[Staged], say: Callable[[str], None] = lambda _: None
) -> StaticChecks:
    """Compile the kernels of some graphs, all for one target, and report on them.

    Args:
        say: gets a line of progress for each graph.
    Raises:
        UsageError: for a target without static checks.
        Exception: the error that stopped the compile of a graph.
    """
    start = time.perf_counter()
    kernels: list[CheckedKernel] = []
    graphs = []
    for one in staged:
        if one.target.name not in PROCESSORS:
            raise UsageError.unknown("target of static checks", one.target.name, PROCESSORS)
        graphs.append(report_graph(one))
        if one.compiled is not None and one.compiled.distinct:
            count = len(one.compiled.functions.functions)
            say(f"graph {one.name}: machine code of {count} kernel{'s' * (count > 1)}")
            kernels += _checked_kernels(one, one.compiled)
    target = staged[0].target.name if staged else ""
    return StaticChecks(target, tuple(graphs), tuple(kernels), time.perf_counter() - start)


def check_known(staged: Sequence[Staged], say: Callable[[str], None]) -> StaticChecks | None:
    """Report on the graphs whose targets have static checks; None if there are none."""
    known = [one for one in staged if one.target.name in PROCESSORS]
    return check_kernels(known, say) if known else None


def _checked_kernels(staged: Staged, compiled: Compiled) -> list[CheckedKernel]:
    """Compile and inspect each function once, several at a time: ptxas is a process."""
    names = list(compiled.functions.functions)
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="fusec-check") as pool:
        inspected = pool.map(partial(_inspected, staged, compiled), names)
        facts = dict(zip(names, inspected, strict=True))
    found = []
    for step in all_launches(compiled.schedule):
        code = compiled.code[step.name]
        made, static, accesses, problem = facts[compiled.functions.calls[code].function]
        moved = step_bytes(step, staged.target.machine)
        found.append(
            CheckedKernel(
                graph=staged.name,
                name=step.name,
                kind=kind_of(compiled.programs[code]),
                code=code,
                static=static,
                problem=problem,
                accesses=accesses,
                programs=product(a.extent for a in compiled.programs[step.name].grid).hint(),
                bytes=moved,
                floor_us=moved / staged.target.machine.bytes_per_us,
                expected=_expected(staged, step, static),
                assembly=made,
            )
        )
    return found


def _expected(
    staged: Staged, step: Kernel | ForeachKernel, static: StaticReport | None
) -> Expectation | None:
    """Return the modelled time of a kernel; None for kernels of tables, and GPUs it lacks."""
    machine, compiled = staged.target.machine, staged.compiled
    if static is None or staged.target.name not in MODELLED or compiled is None:
        return None
    program = compiled.programs[step.name]
    if program.table:
        return None
    (kernel,) = step.kernels
    work = _work_of(staged, kernel, program, static)
    if work is None:
        return None
    if program.roles:
        return expect_roles(program, static, work, machine)
    return expect(static, work, machine)


def _work_of(staged: Staged, step: Kernel, program: Program, static: StaticReport) -> Work | None:
    """Return the work of a kernel's launch, at the hints of sizes; None if it cannot be told."""
    traffic, moved = kernel_traffic(step).values(), step_bytes(step, staged.target.machine)
    again = moved - sum(read + written for read, written in traffic)
    programs = product(a.extent for a in program.grid).hint()
    multiplied = kernel_products(step, staged.target.machine)
    runs = section_runs(program, static, moved / max(1, programs), multiplied / max(1, programs))
    if runs is None:
        return None
    if multiplied:  # a causal mask leaves tiles out
        once = executed(static, runs)
        done = multiplied_by_tiles(program) if program.roles else programs * once
        multiplied = min(multiplied, done)
    small = sum(size for size, _ in traffic if size <= SMALL)
    added = programs * added_bytes(program) if program.added else 0.0
    return Work(max(1, programs), runs, moved, again, small, multiplied, added)


def _inspected(
    staged: Staged, compiled: Compiled, name: str
) -> tuple[Assembly | None, StaticReport | None, tuple[Access, ...], str]:
    """Return a function's code, facts and accesses, and "", or none and why it does not build."""
    try:
        made = assemble(staged, name)
        static = inspect_kernel(made)
        if static.dependent:
            ptx = made.text("ptx")
            lines, found = ptx.splitlines(), unordered(parse(ptx))
            static = replace(static, unordered=tuple(lines[i.line - 1].strip() for i in found))
    except BuildError as error:
        return None, None, (), str(error)
    program, source = compiled.functions.functions[name], compiled.sources[name]
    return made, static, match_accesses(program, source, static.accesses), ""


def kind_of(program: Program) -> str:
    """Return "contraction" for a program with matrix products, "reduction", or "pointwise"."""
    body = tuple(statements(program.body))
    values = [s.value for s in body if isinstance(s, Let | Update)]
    if any(isinstance(value, Dot) for value in values):
        return "contraction"
    folds = any(isinstance(value, Reduce) for value in values)
    return "reduction" if folds or any(isinstance(s, Carry) for s in body) else "pointwise"


# -- JSON ----------------------------------------------------------------------------------------


def _kernel_dict(kernel: CheckedKernel) -> dict[str, Any]:
    names = ("graph", "name", "code", "kind", "problem", "programs", "bytes", "floor_us")
    facts = {
        name: None if kernel.static is None else getattr(kernel.static, name) for name in _FACTS
    }
    left_out = [
        {
            "buffer": access.demand.buffer,
            "line": access.line,
            "width": access.narrowest,
            "reason": access.demand.left_out,
        }
        for access in kernel.left_out
    ]
    rate, model = kernel.instructions_per_byte, kernel.expected
    return {
        **{name: getattr(kernel, name) for name in names},
        **facts,
        "left_out": left_out,
        "instructions_per_byte": rate,
        "expected_us": None if model is None else model.us,
        "expected_share": None if model is None else model.share,
        "cause": None if model is None else model.cause,
    }


# -- text ----------------------------------------------------------------------------------------

_COLUMNS: dict[str, Callable[[CheckedKernel, StaticReport], object]] = {
    "regs": lambda kernel, static: static.registers,
    "spill": lambda kernel, static: static.spill_bytes,
    "shared": lambda kernel, static: static.shared_bytes,
    "blocks": lambda kernel, static: static.blocks,
    "occ": lambda kernel, static: f"{static.occupancy:.0%}",
    "widths": lambda kernel, static: "-".join(
        map(str, sorted({static.narrowest, static.widest} if static.accesses else ()))
    ),
    "16 B": lambda kernel, static: f"{static.wide_share:.0%}" if static.accesses else "",
    "barriers": lambda kernel, static: static.barriers,
    "conv": lambda kernel, static: static.convert_layouts,
    "inst": lambda kernel, static: static.instructions,
    "inst/B": lambda kernel, static: (
        "loop" if kernel.instructions_per_byte is None else f"{kernel.instructions_per_byte:.1f}"
    ),
}
"""Facts of the code in the table: title -> its text."""
_HEADER = ("", "kind", *_COLUMNS, "bytes", "floor")


def _lines(report: StaticChecks) -> Iterator[str]:
    if not report.graphs:
        yield "nothing was compiled: `fusec explain` says why"
        return
    yield f"target {report.target}"
    for graph in report.graphs:
        yield ""
        yield from _graph_lines(graph, [k for k in report.kernels if k.graph == graph.name])
    for title, findings in (("faults", report.faults), ("warnings", report.warnings)):
        yield from ("", f"{title}: {len(findings) or 'none'}")
        for finding in findings:
            yield f"  {finding.graph} {finding.kernel}  {finding.rule}: {finding.seen}"
            yield f"      {finding.advice}"


def _graph_lines(graph: GraphReport, kernels: list[CheckedKernel]) -> Iterator[str]:
    moved, floor = format_bytes(graph.bytes_moved), format_bytes(graph.bytes_floor)
    yield f"graph {graph.name}: {moved} moved, {floor} floor"
    rows = [_HEADER, *map(_row, kernels)]
    table = format_table(rows, right=range(2, len(_HEADER))) if kernels else ["no kernels"]
    yield from indented(table)
    if count := len(graph.externs):
        yield f"  {count} eager kernel{'s' * (count != 1)}, which fusec explain lists"
    for kernel in kernels:
        yield from _notes(kernel)


def _row(kernel: CheckedKernel) -> tuple[str, ...]:
    static = kernel.static
    facts = ("?" if static is None else str(fact(kernel, static)) for fact in _COLUMNS.values())
    costs = (format_bytes(kernel.bytes), f"{kernel.floor_us:.3g} us")
    return (kernel.name, kernel.kind, *facts, *costs)


def _notes(kernel: CheckedKernel) -> Iterator[str]:
    """Yield lines without a column in the table: tensor cores, copies, accesses left out."""
    static, model = kernel.static, kernel.expected
    if model is not None and model.floor_us >= SHORT_US:
        yield f"  {kernel.name}: {model}"
    elif model is None and static and static.target in MODELLED and kernel.floor_us >= SHORT_US:
        yield f"  {kernel.name}: expected time unknown: the model does not cover code of this form"
    if static is not None and (static.dots or static.tma or static.copies):
        counts = {
            "wgmma": static.wgmma,
            "MFMA" if static.processor.whole_operands else "mma.sync": static.mma,
            "tcgen05.mma": static.tcgen05,
            "TMA": static.tma,
            "cp.async": static.copies,
        }
        shown = [f"{count} {name}" for name, count in counts.items() if count]
        if static.dots and not (static.wgmma or static.mma or static.tcgen05):
            shown.insert(0, "no tensor cores")
        yield f"  {kernel.name}: {', '.join(shown)}"
    if kernel.code != kernel.name:
        yield f"  {kernel.name}: the code of {kernel.code}"
        return
    for some in alike(kernel.left_out, lambda access: access.demand.left_out):
        names = ", ".join(dict.fromkeys(access.demand.buffer for access in some))
        yield f"  {kernel.name}: not held to 16 bytes: {names} ({some[0].demand.left_out})"
