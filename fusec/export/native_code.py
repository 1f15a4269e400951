"""C++ of the native wrapper's sizes, offsets and in-place writes, and formulas of its signature.

A formula (``archive/sizes.py``) is written in prefix notation, which needs no brackets: ``2*B + 1``
is ``+ * 2 B 1``. Sums and products of more than two operands are nested.

Offsets in the workspace are computed from the sizes in the arena's order. Worked example, a buffer
of ``s0`` numbers that lies above one of 8::

    const fusec_count s0(sizes[0]);
    const fusec_count place_0 = fusec_count(0LL);
    const fusec_count end_0 = place_0 + fusec_room(fusec_count(32LL));
    const fusec_count place_1 = fusec_most(end_0, fusec_count(0LL));
    const fusec_count end_1 = place_1 + fusec_room((fusec_count(4LL) * s0));
    const fusec_count all = fusec_most(end_1, fusec_most(end_0, fusec_count(0LL)));

The arithmetic is checked: if an offset or a buffer's bytes overflow 64 bits, the result is -1.

Writes to inputs are state that a native model keeps between calls. In Python, writing the next
position of a key cache stays a call of torch. Here such calls become a ``NativeWrite``: the
elements of one view are copied to another view or to indexed rows, in place. Worked example:
``cache[:, pos] = k`` for a ``pos`` of one element::

    for (long long _0 = 0; _0 < 2LL; ++_0)
    for (long long _1 = 0; _1 < 1LL; ++_1)
    for (long long _2 = 0; _2 < 64LL; ++_2) {
      long long at = pos[_1 * 1LL];
      if (at < -128LL || at >= 128LL) return 1;
      if (at < 0) at += 128LL;
      cache[_0 * 8192LL + at * 64LL + _2 * 1LL] = k[_0 * 64LL + _2 * 1LL];
    }
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from fusec.archive.sizes import SizeFormula
from fusec.export.arena import ALIGNMENT, Arena, upwards
from fusec.export.size_formulas import formula_of
from fusec.ir.argument import View
from fusec.ir.dtype import I64
from fusec.ir.expr import Buffer
from fusec.ir.extern import CopyInto, Extern, WriteInto
from fusec.ir.index import Index, index
from fusec.ir.strides import contiguous_strides

# -- sizes and offsets -----------------------------------------------------------------------------


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


def print_formula(formula: SizeFormula) -> str:
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

    def printed(formula: SizeFormula) -> str:
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


# -- writes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NativeWrite:
    """Copy the elements of ``part`` to those of ``into``.

    Attributes:
        axis, places: if given, positions along ``axis`` are read from ``places``, one for each.
        wraps: whether a negative position counts from the end.
    """

    into: View
    part: View
    axis: int = 0
    places: View | None = None
    wraps: bool = False


def write_of(call: Extern) -> NativeWrite | None:
    """Return a call as a ``NativeWrite``, or None if it does anything else."""
    if call.kwargs or call.writes:
        return None
    made: NativeWrite | None = None
    match call.effect, call.target, call.args:
        case CopyInto(), _, (View() as into, View() as part):
            made = NativeWrite(into, part)
        case WriteInto(), "aten.index_copy_.default", (View() as into, int(axis), View() as places,
                                                   View() as part):  # fmt: skip
            made = NativeWrite(into, part, axis % into.rank, places)
        case WriteInto(), "aten.index_put_.default", (
            View() as into,
            tuple(indices),
            View() as part,
        ):
            made = _put(into, indices, part)
    return made if made is not None and _is_plain(made) else None


def _put(into: View, indices: Sequence[object], part: View) -> NativeWrite | None:
    """Return ``into[:, places] = part``, with ``part`` broadcast to the indexed shape."""
    given = [(axis, value) for axis, value in enumerate(indices) if value is not None]
    match given:
        case [(axis, View(shape=(count,)) as places)]:
            shape = (*into.shape[:axis], count, *into.shape[axis + 1 :])
            return NativeWrite(into, _spread(part, shape), axis, places, wraps=True)
    return None


def _spread(view: View, shape: tuple[Index, ...]) -> View:
    """Return a view broadcast to a shape."""
    new = len(shape) - len(view.shape)
    one, none = index(1), index(0)
    strides = tuple(
        none if extent is one and wanted is not one else stride
        for extent, stride, wanted in zip(view.shape, view.strides, shape[new:], strict=True)
    )
    return replace(view, shape=shape, strides=(none,) * new + strides)


def _is_plain(write: NativeWrite) -> bool:
    """Return True if a write needs no conversion, and does not read the buffer it writes."""
    places = write.places
    shape = list(write.into.shape)
    if places is not None:
        shape[write.axis] = write.part.shape[write.axis]
        whole = places.buffer.dtype is I64 and places.shape == (shape[write.axis],)
        if not whole or places.buffer is write.into.buffer:
            return False
    kinds = [(view.buffer.dtype, view.form) for view in (write.into, write.part)]
    same = tuple(shape) == write.part.shape and kinds[0] == kinds[1]
    return same and write.into.buffer is not write.part.buffer


def dense(view: View) -> View:
    """Return the contiguous view of the same shape and buffer, at offset 0."""
    return replace(view, strides=contiguous_strides(view.shape), offset=index(0))


def print_write(
    write: NativeWrite, target: str, name: Callable[[Buffer], str], size: Callable[[Index], str]
) -> Iterator[str]:
    """Yield loops over a part, the last axis fastest.

    Args:
        target: the pointer to the buffer that is written.
        name: buffer that is read -> its pointer.
        size: prints a size as C++.
    """
    axes = [f"_{k}" for k in range(len(write.part.shape))]
    for axis, extent in zip(axes, write.part.shape, strict=True):
        yield f"for (long long {axis} = 0; {axis} < {size(extent)}; ++{axis})"
    source = f"{name(write.part.buffer)}[{_offset(axes, write.part, size)}]"
    if write.places is None:
        yield f"  {target}[{_offset(axes, write.into, size)}] = {source};"
        return
    end = size(write.into.shape[write.axis])
    place = f"{name(write.places.buffer)}[{_offset(axes[write.axis :][:1], write.places, size)}]"
    axes[write.axis] = "at"
    yield "{"
    yield f"  long long at = {place};"
    yield f"  if (at < {f'-{end}' if write.wraps else 0} || at >= {end}) return 1;"
    yield f"  if (at < 0) at += {end};"
    yield f"  {target}[{_offset(axes, write.into, size)}] = {source};"
    yield "}"


def _offset(axes: Sequence[str], view: View, size: Callable[[Index], str]) -> str:
    terms = [f"{axis} * {size(s)}" for axis, s in zip(axes, view.strides, strict=True)]
    first = view.offset
    return " + ".join(terms + [size(first)] * (first is not index(0) or not terms))
