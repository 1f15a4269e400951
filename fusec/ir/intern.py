"""Hash-consing: one object for each distinct node, so that equality is identity.

A class whose metaclass is ``Interned`` is called with its fields, positionally; equal fields give
the same object. The table holds weak references: a node without other references is dropped. It is
locked, because torch compiles backward graphs from autograd threads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

_lock = threading.RLock()
"""Reentrant, because a garbage collection while it is held may call ``_remove``."""


class _Entry(weakref.ref[Any]):
    """A weak reference to a node, with the key in the table for its removal."""

    __slots__ = ("key",)
    key: tuple[Any, ...]


_table: dict[tuple[Any, ...], _Entry] = {}


def _remove(entry: _Entry) -> None:
    with _lock:
        if _table.get(entry.key) is entry:
            del _table[entry.key]


class Interned(type):
    """Metaclass of hash-consed nodes. A class may define ``intern_key(*fields)``."""

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
                return node  # made by another thread
            _table[key] = new
        return made


class Node(metaclass=Interned):
    """Base of interned nodes. Fields are set once, in ``__init__``, and never change.

    Attributes:
        intern_key: returns the key that equal nodes share; None where it is the fields.
    """

    __slots__ = ("__weakref__",)
    intern_key: ClassVar[Callable[..., tuple[Any, ...]] | None] = None
