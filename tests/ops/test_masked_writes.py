"""Writes of trained values where a mask holds: choices of elements, forward and backward."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.nn.functional as F

from fusec.driver.compiler import RECENT
from tests.support import check, externs, values

MASK = values(4, 9, dtype=torch.bool)
X, TOKEN = values(4, 9, 16), values(16, seed=1)


def assigned(x, mask, token, other):
    h = F.gelu(x)
    h[mask] = token
    h[:, mask[0]] = token.unsqueeze(0)
    h[..., other] = token[0]
    h[mask, :] = token[None, :]
    return h.softmax(-1)


def put(x, mask, token, other):
    h = x * 2
    h.index_put_((mask,), token).mul_(3).index_put_((mask,), token[:1], accumulate=True)
    h[:, mask[0]] = token.sum() + x[:, :1, :1]  # one for each part before the mask
    g = torch.index_put(h, (mask,), token * 2).index_put((~mask,), token[:1])
    g.view(-1)[mask.repeat_interleave(16)] = token.mean()
    return g.tanh(), h


WRITES = {"assigned": assigned, "put": put}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "dynamic"), (("assigned", False), ("put", False), ("put", True)), ids=str
)
def test_masked_writes_of_trained_values_match_eager(name, dynamic):
    inputs = X, MASK, TOKEN, values(16, dtype=torch.bool, seed=3)
    RECENT.clear()
    check(WRITES[name], *inputs, train=True, dynamic=dynamic)
    assert RECENT and all(trace.problem is None for trace in RECENT)


def test_no_mask_and_all_of_it_have_the_gradients_of_eager():
    none, every = torch.zeros_like(MASK), torch.ones_like(MASK)
    other = values(16, dtype=torch.bool, seed=3)
    check(assigned, X, none, TOKEN, other, train=True, more=[(X, every, TOKEN, other)])


def test_nothing_of_a_masked_write_is_eager():
    def written(x, mask, token):
        h = x * 2
        h[mask] = token
        return h + 1

    assert externs(written, X, MASK, TOKEN, train=True) == []


@pytest.mark.parametrize("shape", ((3, 16), (15,)), ids=str)
def test_values_that_do_not_fit_are_eager_s_error(shape):
    def written(x, mask, token):
        return x.index_put((mask,), token) * 2

    token = values(*shape).requires_grad_()
    torch._dynamo.reset()
    for call in (written, torch.compile(written, backend="fusec")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the graph runs as eager kernels
            with pytest.raises((RuntimeError, IndexError), match=r"size|shape mismatch"):
                call(X, MASK, token)


def test_a_value_for_each_chosen_element_is_eager_s_and_the_reason_says_what_helps(caplog):
    def written(x, mask, rows):
        h = x * 2
        h[mask] = rows
        return h + 1

    rows = values(int(MASK.sum()), 16, seed=2).requires_grad_()
    helps = "capture_dynamic_output_shape_ops = True"
    torch._dynamo.reset()
    with caplog.at_level("INFO", "fusec.compile"):
        found = torch.compile(written, backend="fusec")(X, MASK, rows)
    assert re.search(f"assign runs as PyTorch runs it.*{helps}", caplog.text)
    torch.testing.assert_close(found, written(X, MASK, rows))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(written, X, MASK, rows.detach(), train=True)
