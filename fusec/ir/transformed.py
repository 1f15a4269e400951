"""Products of matrices between constant transforms, such as a convolution's by Winograd.

A *transformed* product is one of several, each of which multiplies other linear combinations of its
operand's elements; sums over all of them, with constant factors, give the results. It is recognised
by its sums: over the products' axes, which have few elements, around a product in which both
operands vary along them.

Worked example, of two results from three products (F(2, 3) along one axis)::

    y[o, w] = sum(a: A[w%2, a] * sum(c: u[a, c, o] * sum(k: B[a, k] * x[c, 2*(w//2) + k])))

Its product is the sum over c, its terms are ``(a,)``. Along w tiles of two are cut: w is
``2*wo + wi``; wo is a row of the product, and wi, which the product lacks, is a place in the tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fusec.ir.contraction import factors
from fusec.ir.expr import (
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    axes_in,
    both,
    children,
    is_op,
    loads,
    postorder,
    reductions,
    substitute,
    substitute_all,
)
from fusec.ir.graph import Kernel, Store, kernel_nodes
from fusec.ir.index import Axis, FloorDiv, Index, index
from fusec.ir.monoid import SUM
from fusec.ir.rewrite import is_index_only

MOST_TERMS = 8
"""Most elements of an axis of terms, and of one that a transform sums over: both are unrolled."""


@dataclass(frozen=True, slots=True)
class TransformedProduct:
    """The transformed product of a kernel, whose axes are cut into tiles where necessary.

    Attributes:
        stores: the kernel's stores, over the axes below.
        guard: which points exist, if the tiles do not divide the axes they are cut from.
        product: the sum over channels.
        operand: what it multiplies with the weights: transforms of elements in memory.
        weights: contiguous along ``lane``.
        terms: the axes of the products.
        channels: the axis that the product sums over.
        rows: the grid axes of the operand, slowest first: their points are tiles.
        groups: the grid axis of panels of columns; None for a single panel.
        lane: the grid axis of the columns in a panel.
        places: the grid axes of the results of one tile.
        sides: axis of the kernel that was cut into a row and a place -> the extent of the place.
    """

    stores: tuple[Store, ...]
    guard: Expr | None
    product: Reduce
    operand: Expr
    weights: Load
    terms: tuple[Axis, ...]
    channels: Axis
    rows: tuple[Axis, ...]
    groups: Axis | None
    lane: Axis
    places: tuple[Axis, ...]
    sides: Mapping[Axis, Index]


def has_transformed(kernel: Kernel) -> bool:
    """Return True if a kernel has a transformed product, which one schedule alone may run."""
    return bool(_products(kernel_nodes(kernel), kernel.grid))


def match_transformed(kernel: Kernel) -> TransformedProduct | None:
    """Return the transformed product of a kernel; None if it has none, or computes other sums."""
    found = _products(kernel_nodes(kernel), kernel.grid)
    if len(found) != 1:
        return None
    cut = _tiles(found[0], kernel.grid)
    mapping = {axis: whole for axis, (whole, _, _) in cut.items()}
    exprs = substitute_all(tuple(s.expr for s in kernel.stores), mapping)
    stores = tuple(
        replace(s, indices=tuple(substitute(i, mapping) for i in s.indices), expr=expr)
        for s, expr in zip(kernel.stores, exprs, strict=True)
    )
    guard: Expr | None = None
    for _, partial, _ in cut.values():
        guard = both(guard, partial)
    grid = tuple(a for axis in kernel.grid for a in _parts(mapping.get(axis, index(axis))))
    return _roles(stores, guard, grid, {axis: side for axis, (_, _, side) in cut.items()})


def channel_loads(root: Expr, grid: Iterable[Axis]) -> list[tuple[Load, Axis]]:
    """Return the loads below the operands of transformed products, with the axis of channels."""
    found: list[tuple[Load, Axis]] = []
    for node in _products(reductions(root), grid):
        sides = [side for side in children(node.body) if reductions(side)]
        found += [(n, a) for n in loads(sides) for a in node.over if a in n.axes]
    return found


def is_contiguous(root: Expr, axis: Axis) -> bool:
    """Return True if an expression's loads that vary along an axis have stride 1 along it."""
    steps = (
        load.buffer.offset(load.indices).coefficient(axis)
        for load in loads((root,))
        if axis in load.axes
    )
    return all(step is index(1) for step in steps)


def _products(nodes: Iterable[Expr], grid: Iterable[Axis]) -> list[Reduce]:
    """Return the products whose operands both vary along axes of sums with constant factors."""
    sums = [n for n in nodes if isinstance(n, Reduce)]
    weighted = frozenset(a for n in sums if _is_weighted(n) for a in n.over)
    known = frozenset(grid)
    return [
        node
        for node in sums
        if weighted and (parts := factors(node)) is not None and parts.shared - known
        if parts.shared - known <= weighted
    ]


def _is_weighted(node: Reduce) -> bool:
    """Return True for a sum over few elements with a factor of each, which reads no memory."""
    if node.monoid is not SUM or not all(map(is_short, node.over)):
        return False
    body = node.body
    if not is_op(body, "mul"):
        return False
    return any(is_index_only(x) and not x.axes.isdisjoint(node.over) for x in body.args)


def is_short(axis: Axis) -> bool:
    """Return True for an axis of few elements, whose sums are written out."""
    return axis.limit is None and axis.extent.is_constant and axis.extent.const <= MOST_TERMS


def _parts(where: Index) -> tuple[Axis, ...]:
    return tuple(sorted(where.axes, key=lambda a: a.serial))


def _tiles(product: Reduce, grid: Iterable[Axis]) -> dict[Axis, tuple[Index, Expr | None, Index]]:
    """Return axis -> what replaces it, where that exists, and the divisor, if a product divides it.

    An axis of 5 that is read at ``w//2`` becomes ``2*wo + wi``, which exists below 5.
    """
    found: dict[Axis, tuple[Index, Expr | None, Index]] = {}
    for atom in _divisions(product):
        axis = atom.dividend.as_axis()
        if axis is None or axis not in grid or axis in found or not atom.divisor.is_constant:
            continue
        outer = Axis(f"{axis.name}o", (axis.extent + atom.divisor - 1) // atom.divisor)
        inner = Axis(f"{axis.name}i", atom.divisor)
        whole = index(outer) * atom.divisor + index(inner)
        exact = outer.extent * atom.divisor is axis.extent
        below = Op("lt", (IndexValue(whole), IndexValue(axis.extent)))
        found[axis] = (whole, None if exact else below, atom.divisor)
    return found


def _divisions(product: Reduce) -> list[FloorDiv]:
    indices: list[Index] = []
    for node in postorder((product,)):
        if isinstance(node, Load):
            indices += node.indices
        elif isinstance(node, IndexValue):
            indices.append(node.index)
    return [atom for i in indices for atom in i.atoms() if isinstance(atom, FloorDiv)]


def _roles(
    stores: tuple[Store, ...],
    guard: Expr | None,
    grid: tuple[Axis, ...],
    sides: Mapping[Axis, Index],
) -> TransformedProduct | None:
    """Return which role each axis has, or None if these are not the sums of one product."""
    nodes = postorder(s.expr for s in stores)
    found = _products(nodes, grid)
    free = axes_in((*(s.expr for s in stores), *(i for s in stores for i in s.indices)))
    if len(found) != 1 or len(found[0].over) != 1 or not free <= frozenset(grid):
        return None
    (product,) = found
    parts = factors(product)
    assert parts is not None
    pairs = (
        (parts.left, parts.right, parts.left_axes, parts.right_axes),
        (parts.right, parts.left, parts.right_axes, parts.left_axes),
    )
    terms = parts.shared - frozenset(grid)
    for operand, weights, rows, columns in pairs:
        if not isinstance(weights, Load) or weights.guard is not None or not reductions(operand):
            continue
        offset = weights.buffer.offset(weights.indices)
        lanes = [a for a in columns if offset.coefficient(a) is index(1)]
        groups = [a for a in columns if a not in lanes]
        if len(lanes) != 1 or len(groups) > 1 or not (rows | columns) <= frozenset(grid):
            continue
        places = tuple(a for a in grid if a not in rows | columns)
        if parts.shared & frozenset(grid) or not _sums_are_transforms(
            nodes, product, operand, terms
        ):
            return None
        if not all(is_short(a) and a in _factors_around(nodes, product) for a in places):
            return None
        return TransformedProduct(
            stores=stores,
            guard=guard,
            product=product,
            operand=operand,
            weights=weights,
            terms=tuple(sorted(terms, key=lambda a: a.serial)),
            channels=product.over[0],
            rows=tuple(a for a in grid if a in rows),
            groups=groups[0] if groups else None,
            lane=lanes[0],
            places=places,
            sides=sides,
        )
    return None


def _factors_around(nodes: Iterable[Expr], product: Reduce) -> frozenset[Axis]:
    """Return the axes of the constant factors of the sums around a product."""
    around = [n for n in nodes if isinstance(n, Reduce) and product in postorder(n.bodies)]
    factors = [side for n in around for side in children(n.body) if is_index_only(side)]
    return axes_in(factors)


def _sums_are_transforms(
    nodes: Iterable[Expr], product: Reduce, operand: Expr, terms: frozenset[Axis]
) -> bool:
    """Return True if a kernel's sums are its product, those around it over its terms, and those of
    its operand with constant factors: others would be computed for each tile that reads them.
    """
    inner = frozenset(reductions(operand))
    for node in nodes:
        if not isinstance(node, Reduce) or node is product:
            continue
        if node.monoid is not SUM or not all(map(is_short, node.over)):
            return False
        if not (_is_weighted(node) if node in inner else terms.issuperset(node.over)):
            return False
    return True
