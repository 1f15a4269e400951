"""``compile_graph``: the one visible list of stages, top to bottom.

FX graph -> capture -> Graph -> simplify, split, inline -> fuse -> Kernels -> plan, lower ->
Programs -> print -> sources -> build -> cache -> bind -> a callable. The key of the cache is made
of the FX graph, so a warm start does nothing but read an entry and bind it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fusec.codegen import cpp, wrapper
from fusec.codegen.lower import lower
from fusec.codegen.table import print_blocks
from fusec.codegen.targets import Target
from fusec.frontend.capture import Held, capture_with_values, main_device
from fusec.ir import text
from fusec.ir.graph import Bundle, Graph, Kernel, Schedule, all_launches
from fusec.ir.program import Program, print_program
from fusec.ir.structure import structure
from fusec.ir.verify import verify_graph, verify_schedule
from fusec.ir.verify_program import verify_program
from fusec.options import Options
from fusec.passes.bundle import bundle
from fusec.passes.chunk import chunk, with_loops
from fusec.passes.coalesce import coalesce
from fusec.passes.contract import Cut, Judge, cut_with_products, judge_by_model
from fusec.passes.dead_code import dead_code
from fusec.passes.eager_rounding import round_as_eager
from fusec.passes.fuse import Decision, fuse, separate
from fusec.passes.in_place import in_place
from fusec.passes.inline import inline
from fusec.passes.library_bias import library_bias
from fusec.passes.recompute import recompute_wide
from fusec.passes.row_parts import sum_rows_by_parts
from fusec.passes.schedule.plan import Plan, print_plan
from fusec.passes.share import share
from fusec.passes.simplify import simplify
from fusec.passes.split_loop import split_loops
from fusec.passes.split_reduction import split_reduction
from fusec.passes.store_parts import store_parts
from fusec.passes.write_part import write_parts
from fusec.trace import Trace


@dataclass(frozen=True, slots=True)
class Compiled:
    """A graph after codegen, before anything is built.

    Attributes:
        schedule: kernels and externs in order.
        programs, plans: by kernel name.
        code: kernel name -> name of the first kernel of the same structure, whose code it runs.
        sources: kernel name -> source text of that code.
        wrapper: the Python source of ``call``.
    """

    schedule: Schedule
    decisions: tuple[Decision, ...]
    plans: dict[str, Plan]
    programs: dict[str, Program]
    code: dict[str, str]
    sources: dict[str, str]
    wrapper: str

    @property
    def distinct(self) -> dict[str, Program]:
        """The programs that are built: one of each structure."""
        return {name: p for name, p in self.programs.items() if self.code[name] == name}


def optimise(
    graph: Graph,
    target: Target,
    options: Options,
    trace: Trace,
    make_judge: Callable[[Cut], Judge] | None = None,
) -> tuple[Schedule, tuple[Decision, ...]]:
    """Return the graph cut into kernels, and the decisions that led there.

    Args:
        make_judge: gives the judge between the ways to run a product; by default the cost model.
    """

    def cut(graph: Graph) -> tuple[Schedule, tuple[Decision, ...]]:
        return cut_into_kernels(graph, target, options, trace)

    least = options.chunk_bytes if options.fusion else 0
    graph, regions, chunked = chunk(graph, least, target.machine.chunk_rows)
    if options.race == "library" or not options.fusion or not target.multiplies:
        schedule, decisions = cut(graph)
    else:
        judge = judge_by_model(cut, target.machine) if make_judge is None else make_judge(cut)
        schedule, decisions = cut_with_products(
            graph, cut, None if options.race == "fused" else judge
        )
    schedule, inner = with_loops(schedule, regions, cut)
    schedule = write_parts(schedule)
    schedule = in_place(schedule)
    bundled: tuple[Decision, ...] = ()
    if options.fusion and not options.cudagraphs:  # a recording launches at no cost to the host
        schedule, bundled = bundle(schedule, target.machine)
    if options.verify:
        verify_schedule(schedule)
    return schedule, (*chunked, *inner, *decisions, *bundled)


def cut_into_kernels(
    graph: Graph, target: Target, options: Options, trace: Trace
) -> tuple[Schedule, tuple[Decision, ...]]:
    """Return the graph cut into kernels; what is a call stays one."""
    graph = simplify(graph)
    graph = dead_code(graph)
    graph = share(graph)
    graph = sum_rows_by_parts(graph) if target.multiplies else graph
    graph = split_reduction(graph, target.machine)
    graph = inline(graph)
    graph = recompute_wide(graph) if target.multiplies else graph
    graph = dead_code(graph)
    if options.verify:
        verify_graph(graph)
    trace.keep("defs", graph, lambda: text.print_graph(graph))
    if not options.fusion:
        return separate(graph), ()
    schedule, decisions = fuse(graph, target.machine, target.accepts)
    schedule = library_bias(schedule)
    schedule = store_parts(schedule)
    schedule = split_loops(schedule, target.split)
    if options.verify:
        verify_schedule(schedule)
    return schedule, decisions


def generate(
    schedule: Schedule,
    decisions: tuple[Decision, ...],
    target: Target,
    options: Options,
    held: Held | None = None,
) -> Compiled:
    """Return plans, programs and sources of every kernel, and the wrapper.

    Args:
        held: which nodes' values buffers hold; read where the options ask to verify.
    """
    plans: dict[str, Plan] = {}
    programs: dict[str, Program] = {}
    code: dict[str, str] = {}
    sources: dict[str, str] = {}
    first: dict[str, str] = {}
    for step in all_launches(schedule):
        flat = step.template if isinstance(step, Bundle) else coalesce(target.algebra(step))
        offered = offered_plans(flat, target, options)
        plan = offered[min(flat.configuration, len(offered) - 1)]
        program = lower(replace(flat, name=step.name), plan, notation(step))
        if isinstance(step, Bundle):
            program = replace(program, table=True)
        if options.verify:
            verify_program(program)
        plans[step.name], programs[step.name] = plan, program
        code[step.name] = first.setdefault(structure(program), step.name)
        if code[step.name] == step.name:
            sources[step.name] = target.print_kernel(program)
        else:
            sources[step.name] = sources[code[step.name]]
    watched = held if options.verify else None
    text_of_call = wrapper.print_wrapper(schedule, programs, code, watched)
    return Compiled(schedule, decisions, plans, programs, code, sources, text_of_call)


def offered_plans(flat: Kernel, target: Target, options: Options) -> tuple[Plan, ...]:
    """Return the plans of a kernel with flat accesses that the options leave, the first by rule."""
    offered = target.plans(flat)
    if options.descriptors == "auto":
        return offered
    wanted = options.descriptors == "always"
    return tuple(plan for plan in offered if plan.descriptors is wanted) or offered


def notation(step: Kernel | Bundle) -> tuple[str, ...]:
    """Return a kernel in index notation, as the comment on top of its source."""
    printed = text.print_template(step) if isinstance(step, Bundle) else text.print_kernel(step)
    return tuple(printed.splitlines())


def compile_to_source(
    gm: fx.GraphModule,
    name: str,
    target: Target,
    options: Options,
    trace: Trace,
    make_judge: Callable[[Cut], Judge] | None = None,
) -> Compiled:
    """Take an FX graph through all stages up to source text; arguments as of ``optimise``."""
    trace.keep("fx", gm, lambda: gm.print_readable(print_output=False))
    with trace.timed("capture"):
        graph, held = capture_with_values(gm, name)
    if options.precision == "eager":
        graph = round_as_eager(graph)
    trace.keep("graph", graph, lambda: text.print_graph(graph))
    if options.verify:
        verify_graph(graph)
    with trace.timed("passes"):
        schedule, decisions = optimise(graph, target, options, trace, make_judge)
    trace.keep("kernels", schedule, lambda: text.print_schedule(schedule))
    with trace.timed("codegen"):
        compiled = generate(schedule, decisions, target, options, held)
    plans, programs, sources = compiled.plans, compiled.programs, compiled.sources
    trace.keep("plan", plans, lambda: "\n".join(print_plan(k, p) for k, p in plans.items()))
    trace.keep("program", programs, lambda: "\n\n".join(map(print_program, programs.values())))
    trace.keep("source", sources, lambda: "\n\n".join(sources[k] for k in compiled.distinct))
    trace.keep("wrapper", compiled, lambda: compiled.wrapper)
    return compiled


def kernel_rows(compiled: Compiled) -> list[dict[str, Any]]:
    """Return what a loader needs to know of each kernel."""
    return [
        {
            "name": name,
            "buffers": len(program.buffers),
            "sizes": len(program.sizes),
            "blocks": print_blocks(program) if program.table else None,
            "where": program.source[-1] if program.source else "compiled graph",
        }
        for name, program in compiled.distinct.items()
    ]


def cpp_unit(compiled: Compiled, width: int) -> str:
    """Return the C++ translation unit with all kernels of a graph."""
    return cpp.prelude(width) + "\n".join(compiled.sources[k] for k in compiled.distinct)


def manifest(compiled: Compiled) -> bytes:
    """Return the cache entry's description of its kernels, as JSON."""
    return json.dumps({"kernels": kernel_rows(compiled)}, sort_keys=True).encode()


Call = Callable[[list[Any]], Any]


def graph_device(gm: fx.GraphModule) -> torch.device:
    """Return the device on which a graph's kernels run."""
    return main_device(gm)
