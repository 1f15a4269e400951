"""Split row statistics of a matrix product by tiles, so that they fuse into its epilogue.

Spec: ``graph -> graph``. A tile of a product holds a part of each of its rows. Where a row is
reduced and not read again, the reduction becomes partial ones over ``width`` columns, which share
the product's tile, and a small final one (``rfactor.py``). Squared deviations from a row's mean are
summed about the part's own mean, and combined about the row's.

Worked example, with n = p*128 + i::

    s[m] = sum(n: h[m, n])/N            part[m, p] = sum(i: h[m, n]);  s[m] = sum(p: part[m, p])/N
    q[m] = sum(n: (h[m, n] - s[m])**2)  rest[m, p] = sum(i: (h[m, n] - part[m, p]/128)**2)
                                        q[m] = sum(p: rest[m, p] + 128*(part[m, p]/128 - s[m])**2)
"""

from __future__ import annotations

from fusec.ir.combine import AxisSplit
from fusec.ir.contraction import factors
from fusec.ir.expr import Buffer, Load, Reduce, loads, reductions
from fusec.ir.graph import Def, Graph
from fusec.ir.index import Axis
from fusec.ir.monoid import MAX, MIN, SUM
from fusec.passes.graph.rfactor import Splitter, cut_axis, one_reduction
from fusec.passes.graph.squares import find_squares


def sum_rows_by_parts(graph: Graph, width: int) -> Graph:
    """Return the graph with row statistics of products split into parts of ``width`` columns."""
    rows = _rows_of_products(graph, width)
    if not rows or _reads_rows_again(graph, rows):
        return graph
    return graph.map_defs(Splitter(_cuts(graph, rows, width), None, fastest=True).split)


def _rows_of_products(graph: Graph, width: int) -> set[Buffer]:
    """Return the products with long rows, and the buffers that are computed from them pointwise."""
    found: set[Buffer] = set()
    for node in graph.defs:
        if not node.axes:
            continue
        extent = node.axes[-1].extent
        if not extent.is_constant or extent.const <= 2 * width or extent.const % width:
            continue
        if sums := reductions(node.expr):
            if all(factors(n) is not None for n in sums):
                found.add(node.buffer)
        elif any(b in found and b.shape == node.buffer.shape for b in node.reads):
            found.add(node.buffer)
    return found


def _reads_rows_again(graph: Graph, rows: set[Buffer]) -> bool:
    """Return True if a definition of the shape of ``rows`` depends on a reduction over a row."""
    sums: set[Buffer] = set()
    for node in graph.defs:
        sources = set(node.reads)
        wide = {b.shape for b in rows}
        if sources & sums and node.buffer.shape in wide:
            return True
        reduces = bool(reductions(node.expr))
        if sources & sums or (reduces and sources & rows and node.buffer not in rows):
            sums.add(node.buffer)
    return False


def _cuts(graph: Graph, rows: set[Buffer], width: int) -> dict[Def, AxisSplit]:
    """Return line -> split, for lines that reduce rows only, and sums of squares beside them."""
    along = {line: one_reduction(line) for line in graph.defs if _reduces_rows(line, rows)}
    squares = find_squares(along)
    alone = {line for line, node in along.items() if rows.issuperset(_sources(node))}
    return {
        line: cut_axis(node.over[0], width)
        for line, node in along.items()
        if line in alone or (line in squares and squares[line].total in alone)
    }


def _reduces_rows(line: Def, rows: set[Buffer]) -> bool:
    """Return True if a line has one reduction, over whole rows."""
    if len(reductions(line.expr)) != 1 or line.buffer in rows or rows.isdisjoint(line.reads):
        return False
    node = one_reduction(line)
    if node.monoid not in (SUM, MAX, MIN) or len(node.over) != 1:
        return False
    (over,) = node.over
    return all(_along_row(x, over) for x in loads((node.body,)) if x.buffer in rows)


def _sources(node: Reduce) -> set[Buffer]:
    return {load.buffer for load in loads((node.body,))}


def _along_row(load: Load, over: Axis) -> bool:
    whole = load.guard is None and over.extent is load.buffer.shape[-1]
    return whole and load.indices[-1].as_axis() is over
