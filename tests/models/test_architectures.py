"""Architectures of transformers beside eager and f64: results, gradients, several sizes.

Each model is called without gradients and trained. A gradient may cancel to what is left of far
larger ones, whose rounding is then all there is of it: it may be off by a rounding step of the
largest gradient of the model. Otherwise the rule is that of ``tests/support.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from tests.models.architectures import ARCHITECTURES, SIZES, Architecture
from tests.support import Run, assert_agree, compile_with, run

TOLERANCE = 1e-4
"""Sums over dozens of contractions, as for the models of the zoo."""
QUICK = ("mixtral",)


def compare(eager: Run, compiled: Run, exact: Run) -> None:
    """Assert that outputs, inputs and buffers after the call, and gradients agree."""
    kept = zip(
        eager.outputs + eager.inputs,
        compiled.outputs + compiled.inputs,
        exact.outputs + exact.inputs,
        strict=True,
    )
    for (name, a), (_, b), (_, r) in kept:
        assert_agree(a, b, r, name, tol=TOLERANCE)
    found = [g.abs().max().item() for _, g in eager.gradients if g is not None and g.numel()]
    step = torch.finfo(torch.float32).eps * max(found, default=0.0)
    gradients = zip(eager.gradients, compiled.gradients, exact.gradients, strict=True)
    for (name, a), (_, b), (_, r) in gradients:
        own = 0.0 if r is None or not r.numel() else r.abs().max().item()
        tol = max(TOLERANCE, step / own) if own else TOLERANCE
        assert_agree(a, b, r, f"gradient of {name}", tol=tol)


def with_static_images(call: Callable) -> Callable:
    """Call with images whose batch alone varies: their size is the model's."""

    def marked(*args: torch.Tensor) -> object:
        for image in (arg for arg in args if arg.dim() == 4):
            torch._dynamo.mark_static(image, [1, 2, 3])
        return call(*args)

    return marked


def check(row: Architecture, *, train: bool, dynamic: bool) -> None:
    """Compare every size, in one compilation where the model is one graph."""
    torch._dynamo.reset()
    counters.clear()
    model = row.build()
    own = copy.deepcopy(model)
    call = compile_with(own, dynamic=dynamic, fullgraph=row.graphs == 1)
    compiled = with_static_images(call) if dynamic else call
    for size in SIZES if dynamic else SIZES[:1]:
        args = row.arguments(size)
        eager = run(copy.deepcopy(model), args, train=train)
        exact = run(row.exact(model), args, train=train, dtype=torch.float64)
        own.load_state_dict(model.state_dict())
        compare(eager, run(compiled, args, train=train, state=own), exact)
    expected = row.dynamic_graphs if dynamic else row.graphs
    assert counters["stats"]["unique_graphs"] <= expected


@pytest.mark.parametrize("name", QUICK)
def test_training_of_one_layer_matches_eager(name):
    row = ARCHITECTURES[name]
    one = replace(row, settings={**row.settings, "num_hidden_layers": 1})
    check(one, train=True, dynamic=False)


@pytest.mark.slow
@pytest.mark.parametrize("train", (False, True), ids=("inference", "training"))
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_matches_eager(name, dynamic, train):
    check(ARCHITECTURES[name], train=train, dynamic=dynamic)
