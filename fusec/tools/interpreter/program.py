"""Reference interpreter of programs: instance by instance, statement by statement.

Grid points run in row-major order as Python loops, lanes are array dimensions. The masks of a
program are explicit, so that limits of ragged axes are ignored here: a lane that accesses memory
outside a buffer is an error, whatever the axis.

Worked example: ``for co in 0 .. 3: acc := acc + v`` evaluates ``acc + v`` three times, on tiles.

Because a real launch runs instances in any order, an element of a caller's buffer that one instance
writes and another one accesses is an error, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fusec.errors import InternalError
from fusec.ir.expr import Buffer, Expr, Load, Var
from fusec.ir.index import Axis, Index, Size
from fusec.ir.program import (
    Carry,
    For,
    Let,
    Matrix,
    Multiply,
    Program,
    Put,
    Scratch,
    Statement,
    Unzip,
    Update,
    Zip,
)
from fusec.tools.interpreter.expression import (
    STAGE,
    Env,
    Tile,
    allocate,
    check_offsets,
    eval_scalar,
    eval_tile,
    expand,
    extent_of,
    joint_axes,
    locate,
    store,
)
from fusec.tools.interpreter.scalar import Array

_NOBODY = -1


@dataclass(slots=True)
class _ProgramRun:
    """One program run: its environment, and the instance that wrote each element.

    Attributes:
        instance: number of the grid point that runs.
        writer: for each buffer written, the instance that wrote each element, or -1.
    """

    env: Env
    instance: int = 0
    writer: dict[Buffer, Array] = field(default_factory=dict)


def run_program(program: Program, buffers: dict[Buffer, Array], sizes: Mapping[Size, int]) -> None:
    """Run the whole grid; ``buffers`` is flat storage by ``buffer.base``, changed in place.

    Buffers that the program writes and that have no storage get one.

    Raises:
        InternalError: for a lane out of range, a name without a value, a value with lanes that its
            variable does not have, and an element that one instance writes and another accesses.
    """
    run = _ProgramRun(Env(sizes=sizes, storage=buffers, masks_ragged=False))
    for buffer in program.writes:
        if buffer.base not in buffers:
            allocate(buffer, run.env)
            if buffer.base in program.added:
                buffers[buffer.base][:] = 0
        run.writer[buffer.base] = np.full(buffers[buffer.base].size, _NOBODY)
    ranges = [range(extent_of(axis, run.env)) for axis in program.grid]
    for run.instance, point in enumerate(itertools.product(*ranges)):
        run.env.points = dict(zip(program.grid, point, strict=True))
        run.env.variables = {}
        _run_block(program.body, run)


def _run_block(body: tuple[Statement, ...], run: _ProgramRun) -> None:
    env, outside = run.env, set(run.env.variables)
    for statement in body:
        match statement:
            case Let():
                env.variables[statement.var] = _evaluate(statement.value, statement.var, run)
            case Carry():
                env.variables[statement.var] = _evaluate(statement.initial, statement.var, run)
            case Update():
                if statement.var not in env.variables:
                    raise InternalError(f"update of {statement.var}, no carry", stage=STAGE)
                env.variables[statement.var] = _evaluate(statement.value, statement.var, run)
            case Put():
                _put(statement, run)
            case Scratch():
                allocate(statement.buffer, env)
            case For():
                _run_loop(statement, run)
            case Multiply():
                _multiply(statement, run)
            case Unzip(halves=halves, whole=whole):
                env.variables.update(zip(halves, _apart(whole, halves[0], env), strict=True))
            case Zip(whole=whole, halves=halves):
                env.variables[whole] = _in_turn(halves, whole, env)
            case _:
                raise InternalError(statement, stage=STAGE)
    for var in set(env.variables) - outside:
        del env.variables[var]


def _apart(whole: Var, half: Var, env: Env) -> tuple[Tile, Tile]:
    """Return the even and the odd elements of a tile along its axis of pairs."""
    (both,), (lane,) = whole.axes - half.axes, half.axes - whole.axes
    tile = env.variables[whole]
    axes = tuple(lane if axis is both else axis for axis in tile.axes)
    array = np.moveaxis(tile.array, tile.axes.index(both), 0)
    even, odd = (np.moveaxis(array[n::2], 0, axes.index(lane)) for n in range(2))
    return _sorted(axes, even), _sorted(axes, odd)


def _in_turn(halves: tuple[Var, Var], whole: Var, env: Env) -> Tile:
    """Return the tile whose elements along its axis of pairs are those of two others in turn."""
    (both,), (lane,) = whole.axes - halves[0].axes, halves[0].axes - whole.axes
    axes = (*(axis for axis in halves[0].axes if axis is not lane), lane)
    even, odd = (expand(env.variables[half], axes, env) for half in halves)
    array = np.stack((even, odd), -1).reshape(*even.shape[:-1], -1)
    return _sorted((*axes[:-1], both), array)


def _sorted(axes: tuple[Axis, ...], array: Array) -> Tile:
    order = sorted(range(len(axes)), key=lambda n: axes[n].serial)
    return Tile(tuple(axes[n] for n in order), array.transpose(order))


def _run_loop(loop: For, run: _ProgramRun) -> None:
    start = eval_scalar(loop.start, run.env)
    stop = min(eval_scalar(bound, run.env) for bound in loop.stops)
    for position in range(start, stop):
        run.env.points[loop.axis] = position
        _run_block(loop.body, run)
    run.env.points.pop(loop.axis, None)


def _multiply(product: Multiply, run: _ProgramRun) -> None:
    env = run.env
    counts = (
        min(eval_scalar(bound, env) for bound in bounds) * width
        for bounds, width in (
            (product.rows, 1),
            (product.panels, product.width),
            (product.terms, 1),
        )
    )
    rows, columns, terms = map(np.arange, counts)
    into = _elements(product.into, rows, columns, product.width, run)
    storage = env.storage[product.into.buffer.base]
    left = env.storage[product.left.buffer.base][_elements(product.left, rows, terms, 0, run)]
    right = env.storage[product.right.buffer.base][
        _elements(product.right, terms, columns, product.width, run)
    ]
    left, right = (side.astype(storage.dtype, copy=False) for side in (left, right))
    storage[into] = (storage[into] if eval_scalar(product.adds, env) else 0) + left @ right


def _elements(matrix: Matrix, rows: Array, columns: Array, width: int, run: _ProgramRun) -> Array:
    """Return the offsets of a matrix's elements; a width of 0 is one panel.

    Raises:
        InternalError: for an element out of range, or that another instance wrote.
    """
    start, row, column, panel = (
        eval_scalar(part, run.env)
        for part in (matrix.start, matrix.row, matrix.column, matrix.panel)
    )
    panels, within = (columns // width, columns % width) if width else (0, columns)
    along = panels * panel + within * column
    odd = rows % 2 if matrix.pairs else 0
    offsets: Array = start + ((rows - odd) * row + odd)[:, None] + along[None, :]
    base = matrix.buffer.base
    if offsets.size and not 0 <= offsets.min() <= offsets.max() < run.env.storage[base].size:
        raise InternalError(f"a product leaves {base}", stage=STAGE)
    if base in run.writer:
        _check_owner(run.writer[base], offsets.reshape(-1), matrix, run)
    return offsets


def _evaluate(value: Expr, var: Var, run: _ProgramRun) -> Tile:
    if value.dtype is not var.dtype:
        raise InternalError(f"{var}: {var.dtype} = {value}: {value.dtype}", stage=STAGE)
    tile = eval_tile(value, run.env)
    if not var.axes.issuperset(tile.axes):
        raise InternalError(f"{var} = {value} has lanes {tile.axes}", stage=STAGE)
    if isinstance(value, Load):
        _check_reader(value, run)
    return tile


def _check_reader(load: Load, run: _ProgramRun) -> None:
    """Raise if an element read was written by another instance."""
    writer = run.writer.get(load.buffer.base)
    if writer is None:
        return
    guard = None if load.guard is None else eval_tile(load.guard, run.env)
    _check_owner(writer, _offsets(load.buffer, load.indices, guard, run.env), load, run)


def _offsets(buffer: Buffer, indices: tuple[Index, ...], guard: Tile | None, env: Env) -> Array:
    """Return the offsets of the lanes where ``guard`` holds, in one dimension."""
    offset = locate(buffer, indices, env, None)
    axes = joint_axes((offset,) if guard is None else (offset, guard))
    flat = expand(offset, axes, env).reshape(-1)
    return flat if guard is None else flat[expand(guard, axes, env).reshape(-1)]


def _check_owner(writer: Array, offsets: Array, what: object, run: _ProgramRun) -> None:
    owners = writer[offsets]
    if ((owners != _NOBODY) & (owners != run.instance)).any():
        raise InternalError(
            f"{what}: another instance wrote an element that this one touches", stage=STAGE
        )


def _put(statement: Put, run: _ProgramRun) -> None:
    env, buffer = run.env, statement.buffer
    if buffer.base not in env.storage:
        raise InternalError(f"{buffer} is written, but is not in memory", stage=STAGE)
    value = eval_tile(statement.value, env)
    guard = None if statement.guard is None else eval_tile(statement.guard, env)
    offset = locate(buffer.flat(), (statement.offset,), env, None)
    check_offsets(offset, guard, env, f"{buffer}[{statement.offset}]")
    offsets = store(buffer, offset, value, guard, env, adds=statement.adds)
    if buffer.base in run.writer and not statement.adds:
        _check_owner(run.writer[buffer.base], offsets, statement, run)
        run.writer[buffer.base][offsets] = run.instance
