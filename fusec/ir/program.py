"""Programs: scheduled kernels, as printers take them: scopes of statements over named values.

Grammar of the printed form::

    program   ::= 'program' name '(' buffer | size, ... ')'
                  'grid' axis:extent ... 'lanes' axis:extent ... statement*
    statement ::= var ['<' lanes '>'] '=' expr            Let: one operation over vars and constants
                | 'carry' var '=' constant                Carry: a value that loops update
                | var ':=' expr                           Update
                | 'for' axis 'in' start '..' min(stop, ...) ':' statement*
                | buffer '[' offset ']' ('=' | '+=') var ['if' var]   Put
                | 'scratch' buffer '[' length ']'         Scratch: an array private to the program
                | matrix ('=' | '+=') matrix '@' matrix   Multiply: a product of matrices in memory
                  'for' count 'x' count 'x' count
    matrix    ::= buffer '[' offset ']'

    role      ::= statement | 'fill' ring ':' var '=' buffer '[' offset ']' ',' ...
                | 'take' ring [n 'before'] ':' var ',' ...   Take: the tiles in a slot of the ring
                | 'await' var ',' ... ['but' n]          Await: asynchronous products
                | 'free' ring [n 'before'] ['from the second' axis 'on']

Semantics. The body runs once for each point of the grid, in any order or in parallel. A lane axis
is no loop: a value with lane axes is a tile that holds one element for each lane. ``Load`` has one
index, the element offset into the buffer's storage (``buffer.flat()``), and a guard that is a value
of the program; lanes whose guard is false touch no memory and give 0. ``Reduce`` in a ``Let`` folds
lanes of one value. ``For`` runs ``axis`` from ``start`` while it is less than each of ``stops``; a
Carry declared outside keeps its value from one iteration to the next. ``Multiply`` replaces a
``Dot`` of tiles where tiles are arrays; i, j and k in it count rows, columns and terms.

With warp specialization, one program is printed as several
(``codegen/triton/warp_specialization.py``). A producer warp fills the slots of a ring in turn, each
as soon as it is free; consumer warps take their tiles in the same order. A ``Dot`` of taken tiles
is asynchronous until an ``Await``, and only then may its slot be freed.

Worked example, the sum of a row of C elements in chunks of 16 lanes (``c = co*16 + ci``)::

    carry acc<ci> = 0.0
    for co in 0 .. C//16:
      v<ci> = x[m*C + co*16 + ci]
      acc := acc + v
    s = sum(ci: acc)
    out[m] = s
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fusec.ir.dtype import BF16, I8
from fusec.ir.expr import Buffer, Const, Dot, Expr, Load, Var, children, index_exprs, reach
from fusec.ir.index import Axis, Index, Size, index, mod
from fusec.ir.machine import CodeTuning
from fusec.ir.text import print_axes

MULTIPLE = 16
"""A GPU launch is specialised by which addresses, in bytes, and sizes are multiples of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Let:
    """Name a value. ``value`` is one node whose children are ``Var`` or ``Const``."""

    var: Var
    value: Expr


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """Declare a value that ``Update`` changes, with its initial value in every lane."""

    var: Var
    initial: Const


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """Assign to a carry: ``value`` is one node over ``Var`` and ``Const``."""

    var: Var
    value: Expr


@dataclass(frozen=True, slots=True, eq=False)
class Put:
    """Write ``value`` to the element ``offset`` of a buffer, in each lane where ``guard`` is true.

    ``value`` has the buffer's type. Lanes that neither offset nor value has are written once.

    Attributes:
        adds: adds to the elements, each at one go: instances of the body may add to one element,
            in any order. The program has no other access to such a buffer.
    """

    buffer: Buffer
    offset: Index
    value: Var | Const
    guard: Var | None
    adds: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """Declare an array of ``length`` elements, private to one program instance, uninitialised."""

    buffer: Buffer
    length: Index


@dataclass(frozen=True, slots=True, eq=False)
class For:
    """Run ``body`` for ``axis = start, start+1, ...`` while ``axis < min(stops)``, in order."""

    axis: Axis
    start: Index
    stops: tuple[Index, ...]
    body: tuple[Statement, ...]

    @property
    def is_around_one(self) -> bool:
        """Whether it holds one loop, and nothing else."""
        return len(self.body) == 1 and isinstance(self.body[0], For)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix in memory, whose columns may lie in panels of W, and whose rows in pairs.

    Its element i, j is ``buffer[start + i*row + (j // W)*panel + (j % W)*column]``.

    Attributes:
        pairs: rows 2i and 2i + 1 are interleaved, ``b[0, 0] b[1, 0] b[0, 1] b[1, 1] ...``: in
            place of ``i*row`` above stands ``i//2*2*row + i%2``.
    """

    buffer: Buffer
    start: Index
    row: Index
    column: Index
    panel: Index
    pairs: bool = False

    def at(self, row: Index, panel: Index, column: Index) -> Index:
        """Return the offset of an element: its row, its panel, and its column in that."""
        odd = mod(row, index(2)) if self.pairs else index(0)
        along = (row - odd) * self.row + odd
        return self.start + along + panel * self.panel + column * self.column


@dataclass(frozen=True, slots=True, eq=False)
class Multiply:
    """``into[i, j] (+)= sum(k: left[i, k] * right[k, j])`` in f32, or of int8 in i32.

    The order of k is the language's, but depends on ``terms`` alone, not on rows and panels.

    Both operands have one type, f32 or one of ``PACKED``. The columns of ``into`` are contiguous
    within a panel, as are those of ``right`` in f32. ``into`` overlaps neither operand.

    Attributes:
        rows, panels, terms: i, j // width and k are less than each of these; there are none where
            one is not positive.
        width: columns of a panel.
        adds: adds to ``into`` where this is not 0; else overwrites it, with 0 where there are no
            terms.
    """

    into: Matrix
    left: Matrix
    right: Matrix
    rows: tuple[Index, ...]
    panels: tuple[Index, ...]
    terms: tuple[Index, ...]
    width: int
    adds: Index


PACKED = (BF16, I8)
"""Types of which a ``Multiply`` packs the terms of its right operand, wherever its columns lie."""


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """A ring buffer in shared memory, with ``slots`` slots."""

    name: str
    slots: int


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """Copy tiles into the next slot of a ring, as soon as it is free."""

    ring: Ring
    loads: tuple[Let, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """Wait until the next slot of a ring is full, and name the tiles in it.

    Attributes:
        before: 0 for the next slot; else a slot that was taken already and is not yet freed: 1 for
            the last one, 2 for the one before.
    """

    ring: Ring
    values: tuple[Var, ...]
    before: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Await:
    """Wait for all products that were started, except the last ``pending`` ones."""

    sums: tuple[Var, ...]
    pending: int


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    """Free a slot, to be filled again: the one taken last, or ``before`` takes earlier.

    Attributes:
        after: axis of a loop in whose first iteration no slot is freed.
    """

    ring: Ring
    before: int
    after: Axis | None


@dataclass(frozen=True, slots=True, eq=False)
class Halve:
    """Name the halves of a tile's columns."""

    halves: tuple[Var, Var]
    whole: Var


@dataclass(frozen=True, slots=True, eq=False)
class Unzip:
    """Name the even and the odd elements of a tile's columns."""

    halves: tuple[Var, Var]
    whole: Var


@dataclass(frozen=True, slots=True, eq=False)
class Zip:
    """Name a tile whose columns are those of two others in turn."""

    whole: Var
    halves: tuple[Var, Var]


Statement: TypeAlias = (
    Let | Carry | Update | Put | Scratch | For | Multiply | Fill | Take | Await | Free | Halve
    | Unzip | Zip
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaunchSettings:
    """How a kernel is launched and how its loops are pipelined: of a plan, and of its program.

    Attributes:
        warps: warps of a program instance; 0 on a CPU. All others but ``stages`` are a GPU's.
        stages: iterations of a loop that are in flight: asynchronous copies on a GPU; on a CPU,
            how far loads that no other grid point shares are prefetched.
        group: rows of tiles that share the columns' data in the cache: grid points run in blocks of
            this many along the second to last grid axis; 0 for row by row.
        descriptors: operands of products are copied by tensor descriptors where possible.
        adds_tiles: tiles are added to memory by tensor descriptors where possible.
        registers: register limit of a thread; 0 leaves it to the compiler.
        packed: what stands behind a loop's sums is computed again from loads of 16 bits, which take
            half the registers of their values.
        roles: warp specialization. "cooperative": a producer warp loads, consumer warps multiply;
            "": none.
        programs: number of persistent programs that share the grid; 0: one for each grid point.
        dependent: programs may start while the launch before this one ends. Each waits for that
            launch before it touches memory, and then lets the next launch start.
    """

    warps: int = 4
    stages: int = 1
    group: int = 0
    descriptors: bool = False
    adds_tiles: bool = False
    registers: int = 0
    packed: bool = False
    roles: str = ""
    programs: int = 0
    dependent: bool = False

    @property
    def copies_tiles(self) -> bool:
        """Whether it has tensor descriptors, where they are possible."""
        return self.descriptors or self.adds_tiles


@dataclass(frozen=True, slots=True, eq=False)
class Program(LaunchSettings):
    """A kernel ready to print.

    Attributes:
        reads, writes: buffers of the caller, in argument order; a buffer may be in both.
        sizes: symbolic extents, passed as 64-bit integers after the buffers.
        grid: one instance of the body for each point.
        lanes: lane axes, outermost first; their extents are constants (powers of two on a GPU).
        notation, source: the kernel in index notation, and the user's source lines: for comments.
        table: it runs for each row of a table of buffers' addresses and sizes: one launch of a
            foreach kernel.
        counts: for tiles of products, lane axis -> bounds of its elements that exist, if there may
            be fewer than lanes. What lanes beyond hold reaches neither memory nor a reduction.
        overlaid: buffers that may alias each other.
        approximate: function's result -> its form on a CPU (``codegen/lowering/precision.py``):
            "rounded" if it only ever reaches memory in 16 bits, "flushed" if 0 may stand for
            subnormal numbers, "rounded_flushed" for both.
        work: how many points one kernel call visits, for the choice of threads (a CPU hint).
        code: how it is printed.
    """

    name: str
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    sizes: tuple[Size, ...]
    grid: tuple[Axis, ...]
    lanes: tuple[Axis, ...]
    body: tuple[Statement, ...]
    notation: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    work: Index | None = None
    table: bool = False
    overlaid: tuple[Buffer, ...] = ()
    counts: tuple[tuple[Axis, tuple[Index, ...]], ...] = ()
    approximate: tuple[tuple[Var, str], ...] = ()
    code: CodeTuning = field(default_factory=CodeTuning)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Every buffer argument once, in the order of a launch: reads, then writes."""
        return tuple(dict.fromkeys((*self.reads, *self.writes)))

    @property
    def added(self) -> frozenset[Buffer]:
        """The buffers that it adds to: the order of these sums differs from launch to launch."""
        found = (s for s in statements(self.body) if isinstance(s, Put) and s.adds)
        return frozenset(put.buffer.base for put in found)

    @property
    def multiplies(self) -> bool:
        """Whether it multiplies matrices."""
        return any(map(is_product, statements(self.body)))


def is_product(statement: Statement) -> bool:
    """Return True for a statement that multiplies matrices, as tiles or in memory."""
    tiles = isinstance(statement, Let | Update) and isinstance(statement.value, Dot)
    return tiles or isinstance(statement, Multiply)


def statements(body: Iterable[Statement]) -> Iterator[Statement]:
    """Yield the statements of a block in order, each loop followed by its body's."""
    for statement in body:
        yield statement
        if isinstance(statement, For):
            yield from statements(statement.body)


def reads(statement: Statement) -> tuple[Expr, ...]:
    """Return the operands of a statement; of a loop, the values in its bounds."""
    match statement:
        case Let(value=Var() as value) | Update(value=Var() as value):
            return (value,)
        case Let() | Update():
            return children(statement.value)
        case Put():
            guard = () if statement.guard is None else (statement.guard,)
            return (statement.value, *index_exprs(statement.offset), *guard)
        case For():
            return tuple(e for b in (statement.start, *statement.stops) for e in index_exprs(b))
        case Halve() | Unzip():
            return (statement.whole,)
        case Zip():
            return statement.halves
        case _:
            return ()


def accessed(statement: Statement) -> Buffer | None:
    """Return the buffer that a load reads or a store writes; None for any other statement."""
    match statement:
        case Let(value=Load() as load) | Update(value=Load() as load):
            return load.buffer.base
        case Put():
            return statement.buffer.base
        case _:
            return None


def needed_values(
    roots: Iterable[Statement], made: Mapping[Expr, Let] | Mapping[Expr, Let | Update]
) -> set[Expr]:
    """Return the values that statements read, and the operands of those that ``made`` defines."""
    named = [value for statement in roots for value in reads(statement)]
    return set(reach(named, lambda value: reads(made[value]) if value in made else ()))


def map_statements(
    body: Iterable[Statement], rule: Callable[[Statement], Iterable[Statement]]
) -> tuple[Statement, ...]:
    """Return a block with each statement but a loop replaced by the results of ``rule``.

    A loop without any is dropped.
    """
    done: list[Statement] = []
    for statement in body:
        if not isinstance(statement, For):
            done += rule(statement)
        elif inner := map_statements(statement.body, rule):
            done.append(replace(statement, body=inner))
    return tuple(done)


def print_program(program: Program) -> str:
    """Return the program as text."""
    args = ", ".join([*(b.name for b in program.buffers), *(s.name for s in program.sizes)])
    grid, lanes = print_axes(program.grid), print_axes(program.lanes)
    lines = [f"program {program.name}({args})    grid {grid}    lanes {lanes}"]
    print_block(program.body, 1, lines)
    for kind in dict.fromkeys(kind for _, kind in program.approximate):
        lines.append(f"{kind} {_named(tuple(v for v, k in program.approximate if k == kind))}")
    return "\n".join(lines)


def print_block(body: tuple[Statement, ...], depth: int, lines: list[str]) -> None:
    """Append a block's lines."""
    pad = "  " * depth
    for statement in body:
        match statement:
            case Let():
                lines.append(f"{pad}{_var(statement.var)} = {statement.value!r}")
            case Carry():
                lines.append(f"{pad}carry {_var(statement.var)} = {statement.initial!r}")
            case Update():
                lines.append(f"{pad}{statement.var.name} := {statement.value!r}")
            case Put():
                guard = f" if {statement.guard!r}" if statement.guard is not None else ""
                target = f"{statement.buffer.name}[{statement.offset}]"
                sign = "+=" if statement.adds else "="
                lines.append(f"{pad}{target} {sign} {statement.value!r}{guard}")
            case Scratch():
                lines.append(f"{pad}scratch {statement.buffer.name}[{statement.length}]")
            case For():
                stop = _least(statement.stops)
                lines.append(f"{pad}for {statement.axis.name} in {statement.start} .. {stop}:")
                print_block(statement.body, depth + 1, lines)
            case Multiply():
                lines.append(f"{pad}{_product(statement)}")
            case Fill():
                loads = ", ".join(f"{_var(one.var)} = {one.value!r}" for one in statement.loads)
                lines.append(f"{pad}fill {statement.ring.name}: {loads}")
            case Take():
                before = f" {statement.before} before" if statement.before else ""
                lines.append(f"{pad}take {statement.ring.name}{before}: {_named(statement.values)}")
            case Await():
                but = f" but {statement.pending}" if statement.pending else ""
                lines.append(f"{pad}await {_named(statement.sums)}{but}")
            case Free():
                before = f" {statement.before} before" if statement.before else ""
                after = f" from the second {statement.after.name} on" if statement.after else ""
                lines.append(f"{pad}free {statement.ring.name}{before}{after}")
            case Halve():
                lines.append(f"{pad}halve {_var(statement.whole)}: {_named(statement.halves)}")
            case Unzip():
                lines.append(f"{pad}unzip {_var(statement.whole)}: {_named(statement.halves)}")
            case Zip():
                lines.append(f"{pad}{_var(statement.whole)} = zip {_named(statement.halves)}")


def _least(bounds: tuple[Index, ...]) -> str:
    stops = ", ".join(map(repr, bounds))
    return f"min({stops})" if len(bounds) > 1 else stops


def _product(product: Multiply) -> str:
    """Return the line of a product; i, j and k count rows, columns and terms."""
    i, j, k = (Axis(name, index(product.width)) for name in "ijk")
    into, right = product.into, product.right
    left = product.left.at(index(i), index(0), index(k))
    panel = index(Axis("J", index(product.width)))
    sides = (
        f"{into.buffer.name}[{into.at(index(i), panel, index(j))}]",
        f"{product.left.buffer.name}[{left}]",
        f"{right.buffer.name}[{right.at(index(k), panel, index(j))}]",
    )
    columns = tuple(panels * product.width for panels in product.panels)
    count = f"{_least(product.rows)} x {_least(columns)} x {_least(product.terms)}"
    sign = "=" if product.adds is index(0) else "+="
    first = "" if product.adds.is_constant else f", = where {product.adds} is 0"
    return f"{sides[0]} {sign} {sides[1]} @ {sides[2]} for {count}{first}"


def _named(values: tuple[Var, ...]) -> str:
    return ", ".join(map(_var, values))


def _var(var: Var) -> str:
    lanes = ", ".join(a.name for a in sorted(var.axes, key=lambda a: a.serial))
    return f"{var.name}<{lanes}>" if lanes else var.name


def stored_alone(body: tuple[Statement, ...]) -> frozenset[Var]:
    """Return the variables that are only stored, so that the store may round them."""
    inside = list(statements(body))
    stored = {s.value for s in inside if isinstance(s, Put) and isinstance(s.value, Var)}
    others = (s for s in inside if not isinstance(s, Put))
    return frozenset(stored.difference(value for s in others for value in reads(s)))
