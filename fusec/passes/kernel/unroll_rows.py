"""Unroll the rows, and some columns, of a skinny product, which is bound by reads of its weights.

Spec: ``kernel, machine -> kernel``, the same values. A product of few rows takes as long as its
weights take from memory to the core. So each vector of weights is multiplied with all rows once it
is loaded: one grid point computes all rows, and a few columns that share the loads of the rows. The
rest is the schedule of any row kernel, with prefetched loads.

Worked example, two rows and a machine with 16 lanes::

    y[m, n] = sum(k: x[m, k] * w[n, k])    grid m:2 n:64    inside k
    y[0, 4*n] = sum(k: x[0, k] * w[4*n, k]);  y[0, 4*n + 1] = ...;  y[1, 4*n + 3] = ...   grid n:16

Weights in panels have columns in the lanes: a grid point has all rows and some vectors of a panel::

    y[m, n] = sum(k: x[m, k] * w[n//32, k, n%32])              grid m:2 n:64    inside k
    y[0, 32*p + l] = sum(k: x[0, k] * w[p, k, l]);  y[0, 32*p + 16 + l] = ...    grid p:2 l:16

Rows of narrow weights, which take more instructions to convert than to multiply, run in blocks if
they have no room at once: the weights of a few columns stay in the nearest cache for all blocks::

    y[m, n] = sum(k: x[m, k] * f32(w[n, k]))                  grid m:16 n:64    inside k
    y[4*b, 2*n] = ...;  y[4*b, 2*n + 1] = ...;  y[4*b + 3, 2*n + 1] = ...    grid n:32 b:4
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from fusec.ir.dtype import F8
from fusec.ir.expr import Cast, Expr, Load
from fusec.ir.graph import Kernel, Store
from fusec.ir.index import Axis, Index, floordiv, index
from fusec.ir.index import product as product_of
from fusec.ir.machine import Machine
from fusec.ir.streamed import StreamedProduct, divisors, match_streamed
from fusec.passes.graph.simplify import simplifier
from fusec.passes.kernel.unroll import points


def unrolls_rows(kernel: Kernel, machine: Machine) -> bool:
    """Return True for a kernel of skinny products whose accumulators fit the registers.

    Also for one of integer weights in panels that has been unrolled, with blocks of rows left.
    """
    found = _products(kernel, machine)
    unrolled = any(p.narrow and _is_part_of_panel(p) for p in found)
    return unrolled or _block(kernel, machine) is not None


def computes_rows(kernel: Kernel, machine: Machine) -> bool:
    """Return True if the operand with the rows of a skinny product is computed, not loaded.

    Each group of columns would compute it again. With panels a cast counts as computation: the
    elements of a row are broadcast one by one, and each would be widened for every panel. So it
    does with narrow weights, for more than one row: four rows take 0.76 of the time (4096 x 4096,
    AVX2, one thread, 2026-11-28); not with several in a byte, whose pairs of elements of a row are
    told apart while they are widened.
    """
    return any(p.few is not _loaded(p) for p in _products(kernel, machine))


def unroll_rows(kernel: Kernel, machine: Machine) -> Kernel:
    """Return the kernel with all rows, and some columns, of its products unrolled into stores."""
    block = _block(kernel, machine)
    if block is None:
        return kernel
    count, columns = block
    product = _products(kernel, machine)[0]
    blocks, rows = _rows(product, count)
    grid, unrolled = _columns(product, columns, machine.vector, in_blocks=bool(blocks))
    stores: list[Store] = []
    fewer, more = sorted((unrolled, rows), key=len)  # registers hold the fewer ones of a term
    for own, other in itertools.product(more, fewer):
        stores += kernel.substitute({**own, **other}).stores
    grid = (*product.batch, *grid, *product.parts, *blocks)
    made = replace(kernel, grid=grid, stores=tuple(stores), labels=())
    return made.map(simplifier())


def _rows(product: StreamedProduct, count: int) -> tuple[tuple[Axis, ...], list[dict[Axis, Index]]]:
    """Return the axis of blocks of ``count`` rows, if there are several, and for each row of a
    block a substitution of the row axes."""
    if count < product_of(a.extent for a in product.rows).const:
        (row,) = product.rows
        blocks = Axis(row.name, floordiv(row.extent, index(count)))
        return (blocks,), [{row: index(blocks) * count + r} for r in range(count)]
    return (), [*points(product.rows)]


def _columns(
    product: StreamedProduct, columns: int, vector: int, *, in_blocks: bool
) -> tuple[tuple[Axis, ...], list[dict[Axis, Index]]]:
    """Return the new grid axes, and for each unrolled column a substitution of the column axes.

    With panels, ``columns`` counts vectors of columns. Of two in a byte a point has both, so that
    no shift depends on the point; not with blocks of rows, beside which these are no part of a
    panel any more.
    """
    column = product.columns[0]
    if not product.panel:
        own = Axis(column.name, floordiv(column.extent, index(columns)))
        return (own,), [{column: index(own) * columns + c} for c in range(columns)]
    whole = product_of(a.extent for a in product.columns)
    panel = Axis(column.name, floordiv(whole, index(product.panel)))
    panels, at_panel = ((), index(0)) if panel.extent is index(1) else ((panel,), index(panel))
    together = columns * vector
    part = Axis("part", index(product.panel // together))
    lane = Axis("lane", index(vector))
    parts = (part,) if product.panel > together else ()
    both = len(product.columns) > 2 and not in_blocks
    far, near = (product.panel // columns, vector) if both else (vector, together)
    first = index(part) * near if parts else index(0)
    found: list[dict[Axis, Index]] = []
    for c in range(columns):
        at = first + c * far + index(lane)
        places: dict[Axis, Index] = {}
        for axis in reversed(product.columns[1:]):
            places[axis], at = at % axis.extent, at // axis.extent
        found.append({column: at_panel, **places} if places else
                     {column: at_panel * product.panel + at})  # fmt: skip
    return (*panels, *parts, lane), found


def _block(kernel: Kernel, machine: Machine) -> tuple[int, int] | None:
    """Return how many rows and columns a grid point computes; None if there is no room for one."""
    products = _products(kernel, machine)
    if not products:
        return None
    first = products[0]
    rows, own, panel = first.rows, first.columns, first.panel
    if _is_part_of_panel(first):
        return None  # the kernel has been unrolled
    if set(kernel.grid) != {*first.batch, *first.parts, *rows, *own} or any(
        (p.batch, p.parts, p.rows, p.columns, p.panel)
        != (first.batch, first.parts, rows, own, panel)
        for p in products
    ):
        return None
    tuning, cuts = machine.loops, all(p.narrow for p in products) and len(rows) == 1
    shapes = _shapes(first, machine, len(products), cuts=cuts)
    limits = [tuning.panel_sums if panel else tuning.sums]
    if panel and first.narrow:
        limits.insert(0, tuning.converted_sums)
    row, weight = tuning.converted_cost
    for most in limits:
        fitting = [at for at in shapes if math.prod(at) * len(products) <= most * machine.vector]
        if fitting and cuts:
            return min(fitting, key=lambda at: row / at[1] + weight / at[0])
        if fitting:
            return fitting[0]
    return None


def _shapes(
    product: StreamedProduct, machine: Machine, products: int, *, cuts: bool
) -> list[tuple[int, int]]:
    """Return the rows and columns that a grid point may have, the most first.

    Args:
        products: products that it computes, each of which streams weights of its own; of packed
            ones each has sums of groups as well.
        cuts: whether it may have a part of the rows.
    """
    count, own = product_of(a.extent for a in product.rows).const, product.columns
    whole = index(product.panel) if product.panel else own[0].extent
    width = machine.vector if product.panel else 1
    # A vector has one half of each byte.
    lanes = own[-1].extent.const if len(own) > 2 else 1
    least = min(count, machine.loops.narrow_block[0]) if product.panel else 1
    streams = products if product.packed and not product.panel else 1
    return [
        (r, c)
        for r in (divisors(count, least, count) if cuts else (count,))
        for c in machine.loops.columns
        if c == 1 or c * streams <= machine.loops.columns[0]
        if _divides(c * width, whole) and c * width % lanes == 0
    ]


def _is_part_of_panel(product: StreamedProduct) -> bool:
    """Return True if the axes of a product's columns are some of each panel's: it is unrolled."""
    own = product_of(a.extent for a in product.columns[1:])
    return len(product.columns) > 1 and own is not index(product.panel)


def _loaded(product: StreamedProduct) -> Expr | None:
    """Return the operand with the rows if it is a load, widened from 16 bits or not, or None."""
    few = product.few
    widened = isinstance(few, Cast) and not product.widened and few.arg.dtype not in F8
    inner = few.arg if isinstance(few, Cast) and widened else few
    return few if isinstance(inner, Load) else None


def _divides(columns: int, extent: Index) -> bool:
    return columns == 1 or (extent.is_constant and extent.const % columns == 0)


def _products(kernel: Kernel, machine: Machine) -> list[StreamedProduct]:
    """Return a kernel's skinny products; empty if it has other reductions or ragged axes."""
    sums = kernel.reductions
    found = [match_streamed(n, machine) for n in sums]
    ragged = any(a.limit is not None for a in kernel.axes)
    if ragged or any(set(n.over) != set(kernel.inside) for n in sums):
        return []
    return [p for p in found if p is not None] if None not in found else []
