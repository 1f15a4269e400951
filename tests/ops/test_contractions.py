"""Contractions, convolutions, pooling and attention against eager, alone and between chains.

fusec may leave these to eager kernels; then they have to be handed the strides that were traced.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusec
from tests.support import TRAINED, Cases, check, externs, values, with_layout

in_inference, in_training = Cases(), Cases()


@pytest.mark.sampled(3)
@TRAINED
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_linear_layers_between_chains_match_eager(dtype, train):
    def mlp(x, w, b, v):
        h = F.gelu(F.linear(x, w, b), approximate="tanh")
        return x + F.linear(h, v) * 0.5, h.sum(-1)

    tensors = ((3, 5, 16), (32, 16), (32,), (16, 32))
    scaled = [(values(*s, seed=i) * 0.5).to(dtype) for i, s in enumerate(tensors)]
    check(mlp, *scaled, train=train, tol=2e-2 if dtype == torch.bfloat16 else None)


@in_inference
def factors_of_integer_products_become_integers():
    c, a, b = (values(2, 3, 3, dtype=torch.int64, seed=k) for k in range(3))

    def products(c, a, b):
        return torch.baddbmm(c, a, b, beta=0.6, alpha=2.5), torch.addmm(c[0], a[0], b[0], alpha=1.5)

    return products, c, a, b


@pytest.mark.sampled(2)
@TRAINED
def test_every_kind_of_matrix_product_matches_eager(train):
    def products(a, b, c, v):
        return {
            "mm": a[0] @ b[0],
            "bmm": torch.bmm(a, b) + 1,
            "matmul_broadcast": a[:, None] @ b,
            "addmm": torch.addmm(c, a[0], b[0], beta=0.5, alpha=2.0),
            "baddbmm": torch.baddbmm(c, a, b),
            "mv": a[0] @ v,
            "dot": torch.dot(v, v * 2),
            "outer": torch.outer(v, v),
            "transposed": b.mT @ a.mT,
            "prologue": (a.relu() * 2) @ (b + 1),
            "einsum": torch.einsum("bmk,bkn->bnm", a, b),
            "strided": a[:, ::2] @ b[:, :, 1:],
        }

    check(
        products,
        values(3, 6, 8),
        values(3, 8, 5, seed=1),
        values(5, seed=2),
        values(8, seed=3),
        train=train,
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@TRAINED
def test_convolutions_between_chains_match_eager(layout, train):
    def convolve(x, w, b, d):
        h = F.relu(F.conv2d(x, w, b, padding=1))
        s = F.conv2d(h, w[:, :4], stride=2)
        g = F.conv2d(h.sigmoid(), d, groups=4)
        return h * 2, s + 1, g, F.conv_transpose2d(h, w), F.conv1d(x[:, :, 0], w[:, :, 0])

    x = with_layout(values(2, 4, 7, 6), layout)
    check(
        convolve,
        x,
        values(4, 4, 3, 3, seed=1) * 0.3,
        values(4, seed=2),
        values(4, 1, 2, 2, seed=3),
        train=train,
        tol=1e-4,
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@TRAINED
def test_pooling_between_chains_matches_eager(layout, train):
    def pool(x):
        h = x.relu() + 0.1 * x
        return (
            F.max_pool2d(h, 3, 2, 1) * 2,
            F.avg_pool2d(h, 2) + 1,
            F.adaptive_avg_pool2d(h, 1),
            F.adaptive_avg_pool2d(h, (3, 2)),
            F.max_pool2d(h, 2, return_indices=True)[1],
            F.lp_pool2d(x.abs() + 0.5, 2, 2),
            F.avg_pool2d(h, 3, 2, 1, count_include_pad=False),
        )

    check(pool, with_layout(values(2, 4, 8, 7), layout), train=train)


def test_the_gradient_of_a_maximum_is_eager_s_in_planes_on_cpus_and_fuses_else():
    def pool(x):
        return F.max_pool2d(x.relu() * 2, 3, 2, 1).tanh()

    x = values(2, 4, 8, 16)
    [(name, _)] = externs(pool, x, train=True)
    assert name == "max_pool2d_with_indices_backward.default"
    assert externs(pool, with_layout(x, "channels_last"), train=True) == []
    report = fusec.explain(pool, x, train=True, target="sm_90", race="fused")
    assert [extern.op for graph in report.graphs for extern in graph.externs] == []


ATTENTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ATTENTIONS)
@TRAINED
def test_attention_between_chains_matches_eager(kind, train):
    def attend(q, k, v):
        heads = [t.view(2, 9, 2, 8).transpose(1, 2) for t in (q * 1.1, k, v + 0.1)]
        out = F.scaled_dot_product_attention(*heads, **ATTENTIONS[kind])
        return out.transpose(1, 2).reshape(2, 9, 16) + q

    check(attend, *(values(2, 9, 16, seed=s) for s in range(3)), train=train)


@in_training
def attention_with_masks_and_grouped_heads_matches_eager():
    def attend(q, k, v, mask, bias):
        return (
            F.scaled_dot_product_attention(q, k, v, mask),
            F.scaled_dot_product_attention(q, k, v, bias),
            F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
        )

    mask = values(7, 9, dtype=torch.bool) | torch.eye(7, 9, dtype=torch.bool)
    return (
        attend,
        values(2, 4, 7, 8),
        values(2, 4, 9, 8, seed=1),
        values(2, 4, 9, 8, seed=2),
        mask,
        values(2, 1, 7, 9, seed=3),
    )


@in_training
def attention_written_out_matches_eager():
    def attend(q, k, v):
        scores = q @ k.transpose(-2, -1) / 8**0.5
        ahead = torch.ones(9, 9, dtype=torch.bool).triu(1)
        return scores.masked_fill(ahead, -torch.inf).softmax(-1) @ v

    return attend, *(values(2, 2, 9, 8, seed=s) for s in range(3))


def test_operations_nobody_lowers_run_between_chains():
    def rare(x):
        spd = x @ x.mT + 9 * torch.eye(9)
        return (
            torch.linalg.inv(spd) * 2,
            torch.linalg.cholesky(spd) + 1,
            x.sort(-1).values.relu(),
            torch.fft.rfft(x).abs() + 1,
            torch.cdist(x, x * 2),
        )

    check(rare, values(9, 9), tol=1e-4)


@in_inference
def a_custom_operation_nobody_knows_runs_eagerly():
    @torch.library.custom_op("fusec_tests::double_rows", mutates_args=())
    def double_rows(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x))

    @double_rows.register_fake
    def _(x):
        return x.new_empty(2 * x.shape[0], *x.shape[1:])

    return (lambda x: double_rows(x.relu() * 2).sum(0) + 1, values(5, 9))


@TRAINED
def test_recurrent_cells_match_eager(train):
    torch.manual_seed(0)
    check(torch.nn.GRUCell(6, 8), values(3, 6), values(3, 8, seed=1), train=train)
    check(torch.nn.LSTMCell(6, 8), values(3, 6), train=train)


@in_training
def a_kalman_filter_is_sums_of_products():
    def kalman(z, f, h, q, r):
        x, p, found = z.new_zeros(2, 1), torch.eye(2, dtype=z.dtype), []
        for step in range(3):
            x, p = f @ x, f @ p @ f.T + q
            gain = p @ h.T / (h @ p @ h.T + r)
            x, p = x + gain * (z[step] - h @ x), p - gain @ h @ p
            found.append(x[0, 0])
        return torch.stack(found)

    q, r = values(2, 2, seed=3).square(), values(1, 1, seed=4).square() + 1
    return kalman, values(3), values(2, 2, seed=1), values(1, 2, seed=2), q, r


@in_training
def a_delta_rule_of_few_features_is_sums_of_products():
    def delta(q, k, v, b):
        state, found = q.new_zeros(2, 4, 5), []
        for t in range(3):
            read = state.mT @ k[:, t, :, None]
            state = state + b[:, t] * k[:, t, :, None] * (v[:, t, :, None] - read).mT
            found.append(state.mT @ q[:, t, :, None])
        return torch.cat(found, -1)

    keys = values(2, 3, 4) * 0.5, values(2, 3, 4, seed=1) * 0.5
    return delta, *keys, values(2, 3, 5, seed=2), values(2, 3, 1, 1, seed=3)


@TRAINED
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
def test_steps_of_a_small_system_leave_nothing_to_the_library(dtype, train):
    def runge_kutta(x, a):
        for _ in range(2):
            first = torch.tanh(x @ a)
            x = x + 0.1 * torch.tanh((x + 0.05 * first) @ a)
        return x

    inputs = values(7, 4).to(dtype), values(4, 4, seed=1).to(dtype)
    check(runge_kutta, *inputs, train=train, left=())


@TRAINED
def test_contractions_take_dynamic_shapes(train):
    def block(x, w):
        h = F.linear(x, w).relu()
        return h @ h.mT + x.shape[1], (x.softmax(-1) @ w.t()).sum(1)

    check(block, values(3, 5, 8), values(6, 8, seed=1), dynamic=True, train=train)


def test_cases_match_eager():
    in_inference.check()


@TRAINED
def test_cases_match_eager_with_their_gradients(train):
    in_training.check(train=train)
