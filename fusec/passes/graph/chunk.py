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

The loop carries sums over rows; those of products are added up in place, in the type of their
result, or in f32 where that is narrower. Where such a sum in f32 takes about as much memory as the
rows that the product reads (``d`` above), these are whole and the product follows the loop, which
is then around the expansion and what reads it alone. The pass has no notion of a loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from fusec.ir.decision import Decision
from fusec.ir.dtype import F32
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
        body = cut_loops(cut(loop.graph), cut)
        decisions += body.decisions
        body = body.map_kernels(partial(_inside, loop.name))
        cut_into[loop] = _stored_by_body(replace(loop, body=body), body)
    steps = tuple(cut_into.get(step, step) for step in schedule.steps)
    return replace(schedule, steps=steps, decisions=decisions) if cut_into else schedule


def _inside(loop: str, kernel: Kernel) -> tuple[Kernel]:
    """Return the kernel renamed to be unique outside of its loop, too."""
    return (replace(kernel, name=f"{loop}_{kernel.name}"),)


def _stored_by_body(loop: RowLoop, body: Schedule) -> RowLoop:
    """Return the loop with what its body's kernels compute stored where it belongs.

    The body takes a window of the result as a buffer, in the place of returning one to be copied,
    and a buffer for each next value, all of which kernels store.
    """
    stored = {store.buffer for kernel in all_kernels(body) for store in kernel.stores}
    returned = Counter(view.buffer for view in argument_views(body.graph.outputs))
    placed = {b: part for b, part in loop.chunks.items() if part in stored and returned[part] == 1}
    carried = tuple(made for _, made in replace(loop, body=body.graph).states)
    if not placed and not carried:
        return loop
    outputs = zip(loop.results, body.graph.outputs, strict=False)
    graph = replace(
        body.graph,
        inputs=(*body.graph.inputs, *placed.values(), *carried),
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
    tuning = replace(tuning, chunk_bytes=min(tuning.chunk_bytes, threshold))
    original = graph
    graph = clean(graph)
    decisions: list[Decision] = []
    refused: set[Buffer] = set()
    while seeds := [b for b in _expansions(graph, threshold, tuning) if b not in refused]:
        seed = seeds[0]
        try:
            taken = sum(decision.taken for decision in decisions)
            graph, reason = _take_out(graph, seed, f"rows_{taken}", tuning)
        except NotByRows as problem:
            refused.add(seed)
            decisions.append(_decision(seed, False, str(problem)))
            continue
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


class _Lines:
    """The lines of a graph, by position, around an expansion: what grows into its region."""

    def __init__(self, graph: Graph, seed: Buffer, tuning: FusionTuning) -> None:
        self.graph, self.seed, self.tuning = graph, seed, tuning
        self.dag, self.producer = dependencies(graph.nodes), find_uses(graph).producer
        self.row_bytes = buffer_bytes(seed) // max(seed.shape[0].hint(), 1)
        self.readers: dict[Buffer, set[int]] = {}
        for position, node in enumerate(graph.nodes):
            for buffer in node.reads:
                self.readers.setdefault(buffer, set()).add(position)

    def region(self, height: int, kept: tuple[Buffer, ...] = ()) -> tuple[set[int], RowBody]:
        """Return the region's lines, and the body that runs them on ``height`` rows at a time.

        Args:
            kept: large buffers that are whole after the loop, where others read them.
        Raises:
            NotByRows: with the reason why the region cannot run by rows.
        """
        rows = self.seed.shape[0]
        # A size where the last chunk may be short.
        even = rows.is_constant and rows.const % height == 0
        count_of_chunk = index(height if even else Size("rows", height))
        members = {self.producer[self.seed]}
        while True:
            body = RowBody(rows, count_of_chunk)
            for position in sorted(members):
                body.add(position, self.graph.nodes[position])
            grown = members | self._neighbours(body, kept)
            grown |= between(self.dag, grown)
            if grown == members:
                return members, body
            members = grown

    def _neighbours(self, body: RowBody, kept: tuple[Buffer, ...]) -> set[int]:
        """Return the lines that read, or make, something about as large as the expansion."""
        found: set[int] = set()
        for buffer in body.made:
            if self._is_large(numel(buffer)) and buffer not in kept:
                if buffer in self.graph.returned:
                    raise NotByRows(f"{buffer} is returned")
                found |= self.readers.get(buffer, set())
        sources = {self.producer[b] for b in body.sources if b in self.producer}
        return found | {p for p in sources if self._is_large(_points(self.graph.nodes[p]))}

    def _is_large(self, points: int) -> bool:
        return points * self.tuning.chunk_large >= numel(self.seed)

    def whole(self, body: RowBody, heights: tuple[int, int]) -> tuple[Buffer, ...]:
        """Return the operands of products over all rows that had better be whole than added up.

        Products of 16 bits are added up in f32: beside two buffers of a chunk, and later the
        results, there is a sum of twice the results' bytes, which each chunk reads and writes. Or
        the products run once, after the loop, and their operand has all rows. That is as fast as
        if nothing ran in chunks, so a sum has to take clearly less memory.

        Args:
            heights: rows of a chunk without and with such sums.
        Raises:
            NotByRows: if such an operand is itself a product.
        """
        results = sum(map(buffer_bytes, body.widened))
        sums = sum(numel(result) * F32.itemsize for result in body.widened)
        found = dict.fromkeys(b for operands in body.widened.values() for b in operands)
        added = sums + max(results, 2 * heights[1] * self.row_bytes)
        kept = sum(map(buffer_bytes, found)) + max(results, heights[0] * self.row_bytes)
        if added * self.tuning.chunk_gain <= kept:
            return ()
        made = {line.buffer for line in self.graph.defs}
        for buffer in found:
            if buffer not in made:
                raise NotByRows(f"{buffer}: a product over all rows needs it whole")
        return tuple(found)


def _take_out(graph: Graph, seed: Buffer, name: str, tuning: FusionTuning) -> tuple[Graph, str]:
    """Return the graph with a loop in the place of an expansion's region, and what it does.

    Raises:
        NotByRows: with the reason why the region cannot run by rows, or gains nothing by it.
    """
    rows, lines = seed.shape[0], _Lines(graph, seed, tuning)
    height = chunk_rows(rows, lines.row_bytes, tuning)
    if rows.is_constant and height == rows.const:
        raise NotByRows("one chunk has all rows")
    members, body = lines.region(height)
    kept: tuple[Buffer, ...] = ()
    if body.widened:
        taller = chunk_rows(rows, lines.row_bytes, tuning, tuning.chunk_sum_rows)
        kept = lines.whole(body, (height, taller))
        height = height if kept else taller
        members, body = lines.region(height, kept)
    used = {b for b in body.made if not lines.readers.get(b, set()) <= members} | graph.returned
    results = tuple(b for b in body.made if b in used)
    loop = body.loop(name, height, results, graph.sizes)
    reason = f"{loop.chunk} of {loop.rows} rows at a time"
    reason += "".join(f"; {buffer} is whole, for a product over all rows" for buffer in kept)
    region: tuple[Line, ...] = (*body.zeros, loop)
    return _replaced(graph, members, below(lines.dag, members), region, body.after), reason


def _points(node: Line) -> int:
    """Return the elements that a line iterates over: of its result, or of a reduction's body."""
    inner: list[int] = []
    match node:
        case Def():
            inner = [count(n.inner) for n in reductions(node.expr)]
    return max((*inner, *map(numel, node.writes)), default=0)


def _replaced(
    graph: Graph, members: set[int], later: set[int], region: Iterable[Line], after: dict[int, Def]
) -> Graph:
    """Return the graph with ``members`` replaced by lines, which the lines ``later`` follow."""
    before: list[Line] = []
    behind: list[Line] = []
    for position, node in enumerate(graph.nodes):
        if position in after:
            behind.append(after[position])
        elif position not in members:
            (behind if position in later else before).append(node)
    return replace(graph, nodes=(*before, *region, *behind))


# -- sizes -----------------------------------------------------------------------------------------


def chunk_rows(rows: Index, row_bytes: int, tuning: FusionTuning, least: int = 1) -> int:
    """Return the rows of a chunk: an aligned divisor of ``rows`` near the limit, else the limit.

    Args:
        least: rows that a chunk has at least, beside those of ``tuning``.
    """
    step = tuning.chunk_alignment
    fit = max(tuning.chunk_bytes // max(row_bytes, 1) // step * step, step)
    fit = max(fit, tuning.chunk_rows, least)
    if not rows.is_constant:
        return fit
    if rows.const <= fit:
        return rows.const
    even = [n for n in range(fit, fit // 2, -step) if rows.const % n == 0]
    return even[0] if even else fit
