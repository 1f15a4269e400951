"""Eager, Inductor and fusec on an NVIDIA GPU: `python -m bench.gpu [--minutes 9]`.

In order, within the minutes given: first contact, a kernel of each family in a process of its own
(`gpu_contact`); the tests marked `gpu`; what the device reaches at copies and products; all plans
of a few products side by side, those that only a long race tries as well; two cheap rows that show
whether anything is wrong; matrix products with epilogues; attention; decoding; a head with its
loss; memory-bound chains; blocks; products again, beside Inductor's `max-autotune`; the code of
what lost; the ceilings again. The JSON is complete after each measurement, so a run that is cut
short loses one, and `gpu.md` says what broke, what lost and why (`gpu_report`). GPU time is from
CUDA graphs over rotating inputs (`gpu_timing`).

Of each peer: `median_us`; `host_us`, what one call costs the host; `peak_mib`, memory above what
was in use before the call; `of_floor`, the time that the bytes alone, or the operations alone,
would take over the time taken. Of a row: `bare_us`, its matrix products alone in the library.
`fusec` lets the race decide, `fusec-fused` and `fusec-library` force a side; `best/fusec` compares
with the fastest peer that is not fusec.

Not measured yet: Liger's kernels.

`--dry-run` needs no GPU: each row runs tiny on the CPU, eager and fusec, and its kernels are built
for sm_90 at full size; nothing is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import gpu_contact, gpu_measure, gpu_report, gpu_timing, offline, record, workloads
from bench.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
RESERVE_S = 15.0  # kept for the ceilings at the end and the table
DRY_PEERS = ("eager", "fusec")
FINDINGS = ("products", "attention", "decoding")
"""Groups of whose first row all plans race, and the share of the time that this may take."""
FINDINGS_SHARE = 0.25


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("no CUDA device here; --dry-run goes through the script on a CPU", file=sys.stderr)
        return 4
    chosen = chosen_workloads(options)
    if not chosen:
        print("no workload is left; the peers and groups are:", file=sys.stderr)
        for w in workloads.gpu():
            print(f"  {w.group}: {w.label} ({', '.join(w.peers)})", file=sys.stderr)
        return 2
    deadline = time.monotonic() + 60 * options.minutes
    run = record.Record(
        "gpu", options.out, minutes=options.minutes, dry_run=options.dry_run,
        race_seconds=options.race_seconds,
    )  # fmt: skip
    if not options.skip_tests:
        gpu_contact.contact(_device(options), lambda found: run.note("contact", found))
        run.note("tests", gpu_tests(options.out, limit_s=20 * options.minutes))
    run.note("ceilings", {} if options.dry_run else {"start": gpu_timing.ceilings()})
    find_plans(run, chosen, options)
    run.note("left_out", measure_all(run, chosen, options, deadline - RESERVE_S))
    if not options.dry_run:
        explain_losses(run, deadline - RESERVE_S)
        run.note("ceilings", {**run.data["ceilings"], "end": gpu_timing.ceilings()})
    run.note("verdict", verdict(run.data["summary"]))
    print(record.table(run.data, unit="us"))
    for line in closing_lines(run.data):
        print(line)
    record.plot(run.data, options.out / "gpu.png")
    page = options.out / "gpu.md"
    page.write_text(gpu_report.markdown(run.data))
    print(f"numbers: {run.path}, in words: {page}")
    return 1 if options.dry_run and failures(run.data["results"]) else 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    found.add_argument("--minutes", type=float, default=9.0, help="for everything")
    found.add_argument("--only", default="", help="measure rows with this text in group or name")
    found.add_argument("--peers", default="", help="measure these alone; default: each row's own")
    found.add_argument(
        "--race-seconds", type=float, default=10.0, help="of fusec's races, a graph; %(default)s"
    )
    found.add_argument("--skip-tests", action="store_true", help="do not run the tests first")
    found.add_argument("--dry-run", action="store_true", help="no GPU, no timing: see above")
    found.add_argument(
        "--skip-offline", action="store_true", help="a dry run that builds nothing for sm_90"
    )
    found.add_argument("--out", type=Path, default=Path("build/bench"), help="default %(default)s")
    return found


def chosen_workloads(options: argparse.Namespace) -> list[Workload]:
    """Return the rows to measure with the peers to measure them with."""
    wanted = tuple(filter(None, options.peers.split(","))) or (DRY_PEERS if options.dry_run else ())
    found = []
    for workload in workloads.gpu():
        peers = tuple(p for p in workload.peers if not wanted or p in wanted)
        if peers and options.only.lower() in f"{workload.group} {workload.label}".lower():
            found.append(dataclasses.replace(workload, peers=peers))
    return found


def gpu_tests(directory: Path, *, limit_s: float) -> dict[str, Any]:
    """Run the tests marked `gpu` in a process of their own; their output goes to gpu-tests.log."""
    log = directory / "gpu-tests.log"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "tests/gpu"]
    start = time.monotonic()
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT)
        code = _wait(process, limit_s)
    lines = log.read_text().strip().splitlines()
    result = {"exit": code, "seconds": round(time.monotonic() - start, 1), "last": lines[-1:]}
    print(f"tests: {result}", file=sys.stderr, flush=True)
    return result


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | str:
    """Wait for pytest; interrupt it at the limit, so that it still says what failed until then."""
    for ending, patience_s in ((signal.SIGINT, limit_s), (signal.SIGKILL, 10.0)):
        try:
            code = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.send_signal(ending)
        else:
            return code if ending == signal.SIGINT else f"stopped after {limit_s:.0f} s"
    process.wait()
    return f"killed after {limit_s:.0f} s"


def find_plans(run: record.Record, chosen: Sequence[Workload], options: argparse.Namespace) -> None:
    """Let all plans of the first row of a few groups race; the verdicts serve the table as well."""
    rows = {w.group: w for w in reversed(chosen) if "fusec" in w.peers and not w.train}
    deadline = time.monotonic() + 60 * FINDINGS_SHARE * options.minutes
    found: list[dict[str, Any]] = []
    for workload in (rows[group] for group in FINDINGS if group in rows):
        left = deadline - time.monotonic()
        if left < workload.seconds:
            break
        print(f"all plans of {workload.label} ... {left:.0f} s left", file=sys.stderr, flush=True)
        try:
            found.append(
                gpu_measure.race_all(workload, _device(options), left, dry=options.dry_run)
            )
        except Exception as error:  # one row must not cost the others
            found.append(gpu_measure.row_of(workload, {"fusec": _failed(error)}))
        run.note("findings", found)


def explain_losses(run: record.Record, deadline: float) -> None:
    """Add the facts of their code to the rows in which a peer was faster, while there is time."""
    named = {(w.group, w.name, w.train): w for w in workloads.gpu()}
    for row in gpu_report.lost(run.data):
        if time.monotonic() < deadline:
            workload = named[row["group"], row["name"], row["mode"] == "training"]
            try:
                row["offline"] = offline.build(workload)
            except Exception as error:  # the times are worth more than what explains them
                row["offline"] = _failed(error)
            run.flush()


def _device(options: argparse.Namespace) -> str:
    return "cpu" if options.dry_run else "cuda"


def _failed(error: Exception) -> dict[str, Any]:
    return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


def measure_all(
    run: record.Record, chosen: Sequence[Workload], options: argparse.Namespace, deadline: float
) -> list[str]:
    """Add a row for each workload that there is time for; return the names of the others."""
    left_out = []
    for workload in chosen:
        left = deadline - time.monotonic()
        if left < (1.0 if options.dry_run else workload.seconds):
            left_out.append(workload.label)
            continue  # a cheaper one may follow
        print(f"{workload.label} ... {left:.0f} s left", file=sys.stderr, flush=True)
        try:
            run.add(one_row(run, workload, options, deadline))
        except Exception as error:  # one row must not cost the others
            run.add(gpu_measure.row_of(workload, {"eager": _failed(error)}))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    run.note("in_progress", None)
    return left_out


def one_row(
    run: record.Record, workload: Workload, options: argparse.Namespace, deadline: float
) -> dict[str, Any]:
    if not options.dry_run:
        return gpu_measure.measure(
            workload,
            run.data["ceilings"].get("start", {}),
            deadline,
            race_seconds=options.race_seconds,
            progress=lambda row: run.note("in_progress", row),
        )
    row = gpu_measure.rehearse(workload)
    if not options.skip_offline and "fusec" in workload.peers and "tuned" not in workload.group:
        try:
            row["offline"] = offline.build(workload)
        except Exception as error:
            row["offline"] = _failed(error)
    return row


def failures(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return what a dry run found broken."""
    found = []
    for row in results:
        entries = {**row["peers"], "offline": row.get("offline", {})}
        for peer, entry in entries.items():
            problem = entry.get("failed") or (entry.get("accurate") is False and "inaccurate")
            if problem:
                found.append(f"{row['name']} {row['mode']}, {peer}: {problem}")
    return found


def verdict(groups: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Ahead: geometric mean over 1.03 and no row under 0.95."""

    def judge(s: dict[str, Any]) -> str:
        if s["geomean"] > 1.03 and s["worst"] > 0.95:
            return "ahead"
        return "behind" if s["geomean"] < 0.97 else "mixed"

    return {group: {r: judge(s) for r, s in ratios.items()} for group, ratios in groups.items()}


def closing_lines(data: dict[str, Any]) -> list[str]:
    """Ceilings and their drift, fractions of the floor, what failed, what was left out."""
    lines = []
    start, end = (data["ceilings"].get(k, {}) for k in ("start", "end"))
    for name in start:
        drift = abs(end.get(name, start[name]) / start[name] - 1)
        warning = "" if drift < 0.03 else ": repeat the run"
        lines.append(f"{name}: {start[name]:.4g}, drift {drift:.1%}{warning}")
    for row in data["results"]:
        label = f"{row['name']} {row['mode']}"
        shares = {p: f["of_floor"] for p, f in row["peers"].items() if "of_floor" in f}
        memory = {p: f["peak_mib"] for p, f in row["peers"].items() if "peak_mib" in f}
        if shares:
            bare = f", over the bare product {row['over_bare']}" if "over_bare" in row else ""
            lines.append(f"{label}: of the floor {shares}{bare}")
        if memory and row["mode"] == "training":
            lines.append(f"{label}: peak MiB {memory}")
        lines += [
            f"{label}: fault in {fault}" for fault in row.get("offline", {}).get("faults", ())
        ]
    built = [r["offline"]["kernels"] for r in data["results"] if "kernels" in r.get("offline", {})]
    if built:
        lines.append(f"built for {offline.TARGET}: {sum(built)} kernels of {len(built)} rows")
    lines += [f"failed: {failure}" for failure in failures(data["results"])]
    if data["left_out"]:
        lines.append(f"left out for lack of time: {', '.join(data['left_out'])}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
