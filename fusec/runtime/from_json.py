"""Read dataclasses from JSON, each value checked against the type of its field.

Fields that are not compared are no part of the JSON form: they have their defaults.

Entries of the cache, archives and files of verdicts may be another release's, or forged: nothing in
them is taken as it comes. Numbers are counts and times, so none is negative or infinite.

Worked example::

    read(CandidateTime, {"name": "fused", "us": 412, "p20": None, ...})    # us is 412.0
    read(CandidateTime, {"name": "fused", "us": "412", ...})    # ValueError: us: '412' is no number
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

_WORDS = {bool: "neither true nor false", int: "no count", float: "no number", str: "no text"}
_fields = functools.cache(get_type_hints)


def read(kind: Any, found: Any, name: str) -> Any:
    """Return the value of a type: a dataclass, a plain one, ``X | None``, or several of one type.

    Args:
        name: what messages call the value.
    Raises:
        ValueError: naming the value that is of another type.
    """
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        compared = [field.name for field in dataclasses.fields(kind) if field.compare]
        fields = {name: _fields(kind)[name] for name in compared}
        if not isinstance(found, dict) or not fields.keys() <= found.keys():
            raise ValueError(f"{name} has the fields {', '.join(fields)}")
        return kind(**{field: read(inner, found[field], field) for field, inner in fields.items()})
    if isinstance(kind, UnionType):
        return None if found is None else read(get_args(kind)[0], found, name)
    if get_origin(kind) is Mapping:
        if not isinstance(found, dict):
            raise ValueError(f"{name}: {found!r} is no object")
        return {key: read(get_args(kind)[1], item, key) for key, item in found.items()}
    if get_origin(kind) is tuple:
        if not isinstance(found, list):
            raise ValueError(f"{name}: {found!r} is no list")
        return tuple(read(get_args(kind)[0], item, f"one of {name}") for item in found)
    right = type(found) is kind or (kind is float and type(found) is int)
    if not right or (kind in (int, float) and not 0 <= found < math.inf):
        raise ValueError(f"{name}: {found!r} is {_WORDS[kind]}")
    return kind(found)
