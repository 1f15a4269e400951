"""Training as people write it: what stands around forward and backward, against eager and f64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.models.training import Wrap, compare, dtype_of, optimizer_state
from tests.models.zoo import mlp, resnet
from tests.support import compile_with, seeded, since_2_13, values

STEPS_TOL = 1e-4
"""For f32 after some optimizer steps."""


def rows(model: nn.Module, seed: int, count: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels for the model ``mlp``."""
    return values(count, 33, seed=seed).to(dtype_of(model)), (torch.arange(count) + seed) % 9


# -- gradients and who gets them -------------------------------------------------------------------


@pytest.mark.first
@pytest.mark.parametrize("set_to_none", (True, False))
def test_gradients_accumulate_over_micro_batches_and_are_cleared_by_the_optimizer(set_to_none):
    def procedure(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
        call = wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = {}
        for step in range(2):
            for micro in range(3):
                x, labels = rows(model, 3 * step + micro)
                loss = F.nll_loss(call(x), labels) / 3
                loss.backward()
                losses[f"loss {step}.{micro}"] = loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return {**losses, **optimizer_state(optimizer)}

    compare(mlp(), procedure, tol=2e-3)  # AdamW magnifies the rounding of tiny gradients


@pytest.mark.slow
def test_a_graph_is_retained_in_a_step_after_one_that_did_not_retain_it():
    def procedure(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
        call = wrap(model)
        for step, retained in enumerate((False, True, False)):
            x, labels = rows(model, step)
            loss = F.nll_loss(call(x), labels)
            loss.backward(retain_graph=retained)
            if retained:
                loss.backward()
        return {f"gradient of {n}": p.grad for n, p in model.named_parameters()}

    compare(mlp(), procedure)


class TiedModel(nn.Module):
    """An embedding whose weights are the output layer's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 20)
        self.norm = nn.LayerNorm(20)
        self.head = nn.Linear(20, 23, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.norm(self.embed(ids))))


def test_tied_weights_get_the_sum_of_both_gradients_and_stay_tied():
    with seeded():
        model = TiedModel()

    def procedure(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
        call, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = {}
        for step in range(3):
            ids = values(4, 7, dtype=torch.int64, low=0, high=23, seed=step)
            optimizer.zero_grad()
            losses[f"loss {step}"] = F.cross_entropy(call(ids).flatten(0, 1), ids.flatten())
            losses[f"loss {step}"].backward()
            optimizer.step()
        assert model.head.weight is model.embed.weight
        return {**losses, **optimizer_state(optimizer)}

    compare(model, procedure, STEPS_TOL)


@since_2_13
def test_parameters_that_freeze_between_steps_stay_where_they_are():
    def procedure(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
        call, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model[1].requires_grad_(step == 1)
            x, labels = rows(model, step)
            optimizer.zero_grad()
            before = model[1].weight.detach().clone()
            F.nll_loss(call(x), labels).backward()
            assert (model[1].weight.grad is None) is (step != 1)
            optimizer.step()
            assert torch.equal(before, model[1].weight) is (step != 1)
        return {}

    compare(mlp(), procedure, STEPS_TOL)


def test_hooks_on_parameters_and_modules_run_as_in_eager():
    def procedure(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
        seen: list[str] = []
        model[1].weight.register_hook(lambda gradient: 2 * gradient)

        def step_at_once(parameter: torch.Tensor) -> None:
            seen.append("accumulated")
            with torch.no_grad():
                parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step_at_once)
        model[2].register_forward_hook(lambda module, args, out: out * 1.5)
        call = wrap(model)
        for step in range(2):
            x, labels = rows(model, step)
            F.nll_loss(call(x), labels).backward()
        assert len(seen) == 2 * len(list(model.parameters()))
        return {}

    compare(mlp(), procedure, STEPS_TOL)


# -- functions of functions ------------------------------------------------------------------------


@pytest.mark.slow
def test_func_grad_of_a_functional_call_is_compiled_whole():
    def procedure(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
        def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, labels: torch.Tensor) -> Any:
            return F.nll_loss(functional_call(model, parameters, (x,)), labels)

        parameters = {k: v.detach() for k, v in model.named_parameters()}
        return wrap(grad(loss))(parameters, *rows(model, 0))

    compare(mlp(), procedure)


def test_gradients_of_each_sample_come_from_vmap_of_grad():
    def procedure(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
        def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, label: torch.Tensor) -> Any:
            out = functional_call(model, parameters, (x[None],))
            return -torch.where(torch.arange(9) == label, out, 0).sum()

        parameters = {k: v.detach() for k, v in model.named_parameters()}
        each = vmap(grad(loss), in_dims=(None, 0, 0))
        return wrap(each)(parameters, *rows(model, 0, count=5))

    compare(mlp(), procedure)


def test_a_gradient_penalty_inside_the_graph_trains():
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def score(x: torch.Tensor) -> torch.Tensor:
                return self.second(torch.tanh(self.first(x))).sum()

            return ((grad(score)(x).norm(dim=-1) - 1) ** 2).mean() + score(x)

    with seeded():
        model = Penalised()

    def procedure(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
        loss = wrap(model)(values(8, 12).to(dtype_of(model)))
        loss.backward()
        return {"loss": loss}

    compare(model, procedure)


def test_double_backward_through_a_compiled_graph_says_that_there_is_none():
    torch._dynamo.reset()
    x = values(8, 33).requires_grad_()
    (first,) = torch.autograd.grad(compile_with(lambda x: x.sin())(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        first.square().sum().backward()


class Rounded(torch.autograd.Function):
    """Round to steps of a quarter; the gradient passes straight through where x is small."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, step: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1), None


def test_a_custom_autograd_function_keeps_its_own_backward():
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(values(17))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (Rounded.apply(x * self.scale, 0.25) * x).sum()

    def procedure(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
        loss = wrap(model)(values(9, 17, seed=1).to(dtype_of(model)))
        loss.backward()
        assert model.scale.grad.abs().sum() > 0  # torch.round alone has the gradient 0
        return {"loss": loss}

    compare(Quantised(), procedure)


# -- checkpoints -----------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Blocks of products and pointwise operations, each behind activation checkpointing."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
            for _ in range(2)
        )
        self.settings = settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False, **self.settings)
        return x


def policy(saved: CheckpointPolicy, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return saved if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def selective(saved: CheckpointPolicy) -> Any:
    return create_selective_checkpoint_contexts(partial(policy, saved))


def one_step(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
    loss = wrap(model)(values(6, 24).to(dtype_of(model))).square().sum()
    loss.backward()
    return {"loss": loss}


def products_in_backward(model: nn.Module) -> int:
    """Count the library's products that the compiled backward runs."""
    torch._dynamo.reset()
    # Of few rows, fusec's own kernels might run them.
    loss = compile_with(model)(values(20, 24)).square().sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    return sum(event.key in ("aten::mm", "aten::addmm") for event in profile.events())


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.parametrize("saved", (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE))
def test_a_selective_checkpoint_recomputes_what_its_policy_says(saved):
    with seeded():
        model = Checkpointed(context_fn=partial(selective, saved))
    compare(model, one_step)
    # Two gradients for each of four products; of these at least the first of a block is needed.
    again = products_in_backward(model.train()) - 8
    assert again == 0 if saved is CheckpointPolicy.MUST_SAVE else again >= 2


def test_checkpoints_with_dropout_draw_the_same_mask_again():
    torch._dynamo.reset()
    x = torch.ones(64, 32, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x * 3.0, 0.5).sin()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)

    out = compile_with(loss)(x)
    out.sum().backward()
    dropped = out == 0
    assert 0.3 < dropped.float().mean() < 0.7
    expected = torch.where(dropped, 0.0, 6.0 * torch.cos(torch.tensor(6.0)))
    assert torch.allclose(x.grad, expected, atol=1e-5)


# -- losses ----------------------------------------------------------------------------------------

LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "smoothed": lambda out, t: F.cross_entropy(out, t, label_smoothing=0.1),
    "ignoring": lambda out, t: F.cross_entropy(out, t.masked_fill(t == 2, -100)),
    "weighted": lambda out, t: F.cross_entropy(out, t, weight=torch.linspace(1, 2, 9).to(out)),
    "divergence": lambda out, t: F.kl_div(
        F.log_softmax(out, -1), F.softmax(out.flip(0).detach(), -1), reduction="batchmean"
    ),
    "margins": lambda out, t: F.huber_loss(out, F.one_hot(t, 9).to(out)) + F.multi_margin_loss(
        out, t
    ),
    "binary": lambda out, t: F.binary_cross_entropy_with_logits(out, F.one_hot(t, 9).to(out)),
}  # fmt: skip


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_inside_the_graph_trains_as_eager(name):
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return LOSSES[name](self.model(x), labels)

    def procedure(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
        call, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.05)
        losses = {}
        for step in range(2):
            optimizer.zero_grad()
            losses[f"loss {step}"] = call(*rows(model.model, step))
            losses[f"loss {step}"].backward()
            optimizer.step()
        return losses

    compare(WithLoss(), procedure, STEPS_TOL)


# -- mixed precision -------------------------------------------------------------------------------


@pytest.mark.sampled(7)
@pytest.mark.parametrize("inside", (True, False), ids=("inside", "around"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "f16"))
def test_autocast_with_a_scaled_loss_trains_within_eager_s_error(dtype, inside):
    """Autocast stands in the compiled function, or around the call of a compiled model."""

    def procedure(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
        def loss_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=dtype):
                return F.nll_loss(call(x).float() if dtype_of(model) != torch.float64 else call(x),
                                  labels)  # fmt: skip

        call = model if inside else wrap(model)
        step_loss = wrap(loss_of) if inside else loss_of
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype is torch.float16)
        losses = {}
        for step in range(3):
            optimizer.zero_grad()
            loss = step_loss(*rows(model, step))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses[f"loss {step}"] = loss
        return losses

    compare(mlp(), procedure, tol=1e-2)


def test_master_weights_in_f32_of_a_bf16_model_move_as_eager_s():
    def procedure(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
        half = torch.float64 if dtype_of(model) is torch.float64 else torch.bfloat16
        masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        model.to(half)
        call, optimizer = wrap(model), torch.optim.SGD(masters, lr=0.05, momentum=0.9)
        losses = {}
        for step in range(3):
            x, labels = rows(model, step)
            losses[f"loss {step}"] = F.nll_loss(call(x).to(masters[0].dtype), labels)
            losses[f"loss {step}"].backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.to(master.dtype)
                parameter.grad = None
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
        return {**losses, **{f"master {i}": m for i, m in enumerate(masters)}}

    compare(mlp(), procedure, tol=2e-2)


# -- modes -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_and_evaluation_take_turns_on_one_compiled_model():
    def procedure(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
        call, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.05)
        found = {}
        for step in range(2):
            images = values(4, 3, 14, 10, seed=step).to(dtype_of(model))
            model.train()
            optimizer.zero_grad()
            found[f"loss {step}"] = F.cross_entropy(call(images), torch.tensor([0, 3, 1, 4]))
            found[f"loss {step}"].backward()
            optimizer.step()
            model.eval()
            before = [b.clone() for b in model.buffers()]
            with torch.no_grad():
                found[f"no_grad {step}"] = call(images)
            with torch.inference_mode():
                found[f"inference_mode {step}"] = call(images)
            after = list(model.buffers())
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return found

    compare(resnet(), procedure, STEPS_TOL)


@pytest.mark.slow
def test_two_compiled_functions_of_one_model_take_turns():
    def procedure(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
        supervised = wrap(lambda x, labels: F.nll_loss(model(x), labels))
        consistent = wrap(lambda x: (model(x) - model(x.flip(-1))).square().mean())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        found = {}
        for step in range(4):
            x, labels = rows(model, step)
            optimizer.zero_grad()
            loss = supervised(x, labels) if step % 2 == 0 else consistent(x)
            loss.backward()
            optimizer.step()
            found[f"loss {step}"] = loss
        return found

    compare(mlp(), procedure, STEPS_TOL)


def test_a_compiled_optimizer_step_moves_parameters_as_eager():
    def procedure(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
        call, step_once = wrap(model), wrap(optimizer.step, fullgraph=False)
        for step in range(3):
            x, labels = rows(model, step)
            F.nll_loss(call(x), labels).backward()
            step_once()
            optimizer.zero_grad()
        return optimizer_state(optimizer)

    compare(mlp(), procedure, STEPS_TOL)


def test_an_exception_in_a_step_leaves_the_next_step_as_eager_s():
    def procedure(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
        call, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.05)
        found = {}
        for step in range(3):
            x, labels = rows(model, step)
            optimizer.zero_grad()
            out = call(x)
            if step == 1:
                with pytest.raises(RuntimeError, match="in the backward"):
                    out.register_hook(_fail)
                    F.nll_loss(out, labels).backward()
                assert all(p.grad is None for p in model.parameters())
                continue
            found[f"loss {step}"] = F.nll_loss(out, labels)
            found[f"loss {step}"].backward()
            optimizer.step()
        return found

    compare(mlp(), procedure, STEPS_TOL)


def _fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("in the backward")


@since_2_13
def test_an_exception_of_the_graph_itself_is_eager_s_and_harms_nothing():
    class Solves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(values(4, 4) + 4 * torch.eye(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.solve(self.scale * x.exp(), x).sum()

    def procedure(model: nn.Module, wrap: Wrap) -> dict[str, torch.Tensor]:
        call, dtype = wrap(model), dtype_of(model)
        with pytest.raises(torch.linalg.LinAlgError):
            call(torch.full((4, 4), -float("inf"), dtype=dtype))
        loss = call(values(4, 4, seed=2).to(dtype))
        loss.backward()
        return {"loss": loss}

    compare(Solves(), procedure, tol=1e-3)
