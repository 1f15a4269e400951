"""Compare how wide each access of a GPU program could be with its width in the compiled kernel.

A thread loads at most 16 bytes at once. It can where the lanes walk memory in steps of one element,
the tile has 16 bytes for each thread, and neither a row's address nor a mask's end falls between
two multiples of 16 bytes. Where one of these fails, the access is left out, with the reason.

The printer writes the accesses of ``join_pairs(sink(program))`` in order, one ``tl.load`` or
``tl.store`` a line, or that of a tensor descriptor, and the compiled code has the line of each
access. A copy by descriptor is no access of any thread.

Worked example: ``x[m*1024 + c]`` of bf16 with 1024 lanes c in 4 warps can be 16 bytes wide. With
``m*1023`` the rows begin between multiples of 16 bytes, with 512 lanes a thread has 8 bytes.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusec.codegen.triton.mask_widths import mask_lanes
from fusec.codegen.triton.pairs import join_pairs
from fusec.codegen.triton.sink import sink
from fusec.ir.expr import Buffer, Const, Expr, IndexValue, Load, Op, Var
from fusec.ir.index import Axis, Index, Size, product
from fusec.ir.program import Let, Program, Put, Update, statements
from fusec.tools.static_checks import WIDE, GlobalAccess

SCALAR = "one value for all threads of a row or program"
SCATTERED = "lanes do not walk memory in steps of one element"
SMALL = "the tile has less than 16 bytes for each thread"
UNALIGNED = "rows begin between multiples of 16 bytes"
MASKED = "the mask ends between multiples of 16 bytes"
BESIDE_WIDER = "a mask in the layout of the wider tile beside it"
_PROMISED = 16  # divides addresses and, if it divides their hints, sizes


@dataclass(frozen=True, slots=True)
class Demand:
    """One load or store of a program.

    Attributes:
        buffer: its name.
        elements: of its tile; 1 where it has no lanes.
        axis: the lane axis along which memory is contiguous, if there is one.
        left_out: why a thread cannot access 16 bytes at once; "" where it can.
    """

    kind: str
    buffer: str
    itemsize: int
    elements: int
    axis: Axis | None
    left_out: str


@dataclass(frozen=True, slots=True)
class Access:
    """A demand, its line of the source, and the accesses of the compiled code there."""

    demand: Demand
    line: int
    text: str
    found: tuple[GlobalAccess, ...]

    @property
    def bytes(self) -> int:
        return sum(access.bytes for access in self.found)

    @property
    def narrow_bytes(self) -> int:
        return self.narrower(WIDE)

    def narrower(self, width: int) -> int:
        """Return the bytes that move fewer than ``width`` at a time."""
        return sum(access.bytes for access in self.found if access.width < width)

    @property
    def narrowest(self) -> int:
        return min((access.width for access in self.found), default=WIDE)


def demands(program: Program) -> tuple[Demand, ...]:
    """Return the loads and stores of a program, in the order in which they are printed."""
    program = join_pairs(sink(program))
    body = tuple(statements(program.body))
    values = {s.var: s.value for s in body if isinstance(s, Let)}
    lanes = frozenset(program.lanes)
    threads = program.warps * 32
    masks = {} if program.multiplies else mask_lanes(program)
    found = []
    for statement in body:
        match statement:
            case Let(value=Load() as load) | Update(value=Load() as load):
                tile = load.axes & lanes
                offset, guard, kind = load.indices[0], load.guard, "load"
                buffer = load.buffer
            case Put(buffer=buffer, offset=offset, value=value, guard=guard):
                varying = offset.axes | value.axes | (guard.axes if guard else frozenset())
                tile, kind = varying & lanes, "store"
            case _:
                continue
        demand = _demand(kind, buffer, offset, tile, threads, guard, values)
        if getattr(statement, "value", None) in masks:
            demand = replace(demand, left_out=demand.left_out or BESIDE_WIDER)
        found.append(demand)
    return tuple(found)


def match_accesses(
    program: Program, source: str, compiled: Sequence[GlobalAccess]
) -> tuple[Access, ...]:
    """Match each access of a program with those of the compiled kernel, by their lines.

    () if the compiled code has no line numbers, or the source has other accesses.
    """
    lines = _printed_accesses(source, program.name)
    wanted = demands(program)
    if [kind for kind, _ in lines] != [d.kind for d in wanted]:
        return ()
    if not any(access.line for access in compiled):
        return ()
    texts = source.splitlines()
    return tuple(
        Access(
            demand,
            line,
            texts[line - 1].strip(),
            tuple(access for access in compiled if access.line == line),
        )
        for demand, (_, line) in zip(wanted, lines, strict=True)
    )


def _printed_accesses(source: str, name: str) -> list[tuple[str, int]]:
    """Return (kind, line) of each load and store in a kernel's source, in order."""
    found = []
    for function in ast.parse(source).body:
        if not (isinstance(function, ast.FunctionDef) and function.name == name):
            continue
        for node in ast.walk(function):
            match node:
                case ast.Call(func=ast.Attribute(ast.Name(), "load" | "store" as kind)):
                    found.append((kind, node.lineno))
    return sorted(found, key=lambda access: access[1])


def _demand(
    kind: str,
    buffer: Buffer,
    offset: Index,
    tile: frozenset[Axis],
    threads: int,
    guard: Expr | None,
    values: Mapping[Var, Expr],
) -> Demand:
    size = buffer.dtype.itemsize
    ordered = sorted(tile, key=lambda a: a.serial)
    axis = next((a for a in ordered if offset.steps_by_one(a)), None)
    elements = product(a.extent for a in tile).hint()
    vector = max(1, WIDE // size)
    if not tile:
        reason = SCALAR
    elif axis is None:
        reason = SCATTERED
    elif elements * size < WIDE * threads or axis.extent.hint() < vector:
        reason = SMALL
    elif _divisor(offset, axis) % vector:
        reason = UNALIGNED
    elif guard is not None and _mask_divisor(guard, axis, values) % vector:
        reason = MASKED
    else:
        reason = ""
    return Demand(kind, buffer.name, size, elements, axis, reason)


def _divisor(value: Index, axis: Axis) -> int:
    """Return a divisor of an index without its axis, up to the one that a launch guarantees."""
    found = math.gcd(_PROMISED, value.const)
    for monomial, coefficient in value.terms:
        if monomial == (axis,):
            continue
        sizes = [a for a in monomial if isinstance(a, Size) and a.hint % _PROMISED == 0]
        found = math.gcd(found, coefficient * _PROMISED ** len(sizes))
    return found


def _mask_divisor(guard: Expr, axis: Axis, values: Mapping[Var, Expr]) -> int:
    """Return a number such that a mask changes along an axis only at its multiples."""
    node = values.get(guard, guard) if isinstance(guard, Var) else guard
    if axis not in node.axes:
        return _PROMISED
    match node:
        case Op(name="and" | "or" | "not", args=args):
            return math.gcd(*(_mask_divisor(arg, axis, values) for arg in args))
        case Op(name="lt" | "ge", args=(left, right)):
            sides = _bound(left, axis, values), _bound(right, axis, values)
            return math.gcd(_PROMISED, *sides)
        case _:
            return 1


def _bound(side: Expr, axis: Axis, values: Mapping[Var, Expr]) -> int:
    """Return a divisor of one side of ``axis + a < b`` without the axis; 1 if unknown."""
    node = values.get(side, side) if isinstance(side, Var) else side
    match node:
        case Const(value=int(value)):
            return abs(value)
        case IndexValue(index=value) if axis not in value.axes or value.steps_by_one(axis):
            return _divisor(value, axis)
        case _:
            return 1
