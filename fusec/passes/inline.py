"""Substitute definitions that are not worth a place of their own into their readers.

Spec: ``graph -> graph``. Inlined are (a) what reads no memory (masks, ranges, constants), (b) a
pointwise definition with one reader, (c) a cheap pointwise definition of one full-size operand,
into all its readers: to compute it again costs less than to store and load it. Live-out definitions
stay, but cheap ones are inlined as well, so that readers do not wait for memory.

Substitution needs no unification: any index map will do, so chains through reshapes, slices and
cats fuse here, whatever their axes.
"""

from __future__ import annotations

from fusec.ir.expr import Buffer, Expr, Load, Op, Reduce, loads, postorder
from fusec.ir.graph import Def, Extern, Graph, Origin
from fusec.ir.index import Axis, product
from fusec.ir.rewrite import inline_loads
from fusec.ir.scalar import SCALAR_OPS
from fusec.passes.cost import count, numel
from fusec.passes.dag import Uses, find_uses
from fusec.passes.simplify import simplify_exprs

CHEAP = 6
"""Multiply-adds a point that cost less than a round trip through memory (about 8 bytes)."""
MAX_NODES = 400
"""Larger expressions stay apart: readers of a kernel, and compilers, have their limits."""


def inline(graph: Graph) -> Graph:
    """Return the graph with trivial definitions substituted into their readers."""
    uses = find_uses(graph)
    definitions: dict[object, tuple[tuple[Axis, ...], Expr]] = {}
    origins: dict[Buffer, Origin] = {}
    nodes: list[Def | Extern] = []
    for node in graph.nodes:
        if isinstance(node, Extern):
            nodes.append(node)
            continue
        line = _substituted(node, definitions, origins)
        origins[line.buffer] = line.origin
        if _is_inlined(line, uses, graph):
            definitions[line.buffer] = (line.axes, line.expr)
            if line.buffer not in uses.live_out:
                continue
        nodes.append(line)
    return Graph(graph.name, graph.inputs, tuple(nodes), graph.outputs)


def _substituted(
    line: Def,
    definitions: dict[object, tuple[tuple[Axis, ...], Expr]],
    origins: dict[Buffer, Origin],
) -> Def:
    (expr,) = inline_loads((line.expr,), definitions)
    if expr is line.expr:
        return line
    origin = Origin()
    for buffer in dict.fromkeys(n.buffer for n in loads((line.expr,))):
        if buffer in definitions:
            origin = origin + origins[buffer]
    return Def(line.buffer, line.axes, simplify_exprs((expr,))[0], origin + line.origin)


def _is_inlined(line: Def, uses: Uses, graph: Graph) -> bool:
    readers = uses.readers.get(line.buffer, ())
    if not readers:
        return False
    nodes = postorder((line.expr,))
    if any(isinstance(n, Reduce) for n in nodes):
        return False
    sources = [n for n in nodes if isinstance(n, Load)]
    cost = _cost_of_a_point(line)
    if not sources:
        return cost <= 4 * CHEAP
    if len(nodes) > MAX_NODES:
        return False
    if line.buffer in uses.live_out:
        return False
    points = product(a.extent for a in line.axes).hint()
    if len(readers) == 1:
        reader = graph.nodes[readers[0]]
        assert isinstance(reader, Def)
        sites = [n for n in loads((reader.expr,)) if n.buffer is line.buffer]
        repeated = _points(sites[0], reader) > points if sites else False
        return len(sites) <= 2 and (not repeated or cost <= CHEAP)
    full_size = sum(numel(n.buffer) >= points for n in sources)
    return cost <= CHEAP and full_size <= 1


def _cost_of_a_point(line: Def) -> int:
    """Return multiply-adds for one point; what varies along fewer axes is computed once for them.

    ``x[m, c] - log(s[m])`` is a subtraction: its readers compute the logarithm once a row, too.
    """
    points = max(product(a.extent for a in line.axes).hint(), 1)
    operations = [n for n in postorder((line.expr,)) if isinstance(n, Op)]
    total = sum(SCALAR_OPS[n.name].cost * count(n.axes) for n in operations)
    return -(-total // points)


def _points(load: Load, reader: Def) -> int:
    """Return how many points of the reader evaluate a load, each distinct index tuple once."""
    return product(a.extent for a in load.axes).hint()
