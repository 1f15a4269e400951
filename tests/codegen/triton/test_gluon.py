"""Kernels whose warps have roles: values in the emulator, what overlaps, and planted faults.

A machine of two multiprocessors has each program walk over several tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusec.codegen import targets
from fusec.codegen.triton.form import FORM
from fusec.driver.build import triton_source
from fusec.driver.compiler import context_for
from fusec.driver.pipeline import flat_kernels
from fusec.driver.stages import offered_plans
from fusec.driver.trace import Trace
from fusec.options import Options
from fusec.tools.report.emulation import Emulator, emulate
from tests.calls import calls_of
from tests.codegen.test_contraction_static import staged
from tests.codegen.triton.test_nested_specialization import windowed
from tests.planted import recode
from tests.tools.emulator.events import Event, trace
from tests.tools.emulator.recorded import Launched, changed, normal, record, with_instead, without

BF16, F16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def two_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    row = targets.TARGETS["sm_90"]
    few = replace(row, machine=replace(row.machine, units=2))
    monkeypatch.setitem(targets.TARGETS, "sm_90", few)


def tensor(n: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    """Return one of several unlike tensors."""
    return torch.roll(normal(*shape, dtype=dtype, scale=scale), n)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def linear_and_residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Two results, one of them in f32, of a row, a column's and a tile's operands."""
    y = torch.tanh(F.linear(x, w, b) + r)
    return y * r[:, :1], y.float() - 1


def swiglu(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(x @ w.t()) * (x @ v.t())


def swiglu_by_columns(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(x @ w) * (x @ v)


def of_gated_batches(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(x @ w) * (x @ v)


def of_batches(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(x @ w)


def of_columns(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x.t() @ w)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, is_causal=True)


def gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Rows in the layout of scores meet a tile in that of the result."""
    return causal(q, k, v) * torch.sigmoid(gate)


def heads(*shape: int, count: int = 3, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [tensor(n, *shape, dtype=dtype) for n in range(count)]


def rows(m: int, k: int, n: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [tensor(0, m, k, dtype=dtype), tensor(1, n, k, scale=k**-0.5, dtype=dtype)]


Case = tuple[Callable[..., object], list[Tensor]]
CASES: dict[str, Case] = {
    "linear and GELU": (linear, [*rows(200, 264, 328), tensor(2, 328)]),
    "linear and GELU of whole tiles": (linear, [*rows(256, 128, 512), tensor(2, 512)]),
    "linear and GELU in f16": (linear, [*rows(200, 72, 328, F16), tensor(2, 328, dtype=F16)]),
    "a sum of one step": (linear, [*rows(300, 40, 264), tensor(2, 264)]),
    "two results and three operands": (
        linear_and_residual, [*rows(200, 264, 328), tensor(2, 328), tensor(3, 200, 328)]),
    "a result of odd rows, by pointers": (linear, [*rows(200, 72, 257), tensor(2, 257)]),
    "swiglu": (swiglu, [*rows(200, 264, 328), tensor(2, 328, 264, scale=0.06)]),
    "swiglu of weights by columns": (
        swiglu_by_columns, [tensor(n, *shape, scale=0.06) for n, shape in enumerate(
            ((200, 264), (264, 328), (264, 328)))]),
    "swiglu of batches": (
        of_gated_batches, [tensor(n, 3, *shape, scale=0.1) for n, shape in enumerate(
            ((136, 72), (72, 264), (72, 264)))]),
    "batches": (of_batches, [tensor(0, 3, 136, 72), tensor(1, 3, 72, 264, scale=0.1)]),
    "both operands by columns": (of_columns, [tensor(0, 72, 200), tensor(1, 72, 264, scale=0.1)]),
}  # fmt: skip
ATTENTIONS: dict[str, Case] = {
    "attention": (attention, heads(1, 3, 300, 64)),
    "causal attention": (causal, heads(2, 3, 333, 64)),
    "causal attention of wide heads": (causal, heads(1, 2, 300, 128)),
    "attention of wide heads": (attention, heads(1, 2, 300, 128)),
    "attention in f16": (causal, heads(1, 2, 200, 64, dtype=F16)),
    "attention with a bias": (biased, [*heads(1, 2, 200, 64), tensor(3, 1, 1, 200, 200)]),
    "attention with a bias of each head": (
        biased, [*heads(1, 2, 200, 64), tensor(3, 1, 2, 200, 200)]),
    "attention of wide heads with a bias": (
        biased, [*heads(1, 2, 300, 128), tensor(3, 1, 2, 300, 304)[..., :300]]),
    "attention to a window": (windowed, heads(1, 2, 333, 64)),
    "grouped heads": (grouped, [tensor(0, 1, 4, 200, 128), *heads(1, 2, 200, 128)[1:]]),
    "heads of 256 features": (causal, heads(1, 1, 200, 256)),
    "heads of 80 features": (causal, heads(1, 2, 200, 80)),
    "a gate behind an attention": (gated, heads(1, 2, 200, 64, count=4)),
    "other queries than keys": (attention, [tensor(0, 1, 2, 200, 64), *heads(1, 2, 77, 64)[1:]]),
}  # fmt: skip


def sliced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An attention whose heads have 64 features, also where all sizes of its inputs are symbols."""
    return attention(*(x[..., :64] for x in (q, k, v)))


def sliced_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(*(x[..., :64] for x in (q, k, v)))


SYMBOLIC: dict[str, Case] = {
    "attention of sliced heads": (sliced, heads(1, 2, 200, 80)),
    "causal attention of sliced heads": (sliced_causal, heads(1, 2, 333, 80)),
}


def check(name: str, seed: int, *, dynamic: bool = False, train: bool = False) -> None:
    """Emulate a case and check its values, and that its warps had roles."""
    torch._dynamo.reset()
    fn, inputs = (CASES | ATTENTIONS | SYMBOLIC)[name]
    options = {"race": "fused", "roles": "cooperative"}
    with calls_of(triton_source) as made:
        found = emulate(fn, inputs, options=options, seed=seed, dynamic=dynamic, train=train)
    assert found.faults == (), str(found)
    assert any("warp_specialize" in call.result.source for call in made)


def test_values_are_right() -> None:
    check("linear and GELU", 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", (1, 2))
@pytest.mark.parametrize("name", CASES)
def test_values_are_right_in_several_orders(name: str, seed: int) -> None:
    check(name, seed)


@pytest.mark.slow
def test_values_of_symbolic_sizes_are_right() -> None:
    check("linear and GELU of whole tiles", 0, dynamic=True)


def test_an_attentions_values_are_right() -> None:
    check("causal attention", 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", (1, 2))
@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_attentions_values_are_right_in_several_orders(name: str, seed: int) -> None:
    check(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", SYMBOLIC)
def test_an_attentions_values_of_symbolic_sizes_are_right(name: str) -> None:
    check(name, 0, dynamic=True)


def test_an_attentions_gradients_are_right() -> None:
    """Forward and backward have roles; tiles are ragged."""
    check("other queries than keys", 0, train=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", (1, 2))
@pytest.mark.parametrize("name", [name for name in ATTENTIONS if "a bias" not in name])
def test_an_attentions_gradients_are_right_in_several_orders(name: str, seed: int) -> None:
    check(name, seed, train=True)


def test_what_breaks_a_promise_goes_by_pointers_over_the_same_grid() -> None:
    """Rows of 65 elements have no descriptor; those of a moved tensor have none either."""
    torch._dynamo.reset()
    x, w, b = *rows(200, 72, 264), tensor(2, 264)
    moved = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    assert moved.data_ptr() % 16
    found = emulate(linear, [moved, w, b], options={"race": "fused", "roles": "cooperative"})
    assert found.faults == (), str(found)


# -- plans chosen by rule --------------------------------------------------------------------------

RULED: dict[str, Case] = {
    "whole tiles": (linear, [*rows(512, 128, 1024), tensor(2, 1024)]),
    "ragged tiles, and a step of 8 terms": (linear, [*rows(520, 136, 776), tensor(2, 776)]),
    "two accumulators": (swiglu, [*rows(520, 72, 392), tensor(2, 392, 72, scale=0.1)]),
    "batches": (of_batches, [tensor(0, 3, 376, 72), tensor(1, 3, 72, 760, scale=0.1)]),
    "a result of odd rows, by pointers": (linear, [*rows(520, 72, 769), tensor(2, 769)]),
    "an attention of wide heads": (causal, heads(1, 3, 300, 128)),
    "rows of a table are added": (
        lambda x, w, b, e, i: linear(x, w, b) + e[i],
        [*rows(520, 72, 776), tensor(2, 776), tensor(3, 40, 776), torch.arange(520) % 40]),
}  # fmt: skip
"""Kernels of enough tiles for two multiprocessors that fill their waves."""


def ruled(fn: Callable[..., object], inputs: list[Tensor], **how: bool) -> int:
    """Emulate a function in the plans that a rule chooses; return the kernels with roles."""
    torch._dynamo.reset()
    with calls_of(triton_source) as made:
        found = emulate(fn, inputs, options={"race": "fused"}, **how)
    assert found.faults == (), str(found)
    return sum("warp_specialize" in call.result.source for call in made)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RULED)
def test_roles_by_rule_compute_what_is_right(name: str) -> None:
    assert ruled(*RULED[name]) == 1


UNRULED: dict[str, Case] = {
    "rows of 65 terms": (linear, [*rows(520, 65, 776), tensor(2, 776)]),
    "f32": (linear, [*rows(520, 72, 776, torch.float32), tensor(2, 776, dtype=torch.float32)]),
    "rows 150 bytes apart": (
        lambda x, w, b: linear(x[:, :72], w, b),
        [tensor(0, 520, 75), tensor(1, 776, 72, scale=0.1), tensor(2, 776)]),
    "few tiles": (linear, [*rows(200, 72, 328), tensor(2, 328)]),
    "few rows": (linear, [*rows(16, 72, 2048), tensor(2, 2048)]),
    "a factor that is computed": (
        lambda x, w, b: F.linear(torch.sin(x), w, b), [*rows(520, 72, 776), tensor(2, 776)]),
    "narrow heads": (causal, heads(1, 3, 300, 64)),
    "a gathered factor": (
        lambda x, w, i: x[i] @ w.t(), [*rows(520, 72, 776), torch.arange(520).flip(0)]),
}  # fmt: skip
"""Kernels for which the rule chooses no roles: what they lack is in their names."""


@pytest.mark.slow
@pytest.mark.parametrize("name", UNRULED)
def test_kernels_without_roles_by_rule_compute_what_is_right(name: str) -> None:
    assert ruled(*UNRULED[name]) == 0


@pytest.mark.slow
def test_roles_by_rule_in_training_compute_what_is_right() -> None:
    """Backward products read a gradient by rows and by columns."""
    fn, inputs = RULED["ragged tiles, and a step of 8 terms"]
    assert ruled(fn, inputs, train=True) >= 1


def test_memory_that_breaks_a_promise_goes_by_pointers_by_rule() -> None:
    x, w, b = *rows(520, 72, 776), tensor(2, 776)
    moved = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    assert moved.data_ptr() % 16
    assert ruled(linear, [moved, w, b]) == 1


def test_roles_by_rule_run_for_any_sizes_that_a_call_has() -> None:
    """Compiled for 528 rows: more, odd numbers of them, fewer tiles than programs, one, none."""
    emulator = Emulator.of("sm_90", {"race": "fused"})
    torch._dynamo.reset()
    _, w, b = *rows(528, 80, 784), tensor(2, 784)
    with calls_of(triton_source) as made:
        compiled = torch.compile(linear, backend=emulator.backend, dynamic=True)
        for count in (528, 656, 130, 16, 2, 0):
            x = tensor(0, 700, 80)[:count]
            torch.testing.assert_close(compiled(x, w, b), linear(x, w, b), rtol=2e-2, atol=2e-2)
    (one,) = [call.result for call in made if "warp_specialize" in call.result.source]
    assert one.grid[0].startswith("min(2, ") and len(one.divisible) > 4


def test_a_plan_whose_program_does_not_split_is_not_offered() -> None:
    """A gradient that sums a row before it multiplies: two loops unlike each other."""

    def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(torch.ones(300, 300, dtype=torch.bool).triu(1), -1e9)
        return scores.softmax(-1) @ v

    inputs = [x.requires_grad_() for x in heads(1, 2, 300, 64)]
    forward, backward = staged(written_out, *inputs, train=True)
    for one, some in ((forward, True), (backward, False)):
        assert one.compiled is not None
        context = context_for(one.observed.graph, one.target, Options(), Trace("t"))
        flat = flat_kernels(one.compiled.schedule.kernels, context).values()
        assert any(plan.roles for kernel in flat for plan in one.target.plans(kernel))
        found = any(plan.roles for kernel in flat for plan in offered_plans(kernel, context))
        assert found is some


# -- what overlaps ---------------------------------------------------------------------------------


TILES = 6


@functools.cache
def launched() -> Launched:
    """A launch of one block: a cooperative group has six tiles."""
    x, w = rows(256, 320, 768)
    (one,) = record(linear, x, w, tensor(2, 768), roles="cooperative")
    return replace(one, grid=(1, 1, 1))


@functools.cache
def traced(seed: int) -> tuple[Event, ...]:
    one = launched()
    return trace(one.compiled.code, one.grid, one.compiled.arguments(one.args), seed)


def tiles_loaded_ahead(events: tuple[Event, ...]) -> list[float]:
    """Return for each tile how many others had been loaded when its first box was stored."""
    loads = [n for n, event in enumerate(events) if event.operation == "bulk_load"]
    stores = [n for n, event in enumerate(events) if event.operation == "bulk_store"]
    each = len(loads) // TILES
    firsts = stores[:: len(stores) // TILES]
    return [sum(at < here for at in loads) / each - n for n, here in enumerate(firsts, 1)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(3))
def test_the_next_tiles_loads_are_issued_before_a_tile_is_stored(seed: int) -> None:
    *ahead, last = tiles_loaded_ahead(traced(seed))
    assert min(ahead) >= 0 and max(ahead) >= 0.5 and last == 0
    assert sum(share > 0 for share in ahead) >= 4, ahead


@pytest.mark.slow
def test_without_roles_no_tile_is_loaded_before_the_last_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the trace above shows is not there by itself: the same plan, printed for all warps."""
    for_all_warps = tuple(stage for stage in FORM if stage.name != "specialize_warps")
    recode(monkeypatch, "sm_90", form=for_all_warps)
    launched.cache_clear()
    one = launched()
    launched.cache_clear()
    events = trace(one.compiled.code, one.grid, one.compiled.arguments(one.args), 0)
    assert tiles_loaded_ahead(events) == [0] * TILES


@functools.cache
def attended() -> Launched:
    """A launch of one block at the tiles of an attention with several iterations each."""
    (one,) = record(causal, *heads(1, 1, 640, 64), roles="cooperative")
    return replace(one, grid=(1, 1, 1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(3))
def test_scores_are_started_before_the_weights_of_the_iteration_before_are_multiplied(
    seed: int,
) -> None:
    """Tensor cores have both products to do when a warp waits for the scores, and not for both."""
    one = attended()
    events = trace(one.compiled.code, one.grid, one.compiled.arguments(one.args), seed)
    mine = [e for e in events if e.warp == 0 and e.operation in ("wgmma", "wait_group")]
    lines = one.compiled.code.ptx.splitlines()
    waits = [
        n
        for n, e in enumerate(mine)
        if lines[e.line - 1].strip().endswith("wait_group.sync.aligned 1;")
    ]
    for at in waits:
        started = [lines[e.line - 1].split(".f32")[0].split(".")[-1] for e in mine[:at]]
        kinds = [kind for kind, _ in groupby(reversed(started))][:2]
        assert kinds == ["m64n64k16", "m64n128k16"], kinds
    assert len(waits) > 10


# -- planted faults --------------------------------------------------------------------------------

RACES = ("race with a write", "race with a read", "uninitialised read", "deadlock")


def other_parity(line: str) -> str:
    """Wait for the phase after the next: the first wait of a fresh barrier passes at once."""
    before, comma, _ = line.rpartition(", ")
    return f"{before}{comma}1;"


PLANTED: dict[str, tuple[Callable[[str], str], tuple[str, ...]]] = {
    "a wait for products leaves one too many": (
        with_instead("wgmma.wait_group.sync.aligned 1", "wgmma.wait_group.sync.aligned 2"), RACES),
    "the last wait for products leaves one": (
        with_instead("wgmma.wait_group.sync.aligned 0", "wgmma.wait_group.sync.aligned 1"),
        (*RACES, "register in flight")),
    "slots are not freed": (without("mbarrier.arrive.shared", 0), ("deadlock",)),
    "a load expects nothing": (
        without("mbarrier.arrive.expect_tx", 0), (*RACES, "too many arrivals")),
    "a wait for a full slot has the wrong parity": (changed("try_wait", other_parity, 0), RACES),
    "a result is not fenced": (without("fence.proxy.async", 0), ("no proxy fence",)),
    "a result is overwritten while it leaves": (
        without("cp.async.bulk.wait_group.read", 0), ("race with a read",)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_in_some_order(name: str) -> None:
    edit, kinds = PLANTED[name]
    found = [launched().fault(edit, seed=seed) for seed in range(4)]
    seen = {fault.kind for fault in found if fault is not None}
    assert seen and seen <= set(kinds), found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PLANTED if "one too many" not in name])
def test_a_fault_planted_in_an_attention_is_found(name: str) -> None:
    edit, kinds = PLANTED[name]
    found = [attended().fault(edit, seed=seed) for seed in range(4)]
    seen = {fault.kind for fault in found if fault is not None}
    assert seen and seen <= set(kinds), found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_an_attention_as_it_is_has_no_fault(seed: int) -> None:
    assert attended().fault(seed=seed) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_kernel_as_it_is_has_no_fault(seed: int) -> None:
    assert launched().fault(seed=seed) is None


@functools.cache
def gradients() -> tuple[Launched, ...]:
    """Launches of one block: gradients of an attention's queries, and of its keys and values."""
    _, *found = record(attention, *heads(1, 1, 640, 64), train=True, roles="cooperative")
    return tuple(replace(one, grid=(1, 1, 1)) for one in found)


KINDS = (*RACES, "too many arrivals", "register in flight", "no proxy fence")


@pytest.mark.slow
@pytest.mark.parametrize("which", (0, 1), ids=("queries", "keys"))
@pytest.mark.parametrize("name", [name for name in PLANTED if "one too many" not in name])
def test_a_fault_planted_in_a_gradient_is_found(name: str, which: int) -> None:
    edit, _ = PLANTED[name]
    found = [gradients()[which].fault(edit, seed=seed) for seed in range(4)]
    seen = {fault.kind for fault in found if fault is not None}
    assert seen and seen <= set(KINDS), found


@pytest.mark.slow
@pytest.mark.parametrize("which", (0, 1), ids=("queries", "keys"))
@pytest.mark.parametrize("seed", range(4))
def test_a_gradient_as_it_is_has_no_fault(seed: int, which: int) -> None:
    assert gradients()[which].fault(seed=seed) is None
