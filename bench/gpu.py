"""Eager, Inductor and fusec on an NVIDIA GPU: `python -m bench.gpu [--slice 9m]`.

In order, within the time given: first contact, a kernel of each family (`gpu_contact`); the tests
marked `gpu`; what the device reaches at copies and products; then one row each: two cheap ones that
show whether anything is wrong; matrix products with epilogues; attention; decoding; a head with its
loss; memory-bound chains; blocks; products again, beside Inductor's `max-autotune`; and at last the
ceilings again.

Families and rows run in child processes (`children`), several at a time, since most of their time
is compiling; only one of them measures at a time. The JSON is complete after each measurement, so a
run that is cut short loses what it was at; `--resume` goes on with what is missing or failed. The
page `gpu.md` says what broke, what lost and why (`gpu_report`). GPU time is from CUDA graphs over
rotating inputs (`gpu_timing`).

Of each peer: `median_us`; `host_us`, what one call costs the host while the device is idle;
`peak_mib`, memory above what was in use before the call; `of_floor`, the time that the bytes alone,
or the operations alone, would take over the time taken. Of a row: `bare_us`, its matrix products
alone in the library. `fusec` lets the race decide, `fusec-fused` and `fusec-library` force a side;
`best/fusec` compares with the fastest peer that is not fusec.

Not measured yet: Liger's kernels.

`--dry-run` needs no GPU: each row runs tiny on the CPU, eager and fusec, and its kernels are built
for sm_90 at full size; nothing is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from bench import gpu_contact, gpu_measure, gpu_report, gpu_timing, offline, record, workloads
from bench.children import Task, work_through
from bench.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
RESERVE_S = 15.0  # kept for the ceilings at the end and the page
DRY_PEERS = ("eager", "fusec")
TESTS_SHARE = 0.35
"""Share of the time that contact and tests may take."""


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
    start = time.monotonic()
    cores = max(1, (os.cpu_count() or 1) // options.children)  # by default Inductor starts one each
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(cores))
    run = record.Record(
        "gpu", options.out, resume=options.resume, slice_s=options.slice, dry_run=options.dry_run,
        race_seconds=options.race_seconds, children=options.children,
    )  # fmt: skip
    if not options.skip_tests:
        contact_and_tests(run, options, start + TESTS_SHARE * options.slice)
    if not options.dry_run:
        run.data.setdefault("ceilings", {}).setdefault("start", gpu_timing.ceilings())
    measure_all(run, chosen, options, start + options.slice - RESERVE_S)
    if not options.dry_run:
        run.data["ceilings"]["end"] = gpu_timing.ceilings()
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
    found.add_argument("--slice", type=seconds, default=540.0, help="9m, 300s: for everything")
    found.add_argument(
        "--only", nargs="+", default=[""], help="rows with one of these texts in group or name"
    )
    found.add_argument("--peers", default="", help="measure these alone; default: each row's own")
    found.add_argument("--resume", type=Path, help="a gpu.json: measure what it has not")
    found.add_argument(
        "--race-seconds", type=float, default=40.0, help="of fusec's races, a graph; %(default)s"
    )
    found.add_argument(
        "--children", type=int, default=max(1, min(5, (os.cpu_count() or 1) // 3)),
        help="rows that are compiled at a time; here %(default)s",
    )  # fmt: skip
    found.add_argument("--skip-tests", action="store_true", help="neither contact nor tests")
    found.add_argument("--dry-run", action="store_true", help="no GPU, no timing: see above")
    found.add_argument(
        "--skip-offline", action="store_true", help="a dry run that builds nothing for sm_90"
    )
    found.add_argument("--out", type=Path, default=Path("build/bench"), help="default %(default)s")
    return found


def seconds(text: str) -> float:
    """Return the seconds that "9m", "300s" or "300" says.

    Raises:
        argparse.ArgumentTypeError: if it says no time.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(m|s|)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 9m or 300s")
    return float(found[1]) * (60 if found[2] == "m" else 1)


def chosen_workloads(options: argparse.Namespace) -> list[Workload]:
    """Return the rows to measure with the peers to measure them with."""
    wanted = tuple(filter(None, options.peers.split(","))) or (DRY_PEERS if options.dry_run else ())
    found = []
    for workload in workloads.gpu():
        peers = tuple(p for p in workload.peers if not wanted or p in wanted)
        named = f"{workload.group} {workload.label}".lower()
        if peers and any(text.lower() in named for text in options.only):
            found.append(dataclasses.replace(workload, peers=peers))
    return found


# -- contact and tests -----------------------------------------------------------------------------


def contact_and_tests(run: record.Record, options: argparse.Namespace, deadline: float) -> None:
    """Touch each family, while the tests marked `gpu` run beside; neither is timed."""
    found = run.data.setdefault("contact", {})
    tasks = [t for t in gpu_contact.tasks() if "failed" in found.get(t.name, {"failed": ""})]
    tests = None
    if not options.dry_run and run.data.get("tests", {}).get("exit") != 0:
        tests = start_tests(options.out, workers=options.children)
    began = time.monotonic()
    touch = functools.partial(_touch, _device(options))
    for event in work_through(touch, tasks, children=options.children, deadline=deadline):
        if event.kind in ("begun", "progress"):
            continue
        found[event.task] = event.value if event.kind == "done" else {"failed": event.value}
        run.flush()
    if tests is not None:
        code = _wait(tests, max(deadline - time.monotonic(), 1.0))
        lines = (options.out / "gpu-tests.log").read_text().strip().splitlines()
        spent = round(time.monotonic() - began, 1)
        run.note("tests", {"exit": code, "seconds": spent, "last": lines[-1:]})
    print(f"contact: {len(found)} families, tests: {run.data.get('tests')}", file=sys.stderr)


def _touch(device: str, name: str, report: Callable[[Any], None]) -> dict[str, Any]:
    return gpu_contact.touch(name, device)


def start_tests(directory: Path, *, workers: int) -> subprocess.Popen[bytes]:
    """Start the tests marked `gpu` in other processes; their output goes to gpu-tests.log."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "tests/gpu"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(workers)]
    if importlib.util.find_spec("pytest_timeout"):
        command += ["--timeout", "100"]
    with (directory / "gpu-tests.log").open("w") as stream:
        return subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT)


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


# -- rows ------------------------------------------------------------------------------------------


def measure_all(
    run: record.Record,
    chosen: Sequence[Workload],
    options: argparse.Namespace,
    deadline: float,
    measure: Measure | None = None,
) -> None:
    """Add a row for each workload of which there is none without a failure, and time for one.

    Args:
        measure: in place of the measurement in a child.
    """
    run.results[:] = [row for row in run.results if not failures([row])]
    known = {_key(row) for row in run.results}
    rows = {_name(w): w for w in chosen if _key(gpu_measure.row_of(w, {})) not in known}
    tasks = [_task(workload, options) for workload in rows.values()]
    left_out: list[str] = []
    in_progress: dict[str, dict[str, Any]] = {}
    run.data["in_progress"] = in_progress
    ceilings = run.data.get("ceilings", {}).get("start", {})
    peers = {name: workload.peers for name, workload in rows.items()}
    work = functools.partial(measure or _measure, peers, ceilings, options)
    for event in work_through(work, tasks, children=options.children, deadline=deadline):
        if event.kind == "begun":
            print(f"{event.task} ... {deadline - time.monotonic():.0f} s left", file=sys.stderr)
            in_progress[event.task] = gpu_measure.row_of(rows[event.task], {})
        elif event.kind == "progress":
            in_progress[event.task] = event.value
        elif event.kind == "left out":
            left_out.append(event.task)
        else:
            row = in_progress.pop(event.task, gpu_measure.row_of(rows[event.task], {}))
            run.add(event.value if event.kind == "done" else _ended(rows, event, row))
        run.flush()
    run.note("left_out", left_out)


Measure: TypeAlias = Callable[..., dict[str, Any]]
"""Measures a row, as ``_measure`` does."""


def _task(workload: Workload, options: argparse.Namespace) -> Task:
    races = options.race_seconds * options.children  # one at a time
    limit = 60.0 + 5 * workload.seconds + races
    if options.dry_run:
        return Task(_name(workload), 1.0, 10 * limit)
    return Task(_name(workload), workload.seconds, limit)


def _name(workload: Workload) -> str:
    return f"{workload.group}: {workload.label}"


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(row[part] for part in ("group", "name", "mode", "dtype"))


def _ended(rows: Mapping[str, Workload], event: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a process that did not finish it: what is known, and who ended it."""
    missing = [p for p in rows[event.task].peers if p not in row["peers"]]
    timed = [p for p, found in row["peers"].items() if "failed" in found or "median_us" in found]
    at = [p for p in row["peers"] if p not in timed] or missing[:1]
    failed = {p: {**row["peers"].get(p, {}), "failed": event.value} for p in at}
    rest = {p: {"failed": "its process had ended"} for p in missing if p not in at}
    peers = {**row["peers"], **failed, **rest}
    samples = {p: [found["median_us"]] for p, found in peers.items() if "median_us" in found}
    return {**row, "peers": peers, "ratios": gpu_measure.ratios(samples)}


def _measure(
    peers: Mapping[str, tuple[str, ...]],
    ceilings: Mapping[str, float],
    options: argparse.Namespace,
    name: str,
    report: Callable[[Any], None],
) -> dict[str, Any]:
    """Measure one row in a child; or, of a dry run, rehearse it and build its kernels."""
    # Verdicts of a child's own: what another one races meanwhile is none of this row's.
    os.environ.setdefault("FUSEC_CACHE_DIR", tempfile.mkdtemp(prefix="fusec-bench-"))
    (workload,) = (w for w in workloads.gpu() if _name(w) == name)
    workload = dataclasses.replace(workload, peers=peers[name])
    if not options.dry_run:
        limit = time.monotonic() + _task(workload, options).limit_s
        row = gpu_measure.measure(
            workload, ceilings, limit, race_seconds=options.race_seconds, progress=report
        )
        gpu_measure.release()
        return row
    row = gpu_measure.rehearse(workload)
    if not options.skip_offline and "fusec" in workload.peers and "tuned" not in workload.group:
        try:
            row["offline"] = offline.build(workload)
        except Exception as error:
            row["offline"] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    return row


def _device(options: argparse.Namespace) -> str:
    return "cpu" if options.dry_run else "cuda"


# -- what was found --------------------------------------------------------------------------------


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
    start, end = (data.get("ceilings", {}).get(k, {}) for k in ("start", "end"))
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
    if data.get("left_out"):
        lines.append(f"left out for lack of time: {', '.join(data['left_out'])}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
