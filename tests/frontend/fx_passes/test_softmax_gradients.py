"""Row sums of softmax gradients from an attention's output: where they are, and where not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fusec.frontend.aot.decompositions import decompositions
from fusec.frontend.fx_passes.draws import replace_draws
from fusec.frontend.fx_passes.softmax_gradients import rewrite_softmax_row_sums
from tests.support import FUSED, check, tune, values

aten = torch.ops.aten
BATCH, HEADS, ROWS, KEYS, COLUMNS = 2, 2, 6, 24, 8


@pytest.fixture(autouse=True)
def _small_scores_count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real_sizes" not in request.fixturenames:
        tune(monkeypatch, "fusion", scores_bytes=0)


@pytest.fixture
def real_sizes() -> None:
    """A test with the sizes of users."""


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def in_f32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ k.mT).softmax(-1), 0.4) @ v


def masked_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return torch.where(weights > 0.1, weights, 0.0) @ v


def with_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + weights.sum()


def wider_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v.repeat(1, 1, 1, 8)


def in_8_bits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).to(torch.float8_e4m3fn).to(q.dtype) @ v


def over_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rows = (ROWS, KEYS, KEYS)
    shapes = [(BATCH, HEADS, n, COLUMNS) for n in rows]
    return [values(*s, seed=i, dtype=dtype) for i, s in enumerate(shapes)]


def joint_of(function: Callable[..., Tensor], given: list[Tensor]) -> fx.GraphModule:
    """Return the joint graph of a function as the stage gets it."""
    found: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, arguments: Any, **how: Any) -> Any:
        replace_draws(joint)
        found.append(copy.deepcopy(joint))
        return min_cut_rematerialization_partition(joint, arguments, **how)

    def boxed(gm: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(gm.forward)

    backend = aot_autograd(
        fw_compiler=boxed, bw_compiler=boxed, partition_fn=partition,
        decompositions=decompositions(),
    )  # fmt: skip
    torch._dynamo.reset()
    leaves = [t.clone().requires_grad_() for t in given]
    torch.compile(function, backend=backend)(*leaves)
    (joint,) = found
    return joint


def called(joint: fx.GraphModule) -> tuple[Tensor, ...]:
    """Return the outputs and gradients of a joint graph."""
    shapes = [n.meta["val"].shape for n in joint.graph.nodes if n.op == "placeholder"]
    *primals, tangent = [values(*s, seed=i, dtype=torch.float64) for i, s in enumerate(shapes)]
    torch.manual_seed(0)
    made: tuple[Tensor, ...] = joint(primals, [tangent])
    return made


def row_sums(joint: fx.GraphModule) -> list[int]:
    """Return the lengths of the rows that the graph's sums of one dimension have."""
    nodes = [n for n in joint.graph.nodes if n.target is aten.sum.dim_IntList]
    return sorted(n.args[0].meta["val"].shape[-1] for n in nodes if n.args[1] == [-1])


EXCHANGED = (plain, by_einsum, in_f32, dropped, masked_weights)
KEPT = (with_weights, wider_values, in_8_bits, over_rows)


@pytest.mark.parametrize("function", EXCHANGED)
def test_a_row_sum_over_keys_becomes_one_over_the_output_with_equal_gradients(function):
    before = joint_of(function, inputs(torch.float64))
    after = copy.deepcopy(before)
    rewrite_softmax_row_sums(after, 0)
    assert row_sums(before) == [KEYS, KEYS] and row_sums(after) == [COLUMNS, KEYS]
    for a, b in zip(called(before), called(after), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)  # one has weights in f32


@pytest.mark.parametrize("function", KEPT)
def test_other_weights_than_those_of_the_product_keep_their_sums(function):
    joint = joint_of(function, inputs())
    before = row_sums(joint)
    rewrite_softmax_row_sums(joint, 0)
    assert row_sums(joint) == before


def test_a_product_that_repeats_its_factor_is_no_row_sum_of_the_output():
    def repeated(rows: Tensor, v: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.bmm(weights.reshape(1, -1, KEYS), v)
        return (torch.bmm(rows, v.mT) * weights).sum(-1), out

    shapes = ((1, ROWS, COLUMNS), (1, KEYS, COLUMNS), (3, ROWS, KEYS))
    check(repeated, *(values(*s, seed=i) for i, s in enumerate(shapes)), train=True)


def test_a_product_of_further_rows_is_no_output_of_these():
    def some(rows: Tensor, v: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.bmm(weights, v)
        return out, (torch.bmm(rows, v.mT) * weights[:, :ROWS]).sum(-1)

    shapes = ((2, ROWS, COLUMNS), (2, KEYS, COLUMNS), (2, 2 * ROWS, KEYS))
    check(some, *(values(*s, seed=i) for i, s in enumerate(shapes)), train=True)


def test_a_row_sum_before_the_output_stays():
    def early(rows: Tensor, v: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        total = (torch.bmm(rows, v.mT) * weights).sum(-1)
        return total, torch.bmm(weights, v)

    shapes = ((2, ROWS, COLUMNS), (2, KEYS, COLUMNS), (2, ROWS, KEYS))
    check(early, *(values(*s, seed=i) for i, s in enumerate(shapes)), train=True)


def test_a_row_sum_without_the_mask_of_the_output_stays():
    def dropped(rows: Tensor, v: Tensor, weights: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.bmm(weights * kept.to(weights.dtype), v)
        return out, (torch.bmm(rows, v.mT) * weights).sum(-1)

    shapes = ((2, ROWS, COLUMNS), (2, KEYS, COLUMNS), (2, ROWS, KEYS))
    given = [values(*s, seed=i) for i, s in enumerate(shapes)]
    check(dropped, *given, values(2, ROWS, KEYS, dtype=torch.bool), train=True)


@pytest.mark.parametrize(
    ("rows", "dtype", "exchanged"),
    [(512, torch.float32, True), (511, torch.float32, False), (1024, torch.bfloat16, False)],
)
def test_sums_of_small_scores_and_of_16_bits_stay(rows, dtype, exchanged):
    given = [values(1, n, COLUMNS, seed=i, dtype=dtype) for i, n in enumerate((rows, 512, 512))]
    joint = joint_of(plain, given)
    before = row_sums(joint)
    rewrite_softmax_row_sums(joint, 1 << 20)
    assert (row_sums(joint) != before) is exchanged


@pytest.mark.first
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_gradients_agree_with_eager(dtype: torch.dtype):
    check(plain, *inputs(dtype), train=True, backend=FUSED)


@pytest.mark.first
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_gradients_of_a_saturated_softmax_agree_with_eager(real_sizes, dtype: torch.dtype):
    q = values(2, 2, 512, 32, dtype=dtype)
    check(plain, q, q.clone(), q.clone(), train=True)


def test_gradients_agree_with_eager_in_every_length():
    def sized(n: int) -> tuple[Tensor, ...]:
        return tuple(values(1, 2, n, COLUMNS, seed=i) for i in range(3))

    check(plain, *sized(20), train=True, dynamic=True, more=[sized(33)])


def test_a_sum_over_all_axes_is_no_row_sum() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3)
    total = graph.call_function(aten.sum.dim_IntList, (x, None))
    total.meta["val"] = torch.empty(())
    graph.output((total,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    rewrite_softmax_row_sums(module, 0)
    assert [node.target for node in module.graph.nodes][1] is aten.sum.dim_IntList
