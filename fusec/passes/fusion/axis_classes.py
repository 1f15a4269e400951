"""Equivalence classes of axes, with splits, which ``unify`` refines: a union-find with undo.

An axis that is *defined* stands for others: the one that it was united with, or the axes that it
was cut into. Definitions are never changed; only the latest ones can be undone. Resolved values are
cached and extended when definitions are added, so a chain of unions is walked once.

Worked example: ``define(m, b*8 + t, (b, t))`` and ``define(b, n, (n,))`` give ``resolve(m) == n*8 +
t`` and ``fine_axes((m,)) == (n, t)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from fusec.ir.expr import substitute
from fusec.ir.index import Axis, Index, index


class AxisClasses:
    """Union-find over axes. ``parts``: axis -> the axes that directly define it, slowest first."""

    __slots__ = ("_finest", "_resolved", "_whole", "parts", "value")

    def __init__(self) -> None:
        self.value: dict[Axis, Index] = {}
        self.parts: dict[Axis, tuple[Axis, ...]] = {}
        # Caches: resolved as of the last call; later definitions are applied to the cached value.
        self._resolved: dict[Index, Index] = {}
        self._whole: dict[Axis, Index] = {}
        self._finest: dict[Axis, tuple[Axis, ...]] = {}

    def __len__(self) -> int:
        """Return how many axes are defined: a mark to which ``undo`` returns."""
        return len(self.value)

    def define(self, axis: Axis, value: Index, parts: tuple[Axis, ...]) -> None:
        """Define an axis by finer ones, slowest first."""
        self.value[axis] = value
        self.parts[axis] = parts

    def undo(self, mark: int) -> None:
        """Forget all but the first ``mark`` definitions."""
        if len(self.value) == mark:
            return
        while len(self.value) > mark:
            axis, _ = self.value.popitem()
            del self.parts[axis]
        self._resolved.clear()
        self._whole.clear()
        self._finest.clear()

    def since(self, mark: int) -> frozenset[Axis]:
        """Return the axes defined after the first ``mark``."""
        return frozenset(itertools.islice(reversed(self.value), len(self.value) - mark))

    def resolve(self, value: Index) -> Index:
        """Return ``value`` over the finest axes."""
        defined = self.value.keys()
        if defined.isdisjoint(value.axes):
            return value
        axis = value.as_axis()
        if axis is not None:
            return self._resolve_axis(axis)
        known = self._resolved.get(value, value)
        while not defined.isdisjoint(known.axes):
            known = substitute(known, {a: self._resolve_axis(a) for a in known.axes})
            self._resolved[value] = known
        return known

    def _resolve_axis(self, axis: Axis) -> Index:
        chain: list[Axis] = []
        while (value := self._whole.get(axis) or self.value.get(axis)) is not None:
            chain.append(axis)
            following = value.as_axis()
            if following is None:
                break
            axis = following
        end = index(axis) if value is None else value
        if not self.value.keys().isdisjoint(end.axes):
            end = substitute(end, {a: self._resolve_axis(a) for a in end.axes})
        self._whole.update(dict.fromkeys(chain, end))
        return end

    def fine_axes(self, axes: Iterable[Axis]) -> tuple[Axis, ...]:
        """Return the finest axes of some axes, slowest first."""
        found: list[Axis] = []
        for axis in axes:
            if axis in self.parts:
                found.extend(self._fine(axis))
            else:
                found.append(axis)
        return tuple(found)

    def _fine(self, axis: Axis) -> tuple[Axis, ...]:
        known = self._finest.get(axis)
        if known is not None and self.parts.keys().isdisjoint(known):
            return known
        found: list[Axis] = []
        stack = list(self.parts[axis] if known is None else known)[::-1]
        while stack:
            finer = stack.pop()
            known = self._finest.get(finer) or self.parts.get(finer)
            if known is None:
                found.append(finer)
            else:
                stack.extend(known[::-1])
        self._finest[axis] = tuple(found)
        return self._finest[axis]
