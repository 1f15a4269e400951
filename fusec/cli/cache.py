"""Look at the cache of compiled kernels, or empty it.

fusec cache          what it holds
fusec cache path     where it is
fusec cache clear    remove every entry

What races on this machine's device decided, for other machines with such a device:

fusec cache export verdicts.json
fusec cache import verdicts.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fusec.cli.output import progress, show
from fusec.errors import EnvironmentProblem, UsageError
from fusec.options import Options
from fusec.runtime.cache import Cache, open_cache
from fusec.runtime.verdicts import all_verdicts, export_verdicts, import_verdicts

HELP = "look at the cache of compiled kernels, or empty it"
ACTIONS = ("stats", "path", "clear", "export", "import")
WITH_FILE = ("export", "import")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "action", nargs="?", default="stats", metavar="|".join(ACTIONS), help="default: stats"
    )
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="of verdicts, for export and import"
    )


def run(arguments: argparse.Namespace) -> int:
    """Do one action on this user's cache."""
    _check_file(arguments)
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
    """Keep a file's verdicts and say so, or raise if the next process will not find them."""
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
