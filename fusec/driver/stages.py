"""The one visible list of stages: every rewrite from Dynamo's graph to the form that is printed.

Each is a ``Stage``, which the fuzzer, goldens, the CLI and docs/design.md read. ``fold`` runs a
list, with observers and, under ``verify``, verifiers; two stages run one of their own, ``FUSE``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from torch import fx

from fusec.codegen.cpp.stages import CPP_FLAT, CPP_FORM
from fusec.codegen.lowering.lower import lower
from fusec.codegen.parametrize import FUNCTIONS
from fusec.codegen.triton.form import FORM
from fusec.codegen.triton.rules import TRITON_FLAT
from fusec.driver.context import CompileContext
from fusec.driver.partition import partition, products_of_expansions, recompute_scores
from fusec.driver.structures import Planned
from fusec.frontend.aot.custom_operations import spell_out
from fusec.frontend.capture import capture
from fusec.frontend.fx_passes.associative_scans import keep_scans_whole
from fusec.frontend.fx_passes.cat_prefixes import share_cat_prefixes
from fusec.frontend.fx_passes.channel_folding import fold_channels
from fusec.frontend.fx_passes.channel_products import multiply_channels
from fusec.frontend.fx_passes.counted_loops import scan_counted_loops
from fusec.frontend.fx_passes.draws import replace_draws
from fusec.frontend.fx_passes.equal_sizes import unify_sizes
from fusec.frontend.fx_passes.freezing import freeze
from fusec.frontend.fx_passes.fx_nodes import results_of, verify_results
from fusec.frontend.fx_passes.masked_writes import write_by_masks
from fusec.frontend.fx_passes.memory_formats import choose_formats
from fusec.frontend.fx_passes.packing import mark_packed
from fusec.frontend.fx_passes.rolled_loops import roll_loops
from fusec.frontend.fx_passes.short_convolutions import lay_out_short
from fusec.frontend.fx_passes.softmax_gradients import rewrite_softmax_row_sums
from fusec.frontend.fx_passes.summed_products import join_sums
from fusec.frontend.fx_passes.widening import CONVOLUTIONS, PRODUCTS, widen_operands, widen_scaled
from fusec.frontend.fx_passes.winograd import filter_by_tiles
from fusec.frontend.ops.interpolation import keep_gradients_whole
from fusec.ir.graph import FlatKernel, Graph, Schedule
from fusec.ir.verify import verify_flat
from fusec.passes.fusion.contract import cut_with_products, without_calls
from fusec.passes.fusion.cost import kernel_products
from fusec.passes.fusion.fuse import fuse, separate
from fusec.passes.fusion.horizontal import fuse_horizontally
from fusec.passes.fusion.libraries import choose_libraries
from fusec.passes.fusion.library_epilogue import library_epilogue
from fusec.passes.fusion.split_loop import split_loops
from fusec.passes.fusion.store_parts import store_parts
from fusec.passes.graph.chunk import chunk, cut_loops
from fusec.passes.graph.dead_code import dead_code
from fusec.passes.graph.inline import inline
from fusec.passes.graph.recompute import recompute_wide
from fusec.passes.graph.row_parts import sum_rows_by_parts
from fusec.passes.graph.share import merge_equal
from fusec.passes.graph.simplify import round_as_eager, simplify
from fusec.passes.graph.split_reduction import split_reduction
from fusec.passes.kernel.coalesce import coalesce, merge_short_rows
from fusec.passes.kernel.masks import mask_by_infinity
from fusec.passes.kernel.nested_sums import flatten_nested_sums
from fusec.passes.kernel.online_softmax import online_softmax
from fusec.passes.kernel.unroll_parts import unroll_parts
from fusec.passes.kernel.unroll_rows import unroll_rows
from fusec.passes.memory.buffers import plan_host
from fusec.passes.memory.in_place import in_place
from fusec.passes.memory.layouts import choose_layouts
from fusec.passes.schedule.plan import Plan, with_overlap
from fusec.passes.stage import Stage, alone, fold

# -- which compiles have a stage, and how its function is called -----------------------------------


def _fuses(context: CompileContext) -> bool:
    return context.options.fusion


def _fuses_horizontally(context: CompileContext) -> bool:
    # In a CUDA graph, and in C, launches cost nothing.
    return _fuses(context) and not (context.options.cudagraphs or context.options.native)


def _changes_convolutions(context: CompileContext) -> bool:
    return context.target.formats and context.options.precision == "best"


def _fuses_products(context: CompileContext) -> bool:
    left = context.options.race == "library" and not context.options.alone
    return _fuses(context) and context.machine.multiplies and not left


def _changing(kind: str, name: str, does: str, rewrite: Callable[..., None], **more: Any) -> Stage:
    """Return a stage that changes an FX graph of some kind in place."""

    def run(gm: fx.GraphModule, context: Any) -> fx.GraphModule:
        before = results_of(gm) if context.options.verify else []
        rewrite(gm, context)
        if before:
            verify_results(before, gm)
        return gm

    return Stage(name, does, run, kind, kind, **more)


_on_dynamo = partial(_changing, "Dynamo's graph")
_on_fx = partial(_changing, "FX graph")
_on_graph = partial(Stage, takes="Graph", gives="Graph")
_on_schedule = partial(Stage, takes="Schedule", gives="Schedule")
_on_kernel = partial(Stage, takes="Kernel", gives="Kernel")
_on_flat = partial(Stage, takes="FlatKernel", gives="FlatKernel")


# -- before AOTAutograd differentiates ------------------------------------------------------------


def _roll_loops(gm: fx.GraphModule, context: Any) -> None:
    scan_counted_loops(gm)
    roll_loops(gm, context.machine.fusion.least_iterations)


DYNAMO = (
    _on_dynamo(
        "associative_scans",
        "keep a scan by a known associative function as one operation (CPU)",
        alone(keep_scans_whole),
        only=lambda context: context.machine.is_cpu,
    ),
    _on_dynamo(
        "rolled_loops",
        "roll up unrolled loops: states by a recurrence or a scan, bodies with an axis more (CPU)",
        _roll_loops,
        only=lambda context: context.machine.is_cpu,
    ),
    _on_dynamo(
        "equal_sizes",
        "unify the symbolic lengths of an attention's keys and values",
        alone(unify_sizes),
    ),
    _on_dynamo(
        "whole_gradients",
        "keep the gradient of an interpolation as one operation",
        alone(keep_gradients_whole),
    ),
    _on_dynamo(
        "spell_out",
        "decompose `flex_attention`, and custom operations that write their arguments",
        alone(spell_out),
    ),
    _on_dynamo(
        "masked_writes", "turn writes under a boolean mask into `where`", alone(write_by_masks)
    ),
    _on_dynamo(
        "share_cat_prefixes",
        "let a `cat` whose first parts are another `cat`'s read that one",
        alone(share_cat_prefixes),
    ),
)
"""Rewrites of what Dynamo captured, before AOTAutograd differentiates it."""


# -- before capture --------------------------------------------------------------------------------


def _formats(gm: fx.GraphModule, context: CompileContext) -> None:
    if _freezes(context) and context.target.libraries:
        mark_packed(gm)
    choose_formats(gm, context.machine, context.judge, eager_draws=context.options.fallback_random)


def _freezes(context: CompileContext) -> bool:
    return context.options.freeze


def _freeze(gm: fx.GraphModule, context: CompileContext) -> None:
    packs = context.target.libraries and not context.options.alone
    freeze(gm, context.machine, packs=packs, panels=_fuses_products(context))


def _widens(context: CompileContext) -> bool:
    options = context.options
    return bool(context.machine.slow_types) and options.precision == "best" and not options.alone


def _widen(
    gm: fx.GraphModule, context: CompileContext, targets: tuple[Any, ...], keep: Collection[fx.Node]
) -> None:
    widen_operands(gm, targets, context.machine, keep, packed=_freezes(context))


def _widen_products(gm: fx.GraphModule, context: CompileContext) -> None:
    in_chunks = products_of_expansions(gm, context.machine.fusion, context.options.chunk_bytes)
    widen_scaled(gm)
    _widen(gm, context, PRODUCTS, in_chunks)


WIDEN = _on_fx(
    "widen",
    "multiply matrices in f32 where the library has no instructions for 16 or 8 bits (CPU)",
    _widen_products,
    only=_widens,
)
"""In training it runs behind ``partition``, which looks for expansions in 16 bits."""
_on_convolutions = partial(_on_fx, only=_changes_convolutions, needs=("memory_formats",))
_IMAGES = (
    _on_fx(
        "widen_images",
        "convolve in f32 where the library has no instructions for 16 bits (CPU)",
        lambda gm, context: _widen(gm, context, CONVOLUTIONS, ()),
        only=_widens,
    ),
    _on_fx(
        "memory_formats",
        "run sets of convolutions channels-last where they gain by it (CPU)",
        _formats,
        only=lambda at: at.options.channels_last and at.target.formats and not at.options.alone,
    ),
    _on_convolutions(
        "channel_products",
        "turn 1 x 1 convolutions of channels-last images, and their gradients, into products (CPU)",
        lambda gm, context: multiply_channels(gm, context.machine.fusion.channel_product),
    ),
    _on_convolutions(
        "winograd",
        "compute 3 x 3 convolutions of channels-last images with 4/9 of the multiplications (CPU)",
        lambda gm, context: filter_by_tiles(gm, context.machine, freezes=_freezes(context)),
    ),
    _on_convolutions(
        "short_convolutions",
        "lay out the weights of convolutions that sum few channels for fusec's own kernels (CPU)",
        lambda gm, context: lay_out_short(gm, context.machine),
    ),
    _on_fx(
        "draws",
        "replace random draws by functions of a seed and a position",
        alone(replace_draws),
        only=lambda context: not context.options.fallback_random,
        needs=("memory_formats",),
    ),
)
INFERENCE = (
    _on_fx(
        "fold_channels",
        "fold scales and shifts of channels into the weights of convolutions",
        alone(fold_channels),
        only=_freezes,
    ),
    *_IMAGES,
    WIDEN,
    _on_fx(
        "freeze",
        "compute what follows from weights alone once, and pack weights for the library (CPU)",
        _freeze,
        only=_freezes,
        needs=("fold_channels", "winograd", "short_convolutions", "draws"),
    ),
)
"""Rewrites of AOTAutograd's graph where there is no backward."""

JOINT = (
    *_IMAGES,
    _on_fx(
        "softmax_gradients",
        "take the row sums of a softmax's gradient from the attention's output",
        lambda gm, context: rewrite_softmax_row_sums(gm, context.machine.fusion.scores_bytes),
        needs=("draws",),
    ),
    _on_fx(
        "summed_products",
        "multiply once for a sum of products that have few terms each (CPU)",
        alone(join_sums),
        only=lambda context: context.machine.is_cpu,
    ),
    _on_fx(
        "wide_products",
        "tag products too wide to save (scores) for recomputation in the backward",
        lambda joint, context: recompute_scores(joint, context.machine),
        only=_fuses_products,
    ),
)
"""Rewrites of the joint graph of forward and backward."""

PARTITION = Stage(
    "partition",
    "cut into forward and backward; do not save what a fused backward recomputes",
    lambda joint, context: partition(
        joint, context.machine.fusion, context.options.chunk_bytes, context.options.memory_budget
    ),
    "joint FX graph",
    "two FX graphs",
    needs=("draws", "wide_products"),
)


CAPTURE = Stage(
    "capture",
    "lower each ATen operation by its own function; without one it becomes an `Extern`",
    lambda gm, context: capture(gm, context.trace.name, context.empty_graph()),
    "FX graph",
    "Graph",
    needs=("partition",),
)


# -- from a graph to kernels -----------------------------------------------------------------------


def _cut(graph: Graph, context: CompileContext) -> Schedule:
    if not context.options.fusion:
        return separate(graph)
    target = context.target
    limit = context.options.merge_limit
    return fuse(graph, target.machine, target.accepts, limit, context.judged)


FUSE = (
    _on_graph(
        "simplify",
        "apply value-preserving rules: casts, comparisons of indices, guards, one-hot sums",
        alone(simplify),
    ),
    _on_graph(
        "dead_code",
        "drop definitions and elements without readers, so that counts of readers are right",
        alone(dead_code),
    ),
    _on_graph("share", "merge equal definitions", alone(merge_equal), needs=("simplify",)),
    _on_graph(
        "row_parts",
        "sum rows of a product per tile, then the partial sums",
        lambda graph, context: sum_rows_by_parts(graph, context.machine.tiles.side),
        only=_fuses_products,
        needs=("share",),
    ),
    _on_graph(
        "split_reduction",
        "split large column sums in a partial and a final sum",
        lambda graph, context: split_reduction(graph, context.machine),
        needs=("share", "row_parts"),
    ),
    _on_graph(
        "inline",
        "substitute definitions that are not worth storing into their readers; "
        "turn scans that are read from the end",
        lambda graph, context: inline(graph, context.machine),
        needs=("dead_code", "split_reduction"),
    ),
    _on_graph(
        "recompute",
        "recompute products too wide to store (scores) in each of their readers",
        lambda graph, context: recompute_wide(graph, context.machine),
        only=_fuses_products,
        needs=("inline",),
    ),
    _on_graph(
        "unread",
        "drop definitions that have lost their readers",
        alone(dead_code),
        needs=("inline", "recompute"),
    ),
    Stage(
        "fuse",
        "merge definitions into kernels, most profitable pairs first; record each decision",
        _cut,
        "Graph",
        "Schedule",
        needs=("unread",),
    ),
    _on_schedule(
        "library_epilogue",
        "let a library's call add a bias or residual, or apply an activation, if nothing else can",
        lambda schedule, context: library_epilogue(
            schedule, convolutions=_changes_convolutions(context)
        ),
        only=_fuses,
        needs=("fuse",),
    ),
    _on_schedule(
        "store_parts",
        "store the parts of a `cat` that one kernel computes directly in the result",
        alone(store_parts),
        only=_fuses,
        needs=("fuse",),
    ),
    _on_schedule(
        "split_loop",
        "split the loop of a product with few tiles over programs, where that pays (GPU)",
        lambda schedule, context: split_loops(schedule, context.target.split),
        only=_fuses,
        needs=("library_epilogue", "store_parts"),
    ),
)
"""From a graph to kernels; run for each graph that ``contract`` and ``loops`` consider."""

CLEAN = tuple(s for s in FUSE if s.name in ["simplify", "dead_code", "share", "inline", "unread"])
"""Run by ``chunk`` first: without it views, casts and biases hide the consumers of a row."""


def _chunk(graph: Graph, context: CompileContext) -> Graph:
    clean = partial(fold, CLEAN, context=context.quiet())
    return chunk(graph, context.options.chunk_bytes, clean, context.machine.fusion)


def _contract(graph: Graph, context: CompileContext, looped: bool = False) -> Schedule:
    tried = partial(fold, FUSE, context=context.quiet())
    cut: Callable[[Graph], Schedule] = tried if looped else partial(fold, FUSE, context=context)
    if not _fuses_products(context):
        return cut(graph)
    options, machine = context.options, context.machine
    judge = None if options.alone or options.race == "fused" else context.judge
    schedule = cut_with_products(graph, cut, judge, machine, tried=tried, alone=options.alone)
    return without_calls(schedule, cut, machine) if looped else schedule


PASSES = (
    _on_graph(
        "eager_rounding",
        "mark 16-bit values as rounded",
        alone(round_as_eager),
        only=lambda context: context.options.precision == "eager",
    ),
    _on_graph(
        "chunk",
        "compute lines around a far wider product in a loop over chunks of rows",
        _chunk,
        only=lambda context: _fuses(context) and not context.options.alone,
        inner=CLEAN,
    ),
    Stage(
        "contract",
        "decide for each library call with a decomposition: fused kernel or library",
        _contract,
        "Graph",
        "Schedule",
        needs=("eager_rounding", "chunk"),
        inner=FUSE,
    ),
    _on_schedule(
        "loops",
        "cut the bodies of loops over rows into kernels",
        lambda found, context: cut_loops(found, partial(_contract, context=context, looped=True)),
        needs=("chunk", "contract"),
        inner=FUSE,
    ),
    _on_schedule(
        "libraries",
        "choose the fastest library for each product, by race or by rule (CPU)",
        lambda schedule, context: choose_libraries(schedule, context.machine.races, context.judge),
        only=lambda context: context.target.libraries,
        needs=("contract", "loops"),
    ),
    _on_schedule(
        "layouts",
        "lay out values between kernels in the order in which these walk them",
        alone(choose_layouts),
        only=_fuses,
        needs=("libraries",),
    ),
    _on_schedule(
        "in_place",
        "write mutated inputs, or parts of them (a cache's next position), in place",
        alone(in_place),
        needs=("layouts",),
    ),
    _on_schedule(
        "fuse_horizontally",
        "launch independent pointwise kernels of one form together",
        lambda schedule, context: fuse_horizontally(schedule, context.machine),
        only=_fuses_horizontally,
        needs=("in_place",),
    ),
)
"""From the captured graph to the schedule that runs."""

MEMORY = Stage(
    "memory",
    "decide when each buffer is allocated and freed, and which kernels one call launches; "
    "always verified",
    lambda schedule, context: plan_host(
        schedule, context.target.codegen.overwritable, context.target.codegen.run_bytes
    ),
    "Schedule",
    "HostProgram",
    needs=("fuse_horizontally",),
)


# -- from a kernel to a program --------------------------------------------------------------------


def offered_plans(flat: FlatKernel, context: CompileContext) -> tuple[Plan, ...]:
    """Return the plans of a kernel that the options allow; the first is the rule's.

    Schedules offer roles where a kernel's loops should split into them. Where the printed form
    would have none after all, so that all warps ran tiles chosen for roles, they are left out.
    """
    offered = context.target.plans(flat)
    if context.options.descriptors != "auto":
        always = context.options.descriptors == "always"
        wanted = (p for p in offered if (p.descriptors if always else not p.copies_tiles))
        offered = tuple(wanted) or offered
    if context.options.roles != "auto":
        roles = context.options.roles.replace("never", "")
        offered = tuple(plan for plan in offered if plan.roles == roles) or offered
    elif (plan := next((plan for plan in offered if plan.roles), None)) is not None:
        program = lower(flat, plan, context.machine.code)
        if fold(context.target.codegen.form, program, context.quiet()).roles is None:
            offered = tuple(plan for plan in offered if not plan.roles)
    if context.machine.sm.dependent:
        raced = kernel_products(flat, context.machine) > 0
        offered = with_overlap(offered, context.options.dependent_launches, raced=raced)
    return offered


def _plan(flat: FlatKernel, context: CompileContext) -> Planned:
    offered = offered_plans(flat, context)
    return Planned(flat, offered[min(flat.configuration, len(offered) - 1)])


KERNEL = (
    _on_kernel(
        "infinite_masks",
        "replace masks by `finfo.min` with minus infinity where every row has an unmasked key",
        alone(mask_by_infinity),
    ),
    _on_kernel(
        "online_softmax",
        "move a divisor out of a sum that is then linear in an exponential",
        alone(online_softmax),
    ),
    _on_kernel(
        "unroll_rows",
        "unroll a skinny product over rows and some columns: weights are read once (CPU)",
        lambda kernel, context: unroll_rows(kernel, context.machine),
        needs=("online_softmax",),
    ),
    _on_kernel(
        "nested_sums",
        "turn a sum of sums into one sum, where rows are loaded element by element (GPU)",
        lambda kernel, context: flatten_nested_sums(kernel, context.machine),
    ),
    Stage(
        "coalesce",
        "flatten offsets; merge neighbouring axes that walk memory as one; and, in pointwise "
        "kernels, short rows that no vector divides (GPU)",
        lambda kernel, context: merge_short_rows(coalesce(kernel), context.machine),
        "Kernel",
        "FlatKernel",
        needs=("unroll_rows",),
        check=verify_flat,  # at run time its type is ``Kernel``
    ),
    _on_flat(
        "unroll_parts",
        "compute one place of each equal part of an axis: of many, or of parts that read the same",
        lambda flat, context: unroll_parts(flat, context.machine),
        needs=("coalesce",),
    ),
)
"""From a kernel of a schedule to the flat kernel that is planned."""

LOWER = (
    Stage(
        "plan",
        "bind axes to the grid, loops and lanes: the race's winner, or the target's first plan",
        _plan,
        "FlatKernel",
        "Plan",
        needs=("guard_gathers",),
    ),
    Stage(
        "lower",
        "print the plan as a program; decides nothing",
        lambda planned, context: lower(planned.kernel, planned.plan, context.machine.code),
        "Plan",
        "Program",
        needs=("plan",),
    ),
)
"""From a flat kernel to its program."""


def all_stages() -> Iterator[Stage]:
    """Yield every stage in order; ``contract`` comes behind the stages of its inner list."""
    before = dict.fromkeys((*INFERENCE, *JOINT))
    programs = (*KERNEL, *CPP_FLAT, *TRITON_FLAT, *LOWER, *FUNCTIONS, *CPP_FORM, *FORM)
    for stage in (*DYNAMO, *before, PARTITION, CAPTURE, *PASSES, MEMORY, *programs):
        if stage.name == "contract":
            yield from stage.inner
        yield stage
