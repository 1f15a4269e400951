"""Whole training steps: loss.backward, optimizer steps, statistics, accumulated gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from tests.models.zoo import mlp, resnet
from tests.support import assert_agree, compile_with, values

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


def steps(model, call, optimizer, batches, loss_of):
    """Losses and final state after one optimizer step a batch."""
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(call, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, dict(model.state_dict())


def compare_steps(model, optimizer, batches, loss_of, tol=1e-4):
    torch._dynamo.reset()
    plain, double, trained = (copy.deepcopy(model).train() for _ in range(3))
    double.double()
    wide = [[t.double() if t.is_floating_point() else t for t in batch] for batch in batches]
    expected = steps(plain, plain, optimizer, batches, loss_of)
    reference = steps(double, double, optimizer, wide, loss_of)
    found = steps(trained, compile_with(trained), optimizer, batches, loss_of)
    for i, triple in enumerate(zip(expected[0], found[0], reference[0], strict=True)):
        assert_agree(*triple, f"loss of step {i}", tol=tol)
    for name in expected[1]:
        triple = (run[1][name] for run in (expected, found, reference))
        assert_agree(*triple, f"{name} after training", tol=tol)


@pytest.mark.slow
def test_two_steps_of_a_residual_network_move_its_running_statistics_as_eager():
    def batch(seed):
        return [values(4, 3, 14, 10, seed=seed), torch.tensor([0, 3, 1, 4])]

    model = resnet()
    compare_steps(model, "sgd", [batch(0), batch(1)],
                  lambda call, b: F.cross_entropy(call(b[0]), b[1]))  # fmt: skip


@pytest.mark.first
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_three_steps_of_an_mlp_end_where_eager_ends_by_one_compilation(optimizer):
    from torch._dynamo.utils import counters

    batches = [[values(17, 33, seed=s), torch.arange(17) % 9] for s in range(3)]
    counters.clear()
    # AdamW divides a gradient by its own size: rounding of tiny gradients is magnified.
    tol = 1e-4 if optimizer == "sgd" else 2e-3
    compare_steps(mlp(), optimizer, batches, lambda call, b: F.nll_loss(call(b[0]), b[1]), tol)
    assert counters["stats"]["unique_graphs"] == 1


def test_inference_and_training_of_one_compiled_model_alternate():
    torch._dynamo.reset()
    model = mlp()
    compiled = compile_with(model)
    x = values(17, 33)
    with torch.no_grad():
        before = compiled(x)
    loss = compiled(x).square().sum()
    loss.backward()
    with torch.inference_mode():
        after = compiled(x)
    assert torch.allclose(before, model(x), atol=1e-5)
    assert torch.allclose(before, after, atol=1e-6)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.slow
def test_a_checkpointed_block_recomputes_to_eager_gradients():
    from torch.utils.checkpoint import checkpoint

    torch._dynamo.reset()
    model, x = mlp().train(), values(17, 33)
    reference = copy.deepcopy(model)
    compile_with(lambda x: checkpoint(model, x, use_reentrant=False))(x).sum().backward()
    reference(x).sum().backward()
    for (name, a), b in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-5), name
