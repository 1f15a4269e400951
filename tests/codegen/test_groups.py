"""Grouped products on GPUs, in the emulator: a product of each group, in one loop over groups."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusec.codegen.targets import find_target
from fusec.options import Options
from fusec.tools.report.emulation import Emulation, Emulator, emulate
from fusec.tools.report.observe import observe
from fusec.tools.report.stages import take_through
from tests.support import TRITON, values

fallback = pytest.importorskip("transformers.integrations.moe") and (
    torch.ops.transformers.grouped_mm_fallback
)
pytestmark = pytest.mark.skipif(not TRITON, reason="compiles with Triton")

BF16 = torch.bfloat16


def ends(*sizes: int) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def random_ends(seed: int, groups: int, rows: int) -> Tensor:
    """Return where groups end that rows are dealt to, some of them empty."""
    generator = torch.Generator().manual_seed(seed)
    of_group = torch.rand(groups, generator=generator) ** 3
    owner = torch.multinomial(of_group, rows, replacement=True, generator=generator)
    return ends(*torch.bincount(owner, minlength=groups).tolist())


def bf16(*shape: int, seed: int = 0) -> Tensor:
    return values(*shape, seed=seed).to(BF16)


def experts(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return F.silu(torch._grouped_mm(x, w, offs=offs))


def columns(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return F.silu(torch._grouped_mm(w, x, offs=offs))


def of_rows(x: Tensor, y: Tensor, offs: Tensor) -> Tensor:
    return F.silu(torch._grouped_mm(x.T, y, offs=offs))


def gated(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    gate, up = torch._grouped_mm(x, w, offs=offs).chunk(2, -1)
    return F.silu(gate) * up


def emulated(
    fn: Callable[..., Tensor], *calls: list[Tensor], target: str = "sm_90", **how: bool
) -> Emulation:
    torch._dynamo.reset()
    found = emulate(fn, *calls, target=target, options={"race": "fused"}, **how)
    assert not found.faults, str(found)
    assert any(row.launches for row in found.kernels)
    return found


def computed(fn: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """Return what the emulated kernels compute, where eager has no defined result."""
    torch._dynamo.reset()
    run = Emulator.of("sm_90", {"race": "fused"})
    result = torch.compile(fn, backend=run.backend)(*given)
    assert sum(one.launches for one in run.kernels) == 1
    return result


@pytest.mark.parametrize("target", ["sm_90", pytest.param("sm_80", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fn", [experts, gated])
def test_fifty_random_splits(fn: Callable[..., Tensor], target: str) -> None:
    x, w = bf16(70, 72, seed=1), bf16(9, 72, 48, seed=2)
    calls = [[x, w, random_ends(seed, 9, 70)] for seed in range(50)]
    emulated(fn, *calls, target=target)


@pytest.mark.parametrize("fn", [experts, gated])
def test_fifty_random_splits_with_gradients(fn: Callable[..., Tensor]) -> None:
    x, w = (t.requires_grad_() for t in (bf16(70, 72, seed=1), bf16(9, 72, 48, seed=2)))
    calls = [[x, w, random_ends(seed, 9, 70)] for seed in range(50)]
    emulated(fn, *calls, train=True)


def test_all_gradients_may_be_kernels_of_one_launch_each() -> None:
    def scaled(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return F.silu(fallback(x * 2, w * 3, offs))

    given = [bf16(60, 72).requires_grad_(), bf16(4, 72, 40).requires_grad_(), ends(9, 0, 50, 1)]
    found = emulated(scaled, given, train=True)
    assert sum(row.launches for row in found.kernels if row.graph == "backward") <= 3


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (experts, ((64, 40), (5, 40, 72))),
        (columns, ((40, 64), (5, 24, 40))),
        (of_rows, ((64, 40), (64, 72))),
    ],
)
def test_each_form_of_pytorch_s(
    fn: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...]
) -> None:
    emulated(fn, [*(bf16(*shape, seed=k) for k, shape in enumerate(shapes)), ends(9, 0, 4, 1, 50)])


def test_a_product_of_two_batches_has_no_groups() -> None:
    emulated(lambda x, w: F.silu(torch._grouped_mm(x, w)), [bf16(3, 40, 24), bf16(3, 24, 16)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_and_ends_of_64_bits(dtype: torch.dtype) -> None:
    x, w, offs = values(24, 40).to(dtype), values(3, 40, 24).to(dtype), ends(3, 0, 21).long()
    emulated(lambda *given: F.silu(fallback(*given)), [x, w, offs])


@pytest.mark.parametrize("terms", [8, 16])
@pytest.mark.parametrize("sizes", [(1,), (0, 1), (3, 0, 0), (1,) * 20, (0, 0, 130)])
def test_few_terms_and_groups_of_any_size(terms: int, sizes: tuple[int, ...]) -> None:
    given = [bf16(sum(sizes), terms), bf16(len(sizes), terms, 24), ends(*sizes)]
    emulated(experts, given)


def test_ends_may_be_computed_in_the_graph() -> None:
    def routed(x: Tensor, w: Tensor, which: Tensor) -> Tensor:
        sizes = torch.histc(which.float(), bins=5, min=0, max=4)
        return experts(x, w, sizes.cumsum(0, dtype=torch.int32))

    which = torch.arange(40) * 5 // 41
    emulated(routed, [bf16(40, 24), bf16(5, 24, 16), which])
    cast = lambda x, w, offs: experts(x, w, (offs + 0).to(torch.int32))  # noqa: E731
    emulated(cast, [bf16(9, 24), bf16(2, 24, 16), ends(4, 5).long()])


@pytest.mark.parametrize("train", [False, True])
def test_one_code_serves_any_number_of_rows(train: bool) -> None:
    w = bf16(5, 24, 40, seed=2).requires_grad_(train)
    splits = (4, 0, 3, 2, 9), (1, 150, 0, 9, 0), (0, 0, 21, 0, 1)
    calls = [[bf16(sum(s), 24).requires_grad_(train), w, ends(*s)] for s in splits]
    emulated(experts, *calls, dynamic=True, train=train)


@pytest.mark.parametrize(("columns", "k"), [(8, 2), (60, 4)])
def test_a_router_chooses_and_weighs_in_one_kernel(columns: int, k: int) -> None:
    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        weight, place = torch.topk(F.softmax(logits, -1), k)
        return weight / weight.sum(-1, keepdim=True), place

    order = torch.rand(70, columns, generator=torch.Generator().manual_seed(1)).argsort(-1)
    logits = (order.float() / 8).requires_grad_()
    found = emulated(route, [logits], train=True)
    assert sum(row.launches for row in found.kernels if row.graph == "forward") == 1


# -- what one group has reaches no other -----------------------------------------------------------


def test_rows_in_no_group_are_zero() -> None:
    result = computed(experts, bf16(50, 24), bf16(3, 24, 16), ends(9, 0, 4))
    assert result[:13].all(1).any() and not result[13:].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_stays_in_its_group(bad: float) -> None:
    x, w, offs = bf16(50, 24, seed=1), bf16(4, 24, 16, seed=2), ends(9, 0, 4, 37)
    w[1], w[2], x[2] = bad, bad, bad
    result = computed(experts, x, w, offs)
    finite = result.isfinite().all(1)
    assert finite.tolist() == [k not in (2, 9, 10, 11, 12) for k in range(50)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_of_another_group_do_not_reach_a_gradient(bad: float) -> None:
    x, y, offs = bf16(50, 24, seed=1), bf16(50, 16, seed=2), ends(9, 0, 4, 30)
    x[10], y[45] = bad, bad
    finite = computed(of_rows, x, y, offs).isfinite().all(2).all(1)
    assert finite.tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    "wrong", [(9, 3, 14, 70, 50), (-5, 3, 1000, 4, 50), (2**31 - 1, -(2**31), 0, 9, 50)]
)
@pytest.mark.parametrize("fn", [experts, of_rows])
def test_wrong_ends_read_nothing_out_of_bounds(
    fn: Callable[..., Tensor], wrong: tuple[int, ...]
) -> None:
    second = bf16(5, 24, 16) if fn is experts else bf16(50, 16)
    computed(fn, bf16(50, 24), second, torch.tensor(wrong, dtype=torch.int32))


# -- what is made of a layer -----------------------------------------------------------------------


def layer(
    x: Tensor, up: Tensor, down: Tensor, offs: Tensor, weight: Tensor, token: Tensor
) -> Tensor:
    return torch._grouped_mm(gated(x[token], up, offs), down, offs=offs) * weight[:, None]


def shapes_of_layer(rows: int, groups: int, wide: int = 256) -> list[Tensor]:
    return [
        bf16(rows // 2, wide),
        bf16(groups, wide, 2 * wide),
        bf16(groups, wide, wide),
        ends(*[rows // groups] * groups),
        bf16(rows),
        torch.arange(rows) // 2,
    ]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_a_layer_of_experts_has_one_launch_a_projection(target: str) -> None:
    (graph,) = observe(layer, shapes_of_layer(64, 8), options=Options(), target=find_target(target))
    schedule = take_through(graph, find_target(target), Options()).compiled.schedule
    assert len(schedule.steps) == len(schedule.kernels) == 2


def test_a_layer_in_the_emulator() -> None:
    emulated(layer, shapes_of_layer(64, 8, 64))
