"""One page of a GPU run, as Markdown: what broke, what lost and why, what each race measured.

It is made of the record alone (``build/bench/gpu.json``), so that a run that was cut off has one,
too: ``python -m bench.gpu_report build/bench/gpu.json``. The order is that of a first hour: what
broke, the ceilings that all shares refer to, what lost, then laps. ``--explain`` adds the facts of
the code that lost, for which it is built for sm_90; that needs no GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import offline, workloads

LOST = 0.97
"""Ratio of the best peer to fusec below which fusec lost."""
NARROW = 0.95
"""Share of bytes in 16-byte accesses below which their width is worth a word."""


def markdown(data: dict[str, Any]) -> str:
    """Return the page of a record."""
    machine, versions = data.get("machine", {}), data.get("versions", {})
    about = [str(machine.get("gpu", "no GPU: a dry run")), data.get("date", "")]
    about += [f"{name} {version}" for name, version in versions.items()]
    parts = [
        ["# fusec on a GPU: one run", "", ", ".join(about)],
        ["## What broke", "", *_listed(_broken(data), "Nothing.")],
        ["## Ceilings", "", *_listed(_ceilings(data), "Not measured.")],
        ["## What lost, and what its code says", "", *_listed(_lost(data), "Nothing.")],
        ["## Races", "", *_listed(_races(data), "None.")],
        ["## Left out", "", *_listed(data.get("left_out", ()), "Nothing.")],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _listed(lines: Iterator[str] | Sequence[str], nothing: str) -> list[str]:
    return [f"  - {line[2:]}" if line.startswith("  ") else f"- {line}" for line in lines] or [
        nothing
    ]


def _broken(data: dict[str, Any]) -> Iterator[str]:
    for name, entry in data.get("contact", {}).items():
        if problem := _problem(entry):
            yield f"first contact, {name}: {problem}"
    tests = data.get("tests")
    if tests and tests["exit"] != 0:
        yield f"tests: {tests['exit']}: {' '.join(tests['last'])} (gpu-tests.log)"
    for row in data.get("results", ()):
        for peer, entry in {**row["peers"], "offline": row.get("offline", {})}.items():
            if problem := _problem(entry):
                yield f"{_label(row)}, {peer}: {problem}"
    for unfinished in data.get("in_progress", {}).values():
        yield f"{_label(unfinished)}: the run ended while it was measured"


def _problem(entry: dict[str, Any]) -> str:
    if "failed" in entry:
        return str(entry["failed"])
    return f"inaccurate: {entry.get('error')}" if entry.get("accurate") is False else ""


def _ceilings(data: dict[str, Any]) -> Iterator[str]:
    start, end = (data.get("ceilings", {}).get(k, {}) for k in ("start", "end"))
    for name, value in start.items():
        drift = f", drift {abs(end[name] / value - 1):.1%}" if name in end else ""
        yield f"{name} {value:.4g}{drift}"


def _lost(data: dict[str, Any]) -> Iterator[str]:
    """Yield what a peer did faster, the largest loss first, and a line for each of its kernels."""
    for row in lost(data):
        times = {p: f["median_us"] for p, f in row["peers"].items() if "median_us" in f}
        shown = ", ".join(f"{p} {us:.4g}" for p, us in sorted(times.items(), key=lambda t: t[1]))
        share = row["peers"]["fusec"].get("of_floor")
        floor = f"; {share:.0%} of the floor" if share is not None else ""
        yield f"**{_label(row)}**: {_best(row):.2f} of the best ({shown} us{floor})"
        timed, kernels = row.get("kernel_us", {}), row.get("offline", {}).get("facts", ())
        names = [kernel["name"] for kernel in kernels]
        for kernel in kernels:
            known = kernel["name"] in timed and names.count(kernel["name"]) == 1
            measured = f"{timed[kernel['name']]:.4g} us, " if known else ""
            yield f"  {kernel['graph']} {kernel['name']}: {measured}{_facts(kernel)}"


def lost(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a record in which a peer was faster, the largest loss first."""
    return sorted((r for r in data.get("results", ()) if _best(r) < LOST), key=_best)


def _best(row: dict[str, Any]) -> float:
    return float(row.get("ratios", {}).get("best/fusec", 1.0))


def _facts(kernel: dict[str, Any]) -> str:
    """Return the facts of a kernel's code in words, what stands out last."""
    parts = [
        f"{kernel['kind']}, floor {kernel['floor_us']:.4g} us, {kernel['programs']} programs, "
        f"{kernel['registers']} registers, {kernel['blocks']} a multiprocessor"
    ]
    if kernel.get("instructions_per_byte"):
        parts.append(f"{kernel['instructions_per_byte']:.1f} instructions a byte")
    if kernel.get("spill_bytes"):
        parts.append(f"{kernel['spill_bytes']} bytes spilled")
    if kernel.get("wide_share") is not None and kernel["wide_share"] < NARROW:
        parts.append(f"{kernel['wide_share']:.0%} in 16-byte accesses")
    if kernel.get("barriers"):
        parts.append(f"{kernel['barriers']} barriers")
    return ", ".join(parts)


def _races(data: dict[str, Any]) -> Iterator[str]:
    """Yield each race with all its laps, the fastest first, and what was dropped, with why."""
    for row in (*data.get("findings", ()), *data.get("results", ())):
        for verdict in row.get("races", ()):
            laps = verdict["laps"]
            timed = sorted((lap for lap in laps if lap["us"] is not None), key=lambda x: x["us"])
            shown = [f"{lap['name']} {lap['us']:.4g} us" for lap in timed]
            shown += [f"{lap['name']} {lap['dropped']}" for lap in laps if lap["us"] is None]
            yield f"{_label(row)}: {', '.join(shown)}; chosen: {verdict['winner']}"


def _label(row: dict[str, Any]) -> str:
    return f"{row['name']} {row['mode']}"


def explain(data: dict[str, Any]) -> None:
    """Add the facts of their code to the rows in which a peer was faster."""
    named = {(w.group, w.name, w.train): w for w in workloads.gpu()}
    for row in lost(data):
        workload = named[row["group"], row["name"], row["mode"] == "training"]
        try:
            row["offline"] = offline.build(workload)
        except Exception as error:  # the times are worth more than what explains them
            row["offline"] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_report", description=__doc__)
    parser.add_argument("record", type=Path, help="a gpu.json")
    parser.add_argument("--explain", action="store_true", help="build what lost, and say its facts")
    options = parser.parse_args(arguments)
    data = json.loads(options.record.read_text())
    if options.explain:
        explain(data)
    print(markdown(data))


if __name__ == "__main__":
    main()
