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
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusec.errors import EnvironmentProblem, UsageError
from fusec.options import Options
from fusec.runtime.cache.store import Cache, Listed, open_cache
from fusec.runtime.race.verdicts import all_verdicts
from fusec.tools.cli.output import progress, show
from fusec.tools.cli.verdict_file import export_verdicts, import_verdicts
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
