"""One line of index notation, ``buffer[axes] = expr``, and its origin in the user's program.

A line has the properties ``reads``, ``writes`` and ``sizes``: the buffers that it loads and
defines, and the symbolic sizes that it needs. Calls (``extern.py``) and kernels (``graph.py``) have
them too, so that passes order lines or steps, and find consumers of a buffer, in one way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from fusec.ir.expr import Buffer, Expr, IndexValue, Load, Reduce, loads, postorder
from fusec.ir.index import Axis, Index, Runtime, Size


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a definition comes from in the user's program.

    Attributes:
        ops: the ATen operations that the program calls, in order, such as ``("add.Tensor",
            "native_layer_norm.default")``, before their decomposition.
        source: the user's lines, such as ``("model.py:41 in forward: x = x + r",)``.
    """

    ops: tuple[str, ...] = ()
    source: tuple[str, ...] = ()

    def __add__(self, other: Origin) -> Origin:
        return Origin(
            tuple(dict.fromkeys(self.ops + other.ops)),
            tuple(dict.fromkeys(self.source + other.source)),
        )


NOWHERE = Origin()


@dataclass(frozen=True, slots=True, eq=False)
class Def:
    """``buffer[axes] = expr``: one line of index notation.

    Attributes:
        covers: buffers whose definitions were inlined into ``expr``, to be computed here.
    """

    buffer: Buffer
    axes: tuple[Axis, ...]
    expr: Expr
    origin: Origin = NOWHERE
    covers: tuple[Buffer, ...] = ()

    impure: ClassVar[bool] = False
    defines_sizes: ClassVar[tuple[Size, ...]] = ()

    def __str__(self) -> str:
        from fusec.ir.text import print_def  # local: text imports the structures

        return print_def(self)

    def map(self, rule: Callable[[tuple[Expr, ...]], tuple[Expr, ...]]) -> Def:
        """Return the line with its expression rewritten; the same object if that is unchanged."""
        (expr,) = rule((self.expr,))
        return self if expr is self.expr else replace(self, expr=expr)

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """The distinct buffers that it loads, in order."""
        return loaded((self.expr,))

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """The buffer that it defines."""
        return (self.buffer,)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The symbolic sizes that it needs, sorted by name."""
        found = sizes_in_exprs((self.expr,)) | sizes_in(axis.extent for axis in self.axes)
        return by_name(found | sizes_in(self.buffer.strides))


@functools.lru_cache(maxsize=1 << 13)
def loaded(roots: tuple[Expr, ...]) -> tuple[Buffer, ...]:
    """Return the distinct buffers that expressions load, in order; memoised."""
    return tuple(dict.fromkeys(load.buffer.base for load in loads(roots)))


def by_name(sizes: Iterable[Size]) -> tuple[Size, ...]:
    """Return the sizes sorted by name, as a kernel takes them."""
    return tuple(sorted(sizes, key=lambda size: size.name))


def sizes_in(values: Iterable[Index]) -> set[Size]:
    """Return the symbolic sizes in indices, including those in extents of their axes."""
    found: set[Size] = set()
    for atom in (a for value in values for a in value.atoms()):
        match atom:
            case Size():
                found.add(atom)
            case Axis() | Runtime():
                found |= sizes_in((atom.extent,))
    return found


def sizes_in_exprs(roots: Iterable[Expr]) -> set[Size]:
    """Return the symbolic sizes in expressions, including those in strides of loaded buffers."""
    found: set[Size] = set()
    for node in postorder(roots):
        match node:
            case Load():
                found |= sizes_in((*node.indices, *node.buffer.strides))
            case IndexValue():
                found |= sizes_in((node.index,))
            case Reduce():
                found |= sizes_in_axes(node.over)
    return found


def sizes_in_axes(axes: Iterable[Axis]) -> set[Size]:
    """Return the symbolic sizes in extents and limits of axes."""
    axes = tuple(axes)
    return sizes_in(a.extent for a in axes) | sizes_in(a.limit for a in axes if a.limit is not None)
