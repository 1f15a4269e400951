"""Cut a product in the parts that its readers take: as many products over the same terms.

A gated layer multiplies once with the weights of gate and up projection, and reads the halves of
the columns, or every other one. At the axes of a reader neither half is the whole product, so that
no axes unify. Each part by itself is a product at its reader's axes, and all of them run in one
loop.

Worked example, with j of J elements::

    y[m, n] = sum(k: x[m, k] * w[n, k])                h[m, j] = silu(y[m, j]) * y[m, j + J]

becomes ``y0[m, j] = sum(k: x[m, k] * w[j, k])``, ``y1[m, j] = sum(k: x[m, k] * w[j + J, k])`` and
``h[m, j] = silu(y0[m, j]) * y1[m, j]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fusec.ir.contraction import multiplied
from fusec.ir.expr import Buffer, Expr, Load
from fusec.ir.graph import Def, Store
from fusec.ir.index import Axis, Index, index
from fusec.ir.rewrite import rewrite
from fusec.passes.fusion.resolve import loads_of


@dataclass(frozen=True, slots=True)
class Part:
    """The elements ``step*j + first`` of a buffer along one of its dimensions.

    Attributes:
        length: the extent of j.
    """

    dimension: int
    first: int
    step: int
    length: Index

    @staticmethod
    def of(load: Load) -> Part | None:
        """Return the part that a load reads along the only dimension that it does not read whole.

        None for any other load.
        """
        pairs = zip(load.indices, load.buffer.shape, strict=True)
        cut = [k for k, (i, extent) in enumerate(pairs) if not _is_whole(i, extent)]
        if len(cut) != 1 or len(load.indices[cut[0]].axes) != 1:
            return None
        (dimension,) = cut
        where, extent = load.indices[dimension], load.buffer.shape[dimension]
        (axis,) = where.axes
        step, length = where.coefficient(axis), axis.extent
        first = None if step is None else where - step * index(axis)
        if step is None or first is None or not (step.is_constant and first.is_constant):
            return None
        part = Part(dimension, first.const, step.const, length)
        return part if axis.limit is None and part.divides(extent) else None

    def divides(self, extent: Index) -> bool:
        """Return True for one of equal parts of an extent: in a row, or of every other element."""
        if not (extent.is_constant and self.length.is_constant and self.length.const > 0):
            return False
        count, rest = divmod(extent.const, self.length.const)
        start, between = (self.length.const, 1) if self.step == 1 else (1, count)
        fits = rest == 0 and count > 1 and self.step == between
        return fits and self.first % start == 0 and 0 <= self.first < start * count

    def at(self, j: Index) -> Index:
        """Return where its element j is in the whole."""
        return j * self.step + self.first


def _is_whole(where: Index, extent: Index) -> bool:
    axis = where.as_axis()
    return axis is not None and axis.extent is extent


@dataclass(frozen=True, slots=True)
class CutProducts:
    """Definitions with some products cut.

    Attributes:
        whole: part -> the buffer that it is a part of, and which.
    """

    defs: tuple[Def, ...]
    whole: Mapping[Buffer, tuple[Buffer, Part]]

    def store(self, line: Def, value: Expr, resolve: Callable[[Index], Index]) -> Store:
        """Return the store of a value; that of a part is in the whole."""
        where, buffer = list(map(index, line.axes)), line.buffer
        if buffer in self.whole:
            buffer, part = self.whole[buffer]
            where[part.dimension] = part.at(where[part.dimension])
        return Store(buffer, tuple(map(resolve, where)), value)


def cut_products(defs: tuple[Def, ...], live_out: frozenset[Buffer]) -> CutProducts:
    """Return definitions with each product cut of which the others read only parts.

    Of one that is stored they read all parts.
    """
    whole: dict[Buffer, tuple[Buffer, Part]] = {}
    for line in defs:
        if len(defs) == 1 or multiplied(line.expr) is None:
            continue
        made = _parts_of(line, defs, stored=line.buffer in live_out)
        whole.update((own.buffer, (line.buffer, part)) for part, own in made.items())
        defs = _reading(defs, line, made) if made else defs
    return CutProducts(defs, whole)


def _parts_of(line: Def, defs: tuple[Def, ...], *, stored: bool) -> dict[Part, Def]:
    """Return the parts that definitions read of a product; none if they read more than parts."""
    read = [x for d in defs for x in loads_of(d.expr) if x.buffer is line.buffer]
    found = {Part.of(load) for load in read}
    parts = sorted((part for part in found if part is not None), key=lambda part: part.first)
    if None in found or len({(p.dimension, p.step, p.length) for p in parts}) != 1:
        return {}
    (extent,) = {line.buffer.shape[p.dimension] for p in parts}
    if stored and parts[0].length * len(parts) is not extent:
        return {}
    return {part: _part_of(line, part) for part in parts}


def _reading(defs: tuple[Def, ...], line: Def, made: Mapping[Part, Def]) -> tuple[Def, ...]:
    """Return definitions with a product's parts in its place, which the others read."""

    def reading(node: Expr) -> Expr:
        if not isinstance(node, Load) or node.buffer is not line.buffer:
            return node
        part = Part.of(node)
        assert part is not None
        indices = list(node.indices)
        (axis,) = indices[part.dimension].axes
        indices[part.dimension] = index(axis)
        return Load(made[part].buffer, tuple(indices), node.guard)

    others = {d: d.map(lambda exprs: rewrite(exprs, reading)) for d in defs if d is not line}
    return tuple(new for d in defs for new in (made.values() if d is line else (others[d],)))


def _part_of(line: Def, part: Part) -> Def:
    whole = line.axes[part.dimension]
    axis = Axis(whole.name, part.length)
    expr = line.expr.substitute({whole: part.at(index(axis))})
    axes, shape = list(line.axes), list(line.buffer.shape)
    axes[part.dimension], shape[part.dimension] = axis, part.length
    name = f"{line.buffer.name}_{part.first}"
    buffer = Buffer.row_major(name, tuple(shape), line.buffer.dtype)
    covers = (*line.covers, line.buffer)
    return replace(line, buffer=buffer, axes=tuple(axes), expr=expr, covers=covers)
