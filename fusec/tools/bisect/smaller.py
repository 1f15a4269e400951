"""Reduce an excerpt as long as it shows its fault: fewer results, fewer lines, smaller sizes.

Large steps come first, halves before single lines, so that a fault in one line of a thousand is
found in some twenty trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from fusec.tools.bisect.excerpt import (
    Excerpt,
    Input,
    Line,
    NotPlain,
    Ref,
    TensorType,
    alive,
    as_inputs,
    reads,
    retyped,
    rewritten,
    static,
)

T = TypeVar("T")


def shrink(
    found: T, simpler: Callable[[T], Iterable[T]], fails: Callable[[T], bool], most: int
) -> T:
    """Return a failing case none of whose simpler cases fails, or the one after ``most`` trials."""
    trials, progress = 0, True
    while progress:
        progress = False
        for candidate in simpler(found):
            trials += 1
            if trials > most:
                return found
            if fails(candidate):
                found, progress = candidate, True
                break
    return found


_EXTENTS = (1, 2, 8, 32)
"""The values that an extent may be reduced to."""


def simpler(excerpt: Excerpt) -> Iterator[Excerpt]:
    """Yield the excerpts that are one step smaller, each of which can run."""
    steps = (_static, _untrained, _prefixes, _suffixes, _results, _bypasses, _cuts, _extents)
    for step in (*steps, _contiguous):
        for candidate in step(excerpt):
            try:
                made = retyped(alive(candidate))
            except NotPlain:
                continue
            if made is not None and made != excerpt:
                yield made


def _static(excerpt: Excerpt) -> Iterator[Excerpt]:
    if excerpt.dynamic:
        yield static(excerpt)


def _untrained(excerpt: Excerpt) -> Iterator[Excerpt]:
    if excerpt.trains:
        inputs = tuple(replace(one, trained=False) for one in excerpt.inputs)
        yield replace(excerpt, inputs=inputs, trains=False)


def _halves(count: int) -> list[int]:
    """Return how many of ``count`` things to take away: half, a quarter, down to one."""
    return [count >> k for k in range(1, count.bit_length())]


def _prefixes(excerpt: Excerpt) -> Iterator[Excerpt]:
    """Drop lines at the end; values that are left without a consumer become the results."""
    for dropped in _halves(len(excerpt.lines)):
        lines = excerpt.lines[:-dropped]
        read = {name for line in lines for name in reads(line)}
        ends = tuple(
            line.name
            for line in lines
            if isinstance(line.type, TensorType) and line.name not in read
        )
        yield replace(excerpt, lines=lines, results=ends)


def _suffixes(excerpt: Excerpt) -> Iterator[Excerpt]:
    """Drop lines at the beginning; their values that other lines read become inputs."""
    for dropped in _halves(len(excerpt.lines)):
        yield from _as_inputs(excerpt, excerpt.lines[:dropped])


def _cuts(excerpt: Excerpt) -> Iterator[Excerpt]:
    for line in excerpt.lines:
        yield from _as_inputs(excerpt, (line,))


def _as_inputs(excerpt: Excerpt, lines: tuple[Line, ...]) -> Iterator[Excerpt]:
    names = [line.name for line in lines if isinstance(line.type, TensorType)]
    if any(name not in excerpt.results for name in names):
        left = tuple(name for name in excerpt.results if name not in names)
        yield as_inputs(replace(excerpt, results=left), names)


def _results(excerpt: Excerpt) -> Iterator[Excerpt]:
    """Keep one result alone, or half of them."""
    count = len(excerpt.results)
    if count > 3:
        yield replace(excerpt, results=excerpt.results[: count // 2])
        yield replace(excerpt, results=excerpt.results[count // 2 :])
    if count > 1:
        yield from (replace(excerpt, results=(name,)) for name in excerpt.results)


def _bypasses(excerpt: Excerpt) -> Iterator[Excerpt]:
    """Replace a line by an operand of the same type."""
    types = excerpt.types
    for line in excerpt.lines:
        for name in dict.fromkeys(reads(line)):
            if isinstance(line.type, TensorType) and types[name] == line.type:
                yield _without(excerpt, line, name)


def _without(excerpt: Excerpt, gone: Line, operand: str) -> Excerpt:
    left = [line for line in excerpt.lines if line is not gone]
    lines = tuple(rewritten(x, lambda v: Ref(operand) if v == Ref(gone.name) else v) for x in left)
    kept = {line.name for line in lines}
    renamed = (operand if name == gone.name else name for name in excerpt.results)
    results = tuple(name for name in dict.fromkeys(renamed) if name in kept)
    return replace(excerpt, lines=lines, results=results)


def _extents(excerpt: Excerpt) -> Iterator[Excerpt]:
    """Reduce one extent wherever it, or a multiple of it, occurs."""
    types = [one.type for one in excerpt.inputs if isinstance(one.type, TensorType)]
    extents = sorted({n for kind in types for n in kind.shape if n > 1}, reverse=True)
    for old in extents:
        for new in _EXTENTS:
            if new < old:
                yield _resized(excerpt, old, new)


def _resized(excerpt: Excerpt, old: int, new: int) -> Excerpt:
    def number(value: Any) -> Any:
        if type(value) is not int or value < old or value % old:
            return value
        return value // old * new

    inputs = tuple(_smaller_input(one, old, new) for one in excerpt.inputs)
    lines = tuple(rewritten(line, number) for line in excerpt.lines)
    return replace(excerpt, inputs=inputs, lines=lines)


def _smaller_input(given: Input, old: int, new: int) -> Input:
    kind = given.type
    if isinstance(kind, int):
        return replace(given, type=new if kind == old else kind)
    shape = tuple(new if n == old else n for n in kind.shape)
    made = replace(kind, shape=shape, strides=_strides_like(kind, shape))
    most = min(given.most, new) if given.most > new and given.most <= old else given.most
    return replace(given, type=made, most=max(most, 1))


def _strides_like(kind: TensorType, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return dense strides of a shape in another tensor's dimension order; zero strides stay."""
    strides, step = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda a: (kind.strides[a], -a)):
        if kind.strides[axis]:
            strides[axis], step = step, step * shape[axis]
    return tuple(strides)


def _contiguous(excerpt: Excerpt) -> Iterator[Excerpt]:
    """Give an input contiguous strides."""
    for one in excerpt.inputs:
        if isinstance(one.type, TensorType) and one.type.strides != dense(one.type.shape):
            plain = replace(one, type=replace(one.type, strides=dense(one.type.shape)))
            inputs = tuple(plain if other is one else other for other in excerpt.inputs)
            yield replace(excerpt, inputs=inputs)


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
