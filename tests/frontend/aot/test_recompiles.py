"""A function that is compiled anew for each call is said, once, with the user's line."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support import values


def said(call, given) -> list[str]:
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        compiled = torch.compile(call, backend="fusec", dynamic=False)
        for args in given:
            compiled(*args)
    return sorted({str(w.message) for w in seen if str(w.message).startswith("fusec")})


def test_a_shape_that_each_call_changes_is_said():
    def grows(x):
        return x.unsqueeze_(0).sin() + 1

    x = values(3, 4)
    (message,) = said(grows, [(x,)] * 4)
    assert "test_recompiles.py" in message and "x.unsqueeze_(0).sin()" in message
    assert "an input of 3, then 4, then 5 dimensions" in message and "unsqueeze_" in message


def test_a_number_that_each_call_changes_is_said():
    def picks(x, i):
        return (x * 2)[1, i].sin()

    counters.clear()
    messages = said(picks, [(values(4, 5), torch.tensor(i)) for i in range(4)])
    if counters["stats"]["unique_graphs"] == 1:  # from torch 2.15 on one graph takes any number
        assert messages == []
        return
    (message,) = messages
    assert "(x * 2)[1, i].sin()" in message and "i.view(1)" in message


@pytest.mark.parametrize(
    ("fn", "given"),
    (
        (lambda x: x.clone().unsqueeze_(0).sin(), [(values(3, n),) for n in (4, 5, 6, 7)]),
        (lambda x: x.t_().sin(), [(values(3, 4),)] * 4),
        (lambda x: x.unsqueeze_(0).sin(), [(values(3, 4, seed=n),) for n in range(4)]),
        (lambda x, i: (x * 2)[1, i], [(values(4, 5), torch.tensor(2))] * 4),
        (lambda x, i: (x * 2)[1, i.view(1)], [(values(4, 5), torch.tensor(n)) for n in range(4)]),
    ),
    ids=("own tensor", "two shapes", "other tensors", "one number", "an index of one element"),
)  # fmt: skip
def test_what_is_compiled_for_other_reasons_is_not_said(fn, given):
    assert said(fn, given) == []
