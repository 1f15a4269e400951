"""Run what stands around a far larger intermediate in chunks of rows, so that it never is whole.

Spec: ``graph -> graph``. An *expansion* is a product of matrices much wider than the rows
it is made of (``passes/expansion.py``): the logits of a loss, rows x vocabulary. Its *region* is
every line that reads it or anything as large, and what stands between them. If each line of the
region is, row by row,

* a definition that reads row i alone to make row i, or sums over all rows, or
* a product whose rows are these rows, or that contracts over them,

then the region may run over a few rows at a time, and nothing in it has more rows than these. In
the graph one call takes its place; its body is a graph of its own, with fewer rows::

    mm[i, v]  = extern mm(x, W)             lse, dW = rows_0(x, t, W)        # in chunks of rows
    lse[i]    = f(mm[i, :], t[i])                 mm = extern mm(x, W)       # its body
    d[i, v]   = g(mm[i, v], lse[i])               lse, d = ...
    dW[v, c]  = extern mm(d^T, x)                 extern addmm_(dW, d^T, x)

Sums over rows are added up over the chunks: those of products in the type of their result, or in
f32 where that is narrower. Nothing here knows what a loss is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusec.ir.decision import Decision
from fusec.ir.expr import Buffer, Reduce, postorder
from fusec.ir.graph import (
    Chunked,
    Def,
    Extern,
    Graph,
    Kernel,
    Region,
    Schedule,
    Step,
    View,
    argument_views,
)
from fusec.ir.index import Index, Size, index
from fusec.passes.contract import Cut
from fusec.passes.cost import count, numel
from fusec.passes.dag import below, between, dependencies, find_uses, reads
from fusec.passes.machine import Tuning
from fusec.passes.rows import NotByRows, RowBody

RATIO = 6
"""Columns of an expansion for each column of its rows. An MLP's hidden layer has 4 and stays."""
LARGE = 4
"""What has a fourth of the expansion's elements is as large as it."""
TARGET = "fusec.rows"


def cut_loops(schedule: Schedule, cut: Cut) -> Schedule:
    """Return the schedule with loops for the calls of regions, whose bodies ``cut`` cuts."""
    steps: list[Step] = []
    decisions = schedule.decisions
    for step in schedule.steps:
        if isinstance(step, Extern) and step.region is not None:
            body = cut(step.region.body)
            decisions += body.decisions
            steps.append(_loop(step, step.region, body))
        else:
            steps.append(step)
    return replace(schedule, steps=tuple(steps), decisions=decisions)


def chunk(graph: Graph, threshold: int, clean: Callable[[Graph], Graph], tuning: Tuning) -> Graph:
    """Return the graph with calls in the place of regions.

    Args:
        threshold: bytes from which an expansion is large; 0: none is.
        clean: inlines definitions, so that views, casts and biases do not hide who reads a row.
        tuning: says how large a chunk is.
    """
    if not threshold or not any(_is_expansion(node, threshold) for node in graph.nodes):
        return graph
    original = graph
    graph = clean(graph)
    decisions: list[Decision] = []
    refused: set[Buffer] = set()
    while (seed := _next_seed(graph, threshold, refused)) is not None:
        try:
            taken = sum(decision.taken for decision in decisions)
            graph, region = _take_out(graph, seed, f"rows_{taken}", tuning)
        except NotByRows as problem:
            refused.add(seed)
            decisions.append(Decision(seed.name, "chunks of rows", False, str(problem), None))
            continue
        reason = f"{region.chunk} of {region.rows} rows at a time"
        decisions.append(Decision(seed.name, "chunks of rows", True, reason, None))
    found = graph if any(decision.taken for decision in decisions) else original
    return replace(found, decisions=(*graph.decisions, *decisions))


def _is_expansion(node: Def | Extern, threshold: int) -> bool:
    """Return True for a product that is much wider than its rows, and large."""
    if not isinstance(node, Extern) or node.target != "aten.mm.default":
        return False
    (made,), rows = node.outputs, node.args[0]
    if made is None or not isinstance(rows, View):
        return False
    wide = made.shape[1].hint() >= RATIO * rows.shape[1].hint()
    return wide and numel(made) * made.dtype.itemsize >= threshold


def _next_seed(graph: Graph, threshold: int, refused: set[Buffer]) -> Buffer | None:
    for node in graph.nodes:
        if _is_expansion(node, threshold) and isinstance(node, Extern):
            (made,) = node.outputs
            if made is not None and made not in refused:
                return made
    return None


# -- the region ------------------------------------------------------------------------------------


def _take_out(graph: Graph, seed: Buffer, name: str, tuning: Tuning) -> tuple[Graph, Region]:
    """Return the graph with a call in the place of an expansion's region.

    Raises:
        NotByRows: with what stands against it.
    """
    uses, dag = find_uses(graph), dependencies(graph)
    producer = uses.producer
    readers: dict[Buffer, set[int]] = {}
    for position, node in enumerate(graph.nodes):
        for buffer in reads(node):
            readers.setdefault(buffer, set()).add(position)
    returned = {view.buffer for view in argument_views(graph.outputs)}
    rows, size = seed.shape[0], numel(seed)
    row_bytes = numel(seed) // max(rows.hint(), 1) * seed.dtype.itemsize
    height = chunk_rows(rows, row_bytes, tuning)
    members = {producer[seed]}
    share_of = _count(rows, height)
    sizes = graph.sizes
    while True:
        body = RowBody(rows, share_of)
        for position in sorted(members):
            body.add(position, graph.nodes[position])
        grown = set(members)
        for buffer in (b for b in body.made if numel(b) * LARGE >= size):
            if buffer in returned:
                raise NotByRows(f"{buffer} is returned")
            grown |= readers.get(buffer, set())
        for position in (producer[b] for b in body.sources if b in producer):
            if _points(graph.nodes[position]) * LARGE >= size:
                grown.add(position)
        grown |= between(dag, grown)
        if grown == members:
            break
        members = grown
    results = tuple(b for b in body.made if b in returned or not readers.get(b, set()) <= members)
    region = body.region(results, sizes)
    made = Region(name, rows, height, share_of, region.body, results, region.sums, region.added)
    call = Extern(
        name,
        TARGET,
        (name, body.sliced_views(), body.whole_views()),
        (),
        (*results, *region.sums, *region.added),
        f"in chunks of {height} rows",
        region=made,
    )
    return _replaced(graph, members, below(dag, members), call, body.after), made


def _points(node: Def | Extern) -> int:
    """Return the elements that a line makes, or runs over to make fewer."""
    if isinstance(node, Extern):
        return max((numel(b) for b in node.outputs if b is not None), default=0)
    inner = [count(n.body.axes) for n in postorder((node.expr,)) if isinstance(n, Reduce)]
    return max((numel(node.buffer), *inner))


def _replaced(
    graph: Graph, members: set[int], later: set[int], call: Extern, after: dict[int, Def]
) -> Graph:
    """Return the graph with a call where its members were, before all that is ``later``."""
    before: list[Def | Extern] = []
    behind: list[Def | Extern] = []
    for position, node in enumerate(graph.nodes):
        if position in after:
            behind.append(after[position])
        elif position not in members:
            (behind if position in later else before).append(node)
    return replace(graph, nodes=(*before, call, *behind))


# -- sizes -----------------------------------------------------------------------------------------


def chunk_rows(rows: Index, row_bytes: int, tuning: Tuning) -> int:
    """Return how many rows run at a time: an even share if one is near, else an aligned number."""
    step = tuning.chunk_alignment
    fit = max(tuning.chunk_bytes // max(row_bytes, 1) // step * step, step, tuning.chunk_rows)
    if not rows.is_constant:
        return fit
    if rows.const <= fit:
        return rows.const
    even = [n for n in range(fit, fit // 2, -step) if rows.const % n == 0]
    return even[0] if even else fit


def _count(rows: Index, height: int) -> Index:
    """Return the rows of one chunk: a number, or a size where the last chunk may be short."""
    if rows.is_constant and rows.const % height == 0:
        return index(height)
    return index(Size("rows", height))


def _loop(call: Extern, region: Region, body: Schedule) -> Chunked:
    _, sliced, whole = call.args
    steps = tuple(
        replace(s, name=f"{region.name}_{s.name}") if isinstance(s, Kernel) else s
        for s in body.steps
    )
    return Chunked(
        region.name,
        region.rows,
        region.chunk,
        region.count,
        replace(body, steps=steps),
        tuple(argument_views((sliced,))),
        tuple(argument_views((whole,))),
        region.results,
        region.sums,
        region.added,
    )
