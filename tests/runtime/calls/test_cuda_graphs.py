"""CUDA graphs, without a GPU: what is not recorded and why, and what torch's trees are told.

Graphs for CUDA are traced with fake tensors, which need no device. Where calls are run, a fake
takes the place of the trees and writes down what it is given.
"""

from __future__ import annotations

import functools
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fusec.frontend.ops.random  # noqa: F401 (registers the operations)
from bench.workload import backend_of
from fusec.runtime.calls import cuda_graphs
from fusec.runtime.calls.cuda_graphs import Recorder, mutated_inputs, obstacle, static_inputs

aten = torch.ops.aten


def traced(
    fn: Callable, *makes: Callable[[], torch.Tensor], device: str = "cuda:0"
) -> fx.GraphModule:
    """A graph of ATen calls on the inputs that `makes` make, traced on a CPU, as if on a device.

    Torch without CUDA cannot trace every call of fake CUDA tensors; relabelled ones will do.
    """
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
        gm = make_fx(fn)(*(make() for make in makes))
    for node in gm.graph.nodes:
        relabel(node, device)
    return gm


def relabel(node: fx.Node, device: str) -> None:
    values = node.meta.get("val")
    for value in values if isinstance(values, tuple | list) else (values,):
        if isinstance(value, FakeTensor):
            value.fake_device = torch.device(device)


def with_second_input_on(device: str) -> fx.GraphModule:
    gm = traced(lambda x, y: (x + 1, y + 1), V, V)
    relabel(list(gm.graph.nodes)[1], device)
    return gm


def empty(*shape: int, **more: Any) -> Callable[[], torch.Tensor]:
    return functools.partial(torch.empty, shape, **more)


V, M = empty(4), empty(4, 4)


# -- what is refused -------------------------------------------------------------------------------


def test_a_graph_on_one_cuda_device_is_recorded():
    assert obstacle(traced(lambda x, y: (x @ y).relu(), M, M), []) is None


def test_seeds_of_random_numbers_are_drawn_in_the_recording():
    def noisy(x):
        seeds = torch.ops.fusec.random_seeds(1, torch.device("cpu"))
        return x + torch.ops.fusec.random([4], [0], seeds, 0, "uniform", torch.float32)

    assert obstacle(traced(noisy, V), []) is None


def test_a_graph_without_a_cuda_device_is_not():
    gm = traced(lambda x: x + 1, V, device="cpu")
    assert obstacle(gm, []) == "it does not run on a CUDA device"


@pytest.mark.parametrize("device", ("cpu", "cuda:1"))
def test_tensors_on_another_device_are_named(device):
    found = sorted((device, "cuda:0"))
    assert (
        obstacle(with_second_input_on(device), []) == f"it uses several devices: {', '.join(found)}"
    )


def test_tensors_without_memory_do_not_count():
    assert obstacle(with_second_input_on("meta"), []) is None


def test_a_written_input_has_to_be_static():
    gm = traced(lambda x, state: aten.copy_(state, x + state), V, V)
    assert mutated_inputs(gm) == {1}
    assert obstacle(gm, []) == "it writes to inputs whose memory may move: state_1"
    assert obstacle(gm, [0]) is not None
    assert obstacle(gm, [1]) is None


def test_a_write_through_a_view_is_one_to_the_input():
    gm = traced(
        lambda x, cache: aten.copy_(aten.slice(cache, 0, 1, 3), aten.slice(x, 0, 1, 3)), V, V
    )
    assert mutated_inputs(gm) == {1}


def test_a_write_to_something_inside_is_none():
    assert mutated_inputs(traced(lambda x: aten.add_(x * 2, 1), V)) == set()


def test_a_write_by_keyword_or_in_a_list_is_seen():
    def update(x, y):
        torch._foreach_add_([x], 1.0)
        return aten.add.out(x, x, out=y)

    assert mutated_inputs(traced(update, V, V)) == {0, 1}


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: x.nonzero(), "a size that depends on data (nonzero)"),
        (lambda x: x[x > 0], "a boolean index, which the host counts (index)"),
        (lambda x: x.index_put((x > 0,), x[0]), "a boolean index, which the host counts"),
        (lambda x: x * x.sum().item(), "a number that the host reads (_local_scalar_dense)"),
        (lambda x: x.to_sparse(), "a sparse tensor"),
    ],
)
def test_an_operation_that_the_host_waits_for_is_named(fn, reason):
    found = obstacle(traced(fn, V), [])
    assert found is not None and found.startswith(reason), found


def test_an_integer_index_is_no_reason():
    gm = traced(
        lambda x, i: (x[i], x.index_put((i,), x[i])),
        M,
        lambda: torch.zeros(3, dtype=torch.int64),
    )
    assert obstacle(gm, []) is None


def with_inputs(*values: Any) -> fx.GraphModule:
    """A graph by hand: placeholders that stand for `values`, and the first one's sine."""
    graph = fx.Graph()
    nodes = []
    for position, value in enumerate(values):
        nodes.append(graph.placeholder(f"arg{position}"))
        nodes[-1].meta["val"] = value
    sine = graph.call_function(aten.sin.default, (nodes[-1],))
    sine.meta["val"] = values[-1]
    graph.output((sine, None))
    return fx.GraphModule(torch.nn.Module(), graph)


def symbolic_tensor() -> tuple[Any, torch.Tensor]:
    """A symbol and a fake tensor of as many rows."""
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    tensor = mode.from_tensor(torch.empty(5, 4), static_shapes=False)
    with mode:
        return tensor.shape[0], torch.empty(tensor.shape, device="cuda")


def test_a_symbolic_size_has_to_be_an_input_of_its_own():
    size, tensor = symbolic_tensor()
    columns = tensor.shape[1]
    assert obstacle(with_inputs(size, columns, tensor), []) is None
    reason = obstacle(with_inputs(columns, tensor), [])
    assert reason == f"a size that is no input of its own: {size.node.expr}"


def test_an_input_of_another_kind_is_refused():
    with FakeTensorMode():
        tensor = torch.empty(4, device="cuda")
    assert obstacle(with_inputs(3, None, tensor), []) is None
    reason = obstacle(with_inputs(2.5, tensor), [])
    assert reason == "an input that is neither a tensor nor an integer (arg0)"


def test_of_a_backward_the_saved_tensors_are_static():
    gm = with_inputs(7, torch.zeros(2), torch.zeros(2), torch.zeros(2))
    names = ("primals_1", "mul", "tangents_1", "tangents_2")
    for node, name in zip(gm.graph.nodes, names, strict=False):
        node.name = name
    assert static_inputs(gm, backward=True) == [1]
    assert static_inputs(gm, backward=False) == []  # outside of a compile nothing is known


# -- what the trees are told -----------------------------------------------------------------------


class Trees:
    """In place of `torch._inductor.cudagraph_trees`: keeps what it is told, and runs the call."""

    def __init__(self) -> None:
        self.recordings: list[types.SimpleNamespace] = []
        self.backwards_announced = 0

    def cudagraphify_impl(self, model, inputs, static_input_idxs, **told):
        entry = types.SimpleNamespace(static=list(static_input_idxs), told=told, calls=[])
        self.recordings.append(entry)

        def run(args):
            entry.calls.append([a if isinstance(a, int) else tuple(a.shape) for a in args])
            out = model(args)
            assert args == [], "a recorded call has to empty its list"
            return out

        return run

    def cudagraphify(self, model, inputs, static_input_idxs=(), *, device_index, is_backward,
                     is_inference, stack_traces=None, mutated_input_idxs=()):  # fmt: skip
        """What `cudagraphify_impl` hands over: no `constants` and no `placeholders` here."""

    def get_manager(self, device_index, create_if_none_exists=True):
        assert not create_if_none_exists
        return self

    def set_to_running_backward(self):
        self.backwards_announced += 1

    def reset_cudagraph_trees(self):
        self.recordings.clear()


@pytest.fixture
def trees(monkeypatch) -> Iterator[Trees]:
    """Fake trees, which may record CPU graphs too."""
    torch._dynamo.reset()
    cuda_graphs._say.cache_clear()
    fake = Trees()
    monkeypatch.setitem(sys.modules, cuda_graphs._TREES, fake)
    monkeypatch.setattr(cuda_graphs, "devices", lambda gm: {torch.device("cuda", 0)})
    yield fake
    torch._dynamo.reset()


def compiled(fn: Callable, **more: Any) -> Callable:
    return torch.compile(fn, backend=backend_of("fusec"), mode="reduce-overhead", **more)


def test_training_is_recorded_as_a_forward_and_a_backward(trees):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    step, x = compiled(model), torch.randn(5, 8)
    for _ in range(3):
        model.zero_grad()
        out = step(x)
        out.square().sum().backward()
        found = [p.grad.clone() for p in model.parameters()]
    forward, backward = trees.recordings
    assert not forward.told["is_backward"] and backward.told["is_backward"]
    assert not forward.told["is_inference"] and not backward.told["is_inference"]
    shapes = [forward.calls[0][i] for i in forward.static]
    assert sorted(shapes) == [(4,), (4, 16), (16,), (16, 8)]  # the parameters, not x
    assert (5, 4) in backward.calls[0]
    assert (5, 4) not in [backward.calls[0][i] for i in backward.static]  # the gradient may move
    assert len(backward.static) == len(backward.calls[0]) - 1
    assert len(forward.calls) == len(backward.calls) == 3
    model.zero_grad()
    model(x).square().sum().backward()
    for ours, p in zip(found, model.parameters(), strict=True):
        assert torch.allclose(ours, p.grad, atol=1e-5)


def test_only_what_the_trees_take_is_told_by_name(trees):
    compiled(lambda x: x.sin() + 1)(torch.randn(4))
    (only,) = trees.recordings
    assert set(only.told) == {
        "device_index", "is_backward", "is_inference", "stack_traces", "mutated_input_idxs",
    }  # fmt: skip
    assert only.told["is_inference"] and only.told["device_index"] == 0
    assert len(only.told["stack_traces"]) == 1


def test_sizes_reach_the_trees_as_integers(trees):
    fn = compiled(lambda x: x.softmax(-1) * x.shape[0], dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 7)
        assert torch.allclose(fn(x), x.softmax(-1) * rows, atol=1e-6)
    (only,) = trees.recordings
    assert [[a for a in call if isinstance(a, int)] for call in only.calls] == [[3, 7], [5, 7]]


def test_a_dynamic_backward_gets_the_sizes_of_all_that_it_reads(trees):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    step = compiled(model, dynamic=True)
    for rows in (3, 5):
        step(torch.randn(rows, 8)).sum().backward()
    forward, backward = trees.recordings
    assert [[a for a in call if isinstance(a, int)] for call in forward.calls] == [[3], [5]]
    assert [[a for a in call if isinstance(a, int)] for call in backward.calls] == [[3], [5]]


def test_buffers_may_be_written_and_the_trees_know_which(trees):
    model = torch.nn.BatchNorm1d(4)
    compiled(model)(torch.randn(6, 4)).sum().backward()
    forward = trees.recordings[0]
    written = [forward.calls[0][i] for i in forward.told["mutated_input_idxs"]]
    assert sorted(written) == [(), (4,), (4,)]
    assert set(forward.told["mutated_input_idxs"]) <= set(forward.static)


def test_a_written_input_runs_plainly_and_so_does_its_backward(trees, caplog):
    def update(state, x, w):
        state.copy_(state + x)
        return (x * w).sum()

    state, x, w = torch.zeros(4), torch.randn(4), torch.randn(4, requires_grad=True)
    with caplog.at_level(logging.INFO, "fusec.compile"):
        compiled(update)(state, x, w).backward()
    assert trees.recordings == []
    assert torch.equal(state, x) and torch.allclose(w.grad, x)
    said = [r.getMessage() for r in caplog.records if "CUDA graphs" in r.getMessage()]
    assert "writes to inputs" in said[0]
    assert said[1].endswith("its forward is not recorded")


@torch.library.custom_op(
    "fusec_test::unrecorded", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def unrecorded(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("fusec_test::recorded_forward", mutates_args=())
def recorded_forward(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


unrecorded.register_fake(torch.empty_like)
recorded_forward.register_fake(torch.empty_like)
recorded_forward.register_autograd(lambda ctx, gradient: unrecorded(gradient))


def test_a_backward_that_is_not_recorded_tells_the_trees_that_it_ran(trees):
    x = torch.randn(4, requires_grad=True)
    compiled(lambda x: recorded_forward(x.sin()).sum())(x).backward()
    assert len(trees.recordings) == 1
    assert trees.backwards_announced == 1
    assert torch.allclose(x.grad, x.cos())


@pytest.mark.parametrize("lack", ("cudagraphify_impl", "is_backward", "import"))
def test_trees_with_another_interface_are_left_alone(monkeypatch, caplog, lack):
    cuda_graphs._say.cache_clear()
    fake = types.SimpleNamespace(
        get_manager=None,
        reset_cudagraph_trees=None,
        cudagraphify_impl=lambda model, inputs, static, **more: None,
        cudagraphify=lambda model, inputs, static, *, device_index, is_inference: None,
    )

    if lack == "cudagraphify_impl":
        del fake.cudagraphify_impl
    monkeypatch.setitem(sys.modules, cuda_graphs._TREES, None if lack == "import" else fake)
    call = lambda args: None  # noqa: E731
    with caplog.at_level(logging.WARNING, "fusec.compile"):
        gm = traced(lambda x: x + 1, V)
        assert Recorder().record(call, gm, "inference") is call
        assert Recorder().record(call, gm, "inference") is call
    (record,) = caplog.records  # once
    assert ("trees do not load" if lack == "import" else lack) in record.getMessage()


def test_the_trees_of_this_torch_have_what_is_needed():
    assert cuda_graphs.interface_problem() is None
    gm = traced(lambda x: x + 1, V)
    told = cuda_graphs.facts(gm, "forward", 0)
    taken = cuda_graphs._parameters(cuda_graphs._trees())
    assert taken is None or set(told) <= taken
    assert [p.name for p in told["placeholders"]] == ["x_1"]


# -- on a CPU --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ("reduce-overhead", "max-autotune"))
def test_a_cpu_model_runs_plainly_and_nothing_alarms(mode, caplog):
    torch._dynamo.reset()
    cuda_graphs._say.cache_clear()
    model, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, "fusec.compile"):
        warnings.filterwarnings("error", message=".*fusec.*")
        step = torch.compile(model, backend=backend_of("fusec"), mode=mode)
        for _ in range(2):
            assert torch.allclose(step(x), model(x), atol=1e-6)
    said = [r for r in caplog.records if "CUDA graphs" in r.getMessage()]
    assert [r.levelno for r in said] == [logging.INFO]
    assert said[0].getMessage().endswith("it does not run on a CUDA device")
