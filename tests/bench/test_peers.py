"""`bench.peers` on tiny shapes: what is measured, what a peer that fails leaves, what is said."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
from pathlib import Path

import pytest
from torch._dynamo import register_backend

from bench import peers, peers_child, peers_report, runtimes
from bench.workloads import deployed

SOFTMAX = "masked softmax 8x12x256x256 forward fp32"
(ROW,) = (w for w in deployed.rows() if w.label == SOFTMAX)


def chosen(tmp_path: Path, *arguments: str):
    """Return the options of a quick run of two peers."""
    given = ["--quick", "--peers", "eager,fusec", "--rounds", "2", "--cache", str(tmp_path)]
    return peers.parser().parse_args([*given, *arguments])


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch) -> None:
    """Have the places of caches set, and so put back: measuring a peer changes them."""
    for name in peers_child.CACHES:
        monkeypatch.setenv(name, str(tmp_path / name))


def here(workload, names, options):
    """Measure in this process, without what a fresh one is for."""
    return peers_child.measure(workload, names, options, lambda found: None)


# -- what is measured ------------------------------------------------------------------------------


def test_a_row_has_a_median_a_run_and_its_ratio_is_theirs(tmp_path) -> None:
    (row,) = peers.rows(ROW, chosen(tmp_path), here)
    assert (row["name"], row["mode"], row["busy"]) == (ROW.name, "forward", 0)
    for found in row["peers"].values():
        assert found["accurate"] and found["compile_cpu_s"] >= 0
        assert len(found["runs_ms"]) == 3 and found["samples"] == 6
    assert row["best"] == {"peer": "eager", "fusec": "fusec"}
    assert row["ratios"]["best/fusec"] == row["ratios"]["eager/fusec"] > 0


def test_a_row_is_timed_again_beside_other_programs(tmp_path) -> None:
    alone, crowded = peers.rows(ROW, chosen(tmp_path, "--busy", "1"), here)
    assert (alone["busy"], crowded["busy"]) == (0, 1)
    assert crowded["others"] > 0
    assert alone["peers"]["eager"]["runs_ms"] != crowded["peers"]["eager"]["runs_ms"]


@pytest.mark.slow
def test_a_quick_run_writes_its_record_and_prints_it(tmp_path, capfd) -> None:
    arguments = ["--quick", "--only", SOFTMAX, "--peers", "eager,fusec", "--out", str(tmp_path)]
    assert peers.main(arguments) == 0
    (row,) = json.loads((tmp_path / "peers.json").read_text())["results"]
    assert row["peers"]["fusec"]["accurate"] is True
    assert "| masked softmax 8x12x256x256 |" in capfd.readouterr().out


def test_a_run_that_is_resumed_measures_what_its_record_lacks(tmp_path, capfd) -> None:
    kept = {"group": "core forward", "name": ROW.name, "mode": "forward", "busy": 0, "others": 0.5,
            **peers_report.compared({"eager": timed(7.0), "fusec": timed(1.0)})}  # fmt: skip
    (tmp_path / "peers.json").write_text(json.dumps({"results": [kept]}))
    assert peers.main(["--resume", "--only", SOFTMAX, "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "peers.json").read_text())["results"] == [kept]
    assert "| masked softmax 8x12x256x256 | 7 | 1 | 7 |" in capfd.readouterr().out


def test_an_unknown_name_lists_the_rows(tmp_path, capsys) -> None:
    assert peers.main(["--only", "nothing like it", "--out", str(tmp_path)]) == 2
    assert SOFTMAX in capsys.readouterr().err


# -- peers that fail -------------------------------------------------------------------------------


def test_a_peer_that_raises_says_so_in_its_column(tmp_path) -> None:
    (row,) = peers.rows(ROW, chosen(tmp_path, "--peers", "eager,no_such_backend"), here)
    assert "no_such_backend" in row["peers"]["no_such_backend"]["failed"]
    assert row["peers"]["eager"]["samples"] == 6
    assert row["ratios"] == {}


@register_backend
def wrong_at_first(graph, inputs):
    """A backend whose first result is wrong."""
    calls = itertools.count()
    return lambda *given: tuple(x + (next(calls) == 0) for x in graph(*given))


@register_backend
def always_wrong(graph, inputs):
    return lambda *given: tuple(x + 1 for x in graph(*given))


def test_a_peer_is_wrong_if_it_is_for_other_inputs_too(tmp_path) -> None:
    backends = "wrong_at_first,always_wrong"
    (row,) = peers.rows(ROW, chosen(tmp_path, "--peers", f"eager,{backends}"), here)
    assert {peer: found["accurate"] for peer, found in row["peers"].items()} == {
        "eager": True,
        "wrong_at_first": True,
        "always_wrong": False,
    }


def test_a_row_begins_again_without_the_peer_that_ended_its_process(tmp_path) -> None:
    asked = []

    def measure(workload, names, options):
        asked.append(list(names))
        if "fusec" in names:
            return {"current": "fusec", "ended": "killed by SIGSEGV"}
        return here(workload, names, options)

    (row,) = peers.rows(ROW, chosen(tmp_path), measure)
    assert asked == [["eager", "fusec"], ["eager"]]
    assert row["peers"]["fusec"] == {"failed": "killed by SIGSEGV"}
    assert row["peers"]["eager"]["samples"] == 6


def test_all_peers_have_failed_if_a_process_ends_while_none_compiles(tmp_path) -> None:
    told = {"current": None, "ended": "not done after 1 s"}
    (row,) = peers.rows(ROW, chosen(tmp_path), lambda *_: told)
    assert {found["failed"] for found in row["peers"].values()} == {"not done after 1 s"}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("pass", ""),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("raise KeyError('a')", "exit code 1: KeyError: 'a'"),
    ],
)
def test_a_process_says_how_it_ended(program: str, reason: str) -> None:
    assert peers.ended([sys.executable, "-c", program], dict(os.environ)) == reason


@pytest.mark.parametrize("runtime", runtimes.RUNTIMES)
def test_a_runtime_that_is_not_installed_has_failed(runtime: str, tmp_path) -> None:
    if importlib.util.find_spec(runtime):
        pytest.skip("it is installed")
    (row,) = peers.rows(ROW, chosen(tmp_path, "--peers", f"eager,{runtime}"), here)
    assert row["peers"][runtime]["failed"].startswith("ModuleNotFoundError")


# -- what is said ----------------------------------------------------------------------------------


def timed(*runs: float, accurate: bool = True) -> peers_report.Row:
    return {"accurate": accurate, "runs_ms": list(runs), "median_ms": sorted(runs)[len(runs) // 2]}


def result(mode: str = "forward", load: int = 0, **found) -> peers_report.Row:
    named = {"name": "resnet", "group": f"core {mode}", "mode": mode, "busy": load, "others": 0.0}
    return {**named, **peers_report.compared({n.replace("_", "-"): v for n, v in found.items()})}


def test_a_ratio_is_the_median_of_the_runs_best_peer_over_better_fusec() -> None:
    row = result(
        eager=timed(9.0, 9.0, 9.0),
        onnxruntime=timed(4.0, 5.0, 6.0),
        openvino=timed(5.0, 4.0, 9.0),
        fusec=timed(4.0, 4.0, 8.0),
        fusec_freeze=timed(5.0, 5.0, 4.0),
    )
    assert row["ratios"]["best/fusec"] == 1.0  # 4 / 4, 4 / 4, 6 / 4
    assert row["spreads"]["best/fusec"] == 0.5
    assert row["ratios"]["onnxruntime/fusec"] == 1.25
    assert row["best"] == {"peer": "onnxruntime", "fusec": "fusec"}


def test_a_peer_with_wrong_results_is_no_best_peer() -> None:
    row = result(eager=timed(8.0), openvino=timed(1.0, accurate=False), fusec=timed(4.0))
    assert row["ratios"] == {"best/fusec": 2.0, "eager/fusec": 2.0}


def test_a_peer_that_a_row_lacks_has_no_time_and_is_not_wrong() -> None:
    assert peers_report.milliseconds({}) == "-"
    assert peers_report.milliseconds(timed(1.0, accurate=False)).endswith("(wrong)")


def test_a_row_misses_if_it_misses_by_more_than_its_spread() -> None:
    noisy = result(eager=timed(0.9, 0.95, 1.0), fusec=timed(1.0, 1.0, 1.0))
    steady = result(eager=timed(0.9, 0.95, 0.95), fusec=timed(1.0, 1.0, 1.0))
    steady["spreads"]["best/fusec"] = 0.01
    without = result(eager=timed(1.0), fusec={"failed": "it did"})
    bar = next(bar for bar in peers_report.BARS if bar.over == "best")
    assert bar.missed([noisy, steady, without]) == [steady, without]


def test_what_is_said_names_geomeans_misses_and_slow_rows() -> None:
    rows = [
        result(eager=timed(2.0), onnxruntime=timed(1.0), fusec=timed(1.0)),
        result("training", eager=timed(3.0), fusec=timed(2.0)),
        result(load=2, eager=timed(9.0), fusec=timed(3.0)),
    ]
    assert list(peers_report.verdicts(rows)) == [
        "inference, the best of all peers: geomean 1.000 (bar 1.15: missed) of 1 rows; "
        "0 below 0.97",
        "inference of convolutions, ONNX Runtime: geomean 1.000 of 1 rows; 1 below 1.05",
        "  resnet: 1.000, spread 0.000",
        "training, the better of both: geomean 1.500 (bar 1.25: reached) of 1 rows; 0 below 1",
        "inference of the core on a busy machine, the best of all peers: geomean 3.000 "
        "(bar 1: reached) of 1 rows; 0 below 0.8",
        "busy beside quiet: geomean 3.00 times slower; 1 of 1 above 2.5",
        "  resnet: 3.00",
    ]


def test_a_report_of_several_records_has_each_row_as_the_last_one_does(tmp_path, capsys) -> None:
    paths = []
    for name, ms in (("a", 5.0), ("b", 7.0)):
        row = result(eager=timed(ms), fusec=timed(1.0), openvino={"failed": "it did not export"})
        paths.append(tmp_path / name)
        paths[-1].write_text(json.dumps({"results": [row]}))
    assert peers_report.main(list(map(str, paths))) == 0
    said = capsys.readouterr().out
    assert "| resnet | 7 | 1 | failed | 7 | 0 | eager | 0 |" in said
    assert "resnet, forward, openvino: it did not export" in said
