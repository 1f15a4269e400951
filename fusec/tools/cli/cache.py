"""Look at the cache of compiled kernels, or empty it.

fusec cache          what it holds
fusec cache list     by model and target: entries, size, hits, ages; --json has each entry
fusec cache path     where it is
fusec cache clear    remove every entry

Take the verdicts of races on this device to other machines with the same device:

fusec cache export verdicts.json
fusec cache import verdicts.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusec.errors import EnvironmentProblem, UsageError
from fusec.options import Options
from fusec.runtime.cache.store import Cache, Listed, open_cache
from fusec.runtime.race.verdicts import Verdict, all_verdicts, load_verdict, store_verdict
from fusec.tools.cli.output import progress, show, writing
from fusec.tools.terminal import format_table

HELP = "look at the cache of compiled kernels, or empty it"
ACTIONS = ("stats", "list", "path", "clear", "export", "import")
WITH_FILE = ("export", "import")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "action", nargs="?", default="stats", metavar="|".join(ACTIONS), help="default: stats"
    )
    parser.add_argument("--json", action="store_true", help="of list: every entry, schema 1")
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="of verdicts, for export and import"
    )


def run(arguments: argparse.Namespace) -> int:
    """Do one action on this user's cache."""
    _check_file(arguments)
    if arguments.json and arguments.action != "list":
        raise UsageError("--json is of `fusec cache list`.")
    cache = open_cache(Options.from_compile(None, None))
    match arguments.action:
        case "stats":
            show("\n".join(_describe(cache)))
        case "list":
            found = [_entry(one) for one in cache.listing()]
            show(_entries_json(found) if arguments.json else "\n".join(_list(found)))
        case "path":
            if cache.directory is None:
                raise EnvironmentProblem("no directory for a cache: set FUSEC_CACHE_DIR to one.")
            show(str(cache.directory))
        case "clear":
            show(f"removed {cache.clear()} files")
        case "export":
            count = export_verdicts(cache, arguments.file)
            progress(f"{count} verdicts written to {arguments.file}")
        case "import":
            show(_import(cache, arguments.file))
        case unknown:
            raise UsageError.unknown("action", unknown, ACTIONS)
    return 0


def _check_file(arguments: argparse.Namespace) -> None:
    action, file = arguments.action, arguments.file
    if action in WITH_FILE and file is None:
        raise UsageError(f"which FILE? Write `fusec cache {action} verdicts.json`.")
    if action in ACTIONS and action not in WITH_FILE and file is not None:
        raise UsageError(f"`fusec cache {action}` takes no file, and got {str(file)!r}.")


def _import(cache: Cache, file: Path) -> str:
    """Import a file's verdicts and describe them; raise if the next process cannot find them."""
    done = import_verdicts(cache, file)
    cache.forget()
    if (done.added or done.replaced) and not all_verdicts(cache):
        problem = cache.stats().problem or "it could not be written"
        raise EnvironmentProblem(f"the cache keeps no verdicts: {problem}")
    return str(done)


def _describe(cache: Cache) -> list[str]:
    stats = cache.stats()
    return [
        f"directory  {stats.directory or 'none'}",
        f"entries    {stats.entries}",
        f"size       {stats.bytes / 2**20:.1f} MiB of {stats.limit_bytes / 2**20:.0f} MiB",
        f"verdicts   {len(all_verdicts(cache))}",
        f"health     {stats.problem or 'sound'}",
    ]


def _entry(listed: Listed) -> dict[str, Any]:
    about: dict[str, str] = json.loads(listed.about) if listed.about else {}
    return {
        "model": about.get("model", ""),
        "graph": about.get("graph", ""),
        "target": about.get("target", ""),
        "bytes": listed.size,
        "hits": listed.hits if about else 0,  # an entry without metadata counts none
        "written": listed.written,
        "used": listed.used,
    }


def _entries_json(found: Sequence[dict[str, Any]]) -> str:
    return json.dumps({"schema": 1, "entries": found}, indent=2)


def _list(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each model and target, the latest used first."""
    if not found:
        return ["the cache is empty"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in found:
        model = entry["model"] or "(verdicts of races, and what says nothing of itself)"
        groups.setdefault((model, entry["target"]), []).append(entry)
    rows = [("model", "target", "entries", "size", "hits", "written", "used")]
    now = time.time()
    for (model, target), entries in list(groups.items())[:_SHOWN]:
        size = sum(entry["bytes"] for entry in entries) / 2**20
        hits = str(sum(entry["hits"] for entry in entries))
        written, used = (
            _age(now - max(entry[when] for entry in entries)) for when in ("written", "used")
        )
        rows.append((model, target, str(len(entries)), f"{size:.1f} MiB", hits, written, used))
    lines = format_table(rows, right=range(2, 7))
    more = len(groups) - _SHOWN
    return [*lines, *([f"and {more} more, which --json lists"] if more > 0 else [])]


_SHOWN = 40


def _age(seconds: float) -> str:
    """Return how long ago something was: "3 min ago"."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


# -- verdicts in a file: {"kind": "fusec verdicts", "schema": 2, "verdicts": {KEY: VERDICT}} -------


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
