"""What a record of `bench.peers` says: `python -m bench.peers_report build/bench/peers.json ...`.

A row's ratio is the time of the best peer over that of the better of fusec and fusec with `freeze`:
above one, fusec is ahead. Each run has one, of its medians; the row has the median of its runs, and
their spread, the largest less the smallest. A row misses a bar if it misses it by more than its
spread. A peer whose results are wrong counts as one that failed. Of several records, a row counts
once, as the last one has it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from bench.record import geomean

OWN = ("fusec", "fusec-freeze")
Row: TypeAlias = dict[str, Any]


def compared(peers: dict[str, Row]) -> Row:
    """Return a row's peers, ratios, spreads, and the best of the others and of fusec's.

    Ratios are called `best/fusec` and, of each other peer, `PEER/fusec`; those that no run has are
    left out.
    """
    runs = {peer: found["runs_ms"] for peer, found in peers.items() if counts(found)}
    own = {peer: times for peer, times in runs.items() if peer in OWN}
    others = {peer: times for peer, times in runs.items() if peer not in OWN}
    row: Row = {"peers": peers, "ratios": {}, "spreads": {}}
    if not own or not others:
        return row
    fusec, best = least(own), least(others)
    for name, times in {"best": best, **others}.items():
        each = [other / mine for other, mine in zip(times, fusec, strict=True)]
        row["ratios"][f"{name}/fusec"] = round(statistics.median(each), 4)
        row["spreads"][f"{name}/fusec"] = round(max(each) - min(each), 4)
    row["best"] = {"peer": fastest(others), "fusec": fastest(own)}
    return row


def counts(found: Row) -> bool:
    return found.get("accurate") is True and "runs_ms" in found


def least(runs: dict[str, list[float]]) -> list[float]:
    """Return the shortest time of each run."""
    return [min(times) for times in zip(*runs.values(), strict=True)]


def fastest(runs: dict[str, list[float]]) -> str:
    return min(runs, key=lambda peer: statistics.median(runs[peer]))


# -- bars ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bar:
    """What ratios over a peer, or over the best, have to reach in the rows that it is about.

    Attributes:
        geomean: of all these rows; 0 if nothing is asked of it.
        row: of each.
    """

    what: str
    about: Callable[[Row], bool]
    over: str
    geomean: float
    row: float

    def missed(self, rows: list[Row]) -> list[Row]:
        """Return the rows that miss by more than their spread, or have no ratio."""
        ratio = f"{self.over}/fusec"
        return [
            row
            for row in rows
            if row["ratios"].get(ratio, 0.0) + row["spreads"].get(ratio, 0.0) < self.row
        ]


CONVOLUTIONS = ("resnet", "mobilenet", "efficientnet", "convnext")


def quiet(row: Row, mode: str) -> bool:
    return row["mode"] == mode and not row["busy"]


BARS = (
    Bar("inference, the best of all peers", lambda r: quiet(r, "forward"), "best", 1.15, 0.97),
    Bar(
        "inference of convolutions, ONNX Runtime",
        lambda r: quiet(r, "forward") and r["name"].startswith(CONVOLUTIONS),
        "onnxruntime", 0.0, 1.05,
    ),
    Bar(
        "inference of Swin, OpenVINO",
        lambda r: quiet(r, "forward") and r["name"].startswith("swin"),
        "openvino", 0.0, 1.05,
    ),
    Bar("training, the better of both", lambda r: quiet(r, "training"), "best", 1.25, 1.0),
    Bar(
        "inference of the core on a busy machine, the best of all peers",
        lambda r: r["busy"] > 0 and r["group"] == "core forward", "best", 1.0, 0.8,
    ),
)  # fmt: skip
SLOWER = 2.5
"""How many times its quiet time a row's may be on a busy machine, fusec's better choice in both."""


def verdicts(results: list[Row]) -> Iterator[str]:
    """Yield a line for each bar that some row is about, and for each row that misses it."""
    for bar in BARS:
        rows = [row for row in results if bar.about(row)]
        ratios = [row["ratios"].get(f"{bar.over}/fusec") for row in rows]
        known = [ratio for ratio in ratios if ratio is not None]
        if not known:
            continue
        mean, missed = geomean(known), bar.missed(rows)
        asked = f" (bar {bar.geomean:g}: {verdict(mean >= bar.geomean)})" if bar.geomean else ""
        yield (
            f"{bar.what}: geomean {mean:.3f}{asked} of {len(known)} rows; "
            f"{len(missed)} below {bar.row:g}"
        )
        for row in missed:
            yield f"  {row['name']}: {ratio_of(row, f'{bar.over}/fusec')}"
    yield from slowed(results)


def slowed(results: list[Row]) -> Iterator[str]:
    """Yield what is slower than it may be beside other programs."""
    alone = {key(row): own_ms(row) for row in results if not row["busy"]}
    times = {
        row["name"]: mine / before
        for row in results
        if row["busy"] and row["mode"] == "forward"
        for mine, before in [(own_ms(row), alone.get((*key(row)[:-1], 0)))]
        if mine and before
    }
    if times:
        over = {name: slower for name, slower in times.items() if slower > SLOWER}
        yield (
            f"busy beside quiet: geomean {geomean(list(times.values())):.2f} times slower; "
            f"{len(over)} of {len(times)} above {SLOWER:g}"
        )
        yield from (f"  {name}: {slower:.2f}" for name, slower in over.items())


def own_ms(row: Row) -> float | None:
    """Return the median of the better of fusec's two in milliseconds, if there is one."""
    known = [row["peers"][p]["median_ms"] for p in OWN if counts(row["peers"].get(p, {}))]
    return min(known, default=None)


def key(row: Row) -> tuple[str, str, int]:
    return row["name"], row["mode"], row["busy"]


def verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


# -- tables ----------------------------------------------------------------------------------------


def report(results: list[Row]) -> str:
    """Return tables of times and of compiles in Markdown, geomeans, misses and what failed."""
    parts = []
    for title, rows in tables(results):
        peers = list(dict.fromkeys(peer for row in rows for peer in row["peers"]))
        parts += [f"## {title}, ms\n\n{times(rows, peers)}", f"{means(rows, peers)}"]
        if not rows[0]["busy"]:
            parts.append(f"## {title}, compile, CPU-seconds\n\n{compiles(rows, peers)}")
    parts.append("\n".join(verdicts(results)))
    failed = [
        f"{row['name']}, {row['mode']}, {peer}: {found.get('failed', 'wrong results')}"
        for row in results
        for peer, found in row["peers"].items()
        if not counts(found)
    ]
    return "\n\n".join([*parts, *(["failed:\n" + "\n".join(failed)] if failed else [])])


def tables(results: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows that share a table, with what is said above it."""
    for mode, called in (("forward", "inference"), ("training", "training")):
        for load in sorted({row["busy"] for row in results}):
            rows = [row for row in results if (row["mode"], row["busy"]) == (mode, load)]
            if rows:
                yield called + (f" beside {load} programs" if load else ""), rows


def times(rows: list[Row], peers: list[str]) -> str:
    head = ["case", *peers, "best peer / best fusec", "spread", "best peer", "others' CPUs"]
    lines = [
        [
            row["name"],
            *(milliseconds(row["peers"].get(peer, {})) for peer in peers),
            number(row["ratios"].get("best/fusec")),
            number(row["spreads"].get("best/fusec")),
            row.get("best", {}).get("peer", "-"),
            number(row.get("others")),
        ]
        for row in rows
    ]
    return markdown(head, lines)


def compiles(rows: list[Row], peers: list[str]) -> str:
    lines = [
        [row["name"], *(number(row["peers"].get(p, {}).get("compile_cpu_s")) for p in peers)]
        for row in rows
    ]
    return markdown(["case", *peers], lines)


def means(rows: list[Row], peers: list[str]) -> str:
    """Return a line of geomeans of fusec over each other peer."""
    found = []
    for peer in ("best", *(p for p in peers if p not in OWN)):
        known = [row["ratios"][f"{peer}/fusec"] for row in rows if f"{peer}/fusec" in row["ratios"]]
        if known:
            found.append(f"{peer} {geomean(known):.3f} of {len(known)}")
    return f"geomeans of times over fusec's: {', '.join(found)}"


def markdown(head: list[str], lines: list[list[str]]) -> str:
    every = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in every)


def milliseconds(found: Row) -> str:
    if "failed" in found:
        return "failed"
    wrong = "" if found.get("accurate", True) else " (wrong)"  # one of other rows has neither
    return number(found.get("median_ms")) + wrong


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def ratio_of(row: Row, ratio: str) -> str:
    if ratio not in row["ratios"]:
        return "no ratio"
    return f"{row['ratios'][ratio]:.3f}, spread {row['spreads'][ratio]:.3f}"


def main(paths: list[str]) -> int:
    rows = (row for path in paths for row in json.loads(Path(path).read_text())["results"])
    print(report(list({key(row): row for row in rows}.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
