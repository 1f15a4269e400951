"""Parse PTX: a kernel's parameters, registers, arrays and instructions, each with its line.

It reads only what LLVM prints for Triton, inline assembly included: one entry function. Debug
directives are skipped except ``.loc``, which has an instruction's source line.

Grammar of an instruction: ``@!%p1 ld.global.v2.b32 {%r1, %r2}, [%rd1+8];``

Functions are written out where they are called, as LLVM would have inlined them: it calls what is
long and rare, the reduction of large angles, of f64. Registers, labels and arrays of the function
are the call's own; its parameters and its result are arrays of the caller's local memory; a return
is a branch behind its last instruction. Of ``call.uni (retval0), f, (param0);``, the first call::

    ld.param.b64 %rd1, [f_param_0];      becomes      ld.param.b64 %f1_rd1, [param0_3];
    @%p1 ret;                                         @%f1_p1 bra.uni $f1_end;

Worked example::

    kernel = parse(ptx)
    kernel.instructions[0].opcode == ("ld", "param", "b64")
    kernel.instructions[0].operands == (Register("%rd1"), Address(Symbol("k0_param_0"), 0))
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fusec.tools.emulator.faults import UnknownPtx

# -- functions that a kernel calls -----------------------------------------------------------------


CALL = re.compile(r"call(?:\.uni)?\s+(?:\((\w*)\),\s*)?([\w$]+)(?:,\s*\(([^)]*)\))?")
_FUNCTION = re.compile(
    r"^\.(?:visible\s+|weak\s+)?func\s+(?:\(([^)]*)\)\s*)?([\w$]+)\s*\(([^)]*)\)"
    r"(?:\s|//[^\n]*)*\{(.*?)^\}",
    re.S | re.M,
)
_NAME = re.compile(r"([\w$]+)\s*(?:\[\d+\]\s*)?(?:,|$)")
_SPECIAL = r"n?(?:tid|ctaid|warpid)\b|laneid|lanemask|clock|globaltimer|cluster"
_OWN = re.compile(rf"%(?!{_SPECIAL})(?=[a-zA-Z])|\$(?=L)")
_RETURN = re.compile(r"(?<![\w.$%])ret(?:\.uni)?\s*;")
_DEPOT = re.compile(r"__local_depot\d+")


@dataclass(frozen=True, slots=True)
class Function:
    """A function's text.

    Attributes:
        names: of its result, if it has one, then of its parameters.
        line: of the PTX where the text begins.
    """

    names: tuple[str, ...]
    text: str
    line: int


def split_functions(ptx: str) -> tuple[dict[str, Function], str]:
    """Return the functions of a module, and its text with empty lines in their place."""
    found: dict[str, Function] = {}

    def blank(match: re.Match[str]) -> str:
        result, name, parameters, text = match.groups()
        names = (*_NAME.findall(result or ""), *_NAME.findall(parameters))
        found[name] = Function(names, text, ptx.count("\n", 0, match.start(4)) + 1)
        return "\n" * match[0].count("\n")

    rest = _FUNCTION.sub(blank, ptx)
    return found, rest


def inlined(function: Function, given: Sequence[str], call: int) -> str:
    """Return a function's text with arrays for result and parameters; ``call`` is its number."""
    text = _OWN.sub(lambda m: f"{m[0]}f{call}_", function.text)
    text = _DEPOT.sub(lambda m: f"f{call}_{m[0]}", text)
    for name, array in zip(function.names, given, strict=True):
        text = re.sub(rf"\b{name}\b", array, text)
    return f"{_RETURN.sub(f'bra.uni $f{call}_end;', text)}\n$f{call}_end:\n"


# -- a kernel --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """A register, negated if it is a predicate after "!"."""

    name: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Literal:
    """The bits of a constant, as many as its use needs."""

    bits: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A parameter, an array or a label, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """``[base+offset]``, of a tensor ``[base, {coordinates}]``."""

    base: Register | Symbol | Literal
    offset: int
    coordinates: tuple[Register | Literal, ...] = ()


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b}``: registers of one value."""

    parts: tuple[Register | Literal, ...]


Operand = Register | Literal | Symbol | Address | Vector


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        guard: the predicate under which it runs; None: always.
        line: of the PTX, from 1.
        place: line of the printed Triton source, 0 if unknown.
    """

    opcode: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    line: int
    place: int


@dataclass(frozen=True, slots=True)
class Array:
    """Memory that a module declares: ``space`` is "global", "const", "shared" or "local"."""

    name: str
    space: str
    align: int
    size: int
    contents: bytes


@dataclass(frozen=True, slots=True)
class Kernel:
    """A parsed entry function.

    Attributes:
        params: name, byte offset and size of each parameter.
        registers: type (".b32", ".pred"...) of each register.
        labels: the instruction that each label stands before.
        tables: the labels of each ``.branchtargets``.
        threads: of a block.
        thread_registers: that each thread starts with; 0: the compiler decides.
    """

    name: str
    params: tuple[tuple[str, int, int], ...]
    registers: dict[str, str]
    arrays: tuple[Array, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    tables: dict[str, tuple[str, ...]]
    threads: int
    thread_registers: int


_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\n\{", re.S)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[a-z](\d+)\s+(?:\.ptr\s+)?(?:\.global\s+)?(?:\.shared\s+)?"
    r"(?:\.align\s+\d+\s+)?([\w$]+)(?:\[(\d+)\])?"
)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.+)")
_ARRAY = re.compile(
    r"(?:\.(?:extern|visible|weak|common)\s+)?\.(global|const|shared|local)\s+"
    r"(?:\.align\s+(\d+)\s+)?\.[a-z](\d+)\s+([\w$]+)(?:\[(\d*)\])?(?:\s*=\s*(.+))?$",
    re.S,
)
_ARGUMENT = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[a-z](\d+)\s+(\w+)(?:\[(\d+)\])?")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at\s+(\d+)\s+(\d+))?")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_LABEL = re.compile(r"([$\w]+):")
_INSTRUCTION = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_STATEMENT = re.compile(r"[\s;]*([{}]|[$\w]+:(?!:)|\.loc\b[^\n]*|[^;\s][^;]*)")
_BASE = re.compile(r"([%$\w]+)\s*(?:\+\s*(-?\w+))?$")


def parse(ptx: str) -> Kernel:
    """Return the entry function of a module.

    Raises:
        UnknownPtx: for other PTX than LLVM prints for Triton.
    """
    functions, ptx = split_functions(ptx)
    entry = _ENTRY.search(ptx)
    if entry is None:
        raise UnknownPtx("", 0, "no entry function")
    name = entry[1]
    threads = re.search(r"\.reqntid\s+(\d+)", entry[3]) or re.search(r"\.maxntid\s+(\d+)", entry[3])
    if threads is None:
        raise UnknownPtx(name, 0, "no .reqntid says how many threads a block has")
    registers = re.search(r"\.maxnreg\s+(\d+)", entry[3])
    own = frozenset(int(n) for n, path in _FILE.findall(ptx) if path.startswith("<"))
    body = _Body(name, own, functions)  # other files are libraries of Triton
    body.read(ptx[: entry.start()], 1, outside=True)
    body.read(_body_text(ptx[entry.end() :]), ptx.count("\n", 0, entry.end()) + 1)
    return Kernel(
        name,
        tuple(_params(entry[2])),
        body.registers,
        tuple(body.arrays),
        tuple(body.instructions),
        body.labels,
        body.tables,
        int(threads[1]),
        int(registers[1]) if registers else 0,
    )


def _body_text(text: str) -> str:
    """Return the text up to the brace that closes the function."""
    depth = 1
    for match in re.finditer(r"//[^\n]*|[{}]", text):
        if match[0] in "{}":
            depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[: match.start()]
    return text


def _params(text: str) -> Iterator[tuple[str, int, int]]:
    at = 0
    for align, bits, name, count in _PARAM.findall(text):
        each = int(bits) // 8
        size = each * int(count or 1)
        step = int(align or each)
        at = -(-at // step) * step
        yield name, at, size
        at += size


class _Body:
    """A reader of a function's statements: its declarations and its instructions.

    Attributes:
        arguments: arrays of local memory that stand for a call's parameters, by their names in it.
    """

    def __init__(
        self, name: str, own_files: frozenset[int], functions: dict[str, Function]
    ) -> None:
        self.name = name
        self.own_files = own_files
        self.functions = functions
        self.arguments: dict[str, str] = {}
        self.registers: dict[str, str] = {}
        self.arrays: list[Array] = []
        self.names: set[str] = set()  # of arrays
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.tables: dict[str, tuple[str, ...]] = {}
        self.place = 0
        self.scopes = 0
        self.scope: list[str] = []
        self.calls = 0

    def read(self, text: str, line: int, *, outside: bool = False) -> None:
        """Read statements; ``line`` is that of the text's first one."""
        for statement, at in _statements(text, line):
            if statement == "{":
                self.scopes += 1
                self.scope.append(f"{self.scopes}")
            elif statement == "}":
                self.scope.pop()
            elif match := re.fullmatch(_LABEL, statement):
                self.labels[self._scoped(match[1])] = len(self.instructions)
            elif statement.startswith(".loc "):
                self._loc(statement)
            elif statement.startswith("."):
                self._directive(statement)
            elif not outside and statement.startswith("call"):
                self._call(statement, at)
            elif not outside:
                self._instruction(statement, at)

    def _scoped(self, name: str) -> str:
        """Return a label's or register's name; names of inline assembly are local to its scope."""
        return name if name[0] in "$%" or not self.scope else f"{name}@{self.scope[-1]}"

    def _loc(self, statement: str) -> None:
        match = _LOC.match(statement)
        if match is None:
            return
        file, line, outer_file, outer_line = match.groups()
        if int(file) in self.own_files:
            self.place = int(line)
        elif outer_file and int(outer_file) in self.own_files:
            self.place = int(outer_line)

    def _directive(self, statement: str) -> None:
        if match := _REGISTERS.match(statement):
            for name in match[2].split(","):
                self._declare(match[1], name.strip())
        elif match := _ARRAY.match(statement):
            self._array(*match.groups())
        elif match := _ARGUMENT.match(statement):
            align, bits, name, count = match.groups()
            self.arguments[name] = f"{name}_{len(self.arrays)}"
            self._array("local", align or "8", bits, self.arguments[name], count, None)
        elif match := re.match(r"\.branchtargets\s+(.+)", statement, re.S):
            label = next(reversed(self.labels))
            self.tables[label] = tuple(t.strip() for t in match[1].split(","))

    def _declare(self, kind: str, name: str) -> None:
        if match := re.fullmatch(r"([%\w$]+)<(\d+)>", name):
            for k in range(int(match[2])):
                self.registers[self._scoped(f"{match[1]}{k}")] = kind
        else:
            self.registers[self._scoped(name)] = kind

    def _array(
        self, space: str, align: str, bits: str, name: str, count: str, values: str | None
    ) -> None:
        each = int(bits) // 8
        found = [int(v, 0) for v in re.findall(r"-?\w+", values or "")]
        contents = b"".join((v % (1 << 8 * each)).to_bytes(each, "little") for v in found)
        size = each * int(count or 1) if count != "" else 0
        self.names.add(name)
        self.arrays.append(Array(name, space, int(align or 1), size, contents.ljust(size, b"\0")))

    def _call(self, statement: str, line: int) -> None:
        """Read a function's statements in place of its call."""
        match = CALL.fullmatch(statement)
        function = self.functions.get(match[2]) if match else None
        if match is None or function is None:
            raise UnknownPtx(self.name, line, statement)
        names = [name.strip() for name in f"{match[1] or ''},{match[3] or ''}".split(",")]
        given = [self.arguments[name] for name in names if name]
        self.calls += 1
        self.read(inlined(function, given, self.calls), function.line)

    def _instruction(self, statement: str, line: int) -> None:
        match = _INSTRUCTION.fullmatch(statement)
        if match is None:
            raise UnknownPtx(self.name, line, statement)
        negated, guard, opcode, rest = match.groups()
        operands = tuple(self._operand(part, line) for part in _split(rest))
        predicate = None
        if guard is not None:
            predicate = Register(self._scoped(guard), bool(negated))
        parts = tuple(opcode.replace("::", "_").split("."))
        bases = [one.base for one in operands if isinstance(one, Address)]
        arguments = self.arguments.values()
        if any(isinstance(base, Symbol) and base.name in arguments for base in bases):
            parts = tuple("local" if part == "param" else part for part in parts)
        self.instructions.append(Instruction(parts, operands, predicate, line, self.place))

    def _operand(self, text: str, line: int) -> Operand:
        if text.startswith("{"):
            return Vector(tuple(self._atom(p, line) for p in _split(text[1:-1])))
        if text.startswith("["):
            return self._address(text[1:-1].strip(), line)
        if "|" in text:
            return Vector(tuple(self._atom(p.strip(), line) for p in text.split("|")))
        atom = _atom(text)
        if atom is not None:
            return atom
        name = self._scoped(text)
        if name in self.registers:
            return Register(name)
        return Symbol(text if text in self.names else name)

    def _atom(self, text: str, line: int) -> Register | Literal:
        atom = _atom(text)
        if atom is not None:
            return atom
        if self._scoped(text) in self.registers:
            return Register(self._scoped(text))
        raise UnknownPtx(self.name, line, f"operand {text!r}")

    def _address(self, text: str, line: int) -> Address:
        first, *rest = _split(text)
        coordinates: tuple[Register | Literal, ...] = ()
        if rest:
            coordinates = tuple(self._atom(p, line) for p in _split(rest[0].strip()[1:-1]))
        match = _BASE.match(first.strip())
        if match is None:
            raise UnknownPtx(self.name, line, f"address {text!r}")
        offset = int(match[2], 0) if match[2] else 0
        atom = _atom(match[1])
        name = self.arguments.get(match[1], match[1])
        return Address(Symbol(name) if atom is None else atom, offset, coordinates)


def _statements(text: str, line: int) -> Iterator[tuple[str, int]]:
    """Yield statements with their lines: what ends in ";", braces, labels, and ``.loc``.

    Braces open a scope only where a statement may begin; elsewhere they hold vectors.
    """
    pattern = re.compile(
        r"//[^\n]*|\.(?:loc|file|version|target|address_size|section|pragma|ident)\b[^\n]*"
    )
    clean = pattern.sub(lambda m: m[0] if m[0].startswith(".loc") else "", text)
    last = 0
    for found in _STATEMENT.finditer(clean):
        at = found.start(1)
        line += clean.count("\n", last, at)
        last = at
        yield " ".join(found[1].split()), line


def _split(text: str) -> list[str]:
    """Split a text at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _atom(text: str) -> Register | Literal | None:
    """Return a register or a constant, None for any other name."""
    if text.startswith("!"):
        return Register(text[1:].strip(), negated=True)
    if text.startswith("%") or text == "_":
        return Register(text)
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
        return Literal(int(text[2:], 16))
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return Literal(int(text.rstrip("U"), 0))
    if re.fullmatch(r"-?\d+\.\d*(e-?\d+)?", text):
        return Literal(struct.unpack("<Q", struct.pack("<d", float(text)))[0])
    return None
