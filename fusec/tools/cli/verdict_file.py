"""Take verdicts from one machine to others of its kind: ``fusec cache export`` and ``import``.

::

    {"kind": "fusec verdicts", "schema": 2, "verdicts": {KEY: VERDICT, ...}}

``runtime/race/verdicts.py`` has the form of a verdict.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fusec.errors import EnvironmentProblem, UsageError
from fusec.runtime.cache.store import Cache
from fusec.runtime.race.verdicts import (
    Verdict,
    all_verdicts,
    load_verdict,
    store_verdict,
)
from fusec.tools.cli.output import writing

SCHEMA = 2
KIND = "fusec verdicts"


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of a file's verdicts."""

    added: int
    replaced: int
    kept: int

    def __str__(self) -> str:
        found = self.added + self.replaced + self.kept
        return (
            f"{found} verdicts: {self.added} new, {self.replaced} in place of others, "
            f"{self.kept} left as they were"
        )


def export_verdicts(cache: Cache, path: Path) -> int:
    """Write every verdict to a file and return how many those are.

    Raises:
        EnvironmentProblem: if it cannot be written; an earlier file is as it was.
    """
    verdicts = all_verdicts(cache)
    rows = {key: verdict.to_dict() for key, verdict in verdicts.items()}
    text = json.dumps({"kind": KIND, "schema": SCHEMA, "verdicts": rows}, indent=1) + "\n"
    with writing(path):
        _write(path, text)
    return len(verdicts)


def import_verdicts(cache: Cache, path: Path) -> Imported:
    """Keep the verdicts of a file: all of them, or none if one is not right.

    A verdict of the file takes the place of one that is here, but for one that ran out of time
    where the one here did not.

    Raises:
        UsageError: if there is no such file, or it is not one of `export_verdicts`.
        EnvironmentProblem: if it cannot be read.
    """
    try:
        found = _parse(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"there is no file {str(path)!r}.") from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise UsageError(
            f"{str(path)!r} is no file of `fusec cache export`: {error}. Nothing was imported."
        ) from error
    return _merge(cache, found)


def _parse(content: bytes) -> dict[str, Verdict]:
    """Return the verdicts of a file's content; ValueError says why it is not one of ours."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    names = ("kind", "schema", "verdicts")
    if not isinstance(found, dict) or not set(names) <= found.keys():
        raise ValueError(f"the file has the fields {', '.join(names)}")
    kind, schema, rows = (found[name] for name in names)
    if kind != KIND:
        raise ValueError(f"its kind is {kind!r}")
    if schema != SCHEMA:
        raise ValueError(f"its schema is {schema!r}, and this fusec reads {SCHEMA}")
    if not isinstance(rows, dict):
        raise ValueError("the verdicts are no object")
    verdicts = {}
    for key, row in rows.items():
        try:
            verdicts[key] = Verdict.from_dict(row)
        except ValueError as error:
            raise ValueError(f"at {key!r}: {error}") from error
    return verdicts


def _merge(cache: Cache, found: Mapping[str, Verdict]) -> Imported:
    added = replaced = kept = 0
    for key, verdict in found.items():
        here = load_verdict(cache, key)
        if here is None:
            added += 1
        elif here == verdict or (verdict.exhausted and not here.exhausted):
            kept += 1
            continue
        else:
            replaced += 1
        store_verdict(cache, key, verdict)
    return Imported(added, replaced, kept)


def _write(path: Path, text: str) -> None:
    """Write a file in one step; what is no file, /dev/stdout say, is written to as it is."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
