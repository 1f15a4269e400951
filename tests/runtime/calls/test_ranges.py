"""Names in traces: each launch is called by what and where, and only where a profiler runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

import fusec
from fusec.driver.compiler import RECENT
from fusec.runtime.calls import ranges
from fusec.runtime.calls.ranges import Ranges
from fusec.runtime.interior import is_profiling
from tests.calls import calls_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.fft.fft(self.up(self.norm(x)).tanh()).real


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = layer(x)
        return x


def step(model: Any) -> None:
    model(torch.randn(8, 64)).sum().backward()


def launches_of_latest_graphs(count: int) -> int:
    """Return how many kernels and eager kernels the graphs that were compiled last call."""
    found = [json.loads(trace.manifest)["summary"] for trace in list(RECENT)[-count:]]
    return sum(len(graph["kernels"]) + len(graph["externs"]) for graph in found)


def calls_by_name(profiled: profile) -> dict[str, int]:
    return {row.key: row.count for row in profiled.key_averages()}


@pytest.fixture
def compiled() -> Iterator[Any]:
    torch._dynamo.reset()
    yield torch.compile(Net(), backend="fusec", options={"strict": True})


def test_each_launch_of_a_training_step_is_named_by_module_and_operations(compiled: Any) -> None:
    step(compiled)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step(compiled)
        step(compiled)
    calls = calls_by_name(profiled)
    assert calls["fusec forward 0/0"] == calls["fusec backward 0/0"] == 2
    assert calls["h.0.norm: layer_norm"] == 2
    # Layers of one code are one kernel to the wrapper; in traces each has its own name.
    for layer in range(3):
        assert calls[f"h.{layer}: _fft_r2c.default"] == 2
        assert calls[f"h.{layer}.up backward: mm.default"] == 4
        assert calls[f"h.{layer}.norm backward: layer_norm"] == 2
    named = sum(n for name, n in calls.items() if name.startswith("h."))
    assert named == 2 * launches_of_latest_graphs(2)


def test_a_chrome_trace_has_the_names_whatever_a_module_is_called(tmp_path: Path) -> None:
    torch._dynamo.reset()
    hostile = 'a"b\\n</script>'
    model = nn.ModuleDict({hostile: nn.Softmax(-1)})

    def call(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model[hostile](x * 2)
        return result

    compiled = torch.compile(call, backend="fusec", options={"strict": True})
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        compiled(torch.randn(8, 64))
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    names = {
        event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    }
    assert "fusec inference 0/0" in names
    assert "a'b//n</script>: mul + softmax" in names


def test_launches_are_the_printed_ones_where_no_profiler_runs(
    compiled: Any,
) -> None:
    with calls_of(ranges.launcher) as calls:
        step(compiled)
    assert not calls, "named for nobody"
    assert not is_profiling()


def test_which_form_runs_is_asked_at_each_call_of_the_graph() -> None:
    ran: list[str] = []

    def interpret(launch: Callable[..., Any]) -> Callable[[list[Any]], None]:
        ran.append("bound")
        return lambda args: launch("k3", ran.append)("named")

    around = Ranges("g", "", lambda: {"k3": "m: add"})
    call = around.around(lambda args: ran.append("printed"), interpret)
    call([])
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call([])
        call([])
    call([])
    assert ran == ["printed", "bound", "named", "named", "printed"]
    calls = calls_by_name(profiled)
    assert (calls["g"], calls["m: add"]) == (2, 2)


def test_a_watch_counts_what_a_profiler_names(compiled: Any) -> None:
    with fusec.watch() as watched:
        step(compiled)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            step(compiled)
    assert calls_by_name(profiled)["h.1: _fft_r2c.default"] == 1
    assert [graph.calls for graph in watched.seen.graphs] == [2, 2]


def test_what_a_launch_raises_is_raised() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, i: x[i] + 1, backend="fusec")
    with (
        torch.no_grad(),
        profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(IndexError, match="out of range"),
    ):
        compiled(torch.randn(8), torch.tensor([9]))


@pytest.mark.skipif(not torch.profiler.itt.is_available(), reason="torch has no ITT here")
def test_itt_ranges_run_the_form_with_names(compiled: Any) -> None:
    with calls_of(ranges.launcher) as calls:
        step(compiled)
        assert not calls
        with profiler.emit_itt():
            step(compiled)
    assert any("h.0.norm: layer_norm" in call.arguments["titles"].values() for call in calls)
