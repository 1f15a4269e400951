"""Streamed products: each weight is read once, and multiplied with all rows at once.

A product of few rows is limited by the reading of its weights, whose number does not depend on the
rows: it is *skinny*. One of more rows is streamed, too, where its weights lie in panels. Both are
recognised by their sums here; the frontend's spelling, the order of the factors and the type of the
operands do not matter.

Weights are contiguous along the sum, or in panels: the columns of one term in a panel are
neighbours, and the terms of these columns follow each other (``frontend/fx_passes/packing.py``).

Worked example: ``sum(k: x[m, k] * w[n, k])`` with m of 4 streams w along k. Its rows are ``(m,)``
and its column is n; with m of extent 1, which no expression has as an axis, it has no rows. With
``w[n//32, k, n%32]`` instead of ``w[n, k]`` its panels have 32 columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from fusec.ir.contraction import sides
from fusec.ir.expr import Buffer, Expr, Load, Reduce, loads, postorder, reductions
from fusec.ir.expr import substitute as substitute_index
from fusec.ir.graph import Def, Graph
from fusec.ir.index import Axis, Index, Runtime, floordiv, index, mod, product
from fusec.ir.rewrite import Normalizer, inline_loads

WIDEST_PANEL = 128
"""Columns of the widest panel: a wider one is a row-major matrix with terms on other pages."""


@dataclass(frozen=True, slots=True)
class StreamedProduct:
    """A product whose weights are read once.

    Attributes:
        rows: the axes of the rows, constant if they are few; none where there is one row.
        batch: axes that choose the weights, by a number that is read: the group of some rows.
        columns: the axis of the columns; of panels, perhaps more: panels and columns in a panel,
            of two in a byte panels, halves and columns in one.
        few: the operand that has the rows, in f32.
        terms: the number of terms of each sum.
        itemsize: bytes of a weight.
        integers: weights are integers in memory, and converted as they are read.
        packed: several of them are in a byte: the sum has an axis for the place in it.
        panel: columns of a panel, 0 without panels. The second of ``columns`` may be shorter: a
            part of each panel.
    """

    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    few: Expr
    terms: Index
    itemsize: int
    panel: int = 0
    batch: tuple[Axis, ...] = ()
    integers: bool = False
    packed: bool = False


def match_skinny(node: Expr, most: int) -> StreamedProduct | None:
    """Return a sum as a skinny product of at most ``most`` rows; None for anything else.

    Both operands are contiguous along the summed axis, or the weights are in panels. A sum over
    several axes, as of weights packed in groups and bytes, is one if its weights are integers.
    """
    for few, many, own, others, shared, over in _orders(node):
        rows = product(a.extent for a in own)
        if not rows.is_constant or rows.const > most or not others:
            continue
        if shared and not _is_chosen(many, over, shared):
            continue
        extent = product(a.extent for a in others)
        if extent.is_constant and extent.const <= rows.const:
            continue
        ordered, columns, batch = map(_by_serial, (own, others, shared))
        terms, whole = product(a.extent for a in over), reads_integers(many)
        if not _is_contiguous(few, over) or (len(over) > 1 and not whole):
            continue
        if len(columns) == 1 and _is_contiguous(many, over, only_integers=whole):
            size, packed = _itemsize(many), len(over) > 1
            return StreamedProduct(ordered, columns, few, terms, size, 0, batch, whole, packed)
        panel = 0 if batch else _panel(many, over, columns)
        if panel and (len(columns) > 1 or mod(columns[0].extent, index(panel)) is index(0)):
            size = _itemsize(many)
            return StreamedProduct(ordered, columns, few, terms, size, panel, (), whole)
    return None


def rows_beside_integers(node: Expr, most: int) -> Expr | None:
    """Return the rows of a product of at most ``most``, whose weights are integers in memory; None
    for anything else.

    The weights may lie in any order, and several in a byte.
    """
    for few, many, own, others, shared, over in _orders(node):
        rows, columns = (product(a.extent for a in axes) for axes in (own, others))
        if shared or not rows.is_constant or rows.const > most or not reads_integers(many):
            continue
        if others and _is_contiguous(few, over):
            return None if columns.is_constant and columns.const <= rows.const else few
    return None


def match_panels(node: Expr, width: int) -> StreamedProduct | None:
    """Return a product of any number of rows whose weights lie in panels of ``width`` columns.

    None for anything else. A single axis of columns need not end with a panel.
    """
    for few, many, own, others, shared, over in _orders(node):
        columns = _by_serial(others)
        one = columns and not shared and len(over) == 1
        if one and _panel(many, over, columns) == width:
            rows, size = _by_serial(own), _itemsize(many)
            return StreamedProduct(rows, columns, few, over[0].extent, size, width)
    return None


def columns_in_panels(node: Expr) -> Axis | None:
    """Return the axis of the columns in a panel for a product, of any number of rows, of integer
    weights that lie in panels; None for anything else."""
    for _, many, _, others, shared, over in _orders(node):
        columns = _by_serial(others)
        if len(columns) > 1 and not shared and reads_integers(many):
            return columns[-1] if _panel(many, over, columns) else None
    return None


def copies_from_tables(graph: Graph) -> dict[Buffer, Def]:
    """Return the definitions that only copy elements, at places that they read.

    Their readers may load from the table: the weights of a product, one matrix for each row.
    """
    return {line.buffer: line for line in graph.defs if _picks(line.expr)}


def conversions_of_integers(graph: Graph, simplify: Normalizer) -> dict[Buffer, Def]:
    """Return the definitions that compute each element from integers, which may be a weight's.

    They are whole: their producers that are such, too, are inlined.
    """
    found: dict[Buffer, Def] = {}
    for line in graph.defs:
        whole = inline_loads(line, found, simplify)
        if not reductions(whole.expr) and reads_integers(whole.expr):
            found[line.buffer] = whole
    return found


def reads_integers(value: Expr) -> bool:
    """Return True if a value's largest tensors, more than an eighth of the largest, are integers.

    Smaller ones are scales, of columns or of groups of terms.
    """
    sizes = {n: product(n.buffer.shape).hint() for n in loads((value,))}
    most = max(sizes.values(), default=0)
    return bool(most) and all(n.dtype.is_integer for n, size in sizes.items() if size * 8 > most)


def _picks(value: Expr) -> bool:
    atoms = (a for i in value.indices for a in i.atoms()) if isinstance(value, Load) else ()
    return any(isinstance(a, Runtime) for a in atoms)


_Axes: TypeAlias = frozenset[Axis]


def _orders(
    node: Expr,
) -> Iterator[tuple[Expr, Expr, _Axes, _Axes, _Axes, tuple[Axis, ...]]]:
    """Yield, for a product: either operand, the other, the axes of each, of both, and those of the
    sum."""
    found = sides(node)
    if found is None or not isinstance(node, Reduce):
        return
    left, right = (found.left, found.left_axes), (found.right, found.right_axes)
    for (few, own), (many, others) in ((left, right), (right, left)):
        yield few, many, own, others, found.shared, node.over


def _is_chosen(weights: Expr, over: Iterable[Axis], batch: frozenset[Axis]) -> bool:
    """Return True if weights depend on a batch only through numbers that are read."""
    found = [
        n for n in postorder((weights,)) if isinstance(n, Load) and not n.axes.isdisjoint(over)
    ]
    atoms = (a for n in found for i in n.indices for m, _ in i.terms for a in m)
    return all(isinstance(a, Runtime) or batch.isdisjoint(a.axes) for a in atoms)


def _by_serial(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    return tuple(sorted(axes, key=lambda a: a.serial))


def _is_contiguous(operand: Expr, over: tuple[Axis, ...], *, only_integers: bool = False) -> bool:
    """Return True if an operand's loads have stride 1 along one of the axes.

    Args:
        only_integers: leave out the others: scales.
    """
    found = [n for n in postorder((operand,)) if isinstance(n, Load) and n.axes & {*over}]
    found = [n for n in found if n.dtype.is_integer or not only_integers]
    offsets = [load.buffer.offset(load.indices) for load in found]
    steps = [{offset.coefficient(axis) for axis in over} for offset in offsets]
    return bool(found) and all(index(1) in step for step in steps)


def _itemsize(operand: Expr) -> int:
    return max((n.dtype.itemsize for n in postorder((operand,)) if isinstance(n, Load)), default=4)


def _panel(many: Expr, over: tuple[Axis, ...], columns: tuple[Axis, ...]) -> int:
    """Return the number of columns of a panel, or 0 if the operand is not in panels.

    Those of integers have scales beside them; two in a byte are of both halves of a panel.
    """
    found = [n for n in postorder((many,)) if isinstance(n, Load)]
    if reads_integers(many):
        found = [n for n in found if n.dtype.is_integer]
    if len(found) != 1 or found[0].guard is not None:
        return 0
    offset = found[0].buffer.offset(found[0].indices)
    steps = [offset.coefficient(axis) for axis in over]
    step = min((s.const if s and s.is_constant else 0 for s in steps), default=0)
    if not 1 < step <= WIDEST_PANEL:
        return 0
    return next((step * p for p in (1, 2) if _is_of_panels(offset, columns, step, p)), 0)


def _is_of_panels(offset: Index, columns: tuple[Axis, ...], step: int, parts: int) -> bool:
    """Return True for an offset of panels that have some parts of ``step`` columns, which share
    elements."""
    if len(columns) == 1:
        whole = step * parts
        panel = Axis("panel", floordiv(columns[0].extent + (whole - 1), index(whole)))
        between, place = Axis("part", index(parts)), Axis("place", index(step))
        column = index(panel) * whole + index(between) * step + index(place)
        offset = substitute_index(offset, {columns[0]: column})
    elif parts < len(columns) <= 3 and mod(index(step), columns[-1].extent) is index(0):
        panel, between, place = columns[0], columns[-2], columns[-1]
    else:
        return False
    several = panel.extent is not index(1) and offset.coefficient(panel) not in (None, index(0))
    apart = between in offset.axes  # parts of a panel, not of its elements
    return several and apart is (parts == 1) and offset.coefficient(place) is index(1)
