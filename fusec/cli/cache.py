"""Look at the cache of compiled kernels, or empty it.

fusec cache          what it holds
fusec cache path     where it is
fusec cache clear    remove every entry
"""

from __future__ import annotations

import argparse

from fusec.cli.output import show
from fusec.errors import EnvironmentProblem, UsageError
from fusec.options import Options
from fusec.runtime.cache import Cache, open_cache

HELP = "look at the cache of compiled kernels, or empty it"
ACTIONS = ("stats", "path", "clear")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "action", nargs="?", default="stats", metavar="|".join(ACTIONS), help="default: stats"
    )


def run(arguments: argparse.Namespace) -> int:
    """Do one action on this user's cache."""
    cache = open_cache(Options.from_compile(None, None))
    match arguments.action:
        case "stats":
            show("\n".join(_describe(cache)))
        case "path":
            if cache.directory is None:
                raise EnvironmentProblem("no directory for a cache: set FUSEC_CACHE_DIR to one.")
            show(str(cache.directory))
        case "clear":
            show(f"removed {cache.clear()} files")
        case unknown:
            raise UsageError.unknown("action", unknown, ACTIONS)
    return 0


def _describe(cache: Cache) -> list[str]:
    stats = cache.stats()
    return [
        f"directory  {stats.directory or 'none'}",
        f"entries    {stats.entries}",
        f"size       {stats.bytes / 2**20:.1f} MiB of {stats.limit_bytes / 2**20:.0f} MiB",
        f"health     {stats.problem or 'sound'}",
    ]
