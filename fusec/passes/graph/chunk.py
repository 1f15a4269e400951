"""Run the lines around a far wider product in chunks of rows, so that it is never whole in memory.

Spec: ``graph -> graph``. An *expansion* is a matrix product much wider than the rows of its left
operand: the logits of a loss, rows x vocabulary. Its *region* is every line that reads it or a
buffer about as large, and the lines on paths between them. If each line of the region is

* a definition that reads only row i to compute row i, or sums over all rows, or
* a product that has these rows, or that contracts over them,

then the region can run on a few rows at a time, and its buffers have only so many rows. A loop
(``RowLoop``) replaces it in the graph; the body is a graph of its own, with fewer rows::

    mm[i, v]  = extern mm(x, W)             lse, dW = rows_0(x, t, W)        # in chunks of rows
    lse[i]    = f(mm[i, :], t[i])                 mm = extern mm(x, W)       # its body
    d[i, v]   = g(mm[i, v], lse[i])               lse, d = ...
    dW[v, c]  = extern mm(d^T, x)                 extern addmm_(dW, d^T, x)

Sums over rows are accumulated over the chunks: those of products in the type of their result, or in
f32 where that is narrower. The pass has no notion of a loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fusec.ir.decision import Decision
from fusec.ir.expr import Buffer, reductions
from fusec.ir.graph import (
    Def,
    Graph,
    Kernel,
    Line,
    RowLoop,
    Schedule,
    Step,
    all_kernels,
    argument_views,
)
from fusec.ir.index import Index, Size, index
from fusec.ir.machine import FusionTuning
from fusec.passes.dag import below, between, dependencies, find_uses
from fusec.passes.fusion.contract import FuseGraph
from fusec.passes.fusion.cost import buffer_bytes, numel
from fusec.passes.graph.rows import NotByRows, RowBody
from fusec.passes.schedule.access import count


def cut_loops(schedule: Schedule, cut: FuseGraph) -> Schedule:
    """Return the schedule with the bodies of its loops over rows cut into kernels by ``cut``."""
    cut_into: dict[Step, RowLoop] = {}
    decisions = schedule.decisions
    for loop in schedule.loops:
        body = cut(loop.graph)
        decisions += body.decisions
        body = body.map_kernels(partial(_inside, loop.name))
        cut_into[loop] = _stored_by_body(replace(loop, body=body), body)
    steps = tuple(cut_into.get(step, step) for step in schedule.steps)
    return replace(schedule, steps=steps, decisions=decisions) if cut_into else schedule


def _inside(loop: str, kernel: Kernel) -> tuple[Kernel]:
    """Return the kernel renamed to be unique outside of its loop, too."""
    return (replace(kernel, name=f"{loop}_{kernel.name}"),)


def _stored_by_body(loop: RowLoop, body: Schedule) -> RowLoop:
    """Return the loop with rows that its body's kernels compute stored where they belong.

    The body takes a window of the result as a buffer, in the place of returning one to be copied.
    """
    stored = {store.buffer for kernel in all_kernels(body) for store in kernel.stores}
    returned = Counter(view.buffer for view in argument_views(body.graph.outputs))
    placed = {b: part for b, part in loop.chunks.items() if part in stored and returned[part] == 1}
    if not placed:
        return loop
    outputs = zip((*loop.results, *loop.sums), body.graph.outputs, strict=True)
    graph = replace(
        body.graph,
        inputs=(*body.graph.inputs, *placed.values()),
        outputs=tuple(output for buffer, output in outputs if buffer not in placed),
    )
    results = tuple(b for b in loop.results if b not in placed)
    return replace(loop, body=replace(body, graph=graph), results=results, placed=tuple(placed))


def chunk(
    graph: Graph, threshold: int, clean: Callable[[Graph], Graph], tuning: FusionTuning
) -> Graph:
    """Return the graph with regions of large expansions replaced by loops over rows.

    Args:
        threshold: bytes from which an expansion is large; 0 disables the pass.
        clean: inlines definitions, so that views, casts and biases do not hide consumers of a row.
        tuning: what an expansion is, and the size of a chunk.
    """
    if not threshold or not _expansions(graph, threshold, tuning):
        return graph
    original = graph
    graph = clean(graph)
    decisions: list[Decision] = []
    refused: set[Buffer] = set()
    while seeds := [b for b in _expansions(graph, threshold, tuning) if b not in refused]:
        seed = seeds[0]
        try:
            taken = sum(decision.taken for decision in decisions)
            graph, loop = _take_out(graph, seed, f"rows_{taken}", tuning)
        except NotByRows as problem:
            refused.add(seed)
            decisions.append(_decision(seed, False, str(problem)))
            continue
        reason = f"{loop.chunk} of {loop.rows} rows at a time"
        decisions.append(_decision(seed, True, reason))
    found = graph if any(decision.taken for decision in decisions) else original
    return replace(found, decisions=(*graph.decisions, *decisions))


def _decision(seed: Buffer, taken: bool, reason: str) -> Decision:
    return Decision(seed.name, "chunks of rows", taken, reason, None, "all rows at once")


def _expansions(graph: Graph, threshold: int, tuning: FusionTuning) -> list[Buffer]:
    """Return the large products that are much wider than the rows of their left operand."""
    products = [(call.writes[0], call.views[0]) for call in graph.externs if call.product]
    return [
        made
        for made, rows in products
        if is_expansion(
            made.shape[1].hint(), rows.shape[1].hint(), buffer_bytes(made), threshold, tuning
        )
    ]


def is_expansion(columns: int, terms: int, size: int, threshold: int, tuning: FusionTuning) -> bool:
    """Return True for a product of ``size`` bytes that is large, and far wider than its rows."""
    return columns >= tuning.chunk_ratio * terms and size >= threshold


# -- the region ------------------------------------------------------------------------------------


def _take_out(graph: Graph, seed: Buffer, name: str, tuning: FusionTuning) -> tuple[Graph, RowLoop]:
    """Return the graph with a loop in the place of an expansion's region, and the loop.

    Raises:
        NotByRows: with the reason why the region cannot run by rows.
    """
    uses, dag = find_uses(graph), dependencies(graph.nodes)
    producer = uses.producer
    readers: dict[Buffer, set[int]] = {}
    for position, node in enumerate(graph.nodes):
        for buffer in node.reads:
            readers.setdefault(buffer, set()).add(position)
    returned = graph.returned
    rows, size = seed.shape[0], numel(seed)
    row_bytes = numel(seed) // max(rows.hint(), 1) * seed.dtype.itemsize
    height = chunk_rows(rows, row_bytes, tuning)
    # A size where the last chunk may be short.
    even = rows.is_constant and rows.const % height == 0
    count_of_chunk = index(height if even else Size("rows", height))
    members = {producer[seed]}
    while True:
        body = RowBody(rows, count_of_chunk)
        for position in sorted(members):
            body.add(position, graph.nodes[position])
        grown = set(members)
        for buffer in (b for b in body.made if numel(b) * tuning.chunk_large >= size):
            if buffer in returned:
                raise NotByRows(f"{buffer} is returned")
            grown |= readers.get(buffer, set())
        for position in (producer[b] for b in body.sources if b in producer):
            if _points(graph.nodes[position]) * tuning.chunk_large >= size:
                grown.add(position)
        grown |= between(dag, grown)
        if grown == members:
            break
        members = grown
    results = tuple(b for b in body.made if b in returned or not readers.get(b, set()) <= members)
    loop = body.loop(name, height, results, graph.sizes)
    return _replaced(graph, members, below(dag, members), loop, body.after), loop


def _points(node: Line) -> int:
    """Return the elements that a line iterates over: of its result, or of a reduction's body."""
    inner: list[int] = []
    match node:
        case Def():
            inner = [count(n.inner) for n in reductions(node.expr)]
    return max((*inner, *map(numel, node.writes)), default=0)


def _replaced(
    graph: Graph, members: set[int], later: set[int], loop: RowLoop, after: dict[int, Def]
) -> Graph:
    """Return the graph with ``members`` replaced by a loop, which the lines ``later`` follow."""
    before: list[Line] = []
    behind: list[Line] = []
    for position, node in enumerate(graph.nodes):
        if position in after:
            behind.append(after[position])
        elif position not in members:
            (behind if position in later else before).append(node)
    return replace(graph, nodes=(*before, loop, *behind))


# -- sizes -----------------------------------------------------------------------------------------


def chunk_rows(rows: Index, row_bytes: int, tuning: FusionTuning) -> int:
    """Return the rows of a chunk: an aligned divisor of ``rows`` near the limit, else the limit."""
    step = tuning.chunk_alignment
    fit = max(tuning.chunk_bytes // max(row_bytes, 1) // step * step, step, tuning.chunk_rows)
    if not rows.is_constant:
        return fit
    if rows.const <= fit:
        return rows.const
    even = [n for n in range(fit, fit // 2, -step) if rows.const % n == 0]
    return even[0] if even else fit
