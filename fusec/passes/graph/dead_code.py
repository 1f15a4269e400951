"""Remove definitions and pure externs whose results are unused, and elements that nobody reads.

Spec: ``graph -> graph``; outputs and impure externs keep their values; order is kept. Where all
readers of a definition read a first part of it, element by element, only that is computed: a causal
convolution pads both ends of a sequence, and what follows reads no further than the sequence::

    c[t] = sum(k: x[t + k - 3] * w[k])  of 2051 places     y[t] = silu(c[t])  of 2048 places
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial

from fusec.ir.expr import Buffer, loads, postorder
from fusec.ir.graph import Def, Graph, Line
from fusec.ir.index import Axis, Index, index
from fusec.ir.rewrite import is_checked, reading, rewrite
from fusec.ir.strides import contiguous_strides
from fusec.passes.dag import find_uses


def dead_code(graph: Graph) -> Graph:
    """Return the graph without lines that no output, impure extern or size depends on."""
    live = set(graph.returned)
    kept: list[Line] = []
    for line in reversed(graph.nodes):
        if line.impure or line.defines_sizes or not live.isdisjoint(line.writes):
            kept.append(line)
            live.update(line.reads)
    if len(kept) < len(graph.nodes):
        graph = replace(graph, nodes=tuple(reversed(kept)))
    return _narrowed(graph)


def _narrowed(graph: Graph) -> Graph:
    """Return the graph with definitions of those elements alone that are read."""
    places: defaultdict[Buffer, set[tuple[Index, ...]]] = defaultdict(set)
    for load in loads([line.expr for line in graph.defs]):
        places[load.buffer].add(load.indices)
    for buffer in find_uses(graph).live_out:
        places.pop(buffer, None)
    for line in graph.defs:
        if any(map(is_checked, postorder((line.expr,)))):  # elements that nobody reads may raise
            places.pop(line.buffer, None)
    parts = {d.buffer: part for d in graph.defs if (part := _part_of(d.buffer, places[d.buffer]))}
    if not parts:
        return graph

    def narrow(line: Def) -> tuple[Def, ...]:
        part = parts.get(line.buffer)
        if part is None:
            return (line,)
        pairs = zip(line.axes, part.shape, strict=True)
        own = {a: a if a.extent is n else Axis(a.name, n) for a, n in pairs}
        changed = {a: index(b) for a, b in own.items() if a is not b}
        found = line.expr.substitute(changed)
        return (replace(line, buffer=part, axes=tuple(own.values()), expr=found),)

    return graph.map_defs(narrow).map(partial(rewrite, rule=reading(parts)))


def _part_of(buffer: Buffer, places: set[tuple[Index, ...]]) -> Buffer | None:
    """Return a buffer of the leading part of another one that is read; None: all is."""
    if not places or not buffer.is_row_major:
        return None
    shape = list(buffer.shape)
    for k, (extent, *read) in enumerate(zip(buffer.shape, *places, strict=True)):
        ends = {axis.extent for at in read if (axis := at.as_axis()) is not None}
        known = len(ends) == 1 and all(at.as_axis() is not None for at in read)
        (end, *_) = (*ends, extent)
        if known and end.is_constant and extent.is_constant and end.const < extent.const:
            shape[k] = end
    if tuple(shape) == buffer.shape:
        return None
    strides = contiguous_strides(tuple(shape))
    return Buffer(buffer.name, tuple(shape), strides, buffer.dtype, buffer.form)
