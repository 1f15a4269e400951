"""The CPU benchmark on tiny shapes: what it writes, and what it does with a peer that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import compile_time, cpu, memory_child, record, start, timing, workloads
from bench.workload import FROZEN, PEERS
from tests.support import BACKEND


def peaks_here(label, peers, *, shrink):
    """Measure memory where everything is compiled; `test_memory.py` starts the other process."""
    (workload,) = (w for w in workloads.cpu() if w.label == label)
    return memory_child.peaks(workload, peers, shrink=shrink)


def test_a_quick_run_writes_each_row_with_errors_and_ratios(tmp_path, capsys):
    arguments = ["--quick", "--only", "relu(x)", "--peers", "eager,fusec", "--out", str(tmp_path)]
    assert cpu.main(arguments, peaks_here) == 0
    data = json.loads((tmp_path / "cpu.json").read_text())
    assert [r["mode"] for r in data["results"]] == ["forward", "training"]
    for row in data["results"]:
        assert row["peers"]["fusec"]["accurate"] is True
        assert row["peers"]["eager"]["median_ms"] > 0
        assert row["peers"]["eager"]["peak_mib"] >= 0
        assert row["ratios"]["eager/fusec"] > 0
    assert data["summary"]["memory-bound"]["eager/fusec"]["rows"] == 2
    printed = capsys.readouterr().out
    assert "geomean" in printed
    assert "fusec MiB" in printed


def test_a_peer_that_fails_is_reported_and_the_others_are_measured(tmp_path):
    arguments = ["--quick", "--only", "relu(x)*0.5+1 4096x4096 forward", "--out", str(tmp_path)]
    assert cpu.main([*arguments, "--peers", "eager,no_such_backend"], peaks_here) == 0
    (row,) = json.loads((tmp_path / "cpu.json").read_text())["results"]
    assert "no_such_backend" in row["peers"]["no_such_backend"]["failed"]
    assert row["peers"]["eager"]["samples"] >= 5


def test_an_unknown_name_lists_the_workloads(tmp_path, capsys):
    assert cpu.main(["--only", "nothing like it", "--out", str(tmp_path)]) == 2
    assert "masked softmax" in capsys.readouterr().err
    assert not (tmp_path / "cpu.json").exists()


def test_every_cpu_workload_has_a_training_twin_unless_it_is_not_trained():
    untrained = ("decoding", "flex attention", "small mlp")
    models = [w for w in workloads.cpu() if not w.name.startswith(untrained)]
    # A step is no forward, integers are fixed, and models of experts are trained.
    groups = ("optimizers", "integer weights on CPUs", "experts on CPUs")
    models = [w for w in models if w.group not in groups]
    forward = {(w.name, w.dtype) for w in models if not w.train}
    assert forward == {(w.name, w.dtype) for w in models if w.train}


def test_interleaved_rounds_take_one_sample_of_each_peer_a_round():
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in "abc"}
    samples = timing.interleaved(steps, rounds=6, budget=10.0, at_least=0.0)
    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys("abc", 6)
    assert "".join(calls[9:]) == "abcbcacababcbcacab"  # nine warm-up calls first


def test_what_freezes_meets_every_peer_and_what_does_not_those_that_do_not():
    samples = {peer: [2.0] for peer in FROZEN}
    assert set(cpu.ratios(samples)) == {
        *("eager/fusec", "inductor/fusec"),
        *(f"{peer}/fusec-freeze" for peer in (*PEERS, "inductor-freezing")),
    }
    frozen = {w.group for w in workloads.cpu() if "fusec-freeze" in w.peers}
    assert frozen == {"convnets", "products on CPUs"}
    assert not any(w.train for w in workloads.cpu() if w.peers == FROZEN)


def test_summaries_take_the_geometric_mean_and_the_worst_row():
    rows = [{"group": "g", "ratios": {"eager/fusec": v}} for v in (4.0, 1.0)]
    assert record.summarise(rows)["g"]["eager/fusec"] == {
        "geomean": 2.0,
        "worst": 1.0,
        "wins": 1,
        "rows": 2,
    }


def test_records_name_no_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("HOSTNAME", "a-name-of-a-machine")
    run = record.Record("cpu", tmp_path)
    assert "a-name-of-a-machine" not in run.path.read_text()
    import socket

    assert socket.gethostname() not in run.path.read_text()


@pytest.mark.slow
def test_a_start_is_counted_from_the_first_instruction_of_a_process(tmp_path):
    assert start.main(["--quick", "--out", str(tmp_path)]) == 0
    row, *_ = json.loads((tmp_path / "start.json").read_text())["results"]
    found = row["peers"]["fusec"]
    assert found["median_cpu_s"] > found["median_import_s"] > 0


@pytest.mark.slow
def test_compile_time_counts_cold_and_warm_starts(tmp_path):
    arguments = ["--quick", "--only", "mlp", "--peers", BACKEND, "--out", str(tmp_path)]
    assert compile_time.main(arguments) == 0
    cold, warm = json.loads((tmp_path / "compile.json").read_text())["results"]
    assert cold["peers"][BACKEND]["cpu_s"] > warm["peers"][BACKEND]["cpu_s"] > 0
    assert cold["peers"][BACKEND]["programs_cpu_s"] > 0
    assert warm["peers"][BACKEND]["subprocesses"] == 0


@pytest.mark.slow
def test_compiles_of_architectures_are_summed_beside_another_checkout(tmp_path):
    pytest.importorskip("transformers")
    root = str(Path(__file__).parents[2])
    chosen = ["--only", "architectures", "--peers", BACKEND, "--before", root]
    assert compile_time.main(["--quick", *chosen, "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "compile.json").read_text())["results"]
    for found in row["peers"].values():
        assert len(found["parts"]) == 3 and found["cpu_s"] == pytest.approx(
            sum(found["parts"].values()), abs=0.01
        )
    assert row["ratios"].keys() == {f"before/{BACKEND}"}
