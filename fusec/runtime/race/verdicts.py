"""What races decided: the record of one, its JSON form, and where it is kept.

A verdict is an entry of its own in the cache of compiled kernels, so that all promises of
`cache/store.py` hold for it: in memory first, one file each, published by a rename, checked at each
load. The caller's key names the structure of the group, the device and the versions: all that times
depend on. A file of `export_verdicts` takes what one machine measured to others of its kind::

    {"kind": "fusec verdicts", "schema": 2, "verdicts": {KEY: VERDICT, ...}}

    VERDICT ::= {"winner": name, "exhausted": bool, "laps": [LAP, ...], "sizes": [int, ...]}
    LAP     ::= {"name", "us", "p20", "p80": number or null, "dropped": text or null}
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fusec.errors import EnvironmentProblem, NotWritable, UsageError
from fusec.runtime.cache.store import Cache

logger = logging.getLogger("fusec.race")

SCHEMA = 2
KIND = "fusec verdicts"
SHOWN_LAPS = 3
"""Times in the printed form of a verdict, besides the winner's if that is not among them."""

NO_TIME = "no time left"
"""Why a candidate was not timed: the budget was spent before its turn."""

_PREFIX = "verdict 2\0"
_BLOB = "verdict.json"


@dataclass(frozen=True, slots=True)
class CandidateTime:
    """The times of one candidate.

    Attributes:
        us: median over its rounds in microseconds; None if it was never timed.
        p20, p80: the 20th and the 80th percentile.
        dropped: why it left the race before the end, None if it did not: "failed to build: ...",
            "failed to run: ...", "wrong: ...", "behind after 3 rounds", "no time left".
    """

    name: str
    us: float | None = None
    p20: float | None = None
    p80: float | None = None
    dropped: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The winner of a race, and the measurements.

    Attributes:
        exhausted: the budget ended the race, so a better candidate may have been missed.
        sizes: those at which it was timed and that its key does not say: it has their classes, or
            a whole of which a part was timed.
    """

    winner: str
    laps: tuple[CandidateTime, ...]
    exhausted: bool = False
    sizes: tuple[int, ...] = ()

    @property
    def times(self) -> dict[str, float]:
        """Microseconds of each candidate that was timed."""
        return {lap.name: lap.us for lap in self.laps if lap.us is not None}

    @property
    def compared(self) -> bool:
        """Whether the winner stood against others: not if time alone kept all of them away."""
        others = [lap for lap in self.laps if lap.name != self.winner]
        return not others or any(lap.us is not None or lap.dropped != NO_TIME for lap in others)

    def __str__(self) -> str:
        """Return one line, such as "fused 412 us, library 455 us: fused"."""
        timed = sorted((lap for lap in self.laps if lap.us is not None), key=_median)
        shown = [lap for i, lap in enumerate(timed) if i < SHOWN_LAPS or lap.name == self.winner]
        parts = [f"{lap.name} {duration(_median(lap))}" for lap in shown]
        if slower := len(timed) - len(shown):
            parts.append(f"{slower} slower")
        untimed = [lap.dropped or "" for lap in self.laps if lap.us is None]
        for kind in ("failed", "wrong", "no time left"):
            if count := sum(why.startswith(kind) for why in untimed):
                parts.append(f"{count} {kind}")
        end = " (out of time)" if self.exhausted else ""
        return f"{', '.join(parts) or 'nothing was timed'}: {self.winner}{end}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form as dictionaries and lists."""
        laps = [asdict(lap) for lap in self.laps]
        own = {"winner": self.winner, "exhausted": self.exhausted}
        return {**own, "laps": laps, "sizes": list(self.sizes)}

    def to_json(self) -> str:
        """Return the JSON form; the module's docstring has its schema."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, found: object) -> Verdict:
        """Return the verdict of a JSON form.

        Raises:
            ValueError: if it is none; the message says what is wrong with it.
        """
        names = ("winner", "exhausted", "laps", "sizes")
        winner, exhausted, rows, sizes = _fields(found, "a verdict", *names)
        if not isinstance(winner, str) or not isinstance(exhausted, bool):
            raise ValueError("a winner is text and exhausted is true or false")
        if not isinstance(rows, list):
            raise ValueError("the laps are no list")
        laps = tuple(map(_lap, rows))
        if winner not in [lap.name for lap in laps]:
            raise ValueError(f"the winner {winner!r} has no lap")
        if not isinstance(sizes, list) or not all(type(n) is int for n in sizes):
            raise ValueError("the sizes are no list of integers")
        return cls(winner, laps, exhausted, tuple(sizes))

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        """Return the verdict of a JSON text; ValueError as of `from_dict`."""
        return cls.from_dict(json.loads(text))


def duration(us: float) -> str:
    """Return a time with three digits: "8.24 us", "41.2 us", "412 us", "12.5 ms"."""
    value, unit = (us, "us") if us < 9999.5 else (us / 1e3, "ms")
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def _median(lap: CandidateTime) -> float:
    return math.inf if lap.us is None else lap.us


def _fields(found: object, what: str, *names: str) -> list[object]:
    if not isinstance(found, dict) or not set(names) <= found.keys():
        raise ValueError(f"{what} has the fields {', '.join(names)}")
    return [found[name] for name in names]


def _lap(found: object) -> CandidateTime:
    name, us, p20, p80, dropped = _fields(found, "a lap", "name", "us", "p20", "p80", "dropped")
    if not isinstance(name, str) or not isinstance(dropped, str | None):
        raise ValueError("the name of a lap is text, and so is why it was dropped, or null")
    return CandidateTime(name, _time(us), _time(p20), _time(p80), dropped)


def _time(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no time in microseconds")
    return float(value)


# -- kept ------------------------------------------------------------------------------------------


def load_verdict(cache: Cache, key: str) -> Verdict | None:
    """Return the verdict that was kept under a key, or None."""
    blobs = cache.load(_PREFIX + key)
    if blobs is None:
        return None
    try:
        return Verdict.from_json(blobs[_BLOB].decode())
    except (ValueError, KeyError) as error:
        # Sound digests over something else: an older fusec wrote it.
        logger.debug("a verdict is not readable, the race is run again: %s", error)
        return None


def store_verdict(cache: Cache, key: str, verdict: Verdict) -> None:
    """Keep a verdict under a key, in place of an earlier one."""
    cache.store(_PREFIX + key, {_BLOB: verdict.to_json().encode()})


def all_verdicts(cache: Cache) -> dict[str, Verdict]:
    """Return every verdict that is kept, by key."""
    keys = [key.removeprefix(_PREFIX) for key in cache.keys(_PREFIX)]
    loaded = ((key, load_verdict(cache, key)) for key in keys)
    return {key: verdict for key, verdict in loaded if verdict is not None}


# -- as a file -------------------------------------------------------------------------------------


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
    try:
        _write(path, text)
    except OSError as error:
        raise NotWritable(f"cannot write {path}: {error.strerror or error}.") from error
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
    kind, schema, rows = _fields(found, "the file", "kind", "schema", "verdicts")
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
