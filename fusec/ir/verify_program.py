"""What is legal in a program. ``verify_program`` raises ``InvalidIR``, naming the statement.

* A name is defined once, before its use and in an enclosing scope; names in scope are distinct.
* A ``Let`` or ``Update`` is one node over variables and constants; dtypes as in ``verify.py``.
* A variable has every lane that its value has; in a form for a printer
  (``codegen/lowering/orient.py``), a transposed copy of a tile may have the twins of its lanes.
  Indices vary along the grid, enclosing loops and lanes only; bounds of loops do not vary along
  lanes.
* An access has one index, into a buffer of the program or an array in scope. It is guarded by a
  bool or provably in range; for the proof a loop's axis is less than any one of its stops.
* ``Update`` changes a carry in scope. Sizes in indices are among the program's.
* A ``Multiply`` is legal if the equivalent loop nest is: f32 or bf16, summed in f32.

That stores are disjoint is checked on the kernel, not here: a mask that makes lanes disjoint is a
run-time value in a program, which the prover cannot follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fusec.errors import InternalError
from fusec.ir.dtype import BOOL, F4X2, F32, I8, I32
from fusec.ir.expr import (
    Buffer,
    Const,
    Dot,
    Expr,
    IndexValue,
    Load,
    Reduce,
    Scan,
    Var,
    children,
    index_exprs,
    substitute,
)
from fusec.ir.index import Axis, Index, Size, index
from fusec.ir.program import (
    PACKED,
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
from fusec.ir.verify import check, verify_node_types, verify_range


@dataclass(frozen=True, slots=True)
class _Scope:
    """The axes and names that a statement may use.

    Attributes:
        held: axes that are scalar at a statement: the grid and enclosing loops.
        loops: enclosing loops, outermost first.
        copied: copies of whole tiles by descriptor, which stop at their tensor's bounds.
        added: buffers that the program adds to.
    """

    lanes: frozenset[Axis]
    held: frozenset[Axis]
    loops: tuple[For, ...]
    sizes: frozenset[Size]
    reads: set[Buffer]
    writes: set[Buffer]
    variables: set[Var]
    carries: set[Var]
    copied: frozenset[Var | Put]
    added: frozenset[Buffer]

    def inside(self, loop: For) -> _Scope:
        """Return the scope of a loop's body: its definitions are not visible outside."""
        return replace(
            self,
            held=self.held | {loop.axis},
            loops=(*self.loops, loop),
            reads=set(self.reads),
            writes=set(self.writes),
            variables=set(self.variables),
            carries=set(self.carries),
        )


def verify_program(program: Program, copied: frozenset[Var | Put] = frozenset()) -> None:
    """Check a program.

    Args:
        copied: loads, by the variable that they define, and stores whose tiles hardware copies by
            descriptor: they touch nothing outside their tensor.
    Raises:
        InvalidIR: naming the statement at fault.
    """
    head = f"program {program.name}"
    axes = (*program.grid, *program.lanes)
    check(len(set(axes)) == len(axes), head, "an axis stands twice in grid and lanes")
    for lane in program.lanes:
        check(lane.extent.is_constant, head, f"lane axis {lane.name} has {lane.extent} points")
    for buffer in program.buffers:
        check(buffer.base is buffer, head, f"{buffer} is a flat form, not a tensor")
    scope = _Scope(
        frozenset(program.lanes),
        frozenset(program.grid),
        (),
        frozenset(program.sizes),
        set(program.buffers),
        set(program.writes),
        set(),
        set(),
        copied,
        program.added,
    )
    for axis in program.grid:
        _verify_index(axis.extent, frozenset(), scope, f"grid {axis.name}")
    _verify_block(program.body, scope)


def _verify_block(body: tuple[Statement, ...], scope: _Scope) -> None:
    for statement in body:
        match statement:
            case Let():
                line = f"{statement.var.name} = ..."
                _verify_value(statement.value, statement.var, scope, line)
                _define(statement.var, scope, line)
            case Carry():
                line = f"carry {statement.var.name}"
                _verify_value(statement.initial, statement.var, scope, line)
                _define(statement.var, scope, line)
                scope.carries.add(statement.var)
            case Update():
                line = f"{statement.var.name} := ..."
                check(statement.var in scope.carries, line, "this is no carry in scope")
                _verify_value(statement.value, statement.var, scope, line)
            case Put():
                _verify_put(statement, scope)
            case Scratch():
                _verify_scratch(statement, scope)
            case For():
                _verify_loop(statement, scope)
            case Multiply():
                _verify_product(statement, scope)
            case Unzip(halves=halves, whole=whole):
                line = f"unzip {whole.name}"
                _verify_name(whole, scope, line)
                for half in halves:
                    _define(half, scope, line)
                _verify_pairs(whole, halves, line)
            case Zip(whole=whole, halves=halves):
                line = f"{whole.name} = zip ..."
                for half in halves:
                    _verify_name(half, scope, line)
                _define(whole, scope, line)
                _verify_pairs(whole, halves, line)
            case _:
                raise InternalError(statement, stage="ir.verify")


def _define(var: Var, scope: _Scope, line: str) -> None:
    check(all(var.name != other.name for other in scope.variables), line, "defined twice")
    check(var.axes <= scope.lanes, line, "it has axes that are no lanes")
    scope.variables.add(var)


def _verify_pairs(whole: Var, halves: tuple[Var, Var], line: str) -> None:
    """Check that a tile has twice the lanes of its halves along one axis, and theirs beside it."""
    one, two = halves
    check(one.axes == two.axes, line, "halves have different lanes")
    check(whole.dtype is one.dtype is two.dtype, line, "types differ")
    both, each = whole.axes - one.axes, one.axes - whole.axes
    pairs = len(both) == len(each) == 1
    twice = pairs and next(iter(both)).extent == next(iter(each)).extent * 2
    check(twice, line, "no axis has twice the lanes of its halves")


def _verify_value(value: Expr, var: Var, scope: _Scope, line: str) -> None:
    check(value.dtype is var.dtype, line, f"a value of {value.dtype} for a {var.dtype}")
    verify_node_types(value, line)
    for child in children(value):
        _verify_name(child, scope, line)
    if isinstance(value, Var):
        _verify_name(value, scope, line)
    if isinstance(value, IndexValue):
        _verify_index(value.index, scope.lanes, scope, line)
    if isinstance(value, Reduce | Scan):
        single = isinstance(value, Scan) or len(value.bodies) == 1
        check(single, line, f"{value.monoid} of several values")
        combined = (*value.bodies, *(v for v in children(value) if isinstance(v, Var)))
        lacks = any(set(value.over) - operand.axes for operand in combined)
        kinds = zip(value.start, value.bodies, strict=False) if isinstance(value, Scan) else ()
        check(all(a.dtype is b.dtype for a, b in kinds), line, "it starts with another type")
        check(not lacks, line, "it reduces lanes that its value lacks")
    if isinstance(value, Dot):
        held = value.left.axes & value.right.axes
        both = held == frozenset(value.over) or (not held and _sums_over_twins(value))
        check(both, line, f"both operands have the lanes {held}")
        check(not value.scales or len(value.blocks) == 1, line, "its scales share no lane")
    if isinstance(value, Load):
        check(value.buffer.base in scope.reads, line, f"{value.buffer} is not in scope")
        check(value.buffer.base not in scope.added, line, f"{value.buffer} is added to, and read")
        check(len(value.indices) == 1, line, f"{value.buffer} is not addressed by an offset")
        _verify_access(value, value.indices[0], scope, line, copied=var in scope.copied)
    missing = value.axes - scope.held - var.axes
    transposed = isinstance(value, Var) and _are_twins(missing, var.axes - value.axes)
    check(transposed or not missing, line, f"lanes {missing} of the value are missing")


def _are_twins(missing: frozenset[Axis], instead: frozenset[Axis]) -> bool:
    """Return True if the lanes ``missing`` have twins in ``instead``, as in a transposed tile."""
    lacking, having = ({(a.name, a.extent) for a in axes} for axes in (missing, instead))
    return lacking <= having


def _sums_over_twins(dot: Dot) -> bool:
    """Return True if a ``Dot`` of oriented tiles sums over a lane of each, of equal extents."""
    if len(dot.over) != 2:
        return False
    left, right = dot.over
    sides = zip((left, right), (dot.left, dot.right), strict=True)
    extents = {lane.extent * (2 if side.dtype is F4X2 else 1) for lane, side in sides}
    return left in dot.left.axes and right in dot.right.axes and len(extents) == 1


def _verify_name(node: Expr, scope: _Scope, line: str) -> None:
    check(isinstance(node, Var | Const), line, "more than one node in a statement")
    if isinstance(node, Var):
        check(node in scope.variables, line, f"{node.name} is not defined here")


def _verify_put(put: Put, scope: _Scope) -> None:
    line = f"{put.buffer.name}[{put.offset}] = ..."
    check(put.buffer.base in scope.writes, line, f"{put.buffer} is not written by this program")
    seen, expected = put.value.dtype, put.buffer.dtype
    check(seen is expected, line, f"a value of {seen} for a buffer of {expected}")
    alone = (put.buffer.base in scope.added) is put.adds and (expected is F32 or not put.adds)
    check(alone, line, f"{put.buffer} is added to in one place, and accessed in another")
    _verify_name(put.value, scope, line)
    if put.guard is not None:
        _verify_name(put.guard, scope, line)
    _verify_access(put, put.offset, scope, line, copied=put in scope.copied)


def _verify_scratch(scratch: Scratch, scope: _Scope) -> None:
    line = f"scratch {scratch.buffer.name}"
    _verify_index(scratch.length, frozenset(), scope, line)
    check(scratch.buffer.base not in scope.reads, line, "defined twice")
    check(scratch.buffer.base.flat().shape == (scratch.length,), line, "of another length")
    scope.reads.add(scratch.buffer.base)
    scope.writes.add(scratch.buffer.base)


def _verify_loop(loop: For, scope: _Scope) -> None:
    line = f"for {loop.axis.name}"
    taken = loop.axis in scope.held or loop.axis in scope.lanes
    check(not taken, line, "this axis is bound already")
    check(bool(loop.stops), line, "it never stops")
    for bound in (loop.start, *loop.stops):
        _verify_index(bound, frozenset(), scope, line)
    _verify_block(loop.body, scope.inside(loop))


def _verify_product(product: Multiply, scope: _Scope) -> None:
    """Check a product as its equivalent loop nest over rows, panels, columns and terms."""
    line = f"{product.into.buffer.name} = ... @ ..."
    into, left, right = product.into, product.left, product.right
    check(into.buffer.base in scope.writes, line, f"{into.buffer.name} is not written here")
    check(
        into.buffer.base not in (left.buffer.base, right.buffer.base), line, "it reads its result"
    )
    check(into.column is index(1), line, "columns are no neighbours")
    kind = right.buffer.dtype
    sums = I32 if kind is I8 else F32
    check(kind in PACKED or right.column is index(1), line, "columns are no neighbours")
    panels = product.panels
    _verify_index(product.adds, frozenset(), scope, line)
    check(product.width > 0 and bool(panels), line, f"panels of {product.width} columns")
    for matrix, rows, columns, outer, types in (
        (into, product.rows, (index(product.width),), panels, (sums,)),
        (left, product.rows, product.terms, (index(1),), (kind,)),
        (right, product.terms, (index(product.width),), panels, (F32, *PACKED)),
    ):
        check(matrix.buffer.base in scope.reads, line, f"{matrix.buffer.name} is not in scope")
        check(matrix.buffer.dtype in types, line, f"a matrix of {matrix.buffer.dtype}")
        _verify_matrix(matrix, (rows, outer, columns), scope, line)


def _verify_matrix(
    matrix: Matrix, bounds: tuple[tuple[Index, ...], ...], scope: _Scope, line: str
) -> None:
    """Check that all elements of a matrix are in range.

    Args:
        bounds: the stops of its rows, of its panels, and of the columns of a panel.
    """
    axes = []
    for name, stops in zip("ijk", bounds, strict=True):
        for stop in stops:
            _verify_index(stop, frozenset(), scope, line)
        axes.append(Axis(name, stops[0]))
        scope = scope.inside(For(axes[-1], index(0), stops, ()))
    load = Load(matrix.buffer.flat(), (matrix.at(*map(index, axes)),), None)
    _verify_access(load, load.indices[0], scope, line, copied=False)


# -- indices ---------------------------------------------------------------------------------------


def _verify_index(value: Index, lanes: frozenset[Axis], scope: _Scope, line: str) -> None:
    """Check that an index varies only along scalar axes and ``lanes``, with names in scope."""
    for expr in index_exprs(value):
        _verify_name(expr, scope, line)
    loose = value.axes - scope.held - lanes
    check(not loose, line, f"an index varies along {sorted(a.name for a in loose)}")
    unknown = {a for a in value.atoms() if isinstance(a, Size)} - scope.sizes
    check(not unknown, line, f"sizes {sorted(s.name for s in unknown)} are not passed")


def _verify_access(
    access: Load | Put, offset: Index, scope: _Scope, line: str, *, copied: bool
) -> None:
    _verify_index(offset, scope.lanes, scope, line)
    if access.guard is not None:
        check(access.guard.dtype is BOOL, line, f"a guard of type {access.guard.dtype}")
    if access.guard is not None or copied:
        return
    length = access.buffer.base.flat().shape[0]
    what = f"load of {access.buffer}" if isinstance(access, Load) else "store"
    verify_range(offset, length, what, line, *_within_loops(offset, scope))


def _within_loops(offset: Index, scope: _Scope) -> Iterator[Index]:
    """Yield the offset with each loop axis limited by one of its stops, for each choice."""
    loops = [loop for loop in scope.loops if loop.axis in offset.axes]
    for stops in itertools.product(*(loop.stops for loop in loops)):
        mapping: dict[Axis, Index] = {}
        for loop, stop in zip(loops, stops, strict=True):
            limited = Axis(loop.axis.name, loop.axis.extent, substitute(stop, mapping))
            mapping[loop.axis] = index(limited)
        yield substitute(offset, mapping)
