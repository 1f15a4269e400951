"""Share one function between programs that differ only in integer constants: extents, strides.

Spec: ``functions -> functions``; each program still executes the same statements with the same
constants. The program's C++ entry, or its launcher on a GPU, passes the parameter; the callers of
the entry do not know it. Two programs have the same form if they print the same text once extents,
strides and offsets are replaced by holes; the hole values are then their only difference. Their
*least general generalisation* (Plotkin 1970, found by anti-unification) has a constant in each hole
where they agree, and ``k*n + c`` of one size, n, where they differ: a *family*, programs whose hole
values lie on one line, is one function. If the values are proportional, ``c`` is 0, so that common
divisors of all extents still divide the printed ones.

Every choice that depends on the constants has been made before and is visible in the statements:
loops, masked lanes, scalars. Programs with and without a ragged end never share a form. Constants
that a compiler uses for more than an operand stay as they are (``_Rebuild``), as do programs that
multiply matrices or run for each row of a table.

A function is verified like any program: n ranges from the least to the greatest value passed, and
each buffer is as long as the longest of the programs' buffers.

One size is enough: with up to four, in proportion, some kernels of DenseNet-121 would be 0.92 as
fast, without compiling in less time (docs/performance.md, 2026-11).

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
from fusec.ir.atoms import MAX_SIZE
from fusec.ir.canonical import canonical
from fusec.ir.expr import Buffer, Expr, IndexValue, Load, substitute
from fusec.ir.index import Atom, Axis, Index, Size, index, product
from fusec.ir.names import Names
from fusec.ir.program import (
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
    """The function that a program calls, and the parameter that it passes.

    Attributes:
        function: the name of the first program that calls it, by which the function is known.
        number: value passed for n; None if the function is the program itself, unparametrized.
    """

    function: str
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of a graph, and the programs that call them.

    Attributes:
        programs: kernel name -> program, without duplicates.
        functions: name of the first program that calls it -> function.
        calls: program name -> the call that it makes.
    """

    programs: Mapping[str, Program]
    functions: Mapping[str, Program]
    calls: Mapping[str, FunctionCall]

    def instance(self, name: str) -> Program:
        """Return a program's function with the program's parameter and buffers substituted."""
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
    """Merge families of programs into functions with one integer parameter.

    Args:
        multiple: alignment, in elements, that offsets need for wide loads and stores.
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
    """Return False if accesses cannot be proven in range for all values of n at once."""
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
"""The stages from the programs of a graph to its functions."""


def verify_functions(functions: Functions) -> None:
    """Check that each function, given a program's parameter, is equal to that program.

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
    """Return the functions as text, followed by the parametrized calls."""
    parts = [print_program(one) for one in functions.functions.values()]
    calls = [name for name, call in functions.calls.items() if call.number is not None]
    lines = "\n".join(f"{name}: {describe_call(functions, name)}" for name in calls)
    return "\n\n".join(filter(None, (*parts, lines)))


def describe_call(functions: Functions, name: str) -> str:
    """Return a program's call in words: ``the function of k3, with n = 5 for 3``."""
    call = functions.calls[name]
    first = functions.calls[call.function].number
    instead = "" if name == call.function else f" for {first}"
    given = "" if call.number is None else f", with n = {call.number}{instead}"
    return f"the function of {call.function}{given}"


def print_entries(functions: Functions, forms: Mapping[str, Program]) -> dict[str, str]:
    """Return C++ for each program: its function, or an entry that calls a function printed earlier.

    A shared function is ``noinline``: inlining would copy and specialize it for each constant.

    Args:
        forms: name -> function after the stages of ``CPP_FORM``.
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


# -- finding families ------------------------------------------------------------------------------


_Numbers: TypeAlias = tuple[int, ...]
"""Hole values of a program: its constants that may vary in a family, in statement order."""


def _families(programs: Mapping[str, Program], multiple: int) -> Iterator[dict[str, _Numbers]]:
    """Yield families: program name -> hole values, for programs of one form on one line."""
    rough: dict[tuple[object, ...], list[str]] = {}
    for name, program in programs.items():
        if not (program.table or program.multiplies or program.counts):
            count = sum(1 for _ in statements(program.body))
            kinds = (count, len(program.reads), len(program.writes), *map(type, program.body))
            rough.setdefault(kinds, []).append(name)
    for names in rough.values():
        least = programs[names[0]].code.family
        alike: dict[object, dict[str, _Numbers]] = {}
        for name in names if len(names) >= least else ():
            form, numbers = _with_holes(programs[name], multiple)
            alike.setdefault(form, {})[name] = numbers
        for group in alike.values():
            yield from (f for f in _aligned(group) if len(f) >= least)


_BLANK = index(Size("_", 1, None))


def _with_holes(program: Program, multiple: int) -> tuple[object, _Numbers]:
    """Return the program with its varying constants replaced by holes, and the hole values.

    Constants of a memory offset share a hole only if they share the same gcd with ``multiple``.
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
    """Split programs of one form into lines, each the fullest through the first one left."""
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
    """Return the primitive direction of the line through two programs; () if they are equal."""
    steps = [b - a for a, b in zip(one, other, strict=True)]
    ahead = next((step for step in steps if step), 0)
    by = math.gcd(*steps) if ahead > 0 else -math.gcd(*steps)
    return tuple(step // by for step in steps) if ahead else ()


def _common_form(
    members: list[Program], numbers: list[_Numbers]
) -> tuple[Program, tuple[int, ...]]:
    """Return the function of a family, and the value of n that each member passes."""
    first, columns = members[0], list(zip(*numbers, strict=True))
    passed = _passed(columns)
    name = Names(size.name for size in first.sizes).new("n")
    # The hint is the gcd: a GPU launch declares a size divisible by 16 if its hint is.
    n = Size(name, math.gcd(*passed), min(passed), max(passed))
    given = iter([_affine_in_n(column, passed, index(n)) for column in columns])
    ask = lambda number: next(given)  # noqa: E731
    alike = [program.buffers for program in members if program.sizes == first.sizes]
    longest = map(_longest, zip(*alike, strict=True))
    buffers = {buffer.base: long for buffer, long in zip(first.buffers, longest, strict=True)}
    function = _Rebuild(first, ask, ask, buffers=buffers).program
    named = replace(function, name=f"{function.name}_any", sizes=(*function.sizes, n))
    return named, passed


def _longest(buffers: tuple[Buffer, ...]) -> Buffer:
    """Return the function's buffer that replaces one buffer each of programs with equal sizes."""
    lengths = (buffer.flat().shape[0] for buffer in buffers)
    longest = max(lengths, key=lambda length: length.hint())
    return Buffer(buffers[0].name, (longest,), (index(1),), buffers[0].dtype)


def _passed(columns: Sequence[_Numbers]) -> tuple[int, ...]:
    """Return n of each member, at least 1, such that as many columns as possible are multiples.

    Values above ``MAX_SIZE`` are not proposed, since n is a 32-bit argument on a GPU.

    For ``(96, 64)``, ``(6, 4)`` and ``(95, 63)``, n is ``(3, 2)``: 32*n, 2*n and 32*n - 1.
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


def _affine_in_n(column: _Numbers, passed: tuple[int, ...], n: Index) -> Index:
    """Return the expression ``k*n + c`` that gives one hole's value in every member."""
    step = (column[1] - column[0]) // (passed[1] - passed[0])
    return n * step + (column[0] - passed[0] * step)


class _Rebuild:
    """Copy a program over fresh axes with constants, sizes and buffers replaced, as ``program``.

    Args:
        number: constant -> replacement; called in an order given by where axes first occur.
        offset: the same for constants of a memory offset.
        sizes: size -> replacement.
        buffers: buffer -> replacement.

    These constants stay as they are:

    * the stride along the last lane and a stride of one along any, which determine the kind of
      access, and the number of lanes; of other offset constants, the gcd with ``multiple``;
    * those inside a division, since the compiler turns a division by a constant into a
      multiplication, and axis factors in index values, which feed comparisons and random numbers;
    * the trip count of a loop that the printer unrolls, or prints as a call;
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
        self.code = program.code
        # The vector lane, by which the C++ printer unrolls loops; several lanes are a GPU's tile.
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
        """Return an axis's replacement, made with replaced constants when it first occurs."""
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
        counted = turned or is_unrolled(loop, self.lane, self.code)
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
        """Return an index over the new axes and sizes with its constants kept.

        Sizes inside a division are not replaced, since its constants are no holes (see the class).
        """
        moved = substitute(value, self.axes, lambda read: read)
        if not self.sizes:
            return moved
        return index(moved.evaluate(lambda a: self.atom(a) if isinstance(a, Size) else index(a)))

    def index(self, value: Index, number: Callable[[int], Index] | None = None) -> Index:
        number = number or self.number
        if not all(isinstance(a, Axis | Size) for monomial, _ in value.terms for a in monomial):
            return self.unchanged(value)
        total = index(0)
        for atoms, by in sorted(value.terms, key=lambda t: sorted(self.places[a] for a in t[0])):
            one = abs(by) == 1 and not self.lanes.isdisjoint(atoms)
            is_fixed = one or not self.fixed.isdisjoint(atoms)
            total += product(map(self.atom, atoms)) * (index(by) if is_fixed else number(by))
        return total + number(value.const) if value.const else total

    def atom(self, atom: Atom) -> Index:
        match atom:
            case Axis():
                return self.axes.get(atom) or index(atom)
            case Size():
                return self.sizes.get(atom) or index(atom)
            case _:
                raise InternalError(atom, stage="codegen.parametrize")
