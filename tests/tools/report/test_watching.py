"""``fusec.watch``: graphs, modules, times and phases of a block; nothing of it stays behind."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import fusec
from fusec.driver.observers import OBSERVERS
from fusec.tools.clock import Clock
from fusec.tools.report.breaks import Place
from fusec.tools.report.run_report import Launch, Seen, SeenGraph
from fusec.tools.summary import GraphSummary, KernelSummary
from fusec.torch_interior import trace_log
from tests.calls import calls_of
from tests.planted import fail_to_build


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.fft.fft(self.up(self.norm(x))).real


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def seen() -> Seen:
    """What is seen of four training steps, and of a call behind the block."""
    torch._dynamo.reset()
    compiled = torch.compile(Net(), backend="fusec")
    with fusec.watch("four steps") as watched:
        for _ in range(4):
            compiled(torch.randn(8, 64)).sum().backward()
    compiled(torch.randn(8, 64))
    return watched.seen


def test_graphs_have_their_function_and_their_calls(seen: Seen) -> None:
    assert [g.summary.name for g in seen.graphs] == ["forward", "backward"]
    assert {g.place.function for g in seen.graphs} == {"forward"}
    assert {g.place.path for g in seen.graphs} == {__file__}
    # What is compiled in the block is timed as long as it lives.
    assert [g.calls for g in seen.graphs] == [5, 4]
    assert all(g.run_seconds > 0 for g in seen.graphs)


def test_layers_are_folded_into_one_module(seen: Seen) -> None:
    modules = {module for module, _, _ in seen.by_module()}
    assert "h.*.up" in modules
    assert not any(part.isdigit() for module in modules for part in module.split("."))


def test_eager_kernels_have_their_reason_their_calls_and_their_time(seen: Seen) -> None:
    (fft,) = [e for e in seen.slowest(eager=True) if "fft_r2c" in e.name]
    assert (fft.module, fft.calls) == ("h.*", 15)
    assert fft.reason and fft.seconds > 0


def test_compile_times_are_split_by_phase(seen: Seen) -> None:
    assert {"Dynamo", "AOTAutograd"} <= set(seen.compile_seconds)
    assert any(phase.startswith("fusec: ") for phase in seen.compile_seconds)
    assert 0 < sum(seen.compile_seconds.values()) < seen.seconds
    assert seen.peak_bytes > 1 << 20


def test_the_page_says_all_of_it(seen: Seen) -> None:
    page = str(seen)
    assert page.startswith("four steps: ")
    for title in ("graphs: 2", "modules: ", "kernels, by time", "eager kernels", "compile, by"):
        assert title in page
    assert max(map(len, page.splitlines())) < 140


def test_the_json_form_has_its_schema(seen: Seen) -> None:
    document = json.loads(seen.to_json())
    assert document["schema"] == 1
    assert {"what", "seconds", "graphs", "breaks", "recompiles", "launches", "advice"} <= set(
        document
    )
    assert document["graphs"][0]["name"] == "forward"
    assert {"kernels", "externs", "place", "calls", "run_seconds"} <= set(document["graphs"][0])


def test_a_graph_that_falls_back_is_the_first_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_to_build(monkeypatch, ValueError("planted"))
    compiled = torch.compile(Net(), backend="fusec", options={"cache": False})
    with fusec.watch() as watched, torch.no_grad(), pytest.warns(UserWarning, match="planted"):
        compiled(torch.randn(8, 64))
    first = watched.seen.advice()[0].splitlines()
    assert "of the time: graph inference 0/0 runs as eager kernels: ValueError" in first[1]
    assert first[2].startswith("-> fusec bisect --crash SCRIPT")
    assert "planted" in str(watched)


def test_nothing_of_a_watch_stays_behind() -> None:
    before, observers = list(trace_log.handlers), list(OBSERVERS)
    with pytest.raises(ValueError, match="mine"), fusec.watch():
        assert len(trace_log.handlers) == len(before) + 1
        raise ValueError("mine")
    assert trace_log.handlers == before
    assert observers == OBSERVERS


def test_a_mode_with_cuda_graphs_is_timed_on_a_cpu() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(torch.sin, backend="fusec", mode="reduce-overhead")
    with fusec.watch() as watched:
        compiled(torch.ones(3))
    assert [g.calls for g in watched.seen.graphs] == [1]


def test_a_graph_that_nobody_watches_is_not_timed() -> None:
    torch._dynamo.reset()
    with torch.no_grad(), calls_of(Clock.hooks) as clocks:
        torch.compile(Net(), backend="fusec", options={"strict": True})(torch.randn(8, 64))
    assert not clocks


def test_a_module_of_torch_s_own_stands_at_the_line_that_calls_it() -> None:
    torch._dynamo.reset()
    with fusec.watch() as watched, torch.no_grad():
        torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), backend="fusec")(torch.ones(2, 8))
    (graph,) = watched.seen.graphs
    assert graph.place.path == __file__ and "nn.GELU()), backend" in graph.place.code
    assert "external_utils" not in str(watched.seen)


def test_two_modules_of_one_class_of_torch_s_are_no_recompile_to_mend() -> None:
    torch._dynamo.reset()
    with fusec.watch() as watched, torch.no_grad():
        for width in (1, 2):
            layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(width)])
            torch.compile(layers, backend="fusec")(torch.ones(2, 8))
    (again,) = watched.seen.recompiles
    assert again.place.path == __file__
    assert again.remedy.change.startswith("none: another object")


def test_the_page_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KernelSummary("k0", "k0", ("add",), "", ())
    graph = GraphSummary("0/0", "inference", "cpu", False, "", (kernel,), (), {})
    made = Seen("m.py", 1.0, (SeenGraph(graph, Place("m.py", 3, "f"), 1000, 0.5),))
    name = "k0: " + " + ".join(["scaled_dot_product_flash_attention_for_cpu"] * 4)
    launch = Launch("", name, "transformer.h.*.attn.c_proj", True, "no lowering " * 9, 9, 1.0)
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, str(replace(made, launches=(launch,))).splitlines())) <= 80
