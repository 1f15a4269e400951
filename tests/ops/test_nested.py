"""Nested tensors (``layout=torch.jagged``): their values in a row are one tensor, compiled as such.

Their ragged size stands for several lengths. It is no number, and passed on as it is.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusec
from fusec.driver.compiler import RECENT
from fusec.errors import UsageError
from tests.support import assert_agree, compile_with, values


def normed(x, weight):
    h = F.layer_norm(x.relu() * 2, (4,))
    return F.gelu(h * weight) + x, torch.cat([h, x], -1).softmax(-1)


def nested(*lengths, dtype):
    parts = [values(n, 4, seed=n).to(dtype) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def results(fn, lengths, dtype=torch.float32):
    """Return the values of outputs and gradients, whose ragged sizes must be the input's."""
    x, weight = nested(*lengths, dtype=dtype), values(4, seed=9).to(dtype).requires_grad_()
    outputs = fn(x, weight)
    assert [out.shape[1] for out in outputs] == [x.shape[1]] * 2
    made = [out.values() for out in outputs]
    gradients = torch.autograd.grad(sum((out * out).sum() for out in made), (x, weight))
    return [t.detach() for t in (*made, gradients[0].values(), gradients[1])]


def test_values_of_nested_tensors_are_fused_and_their_sizes_passed_on():
    torch._dynamo.reset()
    RECENT.clear()
    compiled = compile_with(normed, "fusec", dynamic=None)
    for lengths in ((3, 5), (2, 4, 1)):
        triples = zip(
            results(normed, lengths), results(compiled, lengths),
            results(normed, lengths, torch.float64), strict=True,
        )  # fmt: skip
        for number, (eager, found, exact) in enumerate(triples):
            assert_agree(eager, found, exact, f"result {number}")
    assert {trace.name for trace in RECENT} == {"forward", "backward"}
    assert all(trace.problem is None for trace in RECENT)


def test_explain_refuses_nested_tensors():
    with pytest.raises(UsageError, match="nested"):
        fusec.explain(normed, nested(3, 5, dtype=torch.float32), values(4))
