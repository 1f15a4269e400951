"""Look at the cache of compiled kernels, or empty it.

fusec cache          what it holds
fusec cache list     by model and target: entries, size, hits, ages; --json has each entry
fusec cache path     where it is
fusec cache clear    remove every entry

A copy of the directory is a cache on other machines, too: an entry is found where it is valid, as
are the verdicts of races on machines with the same device.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from fusec.errors import EnvironmentProblem, UsageError
from fusec.options import Options
from fusec.runtime.cache.store import Cache, Listed, open_cache
from fusec.runtime.race.verdicts import all_verdicts
from fusec.tools.cli.output import show
from fusec.tools.terminal import SCHEMA, alike, format_table

HELP = "look at the cache of compiled kernels, or empty it"
ACTIONS = ("stats", "list", "path", "clear")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "action", nargs="?", default="stats", metavar="|".join(ACTIONS), help="default: stats"
    )
    parser.add_argument("--json", action="store_true", help="of list: every entry, schema 1")


def run(arguments: argparse.Namespace) -> int:
    """Do one action on this user's cache; return 4 if the disk is to hold it and does not."""
    if arguments.json and arguments.action != "list":
        raise UsageError("--json is of `fusec cache list`.")
    cache = open_cache(Options.from_compile(None, None))
    match arguments.action:
        case "stats":
            show("\n".join(_describe(cache)))
        case "list":
            found = [_entry(one) for one in cache.listing()]
            document = {"schema": SCHEMA, "entries": found}
            show(json.dumps(document, indent=2) if arguments.json else "\n".join(_list(found)))
        case "path":
            if cache.directory is None:
                raise EnvironmentProblem("no directory for a cache: set FUSEC_CACHE_DIR to one.")
            show(str(cache.directory))
        case "clear":
            show(f"removed {cache.clear()} files")
        case unknown:
            raise UsageError.unknown("action", unknown, ACTIONS)
    stats = cache.stats()
    return EnvironmentProblem.exit_code if stats.limit_bytes and stats.problem else 0


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


def _list(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each model and target, the latest used first."""
    if not found:
        return ["the cache is empty"]
    groups = alike(found, lambda entry: (entry["model"], entry["target"]))
    rows = [("model", "target", "entries", "size", "hits", "written", "used")]
    now = time.time()
    for entries in groups[:_SHOWN]:
        model = entries[0]["model"] or "(verdicts of races, and what says nothing of itself)"
        size = sum(entry["bytes"] for entry in entries) / 2**20
        hits = str(sum(entry["hits"] for entry in entries))
        written, used = (
            _age(now - max(entry[when] for entry in entries)) for when in ("written", "used")
        )
        rows.append(
            (model, entries[0]["target"], str(len(entries)), f"{size:.1f} MiB", hits, written, used)
        )
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
