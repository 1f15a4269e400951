"""Models with dynamic shapes: several lengths, one compilation, eager's results at each."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from bench.workload import backend_of
from tests.models.zoo import LANGUAGE_MODELS, VOCABULARY, Loss, mlp
from tests.support import assert_agree, compile_with, values

LENGTHS = (13, 7, 24, 33)


def tokens(length, batch=None):
    batch = 2 + length % 3 if batch is None else batch
    return values(batch, length, dtype=torch.int64, low=1, high=VOCABULARY, seed=length)


@pytest.mark.slow
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


@pytest.mark.slow
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


def mark_both(ids):
    torch._dynamo.mark_dynamic(ids, 0)
    torch._dynamo.mark_dynamic(ids, 1)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", ("dynamic", "automatic", "marked"))
@pytest.mark.parametrize("train", (False, True), ids=("inference", "training"))
@pytest.mark.parametrize("name", ("gpt2", "llama"))
def test_one_compilation_serves_twenty_lengths_in_five_batches(name, train, lengths):
    torch._dynamo.reset()
    counters.clear()
    model = LANGUAGE_MODELS[name](layers=1)
    model = Loss(model, shift=True).train() if train else model
    options = {"strict": True, "verify": True}
    dynamic = True if lengths == "dynamic" else None
    compiled = torch.compile(
        model, backend=backend_of("fusec"), dynamic=dynamic, fullgraph=True, options=options
    )
    for batch in (2, 3, 5, 8, 16):
        for length in range(5, 65, 3):
            ids = tokens(length, batch)
            if lengths == "marked":
                mark_both(ids)
            with torch.set_grad_enabled(train):
                assert torch.allclose(compiled(ids), model(ids), atol=1e-4)
    # Two sizes become dynamic one after the other, each when it is seen to change.
    assert counters["stats"]["unique_graphs"] == (3 if lengths == "automatic" else 1)


class Patches(nn.Module):
    """An image in patches and heads, so that sizes divide each other."""

    def __init__(self, width=16, heads=4, patch=4):
        super().__init__()
        self.heads, self.patch = heads, patch
        self.embed, self.qkv = nn.Linear(3 * patch**2, width), nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        b, c, h, w = x.shape
        p = self.patch
        parts = x.view(b, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5)
        y = self.embed(parts.reshape(b, (h // p) * (w // p), c * p * p))
        triple = self.qkv(self.norm(y)).view(b, -1, 3, self.heads, y.shape[-1] // self.heads)
        q, k, v = triple.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return (y + attended.reshape(y.shape)).softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize("train", (False, True), ids=("inference", "training"))
@pytest.mark.parametrize("lengths", ("dynamic", "automatic", "marked"))
def test_fusec_compiles_no_more_often_than_dynamo_asks(lengths, train):
    graphs = []
    for backend in ("aot_eager", "fusec"):
        torch._dynamo.reset()
        counters.clear()
        model = Patches()
        dynamic = True if lengths == "dynamic" else None
        call = torch.compile(model, backend=backend_of(backend), dynamic=dynamic, fullgraph=True)
        for batch in (2, 3, 5):
            for height, width in ((8, 12), (12, 8), (16, 32), (32, 20)):
                x = values(batch, 3, height, width)
                for axis in (0, 2, 3) if lengths == "marked" else ():
                    torch._dynamo.mark_dynamic(x, axis)
                with torch.set_grad_enabled(train):
                    assert torch.allclose(call(x), model(x), atol=1e-5)
                    if train:
                        call(x).square().sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[0]
    assert lengths == "automatic" or graphs[1] == 1


@pytest.mark.slow
def test_batches_of_one_and_none_are_served():
    torch._dynamo.reset()
    model = mlp()
    compiled = compile_with(model, dynamic=True)
    with torch.no_grad():
        for rows in (6, 1, 0, 2):
            x = values(rows, 33)
            assert torch.allclose(compiled(x), model(x), atol=1e-5)
