"""``fusec.watch``: graphs, modules, times and phases of a block; nothing of it stays behind."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import fusec
from fusec.report.breaks import Break, Place, Recompile, Remedy
from fusec.report.seen import Launch, Seen, SeenGraph, folded
from fusec.runtime.clock import current_clock
from fusec.summary import GraphSummary, KernelSummary
from fusec.torch_interior import trace_log


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
    assert folded("h.12.mlp.c_fc1") == "h.*.mlp.c_fc1"


def test_eager_kernels_have_their_reason_their_calls_and_their_time(seen: Seen) -> None:
    (fft,) = [e for e in seen.slowest(eager=True) if "fft_r2c" in e.name]
    assert (fft.module, fft.calls) == ("h.*", 15)
    assert fft.reason and fft.seconds > 0


def test_an_eager_kernel_that_takes_long_is_advice() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(torch.sort, backend="fusec")
    with fusec.watch() as watched:
        compiled(torch.randn(100_000))
        compiled(torch.randn(100_000))
    assert any("takes" in text and "sort" in text for text in watched.seen.advice())


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
    def fail(*_: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr("fusec.compiler.compile_to_source", fail)
    torch._dynamo.reset()
    compiled = torch.compile(Net(), backend="fusec", options={"cache": False})
    with fusec.watch() as watched, torch.no_grad(), pytest.warns(UserWarning, match="planted"):
        compiled(torch.randn(8, 64))
    assert watched.seen.advice()[0].startswith("graph inference 0/0 runs as eager kernels")
    assert "planted" in str(watched)


def test_nothing_of_a_watch_stays_behind() -> None:
    before = list(trace_log.handlers)
    with pytest.raises(ValueError, match="mine"), fusec.watch():
        assert len(trace_log.handlers) == len(before) + 1
        raise ValueError("mine")
    assert trace_log.handlers == before
    assert current_clock() is None


def test_a_mode_with_cuda_graphs_is_timed_on_a_cpu() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(torch.sin, backend="fusec", mode="reduce-overhead")
    with fusec.watch() as watched:
        compiled(torch.ones(3))
    assert [g.calls for g in watched.seen.graphs] == [1]


def test_a_graph_that_nobody_watches_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("timed for nobody")

    monkeypatch.setattr("fusec.runtime.clock.GraphClock.__init__", fail)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Net(), backend="fusec", options={"strict": True})(torch.randn(8, 64))


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


def launch_bound(calls: int, microseconds: float) -> Seen:
    kernel = KernelSummary("k0", "k0", ("add",), "", ())
    made = GraphSummary("0/0", "inference", "cpu", False, "", (kernel, kernel), (), {})
    graph = SeenGraph(made, Place("m.py", 3, "f"), calls, calls * microseconds / 1e6)
    return Seen("m.py", seconds=calls * microseconds / 1e6 * 2, graphs=(graph,))


def test_many_short_calls_are_said_to_be_bound_by_launches() -> None:
    (advice,) = launch_bound(1000, 12.0).advice()
    assert "inference 0/0 is launch-bound: 2 launches in 12 us a call" in advice
    assert launch_bound(10, 12.0).advice() == launch_bound(1000, 100.0).advice() == []


def test_what_costs_most_is_to_be_done_first() -> None:
    remedy, lines = Remedy("change it"), [Place("m.py", line, "f") for line in range(5)]
    again = Recompile(lines[4], "a size", remedy, seconds=2.0)
    rare, often = Break(lines[3], "rare", remedy), Break(lines[2], "often", remedy, count=9)
    skipped = Break(lines[1], "skipped", remedy, skipped=True)
    bound = launch_bound(1000, 12.0)
    (graph,) = bound.graphs
    failed = replace(graph, summary=replace(graph.summary, problem="planted"))
    seen = replace(
        bound, graphs=(graph, failed), recompiles=(again,), breaks=(rare, often, skipped)
    )
    first = [text.splitlines()[0] for text in seen.advice()]
    assert sorted(first[:2]) == [
        "graph inference 0/0 runs as eager kernels: planted",
        "m.py:1 in f",
    ]
    assert first[2:] == [f"m.py:{line} in f" for line in (2, 3, 4, 3)]


def test_what_the_library_computes_by_choice_is_no_advice() -> None:
    reason = "contraction with its bias: runs in the library"
    seen = replace(
        launch_bound(10, 50.0),
        launches=(Launch("", "addmm.default", "up", True, reason, 10, 4e-4),),
    )
    assert seen.advice() == []
    sorting = replace(seen.launches[0], name="sort.default", reason="sorting")
    assert len(replace(seen, launches=(sorting,)).advice()) == 1


def test_the_page_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    made = launch_bound(1000, 12.0)
    name = "k0: " + " + ".join(["scaled_dot_product_flash_attention_for_cpu"] * 4)
    launch = Launch("", name, "transformer.h.*.attn.c_proj", True, "no lowering " * 9, 9, 1.0)
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, str(replace(made, launches=(launch,))).splitlines())) <= 80
