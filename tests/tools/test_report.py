"""``fusec.explain`` and ``fusec.kernels``: what they count, and that they leave the model alone."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import fusec
from fusec.codegen import targets
from fusec.codegen.targets import find_target
from fusec.driver.context import CompileContext
from fusec.errors import ModelError, UsageError
from fusec.ir.decision import Decision
from fusec.options import Options
from fusec.tools.report.explanation import Explanation, GraphReport, _remarks
from fusec.tools.report.observe import observe
from fusec.tools.report.stages import take_through
from fusec.tools.report.watching import watch

TARGETS = ("cpu", "sm_90")
ROWS, WIDTH = 1024, 1024


def tensor_bytes(*shapes_and_sizes: tuple[int, ...]) -> int:
    """Return the bytes of tensors given as (extent, ..., itemsize)."""
    return sum(int(torch.tensor(shape).prod()) for shape in shapes_and_sizes)


class AddNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x + r
        return self.norm(h), h


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class MaskedSoftmax(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax((x * 0.125).masked_fill(mask, float("-inf")), -1)


class BiasGeluResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return F.gelu(x + self.bias) + r


class NormGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.norm(x))


def relu_chain(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 0.5 + 1.0


X = (ROWS, WIDTH, 4)
W = (WIDTH, 4)
CHAINS = {
    # model, number of X-shaped inputs, has a mask, bytes of the forward: inputs once + outputs once
    "add norm": (AddNorm, 2, False, tensor_bytes(X, X, X, X, W, W)),
    "rms norm": (RMSNorm, 1, False, tensor_bytes(X, X, W)),
    "masked softmax": (MaskedSoftmax, 1, True, tensor_bytes(X, X, (ROWS, WIDTH, 1))),
    "bias gelu residual": (BiasGeluResidual, 2, False, tensor_bytes(X, X, X, W)),
    "norm gelu": (NormGelu, 1, False, tensor_bytes(X, X, W, W)),
    "relu chain": (lambda: relu_chain, 1, False, tensor_bytes(X, X)),
}


def inputs_of(name: str) -> list[torch.Tensor]:
    _, count, masked, _ = CHAINS[name]
    inputs = [torch.empty(ROWS, WIDTH) for _ in range(count)]
    return [*inputs, torch.zeros(ROWS, WIDTH, dtype=torch.bool)] if masked else inputs


@pytest.mark.sampled(5)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_one_kernel_that_moves_the_floor(name: str, target: str) -> None:
    build, _, _, expected = CHAINS[name]
    (graph,) = fusec.explain(build(), *inputs_of(name), target=target).graphs
    assert len(graph.kernels) == graph.launches == 1, str(graph)
    assert graph.externs == ()
    assert graph.bytes_moved == graph.bytes_floor == expected
    assert graph.bytes_eager > graph.bytes_moved
    assert graph.launches_eager > 1


@pytest.mark.sampled(5)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_s_backward_is_at_most_two_kernels(name: str, target: str) -> None:
    build = CHAINS[name][0]
    forward, backward = fusec.explain(build(), *inputs_of(name), train=True, target=target).graphs
    assert (forward.name, backward.name) == ("forward", "backward")
    assert len(forward.kernels) == 1 and forward.externs == ()
    assert len(backward.kernels) <= 2 and backward.externs == (), str(backward)


def test_eager_is_counted_by_launches_and_bytes() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x.t() + 1.0).reshape(-1)  # a view, an addition, and a copy, for it is transposed
        return torch.relu(y) @ w  # two launches

    x, w = torch.empty(8, 16), torch.empty(128)
    (graph,) = fusec.explain(fn, x, w).graphs
    assert graph.launches_eager == 4
    size = 128 * 4
    assert graph.bytes_eager == (2 * size) + (2 * size) + (2 * size) + (2 * size + 4)


def test_eager_launches_have_their_module_and_line_in_the_backward_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    forward, backward = observe(model, [torch.randn(4, 8)], train=True)
    assert [(c.op, c.module) for c in forward.eager.calls] == [
        ("addmm.default", "0"),
        ("native_layer_norm.default", "1"),
    ]
    places = {(c.op, c.module) for c in backward.eager.calls}
    assert {("mm.default", "0"), ("native_layer_norm_backward.default", "1")} <= places

    def own(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)

    for graph in observe(own, [torch.randn(4)], train=True):
        assert all("in own: return torch.sin(x)" in call.line for call in graph.eager.calls)


def test_a_gather_reads_no_more_than_it_returns() -> None:
    table, ids = torch.empty(50000, 64), torch.zeros(4, 8, dtype=torch.int64)
    (graph,) = fusec.explain(lambda t, i: F.embedding(i, t), table, ids).graphs
    expected = tensor_bytes((4, 8, 64, 4), (4, 8, 64, 4), (4, 8, 8))
    assert graph.bytes_eager == graph.bytes_moved == expected


def test_externs_count_their_inputs_and_outputs() -> None:
    a, b = torch.empty(64, 32), torch.empty(32, 16)
    (graph,) = fusec.explain(lambda a, b: torch.relu(a @ b), a, b).graphs
    product = tensor_bytes((64, 32, 4), (32, 16, 4), (64, 16, 4))
    assert graph.launches == graph.launches_eager == 2
    assert graph.bytes_moved == product + 2 * tensor_bytes((64, 16, 4)) == graph.bytes_floor
    assert [extern.op for extern in graph.externs] == ["mm.default"]


def test_a_view_that_stays_a_call_is_no_launch() -> None:
    x = torch.empty(16, 64)
    (graph,) = fusec.explain(lambda x: torch.fft.fft(x).real.sort(), x).graphs
    assert graph.launches == graph.launches_eager == 2
    assert graph.bytes_moved == graph.bytes_eager == graph.bytes_floor


def test_without_fusion_each_definition_is_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_FUSION", "0")
    (graph,) = fusec.explain(AddNorm(), *inputs_of("add norm")).graphs
    assert graph.launches > 1
    assert graph.bytes_moved > graph.bytes_floor
    assert graph.bytes_floor == CHAINS["add norm"][3]


def test_decisions_carry_reason_and_price() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        return torch.sin(y @ w) + y

    decisions = fusec.explain(fn, torch.empty(64, 64), torch.empty(64, 64)).graphs[0].decisions
    rejected = [d for d in decisions if not d.taken]
    assert rejected and all(d.reason for d in rejected)
    taken = fusec.explain(AddNorm(), *inputs_of("add norm")).graphs[0].decisions
    assert any(d.taken and d.saved_us is not None and d.saved_us > 0 for d in taken)


def test_explaining_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(4, 8)
    fusec.explain(model, x, train=True)
    fusec.explain(lambda x: model(x), x, train=True)
    assert x.grad is None and not x.requires_grad
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert type(value) is torch.Tensor and torch.equal(value, before[name])


@pytest.mark.usefixtures("unfrozen_heap")
def test_tracing_and_each_compile_spare_the_collector() -> None:
    spared = []

    def adapt(context: CompileContext) -> CompileContext:
        spared.append(gc.get_freeze_count() > 0)
        return context

    options, target = Options.from_compile(None, None), find_target("cpu")
    (one,) = observe(relu_chain, [torch.randn(4)], options=options, target=target, adapt=adapt)
    take_through(one, target, options, adapt)
    assert spared == [True, True]


def test_explaining_again_and_again_sees_the_same() -> None:
    model = AddNorm()
    texts = {str(fusec.explain(model, *inputs_of("add norm"))) for _ in range(9)}
    assert len(texts) == 1


def test_a_compiled_model_is_explained_as_what_was_compiled() -> None:
    compiled = torch.compile(AddNorm(), backend="eager")
    (graph,) = fusec.explain(compiled, *inputs_of("add norm")).graphs
    assert len(graph.kernels) == 1


def test_kernels_have_notation_source_and_assembly() -> None:
    (kernel,) = fusec.kernels(relu_chain, torch.empty(4096), target="sm_90")
    assert (kernel.name, kernel.graph, kernel.language) == ("k0", "inference", "triton")
    assert kernel.notation.startswith("kernel k0 ->")
    assert "@triton.jit" in kernel.source and str(kernel) == kernel.source
    assert ".target sm_90" in kernel.assembly("ptx")
    (kernel,) = fusec.kernels(relu_chain, torch.empty(4096), target="cpu")
    assert kernel.language == "cpp" and 'extern "C"' in kernel.source
    with pytest.raises(UsageError, match="sm_90"):
        kernel.assembly("ptx")


def test_errors_are_the_model_s_own_or_name_what_is_right() -> None:
    with pytest.raises(ModelError, match="invalid for input of size 8"):
        fusec.explain(lambda x: x.view(3), torch.empty(8))
    with pytest.raises(ModelError, match="one type"):
        fusec.explain(nn.Linear(8, 8), torch.empty(8, 8, dtype=torch.bfloat16))
    with pytest.raises(ModelError, match="requires a gradient"):
        fusec.explain(lambda x: x + 1, torch.zeros(8, dtype=torch.int64), train=True)
    with pytest.raises(UsageError, match="sm_90"):
        fusec.explain(relu_chain, torch.empty(8), target="sm_91")


def test_constants_of_a_model_are_in_the_graphs_of_a_training_step() -> None:
    def weighted(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * torch.tensor([0.5, 2.0, 1.0, 4.0])

    graphs = fusec.explain(weighted, torch.randn(3, 4), train=True).graphs
    kernels = [(graph.name, len(graph.kernels)) for graph in graphs]
    assert kernels == [("forward", 1), ("backward", 1)]


def test_floats_of_a_module_are_counted_with_symbolic_sizes() -> None:
    """Dynamo passes them as tensors and reads their values, which fake tensors do not have."""
    inputs = torch.randn(8, 64)
    report = fusec.explain(nn.LayerNorm(64), inputs, train=True, dynamic=True)
    assert [graph.name for graph in report.graphs] == ["forward", "backward"]
    assert report.graphs[0].launches_eager == 1


def test_lines_of_a_kernel_are_in_order_within_a_function() -> None:
    def spread(x: torch.Tensor) -> torch.Tensor:
        y = torch.maximum(
            x.exp(),
            x.tanh(),
        )
        return torch.add(
            y.sigmoid(),
            y.sin(),
        )

    (graph,) = fusec.explain(spread, torch.empty(8)).graphs
    (kernel,) = graph.kernels
    numbers = [int(line.split(":")[1].split()[0]) for line in kernel.source]
    assert numbers == sorted(numbers) and len(numbers) == 6


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.h = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = x + layer(x).cumsum(0)
        return x


@functools.cache
def explained_layers(count: int) -> Explanation:
    return fusec.explain(Layers(count), torch.randn(8, 64))


def test_kernels_and_merges_of_alike_layers_are_one_line_with_their_number() -> None:
    explained = explained_layers(12)
    (graph,) = explained.graphs
    assert len(graph.kernels) == 36  # each is there, and in the JSON form
    both = {f"h.{n}.0..h.{n}.1" for n in range(12)}  # the linear's bias, and gelu
    assert both <= {kernel.module for kernel in graph.kernels}
    text = str(explained)
    assert "12 times in h.*.0..h.*.1: gelu\n" in text
    assert "axes unify, 12 times\n" in text
    assert "    and 42 more, which --json lists\n" in text
    assert len(text.splitlines()) < 50


def test_ways_to_run_are_no_merges_and_each_reason_stands_once() -> None:
    (graph,) = explained_layers(1).graphs
    lost = Decision("mm.default", "oneDNN", False, "by rule: no race", -2.0, "ATen")
    rows = Decision("mm", "chunks of rows", True, "64 of 512 rows at a time", None, "at once")
    apart = [Decision(a, "exp", False, "a cycle", None) for a in ("mean", "tanh_1", "tanh_2")]
    slower = Decision("sum", "exp", False, "slower", -3.0)
    text = str(replace(graph, decisions=(lost, *apart, slower, lost, rows)))
    assert text.partition("merges")[2].splitlines() == [
        " rejected: 4",
        "    slower",
        "      sum with exp, -3 us",
        "    a cycle",
        "      mean with exp; tanh_1 with exp, 2 times",
        "",
        "  choices",
        "    mm.default  in  ATen            not  oneDNN   +2 us  by rule: no race, 2 times",
        "    mm          in  chunks of rows  not  at once         64 of 512 rows at a time",
    ]


def test_a_way_that_was_timed_is_told_by_its_gain_and_by_what_outweighs_it() -> None:
    (graph,) = explained_layers(1).graphs
    timed = Decision("mm", "gelu", False, "modelled: fused 9 us, apart 4 us", -5.0, "the library")
    reason = "measured with 4 images: 3 us beside 2 us; conversions cost 7 us"
    kept = Decision("convolution", "channels-last", False, reason, 1.0, "contiguous")
    text = str(replace(graph, decisions=(timed, kept)))
    first, second = " ".join(text.partition("choices")[2].split()).split(" convolution ")
    assert first == "mm in the library not gelu +5 us modelled"
    end = "-1 us measured with 4 images; conversions cost 7 us"
    assert second == f"in contiguous not channels-last {end}"


def test_kernels_of_one_layer_stand_as_they_are() -> None:
    text = str(explained_layers(1))
    assert "times in" not in text


def test_a_kernel_without_a_line_of_the_user_s_has_its_module() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))
    text = str(fusec.explain(model, torch.randn(8, 64), target="sm_90", race="library"))
    assert " in 0..2: add" in text


def test_many_kernels_have_a_table_by_module() -> None:
    text = str(explained_layers(12))
    table = text.partition("modules, by bytes\n")[2].partition("\n\n")[0]
    assert "12 x  h.*.0  " in table and "12 x  h.*.2  " in table and "kernels  eager" in table
    assert "modules, by bytes" not in str(explained_layers(1))


def test_the_width_of_the_terminal_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    explained = explained_layers(12)
    for width in (60, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        assert max(map(len, str(explained).splitlines())) <= width


def test_inputs_that_change_have_the_program_s_names() -> None:
    explained = fusec.explain(nn.BatchNorm1d(8), torch.randn(4, 8), train=True)
    forward = explained.graphs[0]
    assert ("num_batches_tracked",) in [kernel.outputs for kernel in forward.kernels]

    def step(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return x * state

    (graph,) = fusec.explain(step, torch.randn(8), torch.randn(8)).graphs
    assert "state" in [name for kernel in graph.kernels for name in kernel.outputs]


def test_a_graph_of_launches_alone_is_said_to_be_bound_by_them() -> None:
    def small(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1)

    (graph,) = fusec.explain(small, torch.randn(8, 8)).graphs
    assert "launch-bound: launching takes some 3 us, moving the bytes 0.0" in " ".join(
        graph.remarks
    )
    (graph,) = fusec.explain(small, torch.randn(4096, 1024)).graphs
    assert graph.remarks == ()

    def looped(x: torch.Tensor) -> Any:
        return scan(lambda h, row: ((h + row).tanh(), h * 2), torch.zeros(8), x)

    remarks = [r for g in fusec.explain(looped, torch.randn(2000, 8)).graphs for r in g.remarks]
    assert not remarks  # 2000 steps of its kernels are one native call


def test_a_loop_that_a_condition_ends_is_counted_once_as_eager_runs_it() -> None:
    def halving(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return while_loop(lambda x: x.sum() > 1, lambda x: (x.sin() * 0.5,), (x,))

    (graph,) = fusec.explain(halving, torch.randn(8)).graphs
    assert graph.launches_eager == 4  # the condition's sum and comparison, two in the body


def test_filling_with_zeros_what_a_kernel_adds_to_is_a_launch() -> None:
    heads = [torch.empty(2, 8, 2048, 128, dtype=torch.bfloat16) for _ in range(3)]
    attention = F.scaled_dot_product_attention
    graphs = fusec.explain(attention, *heads, train=True, target="sm_90", race="fused").graphs
    (backward,) = (graph for graph in graphs if graph.name == "backward")
    assert any(one.added for one in backward.sums)
    assert backward.launches == len(backward.kernels) + 1


def test_what_torch_runs_between_graphs_is_named_and_eager_s_launches_count_once() -> None:
    def aliased(x: torch.Tensor) -> torch.Tensor:
        h = x.sin()
        left, right = while_loop(lambda a, b: a.sum() < 9, lambda a, b: (a + 1, b + 1), (h, h))
        return left + right

    explained = fusec.explain(aliased, torch.rand(4))
    (outside,) = explained.outside
    assert (outside.op, "aliasing" in outside.reason) == ("while_loop", True)
    assert [graph.launches_eager for graph in explained.graphs] == [1, 1]
    assert "\noutside of graphs, as PyTorch runs it\n  while_loop" in str(explained)
    assert not fusec.explain(torch.sin, torch.rand(4)).outside


def scaled_window(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((4,), (1,), 3).mul_(2)


def scaled_integers(x: torch.Tensor) -> torch.Tensor:
    return x.addcmul_(x, x, value=2)


@pytest.mark.parametrize(
    ("fn", "given", "reason"),
    [
        (scaled_window, torch.rand(4, 4), "it changes, or differentiates, an input by its place"),
        (scaled_integers, torch.ones(4, dtype=torch.int64), "another form of addcmul_"),
    ],
)
def test_a_graph_that_must_run_uncompiled_is_named_with_the_reason(
    fn: Callable[..., Any], given: torch.Tensor, reason: str
) -> None:
    explained = fusec.explain(fn, given)
    (outside,) = explained.outside
    assert not explained.graphs and outside.op == "a whole graph" and reason in outside.reason
    assert "test_report.py" in outside.place
    assert "nothing is compiled: all of the call runs eagerly" in str(explained)
    with watch() as watched:
        torch.compile(fn, backend="fusec")(given.clone())
    assert [one.summary.outside for one in watched.seen.graphs] == ["a whole graph"]


def test_a_graph_that_got_worse_says_so() -> None:
    graph = GraphReport("inference", (), (), 7, 11, 7, 2, 3, ())
    remarks = tuple(_remarks(graph, targets.TARGETS["cpu"].machine))
    assert remarks[:2] == ("3 launches, eager has 2", "moves 1.57 times the bytes that eager moves")


def test_attention_on_a_gpu_is_not_called_by_its_name_on_cpus() -> None:
    query = torch.randn(1, 2, 16, 32)
    attention = nn.functional.scaled_dot_product_attention
    explained = fusec.explain(attention, query, query, query, target="sm_90", race="library")
    (extern,) = explained.graphs[0].externs
    assert extern.op == "_scaled_dot_product_attention.default"
    assert "for_cpu" not in str(explained)


def test_a_forward_computes_no_operation_of_a_backward() -> None:
    def rows(x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.layer_norm(x.sin(), (64,)).relu()
        return nn.functional.layer_norm(y + x, (64,)).softmax(1)

    forward, backward = observe(rows, [torch.randn(8, 64)], train=True)
    called = [str(node.meta.get("original_aten")) for node in forward.graph.graph.nodes]
    assert not [name for name in called if "backward" in name]
    called = [str(node.meta.get("original_aten")) for node in backward.graph.graph.nodes]
    assert "aten.native_layer_norm_backward.default" in called


@pytest.mark.parametrize(("race", "train"), [("library", True), ("fused", False)])
def test_no_name_in_a_report_for_a_gpu_is_that_of_a_cpu(race: str, train: bool) -> None:
    query, mask = torch.randn(1, 2, 16, 32), torch.zeros(16, 16)

    def attention(q: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q, mask).sin()

    explained = fusec.explain(attention, query, train=train, target="sm_90", race=race)
    assert "for_cpu" not in str(explained) + explained.to_json()


def test_what_explain_prints_of_a_step_is_short() -> None:
    width = 32
    layer = nn.TransformerEncoderLayer(width, 2, 64, 0.1, "gelu", batch_first=True)
    model = nn.Sequential(nn.Linear(8, width), *(copy.deepcopy(layer) for _ in range(2)))
    explained = fusec.explain(model, torch.randn(2, 16, 8), train=True)
    assert len(str(explained).splitlines()) < 130
    kernels = [kernel for graph in explained.graphs for kernel in graph.kernels]
    assert len(kernels) > 12  # enough to be long


@pytest.mark.parametrize("option", ["deterministic", "batch_invariant"])
def test_the_order_of_sums_is_explained_where_rules_choose(option: str) -> None:
    def attend(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q) if q.dim() == 4 else F.softmax(q, -1)

    x = torch.randn(5, 64)
    explained = fusec.explain(attend, x, dynamic=True, options={option: True})
    (sums,) = explained.graphs[0].sums
    assert len(sums.sizes) == 1 and sums.sizes[0] in "".join(sums.over)
    text = str(explained)
    assert "  order of sums\n" in text and f"changes with {sums.sizes[0]}" in text
    assert not fusec.explain(attend, x, options={option: True}).graphs[0].sums
    assert "order of sums" not in str(fusec.explain(attend, x, dynamic=True))
