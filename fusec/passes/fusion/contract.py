"""Choose which products of matrices fusec computes itself.

A library call that index notation can express has a decomposition (``Extern.decomposition``): its
definitions replace the call, and fuse with their neighbours. All such calls are decomposed first. A
product that shares its kernel with no other definition gains nothing, and is kept as a call.
Kernels with decomposed calls, those of one call together, are a *group*. For each group there is a
choice: these kernels, or the library's calls with fused kernels around them. The calls of a group
that loses are kept. The rest is fused again, until every group has won.

Worked example: ``gelu(x @ w + b)`` is decomposed to one kernel. The library's product and a kernel
for the bias and GELU take 1521 us by the model, one kernel 1639 us: the call is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TypeAlias

from fusec.ir.atoms import size_class
from fusec.ir.canonical import Canonical, canonical
from fusec.ir.choice import Choice, Decided, Judge
from fusec.ir.contraction import is_product
from fusec.ir.decision import Decision
from fusec.ir.dtype import I32
from fusec.ir.expr import Buffer, loads, postorder, reach, reductions
from fusec.ir.graph import (
    Argument,
    Def,
    Extern,
    Graph,
    Kernel,
    Line,
    RowLoop,
    Schedule,
    Step,
    whole_view,
)
from fusec.ir.groups import pairs_of
from fusec.ir.index import Size
from fusec.ir.machine import Machine
from fusec.ir.names import operation_words
from fusec.ir.streamed import (
    conversions,
    copies_from_tables,
    match_panels,
    match_streamed,
    reading_weights,
    rows_beside_narrow,
)
from fusec.passes.fusion.cost import call_cost, kernel_cost
from fusec.passes.graph.recompute import is_wide_product
from fusec.passes.graph.simplify import simplifier

LIBRARY, FUSED = "library", "fused #"
"""Candidates of a group: its calls kept, and one kernel in each of its configurations."""

FuseGraph: TypeAlias = Callable[[Graph], Schedule]
"""The passes from a graph to kernels."""


@dataclass(frozen=True, slots=True)
class Group:
    """The part of a graph that some kernels with decomposed calls compute.

    Attributes:
        graph: that part as captured, with its calls kept.
        decomposed: FX nodes of the calls that are decomposed in the kernels.
        kernels: the part, fused.
        cut: the passes that fused it.
    """

    graph: Graph
    decomposed: frozenset[str]
    kernels: tuple[Kernel, ...]
    cut: FuseGraph = field(compare=False)

    @property
    def signature(self) -> str:
        """The graph's canonical form as text, the same in every process; equal layers share it.

        Symbolic sizes are represented by the classes of their hints.
        """
        known = self._canonical()
        classes = [size_class(size.hint) for size in known.of_kind(Size)]
        return repr(known.form) + (f" sizes {classes}" if classes else "")

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Its symbolic sizes, in an order that groups of one signature share."""
        return self._canonical().of_kind(Size)

    def describe(self) -> str:
        """Return a digest of the signature and the operations: the same in every process."""
        digest = hashlib.sha256(self.signature.encode()).hexdigest()[:16]
        origins = [line.origin for line in self.graph.externs]
        origins += [line.origin for line in self.graph.defs]
        ops = operation_words(op for origin in origins for op in origin.ops)
        return f"group {digest} {' + '.join(ops)}"

    def separate(self) -> Schedule:
        """Return it with its calls kept."""
        return self.cut(self.graph)

    def fused(self) -> Schedule:
        """Return it with its calls decomposed."""
        return self.cut(decompose_calls(self.graph, self.decomposed))

    def _canonical(self) -> Canonical:
        buffers = [b for b in self.graph.inputs if isinstance(b, Buffer)]
        buffers += [b for n in self.graph.nodes for b in n.writes]
        layouts = tuple((b.shape, b.strides) for b in buffers)
        return canonical(self.graph, layouts)


def cut_with_products(
    graph: Graph,
    cut: FuseGraph,
    judge: Judge | None,
    machine: Machine,
    *,
    tried: FuseGraph | None = None,
    alone: bool = False,
) -> Schedule:
    """Return the graph cut into kernels, with every product fused where that is faster.

    A kernel that won has the configuration that won.

    Args:
        cut: the passes from a graph to kernels.
        judge: decides each group's choice; None fuses all that can be.
        tried: the passes as the judge runs them, which record nothing; default: ``cut``.
        machine: limits which calls are decomposed; products that are skinny or grouped, or whose
            weights are in panels, are decomposed also if nothing fuses.
        alone: whether products of many rows are decomposed on their own, too.
    """
    few = _skinny_products(graph, machine)
    panels = _panel_products(graph, machine.loops.panel) - few
    narrow = _narrow_products(graph, machine) if machine.is_cpu else set()
    # The gradient of max_pool2d on a CPU stays the library's: it stores once for each window.
    decomposed = _decomposable(graph, others=not machine.is_cpu)
    if judge is not None and not machine.rates.alone:
        decomposed &= _attending(graph, machine) | few | panels | narrow
    single = few | panels | narrow | _grouped_products(graph)
    known: dict[str, Decided] = {}
    log: dict[str, Decision] = {}
    while decomposed:
        schedule = cut(decompose_calls(graph, decomposed))
        kept = set() if alone else (_lonely(graph, schedule) - single) & decomposed
        configured: dict[Step, Step] = {}
        for kernels, calls in _groups(graph, schedule, decomposed - kept) if judge else ():
            group = slice_group(graph, kernels, calls, tried or cut)
            rule = _IN_PANELS if calls <= panels else _NARROW if calls <= narrow else None
            decided = rule or _LOST
            if group is not None and judge is not None:
                signature = group.signature
                if signature not in known:
                    by_model = cache(partial(_by_model, group, machine))
                    by_rule = (lambda rule=rule: rule) if rule else by_model
                    offered = Choice("group", group.describe, group, (LIBRARY,), by_rule, FUSED)
                    known[signature] = judge(offered)
                decided = known[signature]
            name = _name(kernels)
            log[name] = _decision(graph, calls, name, decided)
            if decided.candidate.startswith(FUSED):
                number = int(decided.candidate.removeprefix(FUSED))
                configured.update((k, replace(k, configuration=number)) for k in kernels)
            else:
                kept |= calls
        if not kept:
            steps = tuple(configured.get(step, step) for step in schedule.steps)
            return replace(schedule, steps=steps, decisions=(*schedule.decisions, *log.values()))
        decomposed -= kept
    schedule = cut(graph)
    return replace(schedule, decisions=(*schedule.decisions, *log.values()))


def without_calls(schedule: Schedule, cut: FuseGraph, machine: Machine) -> Schedule:
    """Return a loop's body without library calls, if its kernels are faster in one native call."""
    calls = schedule.externs
    if not machine.is_cpu or not calls or not all(call.decomposition for call in calls):
        return schedule
    own = cut_with_products(schedule.graph, cut, None, machine, alone=True)
    if own.externs:
        return schedule
    us = modelled_us(own, machine) - len(own.kernels) * machine.launch_us
    return schedule if us > modelled_us(schedule, machine) else own


_IN_PANELS = Decided(f"{FUSED}0", "by rule: its weights are in panels")
_NARROW = Decided(f"{FUSED}0", "by rule: its weights are narrow")
_LOST = Decided(LIBRARY, "other calls stand between its kernels", 0.0)


def _by_model(group: Group, machine: Machine) -> Decided:
    fused = sum(kernel_cost(k, machine).us for k in group.kernels)
    separate = modelled_us(group.separate(), machine)
    reason = f"modelled: fused {fused:.4g} us, the library and the rest {separate:.4g} us"
    winner = f"{FUSED}0" if fused < separate else LIBRARY
    return Decided(winner, reason, separate - fused, separate)


def modelled_us(schedule: Schedule, machine: Machine) -> float:
    """Return the modelled time of kernels and calls, one after another."""
    total = 0.0
    for step in schedule.steps:
        match step:
            case Kernel():
                total += kernel_cost(step, machine).us
            case Extern():
                total += call_cost(step, machine).us
            case RowLoop():
                total += step.rounds * modelled_us(step.schedule, machine)
    return total


def _name(kernels: tuple[Kernel, ...]) -> str:
    return "+".join(s.buffer.name for k in kernels for s in k.stores)


def _decision(graph: Graph, decomposed: frozenset[str], name: str, decided: Decided) -> Decision:
    calls = "+".join(
        call.title.removesuffix(".default") for call in graph.externs if call.node in decomposed
    )
    taken = decided.candidate.startswith(FUSED)
    return Decision(calls, name, taken, decided.reason, decided.saved_us, "the library")


# -- decomposition ---------------------------------------------------------------------------------


def decompose_calls(graph: Graph, decomposed: set[str] | frozenset[str]) -> Graph:
    """Return the graph with some calls, named by FX node, replaced by their decompositions.

    The definition that packs a weight for them comes before the first of these.
    """
    nodes: list[Line] = []
    known = {b for line in graph.nodes for b in line.writes}.union(graph.inputs)
    for node in graph.nodes:
        match node:
            case Extern() if node.node in decomposed:
                panels = node.product.panels if node.product else None
                if panels is not None and panels.buffer not in known:
                    known.add(panels.buffer)
                    nodes.append(panels)
                nodes.extend(node.decomposition)
            case _:
                nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _decomposable(graph: Graph, *, others: bool) -> set[str]:
    """Return the calls whose decomposition covers every result that is read.

    Args:
        others: whether calls that multiply no matrices count.
    """
    read = graph.returned.union(*(node.reads for node in graph.nodes))
    return {
        call.node
        for call in graph.externs
        if call.decomposition
        and (others or any(map(is_product, postorder(d.expr for d in call.decomposition))))
        and read.intersection(call.writes) <= {d.buffer for d in call.decomposition}
    }


def _attending(graph: Graph, machine: Machine) -> set[str]:
    """Return the calls of attentions: those of two products; batched products whose scores are too
    wide to store; and those that read what follows from these.

    Two layers of an MLP are no batch. As one kernel their forward ran at 0.84 to 1.7 of the
    library's speed, their training at 0.78 to 0.94 (one core, widths 12 to 192, 2026-11).
    """
    found: set[str] = set()
    scores: set[Buffer] = set()
    for node in graph.nodes:
        follows = not scores.isdisjoint(node.reads)
        match node:
            case Extern(decomposition=(line,)):
                wide = len(line.axes) > 2 and is_wide_product(line, machine)
                found.update((node.node,) if wide or follows else ())
                scores.update(node.writes if wide else ())
            case Extern(decomposition=(_, *_)):
                found.add(node.node)
            case Def() if follows:
                scores.add(node.buffer)
    return found


def _skinny_products(graph: Graph, machine: Machine) -> set[str]:
    """Return the calls of products with so few rows that streaming their weights pays.

    Also those whose weights a definition only copies from a table, at places that it reads.
    """
    copies, simplify = copies_from_tables(graph), simplifier()

    def streams(line: Def) -> bool:
        whole = reading_weights(line, copies, simplify)
        return any(match_streamed(n, machine) for n in postorder((whole.expr,)))

    return {
        call.node
        for call in graph.externs
        if (len(call.decomposition) == 1 or call.product) and any(map(streams, call.decomposition))
    }


def _panel_products(graph: Graph, columns: int) -> set[str]:
    """Return the calls of products whose decompositions read weights in panels."""
    return {
        call.node
        for call in graph.externs
        if call.product
        and call.product.panels
        and any(match_panels(n, columns) for d in call.decomposition for n in postorder((d.expr,)))
    }


def _grouped_products(graph: Graph) -> set[str]:
    """Return the calls of grouped products, for which the library launches two kernels."""
    return {
        call.node
        for call in graph.externs
        if pairs_of(n for line in call.decomposition for n in postorder((line.expr,)))
    }


def _narrow_products(graph: Graph, machine: Machine) -> set[str]:
    """Return the calls of products of a CPU whose weights are narrow in memory.

    A kernel converts them as it reads them; the library would read them converted, two to eight
    times as many bytes, after a kernel that writes them. Also those of products of int8, of any
    rows, whose terms the library takes one by one (below AVX-512 VNNI).
    """
    simplify = simplifier()
    known = conversions(graph, simplify)

    def converts(line: Def) -> bool:
        if any(n.dtype is I32 and is_product(n) for n in reductions(line.expr)):
            return True
        whole = reading_weights(line, known, simplify)
        return any(rows_beside_narrow(n, machine) for n in reductions(whole.expr))

    return {
        call.node
        for call in graph.externs
        if len(call.decomposition) == 1 and any(map(converts, call.decomposition))
    }


def _lonely(graph: Graph, schedule: Schedule) -> set[str]:
    """Return the calls of one definition that share their kernel with nothing else."""
    call = {c.decomposition[0].buffer: c.node for c in graph.externs if len(c.decomposition) == 1}
    alone = [kernel.defs[0] for kernel in schedule.kernels if len(kernel.defs) == 1]
    return {call[buffer] for buffer in alone if buffer in call}


# -- groups ----------------------------------------------------------------------------------------


def _groups(
    graph: Graph, schedule: Schedule, decomposed: set[str]
) -> list[tuple[tuple[Kernel, ...], frozenset[str]]]:
    """Return the kernels that hold definitions of decomposed calls, those of one call together.

    A split reduction, which the captured graph does not have, is in one group with its parts.
    """
    call_of = {
        line.buffer: call.node
        for call in graph.externs
        if call.node in decomposed
        for line in call.decomposition
    }
    known = {buffer for n in graph.nodes for buffer in n.writes}
    groups: list[tuple[tuple[Kernel, ...], frozenset[str]]] = []
    for step in schedule.kernels:
        calls = frozenset(call_of[b] for b in step.defs if b in call_of)
        read = set(step.reads)
        parts = [{s.buffer for k in g[0] for s in k.stores} - known for g in groups]
        joined = [
            g
            for g, made in zip(groups, parts, strict=True)
            if not calls.isdisjoint(g[1]) or not read.isdisjoint(made)
        ]
        if calls or joined or any(s.buffer not in known for s in step.stores):
            groups = [g for g in groups if g not in joined]
            kernels = (*(k for g in joined for k in g[0]), step)
            groups.append((kernels, calls.union(*(g[1] for g in joined))))
    return [g for g in groups if g[1]]


def slice_group(
    graph: Graph, kernels: tuple[Kernel, ...], calls: frozenset[str], cut: FuseGraph
) -> Group | None:
    """Return the part of a graph that some kernels compute, with its calls kept.

    It has the lines between the kernels' loads and their stores, as captured; partial sums, which
    the captured graph does not have, are internal. None if other calls stand between its lines. A
    weight in panels is an input, and so is the weight that the call reads in its place.
    """
    decomposed = [call for call in graph.externs if call.node in calls]
    producer = {buffer: node for node in graph.nodes for buffer in node.writes}
    stores = [store for kernel in kernels for store in kernel.stores]
    given = {load.buffer for load in loads(s.expr for s in stores)} - {s.buffer for s in stores}
    results = [s.buffer for s in stores if s.buffer in producer]
    panels = {c.product.panels.buffer: c for c in decomposed if c.product and c.product.panels}
    given.update(c.views[1].buffer.base for c in panels.values())
    made_inside = producer.keys() - given

    def sources(buffer: Buffer) -> tuple[Buffer, ...]:
        return producer[buffer].reads if buffer in made_inside else ()

    reached = reach(results, sources)
    needed = {producer[buffer] for buffer in reached if buffer in made_inside}
    inputs = dict.fromkeys([*(b for b in reached if b not in made_inside), *panels])
    nodes = tuple(n for n in graph.nodes if n in needed)
    if any(not isinstance(n, Def) and n not in decomposed for n in nodes):
        return None
    sizes = graph.sizes
    outputs: tuple[Argument, ...] = tuple(whole_view(b) for b in results)
    return Group(Graph("group", (*inputs, *sizes), nodes, outputs), calls, kernels, cut)
