"""The GPU benchmark goes through all its code on a CPU, so that it cannot rot unseen."""

from __future__ import annotations

import dataclasses
import json
import math
import time

import pytest
import torch

from bench import gpu, gpu_measure, gpu_timing, offline, record, workloads
from bench.workload import SETTINGS, compiled


def run_dry(directory, *more: str) -> tuple[int, dict]:
    arguments = ["--dry-run", "--skip-tests", "--out", str(directory), *more]
    return gpu.main(arguments), json.loads((directory / "gpu.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("every", (False, True))
def test_a_dry_run_checks_the_workloads(tmp_path, capsys, monkeypatch, every):
    if not every:  # one of each group
        groups = {w.group: w for w in workloads.gpu()}
        monkeypatch.setattr(workloads, "gpu", lambda: list(groups.values()))
    code, data = run_dry(tmp_path, "--skip-offline")
    assert code == 0
    assert [r["name"] for r in data["results"]] == [w.name for w in workloads.gpu()]
    for row in data["results"]:
        assert {p: f.get("failed") for p, f in row["peers"].items()}.keys() <= {"eager", "fusec"}
        assert all(found["accurate"] for found in row["peers"].values()), row["name"]
        assert "fusec" in row["peers"]
    assert data["left_out"] == [] and data["in_progress"] is None
    assert "numbers:" in capsys.readouterr().out


def test_a_dry_run_builds_the_kernels_of_the_device_at_full_size(tmp_path, capsys):
    code, data = run_dry(tmp_path, "--only", "linear+residual llama-8b")
    assert code == 0
    (row,) = data["results"]
    assert {k: row["offline"][k] for k in ("target", "kernels", "eager_kernels")} == {
        "target": "sm_90", "kernels": 1, "eager_kernels": 0,
    }  # fmt: skip
    assert "built for sm_90: 1 kernels of 1 rows" in capsys.readouterr().out


def test_a_dry_run_that_finds_something_broken_fails(tmp_path, capsys, monkeypatch):
    def broken(workload):
        raise RuntimeError("no such register")

    monkeypatch.setattr(offline, "build", broken)
    code, _ = run_dry(tmp_path, "--only", "relu")
    assert code == 1
    assert "forward, offline: RuntimeError: no such register" in capsys.readouterr().out


def test_a_run_out_of_time_names_what_it_left_out(tmp_path):
    _, data = run_dry(tmp_path, "--minutes", "0.1")
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


def test_peers_are_known_to_torch_compile(monkeypatch):
    seen = {}

    def fake(fn, *, backend, dynamic, **more):
        seen[fn.__code__.co_name] = (backend if isinstance(backend, str) else "fusec", more)
        return fn

    monkeypatch.setattr(torch, "compile", fake)
    for peer in ("inductor", "fusec", *SETTINGS):
        compiled(lambda x: x, peer, {"race_budget_s": 3.0} if peer == "fusec" else None)
    assert seen == {
        "inductor_entry": ("inductor", {}),
        "fusec_entry": ("fusec", {"options": {"race_budget_s": 3.0}}),
        "inductor-max_entry": ("inductor", {"mode": "max-autotune-no-cudagraphs"}),
        "fusec-fused_entry": ("fusec", {"options": {"race": "fused"}}),
        "fusec-library_entry": ("fusec", {"options": {"race": "library"}}),
    }


@pytest.fixture
def on_cpu(monkeypatch):
    """Measure tiny rows on the CPU, with times that a script gives."""
    begin = gpu_measure._begin
    monkeypatch.setattr(gpu_measure, "_begin", lambda w, device, shrink: begin(w, "cpu", 64))
    times = iter((4e-6, 2e-6, 1e-6, 8e-6, 0.5e-6))
    monkeypatch.setattr(gpu_timing, "gpu_times", lambda steps: ([next(times)] * 3, "a test"))
    monkeypatch.setattr(gpu_timing, "host_seconds", lambda step: 5e-6)
    monkeypatch.setattr(gpu_timing, "peak_bytes", lambda step: 3 * 2**20)


def measured(peers: tuple[str, ...], seconds: float = 60.0) -> tuple[dict, list[dict]]:
    (workload,) = (w for w in workloads.gpu() if w.name == "linear+gelu vit-l")
    progress: list[dict] = []
    ceilings = {"copy_bytes_per_s": 4e12, "matmul_flops_per_s": 8e14}
    row = gpu_measure.measure(
        dataclasses.replace(workload, peers=peers), ceilings, time.monotonic() + seconds,
        race_seconds=1.0, progress=lambda row: progress.append(json.loads(json.dumps(row))),
    )  # fmt: skip
    return row, progress


def test_a_row_compares_with_each_peer_and_the_best(on_cpu):
    row, progress = measured(("eager", "no_such_peer", "fusec-library", "fusec"))
    assert "no_such_peer" in row["peers"]["no_such_peer"]["failed"]
    assert row["peers"]["fusec"]["median_us"] == pytest.approx(1.0)
    assert row["peers"]["fusec"]["peak_mib"] == 3.0
    assert row["ratios"] == {"eager/fusec": 4.0, "best/fusec": 4.0}  # not fusec's own variant
    assert row["bare_us"] == pytest.approx(8.0) and row["over_bare"] == 0.125
    assert [len(r["peers"]) for r in progress] == [1, 2, 3, 4]  # flushed after each


def test_peers_without_time_left_are_named(on_cpu):
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
    result = gpu.gpu_tests(tmp_path, limit_s=0.01)
    assert result["exit"] in ("stopped after 0 s", "killed after 0 s")
    assert (tmp_path / "gpu-tests.log").exists()


def test_input_sets_together_exceed_the_cache_and_differ():
    assert gpu_timing.sets_needed(2**20) == 32
    assert gpu_timing.sets_needed(100 * 2**20) == 2
    assert 40 * 2**20 * gpu_timing.sets_needed(40 * 2**20) >= gpu_timing.ROTATION_BYTES
    first, second = gpu_measure.input_sets(workloads.gpu()[0], "cpu", 64)
    assert first.call is second.call
    assert not first.inputs[0].equal(second.inputs[0])


def test_without_a_device_the_command_says_what_works_here(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
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
