"""Hash-consing: one object for each distinct node, so that equality is identity.

A class whose metaclass is ``Interned`` is called with its fields, positionally; equal fields give
the same object. The table is weak: a node that nobody uses is forgotten. Locked, because torch
compiles backward graphs from autograd threads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

_lock = threading.RLock()
"""Reentrant: while it is held, a collection may end nodes."""


class _Entry(weakref.ref[Any]):
    """What the table holds of a node, and where: its end is an entry's removal."""

    __slots__ = ("key",)
    key: tuple[Any, ...]


_table: dict[tuple[Any, ...], _Entry] = {}


def _remove(entry: _Entry) -> None:
    with _lock:
        if _table.get(entry.key) is entry:
            del _table[entry.key]


class Interned(type):
    """Metaclass of immutable nodes that exist once. A class may define ``intern_key(*fields)``."""

    def __call__(cls, *fields: Any) -> Any:
        named: Callable[..., tuple[Any, ...]] | None = cls.intern_key  # type: ignore[attr-defined]
        key = (cls, *fields) if named is None else (cls, *named(*fields))
        entry = _table.get(key)
        if entry is not None and (node := entry()) is not None:
            return node
        made = super().__call__(*fields)
        new = _Entry(made, _remove)
        new.key = key
        with _lock:
            entry = _table.get(key)
            if entry is not None and (node := entry()) is not None:
                return node  # of another thread
            _table[key] = new
        return made


class Node(metaclass=Interned):
    """Base of interned nodes. Fields are set once, in ``__init__``, and never change.

    Attributes:
        intern_key: returns what makes two nodes the same, where that is not the fields.
    """

    __slots__ = ("__weakref__",)
    intern_key: ClassVar[Callable[..., tuple[Any, ...]] | None] = None
