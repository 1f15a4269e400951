"""Symbolic sizes in the native wrapper: formulas of its signature, and offsets in the workspace.

A formula (``ir/formula.py``) is written in prefix notation, which needs no brackets: ``2*B + 1`` is
``+ * 2 B 1``. Sums and products of more than two operands are nested.

Offsets in the workspace are computed from the sizes in the arena's order. Worked example, a buffer
of ``s0`` numbers that lies above one of 8::

    const fusec_count s0(sizes[0]);
    const fusec_count place_0 = fusec_count(0LL);
    const fusec_count end_0 = place_0 + fusec_room(fusec_count(32LL));
    const fusec_count place_1 = fusec_most(end_0, fusec_count(0LL));
    const fusec_count end_1 = place_1 + fusec_room((fusec_count(4LL) * s0));
    const fusec_count all = fusec_most(end_1, fusec_most(end_0, fusec_count(0LL)));

The arithmetic is checked: if an offset or a buffer's bytes overflow 64 bits, the result is -1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce

from fusec.export.arena import ALIGNMENT, Arena, upwards
from fusec.ir.expr import Buffer
from fusec.ir.formula import Formula, formula_of
from fusec.ir.index import Index

_LINE = f"""
// Bytes of a line of a cache.
static const long long fusec_line = {ALIGNMENT};
"""
_COUNT = """
// A number of bytes, or of what they are made of; none, where 64 bits do not hold it.
struct fusec_count {
  long long value;
  bool known;
  explicit constexpr fusec_count(long long v, bool k = true) : value(v), known(k) {}
};
static inline fusec_count operator+(fusec_count a, fusec_count b) {
  long long sum = 0;
  const bool over = __builtin_add_overflow(a.value, b.value, &sum);
  return fusec_count(sum, a.known && b.known && !over);
}
static inline fusec_count operator*(fusec_count a, fusec_count b) {
  long long product = 0;
  const bool over = __builtin_mul_overflow(a.value, b.value, &product);
  return fusec_count(product, a.known && b.known && !over);
}
static inline fusec_count fusec_least(fusec_count a, fusec_count b) {
  return fusec_count(a.value < b.value ? a.value : b.value, a.known && b.known);
}
static inline fusec_count fusec_most(fusec_count a, fusec_count b) {
  return fusec_count(a.value > b.value ? a.value : b.value, a.known && b.known);
}
static inline fusec_count fusec_floordiv(fusec_count a, fusec_count b) {
  const bool known = a.known && b.known && b.value > 0;
  return fusec_count(known ? fusec_floordiv(a.value, b.value) : 0, known);
}
static inline fusec_count fusec_mod(fusec_count a, fusec_count b) {
  const bool known = a.known && b.known && b.value > 0;
  const long long rest = known ? a.value % b.value : 0;
  return fusec_count(rest < 0 ? rest + b.value : rest, known);
}
// So many bytes, to the end of the last line of a cache: none, if they are fewer than none.
static inline fusec_count fusec_room(fusec_count bytes) {
  const fusec_count lines = fusec_floordiv(bytes + fusec_count(fusec_line - 1),
                                           fusec_count(fusec_line));
  return fusec_count(lines.value * fusec_line, lines.known && bytes.value >= 0);
}
"""


def print_formula(formula: Formula) -> str:
    """Return a formula, or a condition on formulas, in a signature's prefix notation."""
    match formula:
        case (sign, one):
            return print_formula(one)
        case (sign, *rest, last):
            return reduce(
                lambda text, part: f"{sign} {print_formula(part)} {text}",
                reversed(rest),
                print_formula(last),
            )
    return str(formula)


def print_extent(value: Index) -> str:
    """Return a size in a signature's prefix notation."""
    return print_formula(formula_of(value))


_SPELLED = {"//": "fusec_floordiv", "%": "fusec_mod", "min": "fusec_least"}


def print_size(value: Index, name: Callable[[str], str], number: str = "{}LL") -> str:
    """Return a size as a C++ expression.

    Args:
        name: symbolic size -> its C++ name.
        number: format of an integer literal.
    """

    def printed(formula: Formula) -> str:
        match formula:
            case int():
                return number.format(formula)
            case str():
                return name(formula)
            case ("+" | "*" as sign, *parts):
                return f"({f' {sign} '.join(map(printed, parts))})"
            case (sign, *parts):
                return reduce(lambda a, b: f"{_SPELLED[sign]}({a}, {b})", map(printed, parts))
        raise AssertionError(formula)

    return printed(formula_of(value))


def print_fixed_places(arena: Arena) -> tuple[str, Mapping[Buffer, str]]:
    """Return what ``print_places`` returns, for a graph without symbolic sizes."""
    places = {buffer: str(offset) for buffer, offset in arena.offsets.items()}
    return f"{_BYTES.format('')}  return {arena.bytes};\n}}\n", places


def print_places(
    arena: Arena, sizes: Sequence[str], name: Callable[[str], str]
) -> tuple[str, Mapping[Buffer, str]]:
    """Return the C++ functions that compute offsets, and buffer -> expression of its offset.

    Args:
        sizes: names of the symbolic sizes, in order.
        name: symbolic size -> its C++ name.
    """
    lines = [f"const fusec_count {name(s)}(sizes[{k}]);" for k, s in enumerate(sizes)]
    numbers: dict[tuple[Buffer, ...], int] = {}
    ends: dict[tuple[int, str], str] = {}
    end_of: dict[Buffer, str] = {}
    places: dict[Buffer, str] = {}

    def behind(buffers: Iterable[Buffer]) -> str:
        own = dict.fromkeys(end_of[buffer] for buffer in buffers)
        return reduce(lambda a, b: f"fusec_most({b}, {a})", own, _COUNTED.format(0))

    for buffer in upwards(arena):
        below = arena.below[buffer]
        if below not in numbers:
            numbers[below] = len(numbers)
            lines.append(f"const fusec_count place_{numbers[below]} = {behind(below)};")
        place = numbers[below]
        (elements,) = buffer.base.flat().shape
        room = f"fusec_room({print_size(elements * buffer.dtype.itemsize, name, _COUNTED)})"
        if (place, room) not in ends:
            ends[place, room] = f"end_{len(ends)}"
            lines.append(f"const fusec_count {ends[place, room]} = place_{place} + {room};")
        end_of[buffer] = ends[place, room]
        places[buffer] = f"places[{place}]"
    lines.append(f"const fusec_count all = {behind(end_of)};")
    lines += [f"if (places) places[{k}] = place_{k}.value;" for k in numbers.values()]
    body = "".join(f"  {line}\n" for line in (*lines, "return all.known ? all.value : -1;"))
    asked = f"{_BYTES.format('sizes')}  return fusec_places(sizes, nullptr);\n}}\n"
    return f"{_LINE}{_COUNT}\n{_PLACES}{body}}}\n\n{asked}", places


_COUNTED = "fusec_count({}LL)"
_PLACES = """\
// Where buffers lie; returns the bytes of all, or -1 where 64 bits do not hold them.
static long long fusec_places(const long long *sizes, long long *places) {
"""
_BYTES = 'extern "C" long long fusec_bytes(const long long *{}) {{\n'
