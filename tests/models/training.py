"""Compare whole training steps: a procedure runs with an eager model, in f64, and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from tests.support import assert_agree, compile_with

Wrap: TypeAlias = Callable[..., Callable]
"""Compiles a function as ``compile_with`` does, with its settings, or leaves it as it is."""

Procedure: TypeAlias = Callable[[nn.Module, Wrap], Mapping[str, torch.Tensor]]
"""Trains a model whose calls it has wrapped, and returns what is to be compared beside the model's
state: losses and optimizer states by name."""


def compare(model: nn.Module, procedure: Procedure, tol: float | None = None) -> None:
    """Assert that a compiled model ends where eager ends, by the rule of ``tests/support.py``.

    Compared are what the procedure returns, and parameters, their gradients and buffers after it.

    Args:
        tol: replaces the tolerance of each dtype. A few optimizer steps amplify rounding.
    """
    torch._dynamo.reset()
    ends = [
        _end(copy.deepcopy(model), procedure, _as_it_is),
        _end(copy.deepcopy(model).double(), procedure, _as_it_is),
        _end(copy.deepcopy(model), procedure, compile_with),
    ]
    eager, reference, compiled = ends
    assert eager.keys() == compiled.keys(), "other tensors than eager's"
    for name, value in eager.items():
        assert_agree(value, compiled[name], reference[name], name, tol=tol)


def _as_it_is(fn: Callable, **settings: Any) -> Callable:
    return fn


def _end(model: nn.Module, procedure: Procedure, wrap: Wrap) -> dict[str, torch.Tensor]:
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = {name: value.detach().clone() for name, value in procedure(model, wrap).items()}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach()
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad
    return {**found, **dict(model.named_buffers())}


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the type of a model's parameters: what its inputs are to have."""
    return next(model.parameters()).dtype


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the tensors that an optimizer keeps, by parameter and name."""
    states = optimizer.state_dict()["state"]
    return {
        f"{name} of parameter {number}": value
        for number, state in states.items()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
