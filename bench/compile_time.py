"""What a compile costs: `python -m bench.compile_time [--only NAME] [--before DIR] [--quick]`.

For each case and peer, two fresh processes on one empty cache directory: the first compiles cold,
the second starts warm. Each reports of its first training step, with Dynamo and AOTAutograd:

* `cpu_s`: CPU seconds of the process and everything it started, dead or alive;
* `programs_cpu_s`: of these, what other programs took, for fusec the C++ compiler;
* `wall_s`: the same by the clock;
* `subprocesses`: how many programs were started in between;
* `own_cpu_s`: for fusec, its own share without Dynamo and AOTAutograd, by its own account.

The case `architectures` has the sums over those of the tests, one training step each, cold, races
off, and each by itself. With ``--before DIR`` the fusec of another checkout is a peer, too,
measured beside this one: each case's processes take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import record

CASES = ("mlp block training", "4-layer gpt training", "densenet-121 training", "architectures")
PEERS = ("inductor", "fusec")
LIMIT_S = 600


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    cases = [case for case in CASES if options.only.lower() in case]
    if not cases:
        print(f"no case has {options.only!r} in its name; there are: {CASES}", file=sys.stderr)
        return 2
    peers = options.peers.split(",") + ["before"] * (options.before is not None)
    run = record.Record("compile", options.out, quick=options.quick, peers=peers)
    for case in cases:
        take = architectures if case == "architectures" else starts
        for row in take(case, peers, options):
            run.add(row)
    print(record.table(run.data, unit="cpu_s"))
    print(details(run.results))
    print(f"numbers: {run.path}")
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m bench.compile_time", description=__doc__)
    found.add_argument("--only", default="", help="measure cases with this text in their name")
    found.add_argument("--quick", action="store_true", help="a tiny model: a check")
    found.add_argument("--peers", default=",".join(PEERS), help="default %(default)s")
    found.add_argument("--before", type=Path, help="another checkout, whose fusec is a peer")
    found.add_argument("--out", type=Path, default=Path("build/bench"), help="default %(default)s")
    return found


def starts(case: str, peers: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one case: cold, then warm."""
    found: dict[str, dict[str, Any]] = {"cold": {}, "warm": {}}
    for peer in peers:
        with tempfile.TemporaryDirectory() as cache:
            for start, measured in found.items():
                print(f"{case}, {peer}, {start} ...", file=sys.stderr, flush=True)
                measured[peer] = fresh_process(case, peer, Path(cache), options)
    return [row(f"{start} start", case, start, taken) for start, taken in found.items()]


def architectures(case: str, peers: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row: the sums over the tests' architectures; what each takes stands in `parts`."""
    from tests.models.architectures import ARCHITECTURES  # imports transformers

    names = list(ARCHITECTURES)[:: 20 if options.quick else 1]
    parts: dict[str, dict[str, dict[str, Any]]] = {peer: {} for peer in peers}
    for name in names:
        print(f"{name}, cold ...", file=sys.stderr, flush=True)
        for peer in peers:
            with tempfile.TemporaryDirectory() as cache:
                found = fresh_process(f"architecture {name}", peer, Path(cache), options)
            parts[peer][name] = found
    measured = {peer: summed(found) for peer, found in parts.items()}
    return [row("cold start", f"{len(names)} {case} training, races off", "cold", measured)]


def summed(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The sums of what a peer's processes report, or the first that failed."""
    for name, part in parts.items():
        if "failed" in part:
            return {"failed": f"{name}: {part['failed']}", "parts": parts}
    shared = set.intersection(*(set(part) for part in parts.values()))
    sums = {key: round(sum(p[key] or 0 for p in parts.values()), 3) for key in sorted(shared)}
    return {**sums, "parts": {name: part["cpu_s"] for name, part in parts.items()}}


def row(group: str, name: str, mode: str, peers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    own = peers.get("fusec", {}).get("median_cpu_s")
    ratios = {
        f"{peer}/fusec": round(found["median_cpu_s"] / own, 4)
        for peer, found in peers.items()
        if own and peer != "fusec" and "median_cpu_s" in found
    }
    return {"group": group, "name": name, "mode": mode, "peers": peers, "ratios": ratios}


def fresh_process(case: str, peer: str, cache: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Compile in a process of its own whose caches all lie under one directory."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "FUSEC_CACHE_DIR": str(cache / "fusec"),
    }
    result = cache / "result.json"
    result.unlink(missing_ok=True)
    backend = "fusec" if peer == "before" else peer
    command = [sys.executable, "-m", "bench.compile_child", case, backend, str(result)]
    if options.quick:
        command.append("--quick")
    if peer == "before":
        command += ["--fusec", str(options.before.resolve())]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {LIMIT_S} s"}
    if done.returncode or not result.exists():
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return {"failed": f"exit code {done.returncode}: {last[0][:300]}"}
    found = json.loads(result.read_text())
    return {"median_cpu_s": found["cpu_s"], "samples": 1, **found}


def details(results: list[dict[str, Any]]) -> str:
    """One line a process: what the table has no column for."""
    lines = []
    for result in results:
        for peer, found in result["peers"].items():
            if "failed" in found:
                lines.append(f"{result['name']}, {result['mode']}, {peer}: {found['failed']}")
                continue
            own = found.get("own_cpu_s")
            lines.append(
                f"{result['name']}, {result['mode']}, {peer}: {found['wall_s']:.2f} s wall, "
                f"{found['subprocesses']} subprocesses of {found['programs_cpu_s']:.2f} CPU s"
                + (f", own share {own:.3f} CPU s" if own is not None else "")
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
