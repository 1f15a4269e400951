"""Print in-place writes to inputs as C++ loops: state that a native model keeps between calls.

In Python, writing the next position of a key cache stays a call of torch. Here such calls become a
``NativeWrite``: the elements of one view are copied to another view or to indexed rows, in place.

Worked example: ``cache[:, pos] = k`` for a ``pos`` of one element::

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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fusec.ir.argument import View
from fusec.ir.dtype import I64
from fusec.ir.expr import Buffer
from fusec.ir.extern import CopyInto, Extern, WriteInto
from fusec.ir.index import Index, index
from fusec.ir.strides import contiguous_strides


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
