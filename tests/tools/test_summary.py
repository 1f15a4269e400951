"""What a compile tells: a line of the log, its code, artifacts of torch's trace, seconds."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import fusec
from fusec.driver.pipeline import compile_to_source
from fusec.frontend.modules import stored_nodes
from fusec.tools import summary
from fusec.tools.summary import ARTIFACT, GraphSummary
from fusec.torch_interior import prints_code, trace_log
from tests.calls import calls_of
from tests.planted import fail_to_build

CODE = ("fusec_inference_kernels", "fusec_inference_code", "fusec_inference_decisions")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(self.inner(x)).real.exp()


def compile_block(**options: bool) -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Block(), backend="fusec", options=options)(torch.randn(8, 32))


class Kept(logging.Handler):
    """Keeps what is told to torch's trace: (name of the artifact, its text)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        artifact = record.metadata.get("artifact")  # type: ignore[attr-defined]
        if artifact is not None:
            self.found.append((artifact["name"], record.payload))  # type: ignore[attr-defined]


@contextmanager
def listening() -> Iterator[Kept]:
    handler = Kept()
    trace_log.addHandler(handler)
    try:
        yield handler
    finally:
        trace_log.removeHandler(handler)


def test_a_compile_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    compile_block()  # so that the cache has it
    with caplog.at_level(logging.INFO, logger="fusec.compile"):
        compile_block()
    (line,) = [r.getMessage() for r in caplog.records if r.name == "fusec.compile"]
    assert line.startswith("graph inference [0/0] for cpu: 2 kernels, ")
    assert "1 x _fft_r2c.default" in line
    assert line.endswith(" s, from the cache")


def test_a_graph_that_falls_back_says_why_in_its_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_build(monkeypatch, ValueError("planted"))
    with (
        caplog.at_level(logging.INFO, logger="fusec.compile"),
        pytest.warns(UserWarning, match="planted"),
    ):
        compile_block(cache=False)
    assert "graph inference [0/0]: eager kernels alone: ValueError: planted" in caplog.text


def test_output_code_alone_prints_sources_of_graphs_that_the_cache_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    compile_block()
    torch._logging.set_logs(output_code=True)  # as TORCH_LOGS=output_code
    try:
        compile_block()
    finally:
        with capsys.disabled():  # torch's handlers keep the stderr that they find
            torch._logging.set_logs()
    printed = capsys.readouterr().err
    assert re.search(r'extern "C" void \w+_k0\(', printed)
    assert "def call(args):" in printed
    assert not prints_code()


def test_the_trace_has_the_summary_the_notation_and_the_code() -> None:
    with listening() as kept:
        compile_block(cache=False)
    found = {name: text for name, text in kept.found if name.startswith("fusec")}
    assert list(found) == [*CODE, ARTIFACT]
    assert {"a", "b", "taken", "reason"} <= set(json.loads(found[CODE[2]])[0])
    assert found["fusec_inference_kernels"].startswith("kernel k0 -> ")
    made = GraphSummary.from_json(found[ARTIFACT])
    assert GraphSummary.from_json(made.to_json()) == made
    assert (made.compile, made.name, made.cached) == ("0/0", "inference", False)
    assert [e.op for e in made.externs if "fft" in e.op] == ["_fft_r2c.default"]
    assert made.kernels[0].module in ("inner.0", "inner.0..inner.1")  # two kernels or one
    assert "test_summary.py" in made.kernels[0].source[0]
    assert all(k.bytes and k.us for k in made.kernels)
    assert {"passes", "codegen", "build", "bind"} <= set(made.seconds)


def test_the_trace_has_the_code_of_a_graph_that_is_in_the_cache() -> None:
    compile_block()
    with listening() as kept:
        compile_block()
    found = dict(kept.found)
    assert GraphSummary.from_json(found[ARTIFACT]).cached
    assert set(CODE) <= set(found) and 'extern "C" void' in found[CODE[1]]


def test_a_watcher_has_no_code_made_of_a_graph_that_is_in_the_cache() -> None:
    compile_block()
    with fusec.watch() as watched, calls_of(compile_to_source) as made:
        compile_block(strict=True)
    assert not made
    assert [graph.summary.cached for graph in watched.seen.graphs] == [True]


def test_phases_are_in_the_timeline_of_the_trace() -> None:
    events: list[str] = []

    class Timeline(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "chromium_event" in record.metadata:  # type: ignore[attr-defined]
                events.append(json.loads(record.payload)["name"])  # type: ignore[attr-defined]

    handler = Timeline()
    trace_log.addHandler(handler)
    try:
        compile_block(cache=False)
    finally:
        trace_log.removeHandler(handler)
    assert {"fusec.passes", "fusec.codegen", "fusec.build"} <= set(events)


TRACED = """
import torch

def f(x):
    y = x.exp() * 2
    print("between")
    return (y + 1).sin().sum()

torch.compile(f, backend="fusec")(torch.ones(8, requires_grad=True)).backward()
"""


@pytest.mark.slow
def test_tlparse_shows_a_compile_of_fusec_s(tmp_path: Path) -> None:
    tlparse = shutil.which("tlparse", path=os.path.dirname(sys.executable))
    if tlparse is None:
        pytest.skip("tlparse is not installed: pip install tlparse")
    (tmp_path / "traced.py").write_text(TRACED)
    log = tmp_path / "log"
    own = {**os.environ, "TORCH_TRACE": str(log), "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, tmp_path / "traced.py"], env=own, check=True)
    (file,) = log.iterdir()
    line = [tlparse, file, "-o", tmp_path / "page", "--no-browser"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr
    assert re.search(r"Stats \{ ok: [1-9]\d*(, unknown: \d+)? \}", said), said
    found = {re.sub(r"_\d+\.\w+$", "", p.name) for p in (tmp_path / "page").rglob("fusec_*")}
    assert {"fusec_graph", "fusec_forward_code", "fusec_backward_kernels"} <= found
    assert "fusec.passes" in (tmp_path / "page" / "chromium_events.json").read_text()


def test_phases_are_in_torchs_table_of_compile_times() -> None:
    compile_block(cache=False)
    assert "fusec.passes" in torch._dynamo.utils.compile_times()


def test_torch_s_directory_for_debugging_has_every_stage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "1")
    with torch._dynamo.config.patch(debug_dir_root=str(tmp_path)):
        compile_block()
    (folder,) = tmp_path.glob("**/fusec/inference-0_0")
    stages = {file.name.partition("-")[2] for file in folder.iterdir()}
    assert {"fx.py", "kernels.txt", "source-k0.cpp", "wrapper.py"} <= stages


def test_a_compile_is_summarized_for_those_who_listen_alone() -> None:
    with calls_of(summary.summarize) as made:
        compile_block()
        assert not made
        with listening():
            compile_block()
    assert made


def test_a_part_of_a_node_s_results_belongs_where_the_node_does() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.var_mean.correction, (x,), name="_var_mean")
    second = graph.call_function(torch.ops.aten.var_mean.correction, (x,), name="var_mean_1")
    third = graph.call_function(torch.ops.aten.sin.default, (x,), name="sin")
    first.meta["val"] = second.meta["val"] = (x, x)
    found = {"var_mean": first, "var_mean_1": second, "sin": third}
    assert stored_nodes(found, ["var_mean_1"]) == [first]  # its second result
    assert stored_nodes(found, ["var_mean_1_0"]) == [second]
    assert stored_nodes(found, ["var_mean_1_0", "sin"]) == [third]  # a whole one says more
    assert stored_nodes(found, ["k0_part"]) == []
