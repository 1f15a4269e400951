"""Statistics of a product's rows, tile by tile: sums that a matrix product can compute on its way.

Spec: ``graph -> graph``. A tile of a product holds a piece of each of its rows. Where a row is
summed over and not read again, the sum becomes partial sums over ``WIDTH`` columns, which share the
product's tile, and a small final one. Partial sums of squares are taken about the piece's own mean
and combined about the row's (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm
for computing sample variances", 1979), so that nothing cancels.

Worked example, with n = p*128 + i::

    s[m] = sum(n: h[m, n])/N            part[m, p] = sum(i: h[m, n]);  s[m] = sum(p: part[m, p])/N
    q[m] = sum(n: (h[m, n] - s[m])**2)  rest[m, p] = sum(i: (h[m, n] - part[m, p]/128)**2)
                                        q[m] = sum(p: rest[m, p] + 128*(part[m, p]/128 - s[m])**2)
"""

from __future__ import annotations

from dataclasses import dataclass

from fusec.ir.contraction import factors
from fusec.ir.expr import Buffer, Const, Expr, Load, Op, Reduce, loads, reductions
from fusec.ir.graph import Def, Graph
from fusec.ir.index import Axis, Index, contiguous_strides, index
from fusec.ir.monoid import MAX, MIN, SUM
from fusec.ir.rewrite import rewrite
from fusec.passes.schedule.tiling import COLUMNS

WIDTH = COLUMNS
"""Columns of a piece: those of a product's tile."""


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The partial form of one sum over a row.

    Attributes:
        source: what was summed, over the row's axes and ``over``.
    """

    part: Buffer
    source: Expr
    axes: tuple[Axis, ...]
    over: Axis


def sum_rows_by_parts(graph: Graph) -> Graph:
    """Return the graph with the row statistics of products in pieces of ``WIDTH`` columns."""
    rows = _rows_of_products(graph)
    if not rows or _reads_rows_again(graph, rows):
        return graph
    known: dict[Buffer, _Pieces] = {}
    return graph.map_defs(lambda line: _in_parts(line, rows, known))


def _rows_of_products(graph: Graph) -> set[Buffer]:
    """Return the results of products, and what follows point by point, whose rows are long."""
    found: set[Buffer] = set()
    for node in graph.defs:
        if not node.axes:
            continue
        extent = node.axes[-1].extent
        if not extent.is_constant or extent.const <= 2 * WIDTH or extent.const % WIDTH:
            continue
        if sums := reductions(node.expr):
            if all(factors(n) is not None for n in sums):
                found.add(node.buffer)
        elif any(b in found and b.shape == node.buffer.shape for b in node.reads):
            found.add(node.buffer)
    return found


def _reads_rows_again(graph: Graph, rows: set[Buffer]) -> bool:
    """Return True if a definition as large as a row reads what came of a sum over one."""
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


def _in_parts(line: Def, rows: set[Buffer], known: dict[Buffer, _Pieces]) -> tuple[Def, ...]:
    (node, *others) = reductions(line.expr) or (None,)
    if node is None or others or line.buffer in rows or not set(line.reads) & rows:
        return (line,)
    if node.monoid not in (SUM, MAX, MIN) or len(node.over) != 1:
        return (line,)
    (over,) = node.over
    if not all(_along_row(x, over) for x in loads((node.body,)) if x.buffer in rows):
        return (line,)
    square = _deviation(node, known)
    if square is not None:
        return _squares_in_parts(line, node, *square)
    if any(x.buffer not in rows for x in loads((node.body,))):
        return (line,)
    pieces = _pieces(line, node)
    last = Axis("p", pieces.part.shape[-1])
    total = Reduce(node.monoid, (last,), Load(pieces.part, (*_at(line), index(last))))
    final = _with(line, node, total)
    if node.monoid is SUM and _is_mean(line, node):
        known[line.buffer] = pieces
    else:
        known.setdefault(pieces.part, pieces)
    return _partial(line, node, pieces, node.body), final


def _along_row(load: Load, over: Axis) -> bool:
    whole = load.guard is None and over.extent is load.buffer.shape[-1]
    return whole and load.indices[-1].as_axis() is over


def _at(line: Def) -> tuple[Index, ...]:
    return tuple(index(a) for a in line.axes)


def _pieces(line: Def, node: Reduce) -> _Pieces:
    (over,) = node.over
    shape = (*line.buffer.shape, index(over.extent.const // WIDTH))
    name = f"{line.buffer.name}_part"
    part = Buffer(name, shape, contiguous_strides(shape), node.dtype)
    return _Pieces(part, node.body, line.axes, over)


def _partial(
    line: Def, node: Reduce, pieces: _Pieces, body: Expr, mean: Buffer | None = None
) -> Def:
    """Return the definition of the pieces of ``node`` (about the pieces' means, if given)."""
    (over,) = (pieces.over,)
    own = tuple(Axis(a.name, a.extent) for a in line.axes)
    piece, within = Axis("p", pieces.part.shape[-1]), Axis(over.name, index(WIDTH))
    mapping = {a: index(b) for a, b in zip(line.axes, own, strict=True)}
    mapping[over] = index(piece) * WIDTH + index(within)
    value = body.substitute(mapping)
    if mean is not None:
        here = Load(mean, (*map(index, own), index(piece)))
        about = Op("sub", (value, Op("mul", (here, Const(1.0 / WIDTH, value.dtype)))))
        value = Op("mul", (about, about))
    return Def(pieces.part, (*own, piece), Reduce(node.monoid, (within,), value), line.origin)


def _with(line: Def, node: Reduce, total: Expr) -> Def:
    (expr,) = rewrite((line.expr,), lambda n: total if n is node else n)
    return Def(line.buffer, line.axes, expr, line.origin, line.covers)


def _is_mean(line: Def, node: Reduce) -> bool:
    """Return True if a definition is a row's sum divided by its length."""
    (over,) = node.over
    match line.expr:
        case Op(name="div", args=(total, Const(value=length))):
            return total is node and length == over.extent.const
        case Op(name="mul", args=(total, Const(value=inverse))):
            return total is node and inverse * over.extent.const == 1.0
        case _:
            return False


def _deviation(node: Reduce, known: dict[Buffer, _Pieces]) -> tuple[Load, _Pieces] | None:
    """Return the mean and its pieces if ``node`` is a sum of squares about the row's mean."""
    match node:
        case Reduce(monoid=monoid, body=Op(name="mul", args=(a, b))) if a is b and monoid is SUM:
            match a:
                case Op(name="sub", args=(x, Load() as mean)) if mean.buffer in known:
                    pieces = known[mean.buffer]
                    mapping = dict(zip(pieces.axes, mean.indices, strict=True))
                    mapping[pieces.over] = index(node.over[0])
                    if pieces.source.substitute(mapping) is x:
                        return mean, pieces
    return None


def _squares_in_parts(line: Def, node: Reduce, mean: Load, sums: _Pieces) -> tuple[Def, ...]:
    assert isinstance(node.body, Op) and isinstance(node.body.args[0], Op)
    value = node.body.args[0].args[0]
    pieces = _pieces(line, node)
    partial = _partial(line, node, pieces, value, sums.part)
    last = Axis("p", pieces.part.shape[-1])
    kind = node.dtype
    piece = Load(sums.part, (*mean.indices, index(last)))
    away = Op("sub", (Op("mul", (piece, Const(1.0 / WIDTH, kind))), mean))
    between = Op("mul", (Op("mul", (away, away)), Const(float(WIDTH), kind)))
    rest = Load(pieces.part, (*_at(line), index(last)))
    total = Reduce(SUM, (last,), Op("add", (rest, between)))
    return partial, _with(line, node, total)
