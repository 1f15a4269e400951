"""What races decided: the record of one, its JSON form, and where it is kept.

A verdict is an entry of its own in the cache of compiled kernels, so that all promises of
`cache/store.py` hold for it: in memory first, one file each, published by a rename, checked at each
load. The caller's key names the structure of the group, the device and the versions: all that times
depend on. The form of one::

    VERDICT ::= {"winner": name, "exhausted": bool, "laps": [LAP, ...], "sizes": [int, ...]}
    LAP     ::= {"name", "us", "p20", "p80": number or null, "dropped": text or null}
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import Any

from fusec.runtime.cache.store import Cache
from fusec.runtime.from_json import read

logger = logging.getLogger("fusec.race")

SHOWN_LAPS = 3
"""Times in the printed form of a verdict, besides the winner's if that is not among them."""

VARIES = 0.1
"""Spread of the reference's times, beside their median, up to which a verdict is kept."""

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

    def is_steady(self, reference: str) -> bool:
        """Return True if a later compile may rely on the verdict: its reference ran steadily."""
        first = next(lap for lap in self.laps if lap.name == reference)
        if first.us is None or first.p20 is None or first.p80 is None:
            return self.compared and not self.exhausted
        return self.compared and first.p80 - first.p20 <= VARIES * first.us

    @property
    def compared(self) -> bool:
        """Whether the winner stood against others: not if time alone kept all of them away."""
        others = [lap for lap in self.laps if lap.name != self.winner]
        return not others or any(lap.us is not None or lap.dropped != NO_TIME for lap in others)

    def __str__(self) -> str:
        """Return one line, such as "fused 412 us, library 455 us: fused"."""
        times = self.times
        timed = sorted(times, key=times.__getitem__)
        shown = [name for i, name in enumerate(timed) if i < SHOWN_LAPS or name == self.winner]
        parts = [f"{name} {duration(times[name])}" for name in shown]
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
        return {**asdict(self), "laps": list(map(asdict, self.laps)), "sizes": list(self.sizes)}

    def to_json(self) -> str:
        """Return the JSON form; the module's docstring has its schema."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, found: object) -> Verdict:
        """Return the verdict of a JSON form.

        Raises:
            ValueError: if it is none; the message says what is wrong with it.
        """
        made: Verdict = read(cls, found, "a verdict")
        if made.winner not in [lap.name for lap in made.laps]:
            raise ValueError(f"the winner {made.winner!r} has no lap")
        return made

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        """Return the verdict of a JSON text; ValueError as of `from_dict`."""
        return cls.from_dict(json.loads(text))


def duration(us: float) -> str:
    """Return a time with three digits: "8.24 us", "41.2 us", "412 us", "12.5 ms"."""
    value, unit = (us, "us") if us < 9999.5 else (us / 1e3, "ms")
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


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
