"""Hash-consing: one object for each distinct node, so that equality is identity.

A class whose metaclass is ``Interned`` is called with its fields, positionally; equal fields give
the same object. The table is weak: a node that nobody uses is forgotten. Locked, because torch
compiles backward graphs from autograd threads.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

_lock = threading.Lock()
_table: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()


class Interned(type):
    """Metaclass of immutable nodes that exist once. A class may define ``intern_key(*fields)``."""

    def __call__(cls, *fields: Any) -> Any:
        key = (cls, *cls.intern_key(*fields))  # type: ignore[attr-defined]
        node = _table.get(key)
        if node is None:
            made = super().__call__(*fields)
            with _lock:
                node = _table.setdefault(key, made)
        return node


class Node(metaclass=Interned):
    """Base of interned nodes. Fields are set once, in ``__init__``, and never change."""

    __slots__ = ("__weakref__",)

    @classmethod
    def intern_key(cls, *fields: Any) -> tuple[Any, ...]:
        """Return what makes two nodes the same: the fields, unless a class says otherwise."""
        return fields
