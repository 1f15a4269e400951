"""The GPU benchmark goes through all its code on a CPU, so that it cannot rot unseen."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from bench import (
    gpu,
    gpu_contact,
    gpu_measure,
    gpu_report,
    gpu_timing,
    record,
    workloads,
)
from bench.children import work_through
from bench.workload import SETTINGS, compiled
from fusec.runtime.kernels.triton_interior import assembler
from tests.calls import calls_of

MODES = {False: "forward", True: "training"}


def run_dry(directory, *more: str) -> tuple[int, dict]:
    arguments = ["--dry-run", "--skip-tests", "--slice", "60m", "--out", str(directory), *more]
    return gpu.main(arguments), json.loads((directory / "gpu.json").read_text())


@pytest.mark.slow
def test_a_dry_run_checks_the_workloads(tmp_path, capsys):
    code, data = run_dry(tmp_path, "--skip-offline")
    assert code == 0
    assert [r["name"] for r in data["results"]] == [w.name for w in workloads.gpu()]
    for row in data["results"]:
        assert {p: f.get("failed") for p, f in row["peers"].items()}.keys() <= {"eager", "fusec"}
        assert all(found["accurate"] for found in row["peers"].values()), row["name"]
        assert "fusec" in row["peers"]
    assert data["left_out"] == [] and data["in_progress"] == {}
    assert "numbers:" in capsys.readouterr().out


@pytest.mark.slow
def test_a_dry_run_builds_the_kernels_of_the_device_at_full_size(tmp_path, capsys):
    code, data = run_dry(tmp_path, "--only", "linear+residual llama-8b")
    assert code == 0
    (row,) = data["results"]
    assert {k: row["offline"][k] for k in ("target", "kernels", "eager_kernels")} == {
        "target": "sm_90", "kernels": 1, "eager_kernels": 0,
    }  # fmt: skip
    assert "built for sm_90: 1 kernels of 1 rows" in capsys.readouterr().out


def test_a_dry_run_that_finds_something_broken_fails(tmp_path, capsys, monkeypatch):
    ptxas = tmp_path / "ptxas"
    real = assembler("sm_90")
    ptxas.write_text(
        f"#!/bin/sh\n[ $1 = --version ] && exec {real} $1\necho no such register >&2; exit 1\n"
    )
    ptxas.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    code, _ = run_dry(tmp_path, "--only", "relu")
    assert code == 1
    assert re.search("(?s)forward, offline: .*no such register", capsys.readouterr().out)


def test_a_run_out_of_time_names_what_it_left_out(tmp_path):
    _, data = run_dry(tmp_path, "--slice", "10s")
    assert data["results"] == []
    assert len(data["left_out"]) == len(workloads.gpu())


def test_names_that_match_nothing_list_what_there_is(tmp_path, capsys):
    assert gpu.main(["--dry-run", "--peers", "no_such_peer", "--out", str(tmp_path)]) == 2
    assert "swiglu llama-8b" in capsys.readouterr().err


def test_the_cheap_rows_come_first_and_the_slow_peer_last():
    groups = [w.group for w in workloads.gpu()]
    assert groups[:2] == ["memory-bound"] * 2
    assert {"products", "attention", "linear + loss", "blocks"} <= set(groups)
    tuned = [("inductor-max" in w.peers) for w in workloads.gpu()]
    assert tuned == sorted(tuned) and any(tuned)
    first_training = next(i for i, w in enumerate(workloads.gpu()) if w.train)
    assert first_training > 10


def test_peers_are_known_to_torch_compile():
    with calls_of(torch.compile) as calls:
        for peer in ("inductor", "fusec", *SETTINGS):
            compiled(lambda x: x, peer, {"race_budget_s": 3.0} if peer == "fusec" else None)
    seen = {}
    for given in (call.arguments for call in calls):
        backend = given["backend"] if isinstance(given["backend"], str) else "fusec"
        chosen = {name: given[name] for name in ("mode", "options") if given[name]}
        seen[given["model"].__code__.co_name] = (backend, chosen)
    assert seen == {
        "inductor_entry": ("inductor", {}),
        "fusec_entry": ("fusec", {"options": {"race_budget_s": 3.0}}),
        "inductor-max_entry": ("inductor", {"mode": "max-autotune-no-cudagraphs"}),
        "fusec-fused_entry": ("fusec", {"options": {"race": "fused"}}),
        "fusec-library_entry": ("fusec", {"options": {"race": "library"}}),
        "inductor-freezing_entry": ("inductor", {}),  # a setting of its own, not an option
        "fusec-freeze_entry": ("fusec", {"options": {"freeze": True}}),
    }


def measured(peers: tuple[str, ...], seconds: float = 60.0) -> tuple[dict, list[dict]]:
    """Measure a tiny row on the CPU, with times that a script gives."""
    times = iter((4e-6, 2e-6, 1e-6, 8e-6, 0.5e-6))
    clock = SimpleNamespace(
        gpu_times=lambda steps: ([next(times)] * 3, "a test"),
        interleaved=lambda peers: {peer: ([next(times)] * 3, "a test") for peer in peers},
        host_seconds=lambda step: 5e-6,
        peak_bytes=lambda step: 3 * 2**20,
        alone=nullcontext,
    )
    (workload,) = (w for w in workloads.gpu() if w.name == "linear+gelu vit-l")
    progress: list[dict] = []
    ceilings = {"copy_bytes_per_s": 4e12, "matmul_flops_per_s": 8e14}
    row = gpu_measure.measure(
        dataclasses.replace(workload, peers=peers), ceilings, time.monotonic() + seconds,
        race_seconds=1.0, progress=lambda row: progress.append(json.loads(json.dumps(row))),
        device="cpu", shrink=64, clock=clock,
    )  # fmt: skip
    return row, progress


def test_a_row_compares_with_each_peer_and_the_best():
    row, progress = measured(("eager", "no_such_peer", "fusec-library", "fusec"))
    assert "no_such_peer" in row["peers"]["no_such_peer"]["failed"]
    assert row["peers"]["fusec"]["median_us"] == pytest.approx(1.0)
    assert row["peers"]["fusec"]["peak_mib"] == 3.0
    assert row["ratios"] == {"eager/fusec": 4.0, "best/fusec": 4.0}  # not fusec's own variant
    assert row["bare_us"] == pytest.approx(8.0) and row["over_bare"] == 0.125
    known = [len(r["peers"]) for r in progress]
    assert known == sorted(known) and set(known) == {1, 2, 3, 4}  # flushed after each


def test_peers_without_time_left_are_named():
    row, _ = measured(("eager", "fusec"), seconds=0.0)
    assert {p: f["failed"] for p, f in row["peers"].items()} == dict.fromkeys(
        ("eager", "fusec"), "no time was left"
    )


def test_a_compile_that_takes_too_long_is_stopped():
    with pytest.raises(TimeoutError), gpu_measure._at_most(0.05):
        time.sleep(5)


def test_errors_that_are_no_numbers_do_not_end_a_run(tmp_path):
    run = record.Record("gpu", tmp_path)
    run.add({"group": "g", "peers": {"fusec": {"error": math.nan, "times": [math.inf, 1.0]}}})
    written = json.loads(run.path.read_text())["results"][0]["peers"]["fusec"]
    assert written == {"error": "nan", "times": ["inf", 1.0]}


@pytest.mark.slow
def test_the_gpu_tests_run_in_a_process_with_a_limit(tmp_path):
    process = gpu.start_tests(tmp_path, workers=1)
    assert gpu._wait(process, 0.01) in ("stopped after 0 s", "killed after 0 s")
    assert (tmp_path / "gpu-tests.log").exists()


def test_input_sets_together_exceed_the_cache_and_differ():
    assert gpu_timing.sets_needed(2**20) == 32
    assert gpu_timing.sets_needed(100 * 2**20) == 2
    assert 40 * 2**20 * gpu_timing.sets_needed(40 * 2**20) >= gpu_timing.ROTATION_BYTES
    first, second = gpu_measure.input_sets(workloads.gpu()[0], "cpu", 64)
    assert first.call is second.call
    assert not first.inputs[0].equal(second.inputs[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_the_time_of_the_host_is_that_of_calls_on_an_idle_device():
    done: list[str] = []
    wait = functools.partial(done.append, "wait")
    assert gpu_timing.host_seconds(lambda: done.append("call"), 2, wait) > 0
    assert done == ["call"] * 3 + ["wait", "call"] * 2 + ["wait"]


def test_without_a_device_the_command_says_what_works_here(tmp_path, capsys):
    assert gpu.main(["--out", str(tmp_path)]) == 4
    assert "--dry-run" in capsys.readouterr().err


def test_the_verdict_needs_the_mean_and_the_worst_row():
    groups = {
        "g": {
            "eager/fusec": {"geomean": 1.5, "worst": 0.96},
            "inductor/fusec": {"geomean": 1.5, "worst": 0.9},
            "liger/fusec": {"geomean": 0.8, "worst": 0.7},
        }
    }
    assert list(gpu.verdict(groups)["g"].values()) == ["ahead", "mixed", "behind"]


# -- first contact, and the page in words ----------------------------------------------------------


@pytest.mark.slow
def test_each_family_is_touched_in_its_process():
    touch = functools.partial(gpu._touch, "cpu")
    deadline = time.monotonic() + 600
    events = list(work_through(touch, gpu_contact.tasks(), children=1, deadline=deadline))
    found = {event.task: event.value for event in events if event.kind != "begun"}
    assert found.keys() == {family.name for family in gpu_contact.FAMILIES}
    assert {name for name, entry in found.items() if entry["accurate"] is not True} == set()


def row(name: str, peers: dict, **more: object) -> dict:
    return {"group": "g", "name": name, "mode": "forward", "peers": peers, "ratios": {}, **more}


def test_the_page_says_what_broke_what_lost_and_what_races_measured():
    kernel = {
        "graph": "forward", "name": "k0", "kind": "pointwise", "programs": 64, "bytes": 1,
        "floor_us": 5.0, "registers": 40, "blocks": 9, "instructions_per_byte": 9.2,
        "spill_bytes": 0, "wide_share": 0.5, "barriers": 0,
    }  # fmt: skip
    laps = [
        {"name": "library", "us": 9.0, "p20": 9.0, "p80": 9.0, "dropped": None},
        {"name": "fused #1", "us": 8.0, "p20": 8.0, "p80": 8.0, "dropped": None},
        {"name": "fused #2", "us": None, "p20": None, "p80": None, "dropped": "wrong: 3e-1"},
    ]
    timed = {"eager": {"median_us": 9.0}, "fusec": {"median_us": 10.0, "of_floor": 0.5}}
    data = {
        "contact": {"rows": {"failed": "its process ended with -9"}, "columns": {"accurate": True}},
        "tests": {"exit": 1, "last": ["2 failed"]},
        "ceilings": {"start": {"copy_bytes_per_s": 4.3e12}, "end": {"copy_bytes_per_s": 4.3e12}},
        "results": [
            row("good", timed, ratios={"best/fusec": 1.2}, races=[
                {"winner": "fused #1", "exhausted": False, "laps": laps}]),
            row("slow", timed, ratios={"best/fusec": 0.9}, offline={"facts": [kernel]},
                kernel_us={"k0": 7.5}),
            row("wrong", {"fusec": {"accurate": False, "error": 0.3}}),
        ],
        "in_progress": {"g: last": row("last", {})},
        "left_out": ["blocks"],
    }  # fmt: skip
    page = gpu_report.markdown(json.loads(json.dumps(data)))
    assert page.split("## ")[1:] == [
        "What broke\n\n- first contact, rows: its process ended with -9\n"
        "- tests: 1: 2 failed (gpu-tests.log)\n- wrong forward, fusec: inaccurate: 0.3\n"
        "- last forward: the run ended while it was measured\n\n",
        "Ceilings\n\n- copy_bytes_per_s 4.3e+12, drift 0.0%\n\n",
        "What lost, and what its code says\n\n"
        "- **slow forward**: 0.90 of the best (eager 9, fusec 10 us; 50% of the floor)\n"
        "  - forward k0: 7.5 us, pointwise, floor 5 us, 64 programs, 40 registers, "
        "9 a multiprocessor, 9.2 instructions a byte, 50% in 16-byte accesses\n\n",
        "Races\n\n- good forward: fused #1 8 us, library 9 us, fused #2 wrong: 3e-1; "
        "chosen: fused #1\n\n",
        "Left out\n\n- blocks\n",
    ]


@pytest.mark.slow
def test_what_lost_is_built_for_the_facts_of_its_code(tmp_path, capsys):
    run = record.Record("gpu", tmp_path)
    timed = {"eager": {"median_us": 1.0}, "fusec": {"median_us": 2.0}}
    run.add(gpu_measure.row_of(workloads.gpu()[0], timed) | {"ratios": {"best/fusec": 0.5}})
    gpu_report.main([str(run.path)])
    assert "registers" not in capsys.readouterr().out
    gpu_report.main([str(run.path), "--explain"])
    assert re.search(r"floor [1-9].* us, \d+ programs, [1-9]\d* registers", capsys.readouterr().out)


# -- a run that meets faults -----------------------------------------------------------------------


def obey_names(
    peers: dict, ceilings: dict, options: argparse.Namespace, name: str, report: Callable
) -> dict:
    """Measure nothing, and end as FAULTS says of the row whose number the environment names."""
    (workload,) = (w for w in workloads.gpu() if gpu._name(w) == name)
    found = gpu_measure.row_of(workload, {"eager": {"median_us": 2.0, "accurate": True}})
    report(found)
    row, fault = os.environ["FAULTY_ROW"].split("=")
    if name == row:
        FAULTS[fault]()
    found["peers"]["fusec"] = {"median_us": 1.0, "accurate": True}
    return found


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


FAULTS = {"fault": functools.partial(os._exit, 134), "hang": functools.partial(time.sleep, 300)}
FAULTS["memory"] = out_of_memory
SAID = {"fault": "its process ended with 134", "hang": "given up: no end after 5 s, or of all time"}
SAID["memory"] = "OutOfMemoryError: CUDA out of memory"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", (0, 1, 2))
def test_a_fault_in_a_row_costs_that_row_alone_and_a_resumed_run_measures_it(
    tmp_path, monkeypatch, capsys, fault, place
):
    rows = ("--only", "relu", "vit-l", "masked softmax")
    more = ("--peers", "eager,fusec", "--children", "2", "--race-seconds=-27.5")
    options = gpu.parser().parse_args([*rows, *more])
    chosen = [dataclasses.replace(w, seconds=0.0) for w in gpu.chosen_workloads(options)[:3]]
    assert {gpu._task(workload, options).limit_s for workload in chosen} == {5.0}
    names = [gpu._name(w) for w in chosen]
    run = record.Record("gpu", tmp_path)
    monkeypatch.setenv("FAULTY_ROW", f"{names[place]}={fault}")
    gpu.measure_all(run, chosen, options, time.monotonic() + 600, obey_names)
    failed = gpu.failures(run.results)
    assert failed == [f"{chosen[place].name} {MODES[chosen[place].train]}, fusec: {SAID[fault]}"]
    assert len(run.results) == 3 and SAID[fault] in gpu_report.markdown(run.data)

    monkeypatch.setenv("FAULTY_ROW", "=")
    again = record.Record("gpu", tmp_path / "again", resume=run.path)
    capsys.readouterr()
    gpu.measure_all(again, chosen, options, time.monotonic() + 600, obey_names)
    begun = capsys.readouterr().err.splitlines()
    assert [line.partition(" ... ")[0] for line in begun] == [names[place]]
    assert len(again.results) == 3 and gpu.failures(again.results) == []
