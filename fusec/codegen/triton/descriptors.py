"""Find the loads and stores that can copy whole tiles by tensor descriptors (TMA).

A descriptor is a box in a buffer: a shape, strides and the tile of one copy. The hardware computes
addresses, reads 0 where the tile exceeds the shape, and writes nothing there. So a copy replaces an
access if

1. it is an operand of a product for tensor cores, a tile that a loop of a program with roles loads
   beside these (a bias of scores), or a result in a buffer that the program does not read;
2. its tile has two lane axes, columns of stride 1 and rows, and its offset is affine in both;
3. its guard is exactly the condition that rows and columns are within the tensor;
4. addresses and all other strides are multiples of 16 bytes (a launch declares that of sizes).

Lane-free terms of the offset, such as a batch, are added to the position along an axis without a
bound of its own, or become an axis of the descriptor, along which a tile has one element.

Worked example: ``x[b*M*K + (mo*128 + mi)*K + ko*64 + ki] if mo*128 + mi < M`` of bf16, K = 1024, is
``load([b, mo*128, ko*64])`` of shape [B, M, 1024], strides [M*1024, 1024, 1], tile [1, 128, 64].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from fusec.codegen.lowering.layout import ends_of
from fusec.codegen.lowering.orient import ROWS
from fusec.codegen.triton import floats8
from fusec.codegen.triton.index import fits_32_bits
from fusec.codegen.triton.operations import text_of
from fusec.ir.dtype import BF16, F4X2, F8, F16, F32
from fusec.ir.expr import Buffer, Cast, Dot, Expr, Load, Var, index_exprs, reach
from fusec.ir.index import Axis, Index, Size, floordiv, greatest, index, is_nonnegative, mod
from fusec.ir.program import (
    MULTIPLE,
    For,
    Let,
    Program,
    Put,
    Statement,
    Update,
    map_statements,
    needed_values,
    statements,
)
from fusec.passes.schedule.descriptors import is_multiple

MAX_RANK = 5
"""Greatest number of axes of a descriptor."""
MAX_TILE = 256
"""Greatest extent of a tile along an axis."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A box in a buffer, in elements and over symbolic sizes; the last stride is 1.

    Attributes:
        kind: Triton's name of the elements' type.
        tile: extents of one copy: 1 along all axes but the last two.
    """

    buffer: Buffer
    kind: str
    shape: tuple[Index, ...]
    strides: tuple[Index, ...]
    tile: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.buffer.name}_tiles"


@dataclass(frozen=True, slots=True)
class DescriptorCopy:
    """A load or store by descriptor, at the position ``start`` of its tile.

    Attributes:
        transposed: whether the program's tile has the descriptor's last axis in its rows.
    """

    descriptor: Descriptor
    start: tuple[Index, ...]
    transposed: bool


Copies: TypeAlias = Mapping[Var | Put, DescriptorCopy]
"""Value that a load defines, or store -> its copy."""


def find_copies(program: Program, dimension: Mapping[Axis, int]) -> tuple[Program, Copies]:
    """Return the program without the guards that copies make redundant, and the copies.

    Args:
        program: a program after ``orient.py``, so that each lane axis has a dimension.
    """
    finder = _Finder(program, dimension)
    body = map_statements(program.body, finder.copied)
    if not finder.copies:
        return program, {}
    return replace(program, body=_without_unused(body)), finder.copies


class _Finder:
    """Finds the copies of one program, in one walk."""

    def __init__(self, program: Program, dimension: Mapping[Axis, int]) -> None:
        body = tuple(statements(program.body))
        self.values: dict[Expr, Expr] = {s.var: s.value for s in body if isinstance(s, Let)}
        self.lanes = frozenset(program.lanes)
        self.dimension = dimension
        self.operands = self._operands(body)
        if program.roles:
            loops = (s for s in body if isinstance(s, For))
            self.operands.update(s.var for s in statements(loops) if isinstance(s, Let))
        self.floats8 = floats8.multiplied(program)
        self.read = {v.buffer.base for v in self.values.values() if isinstance(v, Load)}
        self.loads, self.adds = program.descriptors, program.adds_tiles
        self.written = {s.buffer.base for s in body if isinstance(s, Put)}
        self.copies: dict[Var | Put, DescriptorCopy] = {}

    def _operands(self, body: Iterable[Statement]) -> set[Expr]:
        """Return the operands of tensor cores, and values that only a cast or transpose changes."""
        values = (s.value for s in body if isinstance(s, Let | Update))
        dots = [dot for dot in values if isinstance(dot, Dot)]
        fast = [dot for dot in dots if dot.left.dtype.itemsize <= 2 or dot.tf32]

        def made_of(node: Expr) -> tuple[Expr, ...]:
            match self.values.get(node):
                case Cast(arg=other) | (Var() as other):
                    return (other,)
                case _:
                    return ()

        return set(reach((side for dot in fast for side in (dot.left, dot.right)), made_of))

    def copied(self, statement: Statement) -> tuple[Statement]:
        """Return a statement without the guard that its copy makes redundant, or unchanged."""
        match statement:
            case Let(var=var, value=Load() as load) if self.loads and var in self.operands:
                kind = text_of(var.dtype)
                if var in self.floats8:  # tensor cores multiply floats of 8 bits, not codes
                    kind = floats8.HARDWARE[var.dtype.name]
                copy = self.copy(load.buffer, kind, load.indices[0], load.guard)
                if copy is not None and load.buffer.base not in self.written:
                    self.copies[var] = copy
                    return (Let(var, Load(load.buffer, load.indices)),)
            case Put(value=Var() as value) if self.stores(statement):
                buffer, kind = statement.buffer, text_of(statement.buffer.dtype)
                copy = self.copy(buffer, kind, statement.offset, statement.guard)
                if copy is not None and value.axes == statement.offset.axes & self.lanes:
                    put = replace(statement, guard=None)
                    self.copies[put] = copy
                    return (put,)
        return (statement,)

    def stores(self, put: Put) -> bool:
        """Return True for a store that the plan lets descriptors copy."""
        return self.adds if put.adds else self.loads and put.buffer.base not in self.read

    def copy(
        self, buffer: Buffer, kind: str, offset: Index, guard: Expr | None
    ) -> DescriptorCopy | None:
        """Return the copy that replaces an access, or None."""
        lanes = offset.axes & self.lanes
        box = _Box.of(offset, lanes, MULTIPLE // buffer.dtype.itemsize)
        bounds = self.bounds(guard, lanes)
        if buffer.dtype not in (BF16, F16, *F8, F4X2, F32) or box is None or bounds is None:
            return None
        axes = box.axes(bounds)
        if axes is None or len(axes) > MAX_RANK or not all(map(_is_describable, axes)):
            return None
        descriptor = Descriptor(
            buffer.base,
            kind,
            tuple(a.extent for a in axes),
            tuple(a.stride for a in axes),
            (*(1 for _ in axes[2:]), box.rows.extent.const, box.columns.extent.const),
        )
        transposed = self.dimension[box.columns] == ROWS
        return DescriptorCopy(descriptor, tuple(a.start for a in axes), transposed)

    def bounds(self, guard: Expr | None, lanes: frozenset[Axis]) -> _Bounds | None:
        """Return the bounds of lane axes that a guard checks; None if it checks anything else."""
        ends = ends_of(guard, self.values)
        found: _Bounds = {}
        for here, end in ends or ():
            moved = _varying(end)  # i < M - p*256, in part p, is p*256 + i < M
            here, end = here - moved, end - moved
            if len(here.axes & lanes) != 1 or any(index_exprs(end)):
                return None
            (lane,) = here.axes & lanes
            if lane in found or not here.steps_by_one(lane) or not is_nonnegative(here):
                return None
            found[lane] = here, end
        return None if ends is None else found


# -- boxes -----------------------------------------------------------------------------------------

_Bounds: TypeAlias = dict[Axis, tuple[Index, Index]]
"""Lane axis -> a position along its dimension, and that dimension's extent."""


@dataclass(frozen=True, slots=True)
class _Dimension:
    """One axis of a descriptor, and the start of a tile along it."""

    start: Index
    extent: Index
    stride: Index


@dataclass(frozen=True, slots=True)
class _Box:
    """An offset split into ``rows * stride + columns + rest``.

    Attributes:
        vector: elements in 16 bytes.
    """

    rows: Axis
    columns: Axis
    stride: Index
    rest: Index
    vector: int

    @classmethod
    def of(cls, offset: Index, lanes: frozenset[Axis], vector: int) -> _Box | None:
        """Return the box of an offset with two lane axes in which it is affine."""
        steps = {lane: offset.coefficient(lane) for lane in lanes}
        columns = next((a for a in lanes if steps[a] is index(1)), None)
        if len(lanes) != 2 or columns is None or tuple(index_exprs(offset)):
            return None
        (rows,) = lanes - {columns}
        stride = steps[rows]
        if stride is None or stride.axes or not _is_aligned(stride, vector):
            return None
        wide = all(a.extent.const <= MAX_TILE for a in lanes)
        rest = offset - index(rows) * stride - index(columns)
        return cls(rows, columns, stride, rest, vector) if wide else None

    def axes(self, bounds: _Bounds) -> tuple[_Dimension, ...] | None:
        """Return the axes of the descriptor, rows and columns last, or None if there is none."""
        row, last_row = bounds.get(self.rows, (index(self.rows), None))
        column, last_column = bounds.get(self.columns, (index(self.columns), None))
        row, column = row - index(self.rows), column - index(self.columns)
        leading: dict[Index, Index] = {}
        shift = index(0)
        for term in _terms(self.rest - row * self.stride - column):
            stride, varying = _split(term)
            if last_row is None and mod(term, self.stride) is index(0):
                row = row + floordiv(term, self.stride)
            elif term.is_constant or (last_column is None and self._holds(column + shift + term)):
                shift = shift + term
            elif varying.axes and _is_aligned(stride, self.vector):
                leading[stride] = leading.get(stride, index(0)) + varying
            else:
                return None
        column = column + shift
        end = self.stride if last_column is None else last_column + shift
        within = self._holds(column) if last_column is None else is_nonnegative(self.stride - end)
        if not within or not is_multiple(column, self.vector):
            return None
        rows = _Dimension(
            row, _end(row, self.rows.extent) if last_row is None else last_row, self.stride
        )
        outer = (_Dimension(a, _end(a, index(1)), stride) for stride, a in leading.items())
        return (*outer, rows, _Dimension(column, end, index(1)))

    def _holds(self, column: Index) -> bool:
        """Return True if tiles that begin at ``column`` end within a row of the buffer."""
        end = _end(column, self.columns.extent)
        return not end.axes and is_nonnegative(self.stride - end)


def _terms(value: Index) -> tuple[Index, ...]:
    parts = [Index((term,), 0) for term in value.terms]
    return (*parts, index(value.const)) if value.const else tuple(parts)


def _varying(value: Index) -> Index:
    """Return the terms of a sum that vary within a launch."""
    return sum((term for term in _terms(value) if term.axes), index(0))


def _split(term: Index) -> tuple[Index, Index]:
    """Split a term into its factor that is constant during a launch, and the varying factor."""
    ((monomial, coefficient),) = term.terms or (((), term.const),)
    fixed, varying = index(coefficient), index(1)
    for atom in monomial:
        if isinstance(atom, Size):
            fixed = fixed * atom
        else:
            varying = varying * atom
    return fixed, varying


def _end(start: Index, tile: Index) -> Index:
    """Return an upper bound, over sizes, of the ends of tiles; if none is known, one with axes."""
    last = greatest(start)
    return start + tile if last is None else last + tile


def _is_aligned(stride: Index, vector: int) -> bool:
    return is_nonnegative(stride - 1) and is_multiple(stride, vector)


def _is_describable(axis: _Dimension) -> bool:
    """Return True if the hardware can represent an axis: starts and extent in 0 .. 2**31 - 1."""
    counted = fits_32_bits(axis.start) and fits_32_bits(axis.extent)
    sized = not axis.extent.axes and is_nonnegative(axis.extent - 1)
    return counted and sized and is_nonnegative(axis.start)


# -- dead code -------------------------------------------------------------------------------------


def _without_unused(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Remove the definitions of unused values."""
    inside = tuple(statements(body))
    made: dict[Expr, Let] = {s.var: s for s in inside if isinstance(s, Let)}
    needed = needed_values((s for s in inside if not isinstance(s, Let)), made)
    unused = {s for s in made.values() if s.var not in needed}
    return map_statements(body, lambda statement: () if statement in unused else (statement,))
