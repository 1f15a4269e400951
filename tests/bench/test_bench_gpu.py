"""The GPU benchmark goes through all its code on a CPU, so that it cannot rot unseen."""

from __future__ import annotations

import json

from bench import gpu, gpu_timing, workloads


def test_a_dry_run_checks_every_workload_of_every_peer(tmp_path, capsys):
    arguments = ["--dry-run", "--skip-tests", "--peers", "eager,fusec", "--out", str(tmp_path)]
    assert gpu.main(arguments) == 0
    data = json.loads((tmp_path / "gpu.json").read_text())
    assert [r["name"] for r in data["results"]] == [w.name for w in workloads.gpu()]
    for row in data["results"]:
        assert {p: f.get("failed") for p, f in row["peers"].items()} == {
            "eager": None,
            "fusec": None,
        }
        assert all(found["accurate"] for found in row["peers"].values()), row["name"]
    assert data["left_out"] == []
    assert "numbers:" in capsys.readouterr().out


def test_a_run_out_of_time_names_what_it_left_out(tmp_path):
    arguments = ["--dry-run", "--skip-tests", "--minutes", "0.1", "--out", str(tmp_path)]
    assert gpu.main(arguments) == 0
    data = json.loads((tmp_path / "gpu.json").read_text())
    assert data["results"] == []
    assert len(data["left_out"]) == len(workloads.gpu())


def test_the_gpu_tests_run_in_a_process_with_a_limit(tmp_path):
    result = gpu.gpu_tests(tmp_path, limit_s=0.01)
    assert result["exit"] == "stopped after 0 s"
    assert (tmp_path / "gpu-tests.log").exists()


def test_input_sets_together_exceed_the_cache_and_differ():
    assert gpu_timing.sets_needed(2**20) == 32
    assert gpu_timing.sets_needed(100 * 2**20) == 2
    assert 40 * 2**20 * gpu_timing.sets_needed(40 * 2**20) >= gpu_timing.ROTATION_BYTES
    first, second = gpu.input_sets(workloads.gpu()[0], "cpu", 64)
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
