"""Collectives stay as they were written: each once, in order, and waited for before it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import fx
from torch.utils.checkpoint import checkpoint

import fusec
from fusec.codegen.targets import find_target
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import compile_to_source
from fusec.driver.trace import Trace
from fusec.driver.user_passes import REGISTERED
from fusec.errors import PassError
from fusec.ir.graph import Extern, Graph, RowLoop, Schedule
from fusec.options import Options
from fusec.tools.report.observe import observe
from tests.distributed.ranks import run_ranks
from tests.support import check, compile_with, since_2_13, values

NAMESPACE = "_c10d_functional"
TARGETS = ("cpu", "sm_90")


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    return collectives.all_reduce(x, "sum", dist.group.WORLD)


def gather(x: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_gather_into_tensor(x, 1, dist.group.WORLD.group_name)
    )


def mixed(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Equal collectives, one that nobody reads, and independent lines that want to fuse."""
    first = sum_over_ranks(x)
    again = sum_over_ranks(x)
    gather(x)  # for its effect on the other ranks alone
    h = F.gelu(first + again) @ w
    late = gather(x.exp() * 2)
    y = F.layer_norm(sum_over_ranks(h) + late @ w, (w.shape[1],))
    return y, first.sin(), sum_over_ranks(x.exp() * 2)


def said(graph: fx.GraphModule) -> list[str]:
    """Return the collectives of an FX graph, in order, by node."""
    return [n.name for n in graph.graph.nodes if getattr(n.target, "namespace", "") == NAMESPACE]


def kept(schedule: Schedule) -> list[str]:
    """Return those of a schedule."""
    found = []
    for step in schedule.steps:
        if isinstance(step, Extern) and step.target.startswith(NAMESPACE):
            found.append(step.node)
        assert not isinstance(step, RowLoop) or not kept(step.body)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("race", ("auto", "fused"))
@pytest.mark.parametrize("target", TARGETS)
def test_collectives_keep_their_number_and_order_through_all_passes(target, race):
    (seen,) = observe(mixed, (values(32, 16), values(16, 24)))
    options = Options.from_compile(None, {"verify": True, "strict": True, "race": race})
    made = compile_to_source(seen.graph, CompileContext(find_target(target), options, Trace("g")))
    expected = said(seen.graph)
    assert len(expected) == 12, "each is a call and a wait"
    assert kept(made.schedule) == expected
    positions = [made.wrapper.index(f"extern_{name}(") for name in expected]
    assert positions == sorted(positions)
    assert all(made.wrapper.count(f"extern_{name}(") == 1 for name in expected)


def test_collectives_keep_their_order_around_a_loop_over_rows():
    """Logits run in chunks of rows; sums over ranks stand before, beside and after these."""

    def loss(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = sum_over_ranks(x)
        each = F.cross_entropy(h @ w, t)
        return sum_over_ranks(each) + sum_over_ranks(x.sum())

    inputs = values(4096, 8), values(8, 128), torch.zeros(4096, dtype=torch.int64)
    (seen,) = observe(loss, inputs)
    options = Options.from_compile(None, {"chunk_bytes": 64 * 128})
    made = compile_to_source(seen.graph, CompileContext(find_target("sm_90"), options, Trace("g")))
    assert any(isinstance(step, RowLoop) for step in made.schedule.steps)
    assert kept(made.schedule) == said(seen.graph)


def test_inputs_that_are_written_in_place_leave_collectives_in_order_and_what_they_send_intact():
    def fn(
        x: torch.Tensor, w: torch.Tensor, sent: torch.Tensor, own: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        name = dist.group.WORLD.group_name
        under_way = torch.ops._c10d_functional.all_gather_into_tensor(sent, 1, name)
        sent.mul_(2)  # not before the gather is done
        own.mul_(0.9).add_(sum_over_ranks(own.exp()))
        return *mixed(x, w), torch.ops._c10d_functional.wait_tensor(under_way).sin()

    (seen,) = observe(fn, (values(32, 16), values(16, 24), values(9), values(9)))
    made = compile_to_source(seen.graph, CompileContext(find_target("cpu"), Options(), Trace("g")))
    assert kept(made.schedule) == said(seen.graph)
    writes = made.wrapper.index("aten.copy_.default(")
    assert made.wrapper.count("aten.copy_.default(") == 1, "own is written by its kernel"
    assert writes > made.wrapper.index(f"extern_{said(seen.graph)[-1]}(")


class Summed(torch.autograd.Function):
    """A sum over ranks whose gradient is one."""

    @staticmethod
    def forward(ctx, x):
        return sum_over_ranks(x)

    @staticmethod
    def backward(ctx, gradient):
        return sum_over_ranks(gradient)


def test_large_sums_over_ranks_are_not_computed_again_in_the_backward(monkeypatch):
    """Logits that are summed over ranks: what fusec computes again ends at the collective."""
    monkeypatch.setenv("FUSEC_CHUNK_BYTES", str(64 * 128))

    def loss(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = x @ w
        return F.cross_entropy(h, t, reduction="none").exp() + Summed.apply(h).sin().sum(-1)

    inputs = values(64, 8), values(8, 128), torch.zeros(64, dtype=torch.int64)
    forward, backward = observe(loss, inputs, train=True)
    assert len(said(forward.graph)) == len(said(backward.graph)) == 2, "a call and a wait"


def collectives_run(step: Callable[[], object]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return sum(event.key == f"{NAMESPACE}::all_reduce" for event in profile.events())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("checkpointed", (False, pytest.param(True, marks=since_2_13)))
def test_a_training_step_sends_as_often_as_eager_s(checkpointed):
    w = values(16, 16).requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return Summed.apply(torch.tanh(x @ w)).sin()

    def fn(x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return (Summed.apply(x.cos()) * x).sum()

    torch._dynamo.reset()
    compiled = compile_with(fn)
    x = values(8, 16)
    compiled(x).backward()
    counts = [collectives_run(lambda call=call: call(x).backward()) for call in (fn, compiled)]
    assert counts == [5, 5] if checkpointed else counts == [4, 4]


# -- results that are not there yet ----------------------------------------------------------------


def transposed(x: torch.Tensor) -> torch.Tensor:
    return collectives.broadcast(x.t().exp(), 0, dist.group.WORLD)


def test_a_result_of_other_strides_is_copied_after_it_was_waited_for():
    """The trace says that a broadcast keeps strides; its kernel makes them row-major."""
    (seen,) = observe(transposed, (values(8, 16),))
    (node,) = [n for n in seen.graph.graph.nodes if n.name == "broadcast"]
    assert node.meta["val"].stride() == (1, 16), "torch has changed: choose another collective"
    made = compile_to_source(seen.graph, CompileContext(find_target("cpu"), Options(), Trace("g")))
    assert "broadcast = extern_broadcast(" in made.wrapper
    assert "wait_tensor = restride(extern_wait_tensor(broadcast), (1, 16))" in made.wrapper


def broadcast_from_the_first(rank: int) -> None:
    x = values(300, 400, seed=rank)
    found = compile_with(transposed)(x)
    assert torch.allclose(found, values(300, 400).t().exp(), rtol=1e-5)


@pytest.mark.slow
def test_a_broadcast_of_transposed_values_arrives():
    dist.destroy_process_group()
    try:
        run_ranks(broadcast_from_the_first)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_values_around_collectives_agree_with_eager():
    check(lambda x, w: tuple(y * 1 for y in mixed(x, w)), values(32, 16), values(16, 24))


# -- what serving engines write by hand, up to the collective --------------------------------------


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes of 8 bits, and the scale of each row."""
    scale = x.abs().amax(-1, keepdim=True).float() / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def summed_and_normed(
    part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    residual = residual + sum_over_ranks(part)
    normed = F.rms_norm(residual, (residual.shape[-1],), weight, 1e-6)
    return *quantised(normed), residual


def gated(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    gate, up = x.chunk(2, -1)
    return summed_and_normed(F.silu(gate) * up, residual, weight)


def row_parallel(
    x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The second half of a tensor-parallel MLP: each rank has some rows of w."""
    gate, up = x.chunk(2, -1)
    return summed_and_normed((F.silu(gate) * up) @ w, residual, weight)


ENGINE: dict[str, tuple[Callable[..., tuple[torch.Tensor, ...]], tuple[tuple[int, ...], ...]]] = {
    "gated": (gated, ((64, 512), (64, 256), (256,))),
    "row-parallel": (row_parallel, ((64, 512), (256, 256), (64, 256), (256,))),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ENGINE)
def test_what_stands_before_a_collective_is_one_kernel_and_what_stands_behind_is_one(case, target):
    """Residual, norm and quantisation behind a sum over ranks, with no pattern for it anywhere."""
    fn, shapes = ENGINE[case]
    (seen,) = observe(fn, tuple(values(*shape, dtype=torch.bfloat16) for shape in shapes))
    made = compile_to_source(seen.graph, CompileContext(find_target(target), Options(), Trace("g")))
    calls = [step.target for step in made.schedule.steps if isinstance(step, Extern)]
    product = ["aten.mm.default"] * (case == "row-parallel")
    assert calls == [
        *product,
        f"{NAMESPACE}.all_reduce.default",
        f"{NAMESPACE}.wait_tensor.default",
    ]
    assert [isinstance(step, Extern) for step in made.schedule.steps] == [
        False, *(True for _ in calls), False,
    ]  # fmt: skip
    before, behind = made.schedule.kernels
    assert len(before.writes) == 1, "what is sent, or multiplied"
    assert len(behind.writes) == 3, "codes, scales, and the residual for the next layer"


@pytest.mark.parametrize("case", ENGINE)
def test_norm_and_quantisation_behind_a_sum_over_ranks_agree_with_eager(case):
    fn, shapes = ENGINE[case]
    inputs = tuple(values(*shape, seed=seed) for seed, shape in enumerate(shapes))
    ours, theirs = compile_with(fn)(*inputs), fn(*inputs)
    torch.testing.assert_close(ours[1:], theirs[1:])
    # A code is one of 8 bits: a rounding before it may end at its neighbour.
    torch.testing.assert_close(ours[0].float(), theirs[0].float(), rtol=0.13, atol=1e-2)
    assert (ours[0].float() != theirs[0].float()).float().mean() < 0.01


def test_a_pass_of_the_user_leaves_collectives_where_they_are():
    """It may neither drop nor move a call that other ranks wait for."""
    (seen,) = observe(mixed, (values(32, 16), values(16, 24)))
    options = Options(passes="turned")

    @fusec.register_pass("turned")
    def turned(graph: Graph) -> Graph:
        call, wait, other, awaited, *_ = (line for line in graph.externs if line.impure)
        instead = {call: other, wait: awaited, other: call, awaited: wait}
        return replace(graph, nodes=tuple(instead.get(line, line) for line in graph.nodes))

    try:
        with pytest.raises(PassError, match="a graph with other calls that have effects"):
            compile_to_source(seen.graph, CompileContext(find_target("cpu"), options, Trace("g")))
    finally:
        REGISTERED.pop("turned")
