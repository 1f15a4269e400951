"""Compiled functions meet tensors without memory: a pointer to nothing would end the process."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.support import compile_with


def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2 + 1


def test_a_compiled_function_takes_fake_tensors_under_their_mode() -> None:
    compiled = compile_with(doubled)
    with FakeTensorMode():
        made = compiled(torch.ones(3, 5))
    assert isinstance(made, FakeTensor)
    assert made.shape == (3, 5)


def test_a_compiled_function_takes_fake_tensors_after_their_mode() -> None:
    with FakeTensorMode():
        fake = torch.ones(3, 5)
    compiled = compile_with(doubled)
    for _ in range(2):
        assert isinstance(compiled(fake), FakeTensor)


def test_real_and_fake_calls_of_one_function_do_not_disturb_each_other() -> None:
    compiled = compile_with(doubled)
    real = torch.ones(3, 5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(compiled(real), FakeTensor)
    assert torch.equal(compiled(real), torch.full((3, 5), 3.0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(compiled(real), FakeTensor)
    assert torch.equal(compiled(real), torch.full((3, 5), 3.0))


def test_a_fake_model_trains() -> None:
    with FakeTensorMode():
        model = compile_with(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)))
        model(torch.ones(3, 8)).sum().backward()
    assert all(isinstance(p.grad, FakeTensor) for p in model.parameters())
