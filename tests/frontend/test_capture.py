"""Whole graphs: models forward and backward, mutation, aliasing, what is left to eager kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusec.frontend.capture import NodeDefinitions
from fusec.frontend.fallbacks import reason_for
from fusec.frontend.ops.literals import LONGEST
from fusec.frontend.origin import NO_TEXT, source_line
from fusec.ir.graph import Def, Extern, NodeConstant, SizeValue, View
from fusec.ir.index import index
from fusec.ir.text import print_graph
from tests.frontend.tracing import Captured, body, graph_of, lowered, notation_of, traced

VOCABULARY, WIDTH, HEADS = 50, 32, 4


class Block(nn.Module):
    """An embedding, one transformer block and a head with cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.grow = nn.Linear(WIDTH, 4 * WIDTH)
        self.shrink = nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        b, t, c = x.shape
        parts = self.attention(self.norm(x)).split(c, dim=2)
        q, k, v = (p.view(b, t, HEADS, c // HEADS).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).contiguous().view(b, t, c)
        x = x + self.shrink(F.gelu(self.grow(x)))
        return F.cross_entropy(self.head(x).view(-1, VOCABULARY), targets.view(-1))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm(self.convolution(x)))
        return self.head(F.max_pool2d(h, 2).mean((2, 3))).square().sum()


def check_training(model: nn.Module, *inputs: torch.Tensor, dynamic: bool) -> Captured:
    """Assert that loss, gradients and buffers of a captured model are eager's."""
    twin = copy.deepcopy(model)
    loss = model(*inputs)
    loss.backward()
    captured = Captured(twin, dynamic=dynamic)
    twin_loss = captured(*inputs)
    twin_loss.backward()
    torch.testing.assert_close(twin_loss, loss)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=lambda m, n=name: f"{n}: {m}")
    for p, q in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(q, p)
    assert captured.guards_added == 0
    return captured


@pytest.mark.first
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_transformer_block_trains_as_in_eager(dynamic: bool) -> None:
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, VOCABULARY, (2, 3, 8))
    targets[0, 0] = -100
    captured = check_training(Block(), tokens, targets, dynamic=dynamic)
    assert [g.name for g in captured.graphs] == ["forward", "backward"]
    targets_left = {e.target.split(".")[1] for e in captured.externs}
    assert targets_left == {
        "mm",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    }


@pytest.mark.first
@pytest.mark.parametrize("dynamic", [True, False])
def test_batch_norm_updates_its_running_statistics(dynamic: bool) -> None:
    torch.manual_seed(0)
    captured = check_training(Convolutions(), torch.randn(4, 3, 8, 8), dynamic=dynamic)
    written = [e for e in captured.externs if e.target == "aten.copy_.default"]
    assert len(written) == 3
    assert all(e.impure and e.outputs == () for e in written)


def test_no_copy_is_made_for_the_operands_of_a_linear_layer() -> None:
    def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, w, b))

    for dynamic in (False, True):
        graph = graph_of(
            linear, torch.randn(2, 3, 9), torch.randn(5, 9), torch.randn(5), dynamic=dynamic
        )
        (product,) = [n for n in graph.nodes if isinstance(n, Extern)]
        operands = [v for v in product.args if isinstance(v, View)]
        assert [v.buffer in graph.inputs for v in operands] == [True, True]


def test_linear_and_gelu_print_as_index_notation() -> None:
    def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, w, b))

    graph = graph_of(linear, torch.randn(2, 3, 9), torch.randn(5, 9), torch.randn(5))
    assert body(graph) == [
        "mm = extern aten.mm.default(arg0_1[6, 9 : 9, 1 + 0], arg1_1[9, 5 : 1, 9 + 0])",
        "add[i0, i1] = mm[i0, i1] + arg2_1[i1]",
        "gelu[i0, i1, i2] = add[3*i0 + i1, i2] * ndtr(add[3*i0 + i1, i2])",
        "return gelu",
    ]


@pytest.mark.parametrize(
    ("shapes", "dynamic", "small"),
    [
        (((64, 8), (8, 8)), False, True), (((65, 8), (8, 8)), False, False),
        (((2, 9), (9, 3)), False, False), (((2, 3), (3, 9)), False, False),
        (((2, 3), (3, 4)), True, False), (((99, 2, 3), (99, 3, 1)), False, True),
        (((3, 0), (0, 3)), False, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
def test_a_small_product_is_a_sum(dtype, shapes, dynamic, small) -> None:
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
    graph = graph_of(torch.matmul, *tensors, dynamic=dynamic)
    assert [isinstance(n, Extern) for n in graph.nodes] == [not small]


def test_a_bf16_sum_is_computed_in_f32_and_rounded_once() -> None:
    x, y = torch.randn(2, 3, dtype=torch.bfloat16)
    assert body(lowered(lambda x, y: torch.add(x, y, alpha=2), x, y)) == [
        "add[i0] = bf16(f32(x_1[i0]) + (f32(y_1[i0]) * 2.0))",
        "return add",
    ]


# -- aliasing and mutation ------------------------------------------------------------------------


def test_outputs_alias_inputs_exactly_where_they_do_in_eager() -> None:
    def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.t(), x[1:, ::2], x.flip(1), x.expand(2, 4, 6), (x + 1).t(), x * 1

    graph = lowered(views, torch.randn(4, 6))
    (x,) = graph.inputs
    aliases = [isinstance(v, View) and v.buffer is x for v in graph.outputs]
    assert aliases == [True, True, False, True, False, False]


def test_two_outputs_that_are_apart_in_eager_do_not_share_a_buffer() -> None:
    graph = lowered(lambda x: ((y := x + 1), y * 1, y.t()), torch.randn(4, 6))
    first, second, third = (v.buffer for v in graph.outputs if isinstance(v, View))
    assert first is not second
    assert first is third


def test_an_output_has_the_traced_strides() -> None:
    graph = lowered(lambda x: x.t().contiguous().t() + 1, torch.randn(4, 6))
    (result,) = graph.outputs
    assert isinstance(result, View)
    assert [s.const for s in result.strides] == [1, 4]


def test_swapped_inputs_read_their_old_contents() -> None:
    def swap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        old = a.flip(0)
        a.copy_(b.flip(0))
        b.copy_(old)
        return a + 1

    a, b = torch.randn(2, 4, 6)
    want_a, want_b = b.flip(0), a.flip(0)
    captured = Captured(swap)
    torch.testing.assert_close(captured(a, b), want_a + 1)
    torch.testing.assert_close(a, want_a)
    torch.testing.assert_close(b, want_b)


def test_what_is_read_after_a_write_is_copied_before_it() -> None:
    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        late = x.flip(0)
        torch.ops.aten.copy_(x, y)
        return late

    gm = make_fx(write, tracing_mode="fake")(torch.randn(4), torch.randn(4))
    kinds = [type(n) for n in notation_of(gm).nodes]
    assert kinds == [Def, Extern]


def test_a_written_part_of_a_cache_is_a_call_where_it_is_small_and_else_a_definition() -> None:
    def write(cache: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        cache[:, 3] = new
        return cache.sum()

    for length, calls in ((8, ["aten.select_scatter.default"]), (7, [])):
        cache, new = torch.zeros(2, length, 3), torch.randn(2, 3)
        captured = Captured(write)
        torch.testing.assert_close(captured(cache, new), new.sum())
        torch.testing.assert_close(cache[:, 3], new)
        assert [e.target for e in captured.externs] == [*calls, "aten.copy_.default"]


# -- what is left to eager kernels ----------------------------------------------------------------


def test_an_extern_says_why() -> None:
    def mixed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ x, torch.rand_like(x), x.sort().values, x.logdet()

    reasons = [n.reason for n in lowered(mixed, torch.randn(40, 40)).nodes if isinstance(n, Extern)]
    assert reasons == [
        "contraction: runs in the library",
        "random numbers: eager's stream",
        "sorting",
        "no lowering for aten._linalg_slogdet.default",
    ]


def test_random_numbers_keep_their_order() -> None:
    graph = lowered(lambda x: torch.rand_like(x) + torch.rand_like(x), torch.randn(4))
    assert [n.impure for n in graph.nodes if isinstance(n, Extern)] == [True, True]


def test_complex_numbers_flow_between_externs() -> None:
    def rotate(x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(x.view(4, 3, 2)) * torch.polar(x[0, :3], x[1, :3])
        return torch.view_as_real(turned) * 2

    x = torch.randn(4, 6)
    captured = Captured(rotate)
    torch.testing.assert_close(captured(x), rotate(x))
    assert captured.defs[-1].buffer.dtype.name == "f32"


def test_a_constant_of_the_model_is_an_extern_and_is_not_handed_out() -> None:
    long = [float(k) for k in range(LONGEST + 1)]
    captured = Captured(lambda x: (torch.tensor(long), x + torch.tensor(long[::-1])))
    first, second = captured(torch.zeros(LONGEST + 1))
    assert first.tolist() == long
    assert second.tolist() == long[::-1]
    assert [e.target for e in captured.externs] == ["get_attr", "get_attr"]


def test_a_branch_is_called_with_its_subgraphs_by_name() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)) * 2

    captured = Captured(branch)
    x = torch.ones(4)
    torch.testing.assert_close(captured(x), branch(x))
    (cond,) = captured.externs
    assert [type(a) for a in cond.args[1:3]] == [NodeConstant, NodeConstant]
    assert cond.reason == "the higher-order operation cond"


def test_an_empty_tensor_is_left_to_eager() -> None:
    graph = lowered(lambda x: x[:0] + 1, torch.randn(4))
    assert {n.reason for n in graph.nodes if isinstance(n, Extern)} == {"an empty tensor"}


def test_what_runs_eagerly_anyway_says_its_own_reason_not_that_a_result_is_empty() -> None:
    graph = lowered(
        lambda table, ids: torch.ops.aten._embedding_bag(table, ids, ids[:1])[0],
        torch.randn(4, 2),
        torch.zeros(3, dtype=torch.int64),
    )
    assert [n.reason for n in graph.nodes if isinstance(n, Extern)] == [
        "a scatter: elements may collide"
    ]


def test_what_acts_beside_its_results_is_named() -> None:
    made = fx.Graph()
    token, x = made.placeholder("token"), made.placeholder("x")
    effects = torch.ops.higher_order.with_effects
    node = made.call_function(effects, (token, torch.ops.aten._assert_async.default, x))
    reason = reason_for(node)
    assert reason == "_assert_async.default acts beside its results: it runs once, in order"


def test_a_shape_that_depends_on_data_is_given_by_the_call_that_makes_it() -> None:
    gm = traced(lambda x: x.nonzero() + 1, torch.randn(4))
    call, line = (n for n in notation_of(gm).nodes if not isinstance(n, Extern) or n.bound_sizes)
    assert isinstance(call, Extern) and isinstance(line, Def)
    (bound,) = call.bound_sizes
    assert (bound.result, bound.axis, bound.size.least) == (0, 0, 0)
    assert line.axes[0].extent is index(bound.size)


def test_tensors_of_two_devices_meet_in_eager() -> None:
    """Numbers of the CPU are written into GPU code; its tensors are not."""
    aten = torch.ops.aten

    def mixed(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zero = aten.scalar_tensor(0.0, device="cpu")
        return aten.where(x > 0, x, zero), x * scale, aten._to_copy(scale, device="cuda")

    with FakeTensorMode():
        x, scale = torch.empty(4, 6, device="cuda"), torch.empty(())
        graph = notation_of(make_fx(mixed)(x, scale))
    reasons = [n.reason for n in graph.nodes if isinstance(n, Extern)]
    assert reasons == ["tensors on another device"] * 2
    assert sum(isinstance(n, Def) for n in graph.nodes) == 2


def test_an_expanded_result_is_stored_once() -> None:
    graph = lowered(lambda x: x.flip(0).expand(5, 4), torch.randn(4))
    (line,) = graph.nodes
    (result,) = graph.outputs
    assert isinstance(line, Def)
    assert isinstance(result, View)
    assert [e.const for e in line.buffer.shape] == [1, 4]
    assert [s.const for s in result.strides] == [0, 1]


# -- sizes, names, origins ------------------------------------------------------------------------


def test_symbolic_sizes_are_inputs_and_outputs() -> None:
    captured = Captured(lambda x: (x + 1, x.shape[0] * 2), dynamic=True)
    captured(torch.randn(3, 4))
    (graph,) = captured.graphs
    assert print_graph(graph).splitlines()[0].startswith("graph inference(s77: size, s27: size")
    sizes = [v for g in captured.graphs for v in g.outputs if isinstance(v, SizeValue)]
    assert all(repr(s.index) in ("2*s77", "s77") for s in sizes)


def test_a_symbolic_float_becomes_an_expression_of_sizes() -> None:
    captured = Captured(lambda x: x * (x.shape[0] / (x.shape[0] - 1)), dynamic=True)
    x = torch.randn(3, 4)
    torch.testing.assert_close(captured(x), x * 1.5)
    assert not captured.externs


def test_an_unused_input_is_none() -> None:
    graph = lowered(lambda x, y: x + 1, torch.randn(3), torch.randn(3))
    assert graph.inputs[1] is None


def test_names_are_identifiers_and_unique() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._to_copy(x, dtype=torch.float64) + x.var()

    graph = lowered(twice, torch.randn(3))
    names = [n.buffer.name for n in graph.nodes if isinstance(n, Def)]
    assert names == ["to_copy", "var_mean", "var", "add"]


def test_a_file_may_have_any_name() -> None:
    trace = 'File "/a b/q"uo\'te.py", line 7, in forward\n    return x'
    assert source_line(trace) == "q\"uo'te.py:7 in forward: return x"


def test_a_line_behind_a_graph_break_is_of_the_user_s_function() -> None:
    trace = 'File "net.py", line 9, in torch_dynamo_resume_in_forward_at_7\n    return x'
    assert source_line(trace) == "net.py:9 in forward: return x"


def test_a_line_that_no_file_holds_says_so() -> None:
    """Code of exec has frames of one line each: the next frame is not its text."""
    frames = 'File "<string>", line 3, in forward', 'File "/lib/torch/nn/x.py", line 9, in forward'
    for trace in (frames[0], f"{frames[0]}\n  {frames[1]}\n    return F.relu(x)"):
        assert source_line(trace) == f"<string>:3 in forward: {NO_TEXT}"


def test_a_definition_knows_its_source_line() -> None:
    graph = graph_of(lambda x: x.sin() + 1, torch.randn(3))
    origin = graph.nodes[0].origin
    assert origin.ops == ("sin.default",)
    assert len(origin.source) == 1
    assert origin.source[0].startswith("test_capture.py:")
    assert origin.source[0].endswith(": graph = graph_of(lambda x: x.sin() + 1, torch.randn(3))")


# Single nodes.


def definitions(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> dict[str, str]:
    """Return the elements that the nodes of a function compute, by the nodes' names."""
    given = [torch.empty(shape) for shape in shapes]
    with FakeTensorMode() as mode:
        gm = make_fx(fn, tracing_mode="fake")(*map(mode.from_tensor, given))
    nodes = NodeDefinitions(gm)
    lines = {node.name: nodes.of(node) for node in reversed(gm.graph.nodes)}
    return {name: repr(found[-1].expr) for name, found in lines.items() if found}


def test_a_node_alone_loads_what_it_takes() -> None:
    found = definitions(lambda x, w: (x @ w.permute(1, 0)).exp().view(-1), (4, 8), (3, 8))
    assert found == {
        "permute": "w_1[i1, i0]",
        "mm": "sum(k: x_1[i0, k] * permute[k, i1])",
        "exp": "exp(mm[i0, i1])",
        "view": "exp[(i0)//(3), (i0)%(3)]",
    }


def test_a_node_alone_has_constants_inside() -> None:
    found = definitions(lambda x: torch.where(x > 0, x, torch.full_like(x, 0.0)), (4,))
    assert found["where"] == "where(gt[i0], x_1[i0], 0.0)"


def test_a_node_without_a_lowering_is_opaque() -> None:
    assert definitions(lambda x: torch.sort(x).values.neg(), (4,)) == {"neg": "neg(getitem[i0])"}
