"""One function for programs that are alike but for numbers on one line: extents, strides.

Spec: ``functions -> functions``; each program runs the same statements on the same numbers, which
its C++ entry or its launcher on a GPU knows: who calls it does not. Two programs are alike
if one text is that of both once extents, steps and places are blanks; what the blanks hold is all
that they differ in. Their *least general generalisation* (Plotkin 1970; what finds it is called
anti-unification) has a number in each blank where they agree, and ``k*n + c`` of one size, n, where
they do not: a *family*, whose numbers lie on a line, is one function. Where they lie in proportion
``c`` is 0, so that what divides all of their extents still divides what is printed.

All choices that numbers decide have been made by now, and stand in the statements: which loops
there are, which lanes have a mask, what is a scalar. A program without a ragged end is never like
one with such an end. Numbers of which a compiler makes more than an operand stay as they are
(``_Rebuild``), as do programs that multiply matrices or run for rows of a table.

A function is verified like any program: n is between the least and the most that is passed, and its
buffers are as long as the longest of its programs'.

One size is enough: with up to four, in proportion, some kernels of DenseNet-121 would be 0.92 as
fast, and save the compiler no time (docs/performance.md, 2026-11).

Worked example: ``y[i] = x[96*i]`` for i < 12 and ``q[i] = p[64*i]`` for i < 8 run one function
``y[i] = x[32*n*i]`` for i < 4*n, with 3 and 2 for n.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from fusec.codegen.cpp import printer as cpp
from fusec.codegen.cpp.transposed import transposed_block
from fusec.codegen.cpp.unrolling import is_unrolled
from fusec.errors import InternalError, InvalidIR
from fusec.ir.canonical import canonical
from fusec.ir.expr import Buffer, Expr, IndexValue, Load, substitute
from fusec.ir.index import Atom, Axis, Index, Size, index, product
from fusec.ir.names import Names
from fusec.ir.program import (
    MAX_SIZE,
    For,
    Let,
    Program,
    Put,
    Statement,
    Update,
    print_program,
    statements,
)
from fusec.ir.verify import check
from fusec.ir.verify_program import verify_program
from fusec.passes.stage import Stage

_NONE: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """What a program does: it runs a function.

    Attributes:
        function: the name of the first program that runs it.
        number: what it passes beside its own arguments; None where all numbers are its own.
    """

    function: str
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of a graph, and the programs that run them.

    Attributes:
        programs: no two of them equal, by the name of a kernel.
        functions: by the name of the first program that runs it.
        calls: by the name of a program.
    """

    programs: Mapping[str, Program]
    functions: Mapping[str, Program]
    calls: Mapping[str, FunctionCall]

    def instance(self, name: str) -> Program:
        """Return a function with a program's numbers and buffers in the place of its own."""
        program, call = self.programs[name], self.calls[name]
        function = self.functions[call.function]
        if call.number is None:
            return function
        filled = {function.sizes[-1]: index(call.number)}
        buffers = dict(zip(function.buffers, program.buffers, strict=True))
        return _Rebuild(function, index, index, filled, buffers).program


def one_each(programs: Mapping[str, Program]) -> Functions:
    """Return a function for each program."""
    return Functions(programs, programs, {name: FunctionCall(name) for name in programs})


def parametrize(functions: Functions, multiple: int = 1) -> Functions:
    """Return functions that run all programs whose numbers follow from one.

    Args:
        multiple: of so many elements are places where an access can be a wide one.
    """
    made, calls = dict(functions.functions), dict(functions.calls)
    for family in _families(functions.functions, multiple):
        first, *others = family
        members = [made[name] for name in family]
        function, passed = _common_form(members, list(family.values()))
        if max(passed) > MAX_SIZE or not _is_verified(function):
            continue
        calls.update((name, FunctionCall(first, n)) for name, n in zip(family, passed, strict=True))
        runs = ", ".join(f"{n} in {name}" for name, n in zip(family, passed, strict=True))
        said = f"{function.sizes[-1].name} is {runs}"
        made[first] = replace(function, notation=(*function.notation, said))
        for name in others:
            del made[name]
    if len(made) == len(functions.functions):
        return functions
    return replace(functions, functions=made, calls=calls)


def _is_verified(function: Program) -> bool:
    """Return False where what is in range for each number is so by no proof for all of them."""
    try:
        verify_program(function)
    except InvalidIR:
        return False
    return True


FUNCTIONS = (
    Stage(
        "parametrize",
        "merge programs that differ in numbers on one line into one function with a parameter",
        lambda functions, context: parametrize(functions, context.target.codegen.multiple),
        "Functions",
        "Functions",
        needs=("lower",),
    ),
)
"""From the programs of a graph to its functions."""


def verify_functions(functions: Functions) -> None:
    """Check that each function is its program, once it is given that program's number.

    Raises:
        InvalidIR: naming a program that computes something else, or is called wrongly.
    """
    for name, call in functions.calls.items():
        check(call.function in functions.functions, name, f"there is no function {call.function}")
        program, function = functions.programs[name], functions.functions[call.function]
        passed = len(program.sizes) + (call.number is not None)
        check(passed == len(function.sizes), name, f"{passed} sizes for {len(function.sizes)}")
        same = canonical(functions.instance(name)).form == canonical(program).form
        check(same, name, f"{describe_call(functions, name)} computes something else")


def print_functions(functions: Functions) -> str:
    """Return the functions as text, and which programs run those of others."""
    parts = [print_program(one) for one in functions.functions.values()]
    calls = [name for name, call in functions.calls.items() if call.number is not None]
    lines = "\n".join(f"{name}: {describe_call(functions, name)}" for name in calls)
    return "\n\n".join(filter(None, (*parts, lines)))


def describe_call(functions: Functions, name: str) -> str:
    """Return what a program runs: ``the function of k3, with n = 5 for 3``."""
    call = functions.calls[name]
    first = functions.calls[call.function].number
    instead = "" if name == call.function else f" for {first}"
    given = "" if call.number is None else f", with n = {call.number}{instead}"
    return f"the function of {call.function}{given}"


def print_entries(functions: Functions, forms: Mapping[str, Program]) -> dict[str, str]:
    """Return C++ for each program: its function, or an entry that calls one printed before it.

    What several programs run is copied into none of them, and knows none of their numbers.

    Args:
        forms: the functions as they are printed, by name.
    """
    found = {}
    for name, call in functions.calls.items():
        function = forms[call.function]
        if call.number is None:
            found[name] = cpp.print_kernel(function)
            continue
        printer = cpp.CppPrinter(functions.programs[name])
        own = [*map(printer.name, printer.program.buffers)]
        own += map(printer.name, printer.program.sizes)
        called = f"{function.name}({', '.join((*own, str(call.number), 'status'))});"
        parts = [f"// {describe_call(functions, name)}\n{printer.head()} {{ {called} }}\n"]
        if name == call.function:
            parts.insert(
                0, cpp.CppPrinter(function, "static __attribute__((noinline)) void").print()
            )
        found[name] = "\n".join(parts)
    return found


# -- which programs are alike ----------------------------------------------------------------------

LEAST = 3
"""Members of a family at least: two save little to compile, and in C++ a call has a call inside."""


_Numbers: TypeAlias = tuple[int, ...]
"""The numbers of a program that may be another's, in the order of its statements."""


def _families(programs: Mapping[str, Program], multiple: int) -> Iterator[dict[str, _Numbers]]:
    """Yield the numbers of programs that are alike and of one argument, by their names."""
    rough: dict[tuple[object, ...], list[str]] = {}
    for name, program in programs.items():
        if not program.table and not cpp.multiplies(program):
            count = sum(1 for _ in statements(program.body))
            kinds = (count, len(program.reads), len(program.writes), *map(type, program.body))
            rough.setdefault(kinds, []).append(name)
    for names in rough.values():
        alike: dict[object, dict[str, _Numbers]] = {}
        for name in names if len(names) >= LEAST else ():
            form, numbers = _opened(programs[name], multiple)
            alike.setdefault(form, {})[name] = numbers
        for group in alike.values():
            yield from (f for f in _aligned(group) if len(f) >= LEAST)


_BLANK = index(Size("_", 1, None))


def _opened(program: Program, multiple: int) -> tuple[object, _Numbers]:
    """Return what a program is with blanks for the numbers that may be another's, and these.

    A number of a place in memory may be another's that has the same divisors of ``multiple``.
    """
    found: list[int] = []

    def blank(number: int) -> Index:
        found.append(number)
        return _BLANK

    def offset(number: int) -> Index:
        found.append(number)
        shared = math.gcd(number, multiple)
        return index(Size(f"_{shared}", shared, shared))

    return canonical(_Rebuild(program, blank, offset).program).form, tuple(found)


def _aligned(numbers: Mapping[str, _Numbers]) -> Iterator[dict[str, _Numbers]]:
    """Yield alike programs by the lines they lie on, each time that of most through the first."""
    left = dict(numbers)
    while left:
        first = next(iter(left))
        start = left.pop(first)
        lines: dict[_Numbers, list[str]] = {}
        for name, other in left.items():
            lines.setdefault(_direction(start, other), []).append(name)
        lines.pop((), None)
        others = max(lines.values(), key=len, default=[])
        yield {first: start, **{name: left.pop(name) for name in others}}


def _direction(one: _Numbers, other: _Numbers) -> _Numbers:
    """Return the direction of the line through two programs; () where no number differs."""
    steps = [b - a for a, b in zip(one, other, strict=True)]
    ahead = next((step for step in steps if step), 0)
    by = math.gcd(*steps) if ahead > 0 else -math.gcd(*steps)
    return tuple(step // by for step in steps) if ahead else ()


def _common_form(
    members: list[Program], numbers: list[_Numbers]
) -> tuple[Program, tuple[int, ...]]:
    """Return what a family has in common, and what each member passes for n."""
    first, columns = members[0], list(zip(*numbers, strict=True))
    passed = _passed(columns)
    name = Names(size.name for size in first.sizes).new("n")
    # The hint: a launch on a GPU promises of a size that it is a multiple of 16 if its hint is one.
    n = Size(name, math.gcd(*passed), min(passed), max(passed))
    given = iter([_restated(column, passed, index(n)) for column in columns])
    ask = lambda number: next(given)  # noqa: E731
    alike = [program.buffers for program in members if program.sizes == first.sizes]
    longest = map(_longest, zip(*alike, strict=True))
    buffers = {buffer.base: long for buffer, long in zip(first.buffers, longest, strict=True)}
    function = _Rebuild(first, ask, ask, buffers=buffers).program
    named = replace(function, name=f"{function.name}_any", sizes=(*function.sizes, n))
    return named, passed


def _longest(buffers: tuple[Buffer, ...]) -> Buffer:
    """Return the buffer of a function in the place of those of programs with the same sizes."""
    lengths = (buffer.flat().shape[0] for buffer in buffers)
    longest = max(lengths, key=lambda length: length.hint())
    return Buffer(buffers[0].name, (longest,), (index(1),), buffers[0].dtype)


def _passed(columns: Sequence[_Numbers]) -> tuple[int, ...]:
    """Return n of each member, at least 1: as far as it can be that of which most are multiples.

    It is an argument of 32 bits on a GPU, so that a number beyond these is not what is passed.

    Of ``(96, 64)``, ``(6, 4)`` and ``(95, 63)`` n is ``(3, 2)``: they are 32*n, 2*n and 32*n - 1.
    """
    varying = [column for column in columns if len(set(column)) > 1]
    some = varying[0]
    by = math.gcd(*(number - some[0] for number in some))
    found: Counter[tuple[int, ...]] = Counter()
    for ahead in (by, -by):
        places = [(number - some[0]) // ahead for number in some]
        found[tuple(place - min(places) + 1 for place in places)] = 0
        for column in varying:
            start, rest = divmod(column[0], (column[1] - column[0]) // places[1])
            if not rest and start + min(places) > 0 and start + max(places) <= MAX_SIZE:
                found[tuple(place + start for place in places)] += 1
    return max(found, key=found.__getitem__)


def _restated(column: _Numbers, passed: tuple[int, ...], n: Index) -> Index:
    """Return one number of all members by what they pass."""
    step = (column[1] - column[0]) // (passed[1] - passed[0])
    return n * step + (column[0] - passed[0] * step)


class _Rebuild:
    """A program again, over axes of its own: ``program``.

    Args:
        number: gives what stands for a number that may differ; it is asked in one order, by the
            places where axes are met and not by when they were made.
        offset: the same for numbers of an offset in memory.
        sizes: what stands for sizes.
        buffers: what stands for buffers.

    These numbers stay as they are:

    * the step along the last lane and a step of one along any, which say what an access is, and the
      number of lanes; of other numbers of an offset, what they share with ``multiple``;
    * those inside a division, since the compiler makes a multiplication of one by a number, and
      factors of axes in the value of an index, of which comparisons and random numbers are made;
    * how often a loop runs that the printer takes apart, or prints as a call;
    * lengths of arrays, which are in registers or on the stack.
    """

    def __init__(
        self,
        program: Program,
        number: Callable[[int], Index],
        offset: Callable[[int], Index],
        sizes: Mapping[Size, Index] = _NONE,
        buffers: Mapping[Buffer, Buffer] = _NONE,
    ) -> None:
        self.number, self.offset = number, offset
        self.sizes = sizes
        self.buffers = buffers
        # The lane of a vector, by which C++ takes loops apart; tiles are a GPU's.
        self.lane = program.lanes[0] if len(program.lanes) == 1 else None
        self.axes: dict[Axis, Index] = {}
        self.lanes: frozenset[Atom] = frozenset(program.lanes)
        self.fixed: set[Atom] = set(program.lanes[-1:])
        known: tuple[Atom, ...] = (*program.sizes, *program.lanes)
        self.places = {atom: place for place, atom in enumerate(known)}
        grid = tuple(map(self.axis, program.grid))
        body = tuple(map(self.statement, program.body))
        self.program = replace(
            program,
            reads=tuple(map(self.buffer, program.reads)),
            writes=tuple(map(self.buffer, program.writes)),
            overlaid=tuple(map(self.buffer, program.overlaid)),
            sizes=tuple(size for size in program.sizes if size not in sizes),
            grid=grid,
            body=body,
            work=None if program.work is None else self.index(program.work),
        )

    def axis(self, axis: Axis) -> Axis:
        """Return the axis that stands for one; the first time it is met its numbers are asked."""
        if axis not in self.axes:
            self.places[axis] = len(self.places)
            limit = None if axis.limit is None else self.index(axis.limit)
            self.axes[axis] = index(Axis(axis.name, self.index(axis.extent), limit))
        made = self.axes[axis].as_axis()
        assert made is not None
        return made

    def buffer(self, buffer: Buffer) -> Buffer:
        base = self.buffers.get(buffer.base, buffer.base)
        return base if buffer is buffer.base else base.flat()

    def statement(self, statement: Statement) -> Statement:
        match statement:
            case For():
                return self.loop(statement)
            case Put():
                buffer = self.buffer(statement.buffer)
                offset = self.index(statement.offset, self.offset)
                return replace(statement, buffer=buffer, offset=offset)
            case Let() | Update():
                return replace(statement, value=self.value(statement.value))
            case _:
                return statement

    def loop(self, loop: For) -> For:
        turned = transposed_block(loop, self.lane) is not None
        counted = turned or is_unrolled(loop, self.lane)
        if turned:
            self.fixed.add(loop.axis)
        if counted and loop.axis not in self.axes:
            self.places[loop.axis] = len(self.places)
            self.axes[loop.axis] = index(loop.axis)
        axis, bound = self.axis(loop.axis), self.unchanged if counted else self.index
        start, stops = bound(loop.start), tuple(map(bound, loop.stops))
        return For(axis, start, stops, tuple(map(self.statement, loop.body)))

    def value(self, value: Expr) -> Expr:
        match value:
            case Load(indices=(offset,), guard=guard):
                return Load(self.buffer(value.buffer), (self.index(offset, self.offset),), guard)
            case IndexValue(index=place):
                moved = self.number(place.const) if place.const else 0
                return IndexValue(self.unchanged(place - place.const) + moved, value.dtype)
            case _:
                return value

    def unchanged(self, value: Index) -> Index:
        """Return an index over the new axes and sizes, with the numbers that it has.

        In a division no number is a size (above).
        """
        moved = substitute(value, self.axes, lambda read: read)
        if not self.sizes:
            return moved
        total = index(moved.const)
        for atoms, by in moved.terms:
            total += product(self.atom(a) if isinstance(a, Size) else a for a in atoms) * by
        return total

    def index(self, value: Index, number: Callable[[int], Index] | None = None) -> Index:
        number = number or self.number
        if not all(isinstance(a, Axis | Size) for monomial, _ in value.terms for a in monomial):
            return self.unchanged(value)
        total = index(0)
        for atoms, by in sorted(value.terms, key=lambda t: sorted(self.places[a] for a in t[0])):
            factor = index(by) if self.is_fixed(atoms, by) else number(by)
            total = total + product(map(self.atom, atoms)) * factor
        return total + number(value.const) if value.const else total

    def is_fixed(self, atoms: Sequence[Atom], step: int) -> bool:
        one = abs(step) == 1 and not self.lanes.isdisjoint(atoms)
        return one or not self.fixed.isdisjoint(atoms)

    def atom(self, atom: Atom) -> Index:
        match atom:
            case Axis():
                return self.axes.get(atom) or index(atom)
            case Size():
                return self.sizes.get(atom) or index(atom)
            case _:
                raise InternalError(atom, stage="codegen.parametrize")
