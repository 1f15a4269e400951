"""Models with dynamic shapes: several lengths, one compilation, eager's results at each."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from tests.models.zoo import LANGUAGE_MODELS, VOCABULARY, Loss, mlp
from tests.support import assert_agree, compile_with, values

LENGTHS = (13, 7, 24, 33)


def tokens(length):
    return values(2, length, dtype=torch.int64, low=1, high=VOCABULARY, seed=length)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_one_compilation_serves_every_sequence_length(name):
    torch._dynamo.reset()
    counters.clear()
    model = LANGUAGE_MODELS[name](layers=1)
    double = copy.deepcopy(model).double()
    compiled = compile_with(model, dynamic=True)
    with torch.no_grad():
        for length in LENGTHS:
            ids = tokens(length)
            triple = model(ids), compiled(ids), double(ids)
            assert_agree(*triple, f"logits at length {length}", tol=1e-4, strides=True)
    assert counters["stats"]["unique_graphs"] == 1


def test_one_compilation_trains_at_every_sequence_length():
    torch._dynamo.reset()
    counters.clear()
    model = Loss(LANGUAGE_MODELS["gpt2"](layers=1), shift=True).train()
    double = copy.deepcopy(model).double()
    trained = copy.deepcopy(model)
    compiled = compile_with(trained, dynamic=True)
    for length in LENGTHS:
        for call in (model, double, compiled):
            call(tokens(length)).backward()
    names = [name for name, _ in model.named_parameters()]
    gradients = ([p.grad for p in m.parameters()] for m in (model, trained, double))
    for name, *triple in zip(names, *gradients, strict=True):
        assert_agree(*triple, f"gradient of {name}", tol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_second_length_makes_an_automatic_model_dynamic_and_a_third_costs_nothing():
    torch._dynamo.reset()
    counters.clear()
    model = mlp()
    compiled = compile_with(model, dynamic=None)
    with torch.no_grad():
        for rows in (5, 9, 17, 40):
            x = values(rows, 33, seed=rows)
            assert torch.allclose(compiled(x), model(x), atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 2


def test_batches_of_one_and_none_are_served():
    torch._dynamo.reset()
    model = mlp()
    compiled = compile_with(model, dynamic=True)
    with torch.no_grad():
        for rows in (6, 1, 0, 2):
            x = values(rows, 33)
            assert torch.allclose(compiled(x), model(x), atol=1e-5)
