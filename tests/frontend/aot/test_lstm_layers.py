"""LSTMs that Dynamo traces are one graph around oneDNN's layers, with eager's gradients."""

from __future__ import annotations

import copy

import pytest
import torch

from fusec.torch_interior import dynamo_config
from tests.support import BACKEND


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_lstms_are_trained_as_in_eager(layers, bidirectional):
    def step(module, x):
        y, (h, c) = module(x)
        (y.sin().sum() + h.square().sum() + c.cos().sum()).backward()
        return y, x.grad, *(p.grad for p in module.parameters())

    torch.manual_seed(0)
    eager = torch.nn.LSTM(8, 16, layers, batch_first=True, bidirectional=bidirectional)
    compiled = copy.deepcopy(eager)
    x = torch.randn(3, 5, 8)
    with dynamo_config.patch(allow_rnn=True):
        call = torch.compile(compiled, backend=BACKEND, fullgraph=True)
        found = step(call, x.clone().requires_grad_())
        with torch.no_grad():
            inferred = call(x)[0]
    expected = step(eager, x.clone().requires_grad_())
    torch.testing.assert_close(inferred, expected[0])
    torch.testing.assert_close(found, expected)
