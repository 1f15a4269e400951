"""Reference semantics of expressions: the value at every point of the free axes, as an array.

A ``Tile`` is an array with one dimension for each of its axes, in the order of their serials; a
dimension of length 1 stands for a value that does not vary along it. Axes with a fixed coordinate
in the environment (grid and loop axes of a running program) are numbers and make no dimension.

Memory is flat: each buffer's storage is a one-dimensional array that its strides address, so that a
view with any strides is right. An index out of range is an error, unless a guard is false there
(the load gives 0) or a ragged axis is beyond its limit (any value); no memory is read then.

Worked example: ``sum(c: x[m, c])`` is the tile ``x[m, c]`` of shape (M, C), then one of shape (M,).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from fusec.errors import InternalError
from fusec.ir.combine import identities
from fusec.ir.dtype import F4X2, F32
from fusec.ir.expr import (
    Buffer,
    Cast,
    Const,
    Dot,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Scan,
    Select,
    Var,
    children,
    reach,
)
from fusec.ir.index import Atom, Axis, FloorDiv, Index, Mod, Runtime, Size, index
from fusec.ir.serial import hits_of, runs_backwards, scan_of, serial_axes, turned
from fusec.tools.interpreter.scalar import (
    Array,
    Operation,
    convert,
    fill_value,
    numpy_type,
    reduce_array,
    reduce_pairs,
    scalar_operation,
    scan_array,
    scatter_array,
)

STAGE = "interpreter"


@dataclass(frozen=True, slots=True)
class Tile:
    """An array with one dimension for each of ``axes``, which are sorted by serial."""

    axes: tuple[Axis, ...]
    array: Array


@dataclass(slots=True)
class Env:
    """The values of free names.

    Attributes:
        sizes: the value of each symbolic size.
        storage: flat memory by ``buffer.base``.
        points: the coordinates of axes that are fixed.
        variables: values of a program's variables.
        masks_ragged: points beyond an axis' limit are masked, as in kernels; in a program, whose
            masks are explicit, they are ordinary lanes.
    """

    sizes: Mapping[Size, int] = field(default_factory=dict)
    storage: dict[Buffer, Array] = field(default_factory=dict)
    points: dict[Axis, int] = field(default_factory=dict)
    variables: dict[Var, Tile] = field(default_factory=dict)
    masks_ragged: bool = True


Memo: TypeAlias = dict[Expr, Tile]


# -- tiles ---------------------------------------------------------------------------------------


def sort_axes(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Return the distinct axes, sorted by serial."""
    return tuple(sorted(set(axes), key=lambda axis: axis.serial))


def joint_axes(tiles: Iterable[Tile]) -> tuple[Axis, ...]:
    """Return the axes that any of the tiles has, sorted."""
    distinct = {tile.axes for tile in tiles if tile.axes}
    if len(distinct) <= 1:
        return distinct.pop() if distinct else ()
    return sort_axes(axis for axes in distinct for axis in axes)


def align(tile: Tile, axes: tuple[Axis, ...]) -> Array:
    """Return the tile's array, broadcastable over ``axes``: sorted, a superset of the tile's."""
    if tile.axes == axes or not tile.axes:
        return tile.array
    lengths = dict(zip(tile.axes, tile.array.shape, strict=True))
    return tile.array.reshape([lengths.get(axis, 1) for axis in axes])


def expand(tile: Tile, axes: tuple[Axis, ...], env: Env) -> Array:
    """Return the tile's array over the whole extent of each of ``axes``, in that order."""
    ordered = sort_axes(axes)
    shape = [extent_of(axis, env) for axis in ordered]
    full = np.broadcast_to(align(tile, ordered), shape)
    return full.transpose([ordered.index(axis) for axis in axes])


def extent_of(axis: Axis, env: Env) -> int:
    """Return the extent of an axis, including the points beyond a ragged limit."""
    return eval_scalar(axis.extent, env)


def combine(operation: Operation, *tiles: Tile) -> Tile:
    """Return the operation applied point by point, over the axes of all tiles."""
    axes = joint_axes(tiles)
    return Tile(axes, np.asarray(operation(*(align(tile, axes) for tile in tiles))))


def conjunction(masks: Iterable[Tile | None]) -> Tile | None:
    """Return the conjunction of masks; None is a mask that is true everywhere."""
    present = [mask for mask in masks if mask is not None]
    if not present:
        return None
    return functools.reduce(functools.partial(combine, np.logical_and), present)


def ragged_mask(axes: Iterable[Axis], env: Env) -> Tile | None:
    """Return the mask of points below the limits of ``axes``, or None if none has a limit."""
    if not env.masks_ragged:
        return None
    return conjunction(
        combine(np.less, eval_index(index(axis), env), eval_index(axis.limit, env))
        for axis in axes
        if axis.limit is not None
    )


# -- indices -------------------------------------------------------------------------------------


def eval_index(value: Index, env: Env, memo: Memo | None = None) -> Tile:
    """Return the value of an index, in 64-bit integers."""
    number, tiles = value.const, []
    for monomial, coefficient in value.terms:
        factors = [_eval_atom(atom, env, memo) for atom in monomial]
        scale = coefficient * math.prod(f for f in factors if isinstance(f, int))
        varying = [f for f in factors if not isinstance(f, int)]
        if not varying:
            number += scale
            continue
        term = _number(scale)
        for factor in varying:
            term = combine(np.multiply, term, factor)
        tiles.append(term)
    total = _number(number)
    for tile in tiles:
        total = combine(np.add, total, tile)
    return total


def eval_scalar(value: Index, env: Env) -> int:
    """Return the value of an index all of whose axes are fixed."""
    if value.is_constant:
        return value.const
    tile = eval_index(value, env)
    if tile.axes:
        raise InternalError(f"{value} varies along {tile.axes}", stage=STAGE)
    return int(tile.array)


def _number(value: int) -> Tile:
    return Tile((), np.asarray(value, dtype=np.int64))


def _eval_atom(atom: Atom, env: Env, memo: Memo | None) -> Tile | int:
    """Return the value of an atom: an int if it does not vary."""
    match atom:
        case Axis():
            if atom in env.points:
                return env.points[atom]
            return Tile((atom,), np.arange(extent_of(atom, env), dtype=np.int64))
        case Size():
            if atom not in env.sizes:
                raise InternalError(f"size {atom} has no value", stage=STAGE)
            return env.sizes[atom]
        case FloorDiv() | Mod():
            operation = np.floor_divide if isinstance(atom, FloorDiv) else np.remainder
            dividend = eval_index(atom.dividend, env, memo)
            tile = combine(operation, dividend, eval_index(atom.divisor, env, memo))
        case Runtime():
            expr: Expr = atom.expr
            tile = (memo or {}).get(expr) or eval_tile(expr, env, memo)
        case _:
            raise InternalError(atom, stage=STAGE)
    return Tile(tile.axes, tile.array.astype(np.int64)) if tile.axes else int(tile.array)


# -- memory --------------------------------------------------------------------------------------


def storage_length(buffer: Buffer, env: Env) -> int:
    """Return the number of elements of the storage of ``buffer``."""
    if any(eval_scalar(extent, env) == 0 for extent in buffer.base.shape):
        return 0
    return eval_scalar(buffer.base.flat().shape[0], env)


def allocate(buffer: Buffer, env: Env) -> Array:
    """Give ``buffer`` unwritten storage (NaN, or the greatest integer) and return it."""
    storage = np.full(
        storage_length(buffer, env), fill_value(buffer.dtype), numpy_type(buffer.dtype)
    )
    env.storage[buffer.base] = storage
    return storage


def locate(buffer: Buffer, indices: tuple[Index, ...], env: Env, memo: Memo | None) -> Tile:
    """Return the element offset of ``buffer[indices]``, or -1 where an index is out of range."""
    offset, inside = _number(0), Tile((), np.asarray(True))
    for value, extent, stride in zip(indices, buffer.shape, buffer.strides, strict=True):
        position = eval_index(value, env, memo)
        inside = combine(_within, inside, position, eval_index(extent, env))
        offset = combine(np.add, offset, combine(np.multiply, position, eval_index(stride, env)))
    return combine(np.where, inside, offset, _number(-1))


def _within(inside: Array, position: Array, extent: Array) -> Array:
    return inside & (position >= 0) & (position < extent)


def check_offsets(offset: Tile, mask: Tile | None, env: Env, what: object) -> None:
    """Raise InternalError if ``offset`` is -1 where ``mask`` is true."""
    outside = Tile(offset.axes, offset.array < 0)
    if mask is not None:
        outside = combine(np.logical_and, outside, mask)
    if outside.array.any():
        point = np.argwhere(outside.array)[0].tolist()
        at = ", ".join(f"{a}={p}" for a, p in zip(outside.axes, point, strict=True))
        held = ", ".join(f"{a}={p}" for a, p in env.points.items())
        where = ", ".join(part for part in (at, held) if part)
        raise InternalError(f"{what} is out of range at {where or 'its one point'}", stage=STAGE)


def store(
    buffer: Buffer, offset: Tile, value: Tile, mask: Tile | None, env: Env, *, adds: bool = False
) -> Array:
    """Write, or add, a value where ``mask`` is true; return the offsets of the elements.

    Raises:
        InternalError: if two points write one element.
    """
    tiles = (offset, value) if mask is None else (offset, value, mask)
    axes = joint_axes(tiles)
    offsets, values, *kept = (expand(tile, axes, env).reshape(-1) for tile in tiles)
    for where in kept:
        offsets, values = offsets[where], values[where]
    if np.unique(offsets).size != offsets.size:
        raise InternalError(f"two points store to one element of {buffer}", stage=STAGE)
    storage = env.storage[buffer.base]
    storage[offsets] = convert(storage[offsets] + values if adds else values, buffer.dtype)
    return offsets


# -- expressions ---------------------------------------------------------------------------------


def eval_tile(expr: Expr, env: Env, memo: Memo | None = None) -> Tile:
    """Return the value of ``expr``; each distinct node is evaluated once per ``memo``."""
    memo = {} if memo is None else memo
    with np.errstate(all="ignore"):
        for node in reach((expr,), functools.partial(_operands, env=env)):
            if node not in memo:
                memo[node] = _eval_node(node, env, memo)
    return memo[expr]


def _operands(node: Expr, env: Env) -> tuple[Expr, ...]:
    return () if isinstance(node, Reduce) and _runs_serially(node, env) else children(node)


def _runs_serially(node: Reduce, env: Env) -> bool:
    """Return whether to evaluate a scatter or scan point by point, which takes less memory."""
    steps = serial_axes((node,))
    return bool(steps) and all(
        a.limit is None and a not in env.points for a in (*node.over, *steps)
    )


def _eval_node(node: Expr, env: Env, memo: Memo) -> Tile:
    match node:
        case Load():
            return _eval_load(node, env, memo)
        case Const():
            return Tile((), np.asarray(node.value, dtype=numpy_type(node.dtype)))
        case IndexValue():
            tile = eval_index(node.index, env, memo)
            return Tile(tile.axes, convert(tile.array, node.dtype))
        case Op():
            operation = scalar_operation(node.name, node.dtype)
            return combine(operation, *(memo[arg] for arg in node.args))
        case Cast():
            tile = memo[node.arg]
            return Tile(tile.axes, convert(tile.array, node.dtype))
        case Select():
            return combine(np.where, memo[node.condition], memo[node.then], memo[node.other])
        case Reduce():
            return _eval_reduce(node, env, memo)
        case Scan():
            return _eval_scan(node, env, memo)
        case Dot():
            return _eval_dot(node, memo)
        case Var():
            if node not in env.variables:
                raise InternalError(f"variable {node} has no value", stage=STAGE)
            return env.variables[node]
        case _:
            raise InternalError(node, stage=STAGE)


def _eval_load(node: Load, env: Env, memo: Memo) -> Tile:
    storage = env.storage.get(node.buffer.base)
    if storage is None:
        raise InternalError(f"{node} reads {node.buffer}, which is not in memory", stage=STAGE)
    offset = locate(node.buffer, node.indices, env, memo)
    guard = None if node.guard is None else memo[node.guard]
    mask = conjunction((guard, ragged_mask(offset.axes, env)))
    check_offsets(offset, mask, env, node)
    somewhere = storage if storage.size else np.zeros(1, storage.dtype)
    loaded = Tile(offset.axes, somewhere[np.maximum(offset.array, 0)])
    if guard is None:
        return loaded
    return combine(np.where, guard, loaded, Tile((), np.zeros((), storage.dtype)))


def _eval_scatter(node: Reduce, env: Env) -> Tile:
    """Return a scatter: each source is evaluated where it hits, and combined there."""
    hits = hits_of(node)
    there = {hit.axis: index(Runtime(hit.point, hit.axis.extent)) for hit in hits}
    value = eval_tile(node.body.substitute(there), env)
    points = [eval_tile(hit.point, env) for hit in hits]
    kept = sort_axes(a for tile in (value, *points) for a in tile.axes if a not in node.over)
    values = expand(value, (*node.over, *kept), env)
    places = [expand(point, (*node.over, *kept), env) for point in points]
    places += [*np.indices(values.shape)[len(node.over) :]]
    axes = (*(hit.axis for hit in hits), *kept)
    shape = tuple(extent_of(axis, env) for axis in axes)
    found = scatter_array(node.monoid, shape, places, values, node.dtype)
    ordered = sort_axes(axes)
    return Tile(ordered, found.transpose([axes.index(axis) for axis in ordered]))


def _eval_scan(node: Scan, env: Env, memo: Memo) -> Tile:
    """Return a scan along an axis of terms."""
    (along,) = node.over
    axes = joint_axes((*(memo[body] for body in node.bodies), Tile(node.over, np.zeros(0))))
    whole, dim = [expand(memo[body], axes, env) for body in node.bodies], axes.index(along)
    before = [expand(memo[value], axes, env).take([-1], dim) for value in node.start]
    if before:
        whole = [np.concatenate(pair, dim) for pair in zip(before, whole, strict=True)]
    found = scan_array(node.monoid, whole, dim, node.dtype)
    return Tile(axes, np.delete(found, 0, dim) if before else found)


def _eval_turned(scan: Scan, env: Env) -> Tile:
    """Return a scan from the last point along its axis to the first."""
    (along,) = scan.over
    found = eval_tile(scan.substitute({along: turned(along)}), env)
    return Tile(found.axes, np.flip(found.array, found.axes.index(along)))


def _eval_reduce(node: Reduce, env: Env, memo: Memo) -> Tile:
    if _runs_serially(node, env):
        scan = scan_of(node)
        if scan is None:
            return _eval_scatter(node, env)
        return _eval_turned(scan, env) if runs_backwards(node) else eval_tile(scan, env)
    bodies, mask = [memo[body] for body in node.bodies], ragged_mask(node.over, env)
    if mask is not None:
        bodies = [
            combine(np.where, mask, body, Tile((), np.asarray(e.value, dtype=body.array.dtype)))
            for body, e in zip(bodies, identities(node), strict=True)
        ]
    kept = tuple(a for a in joint_axes(bodies) if a not in node.over)
    over = tuple(axis for axis in node.over if axis not in env.points)
    ordered = sort_axes((*kept, *over))
    lengths = {a: n for b in bodies for a, n in zip(b.axes, b.array.shape, strict=True)}
    shape = [extent_of(a, env) if a in over else lengths[a] for a in ordered]
    full = [np.broadcast_to(align(body, ordered), shape) for body in bodies]
    dims = tuple(ordered.index(axis) for axis in over)
    if len(full) == 1:
        return Tile(kept, reduce_array(node.monoid, full[0], dims, node.dtype))
    return Tile(kept, reduce_pairs(node.monoid, full[0], full[1], dims))


def _eval_dot(node: Dot, memo: Memo) -> Tile:
    if node.scales:
        return _eval_scaled_dot(node, memo)
    left, right = (convert(memo[side].array, node.dtype) for side in (node.left, node.right))
    product = combine(
        np.multiply, Tile(memo[node.left].axes, left), Tile(memo[node.right].axes, right)
    )
    dims = tuple(product.axes.index(axis) for axis in node.over)
    kept = tuple(axis for axis in product.axes if axis not in node.over)
    total = Tile(kept, product.array.sum(axis=dims, dtype=product.array.dtype))
    return total if node.into is None else combine(np.add, memo[node.into], total)


def _eval_scaled_dot(node: Dot, memo: Memo) -> Tile:
    """Return a product of factors with a scale for each block of terms."""
    (block,) = node.blocks
    sides = zip((node.left, node.right), node.scales, strict=True)
    (m, left), (n, right) = (
        _scaled_rows(memo[side], memo[scale], block, side.dtype is F4X2) for side, scale in sides
    )
    total = Tile((m, n), np.asarray(left @ right.T))
    return total if node.into is None else combine(np.add, memo[node.into], total)


def _scaled_rows(side: Tile, scale: Tile, block: Axis, pairs: bool) -> tuple[Axis, Array]:
    """Return the axis of a factor's rows, and rows of terms times their scales."""
    (row,) = (axis for axis in scale.axes if axis is not block)
    values = side.array if side.axes[0] is row else side.array.T
    scales = scale.array if scale.axes[0] is row else scale.array.T
    if pairs:
        codes = np.stack((values, values >> 4), -1).reshape(len(values), -1)
        values = scalar_operation("e2m1", F32)(codes)
    return row, values * scales.repeat(values.shape[1] // scales.shape[1], 1)
