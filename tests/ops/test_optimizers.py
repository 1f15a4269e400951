"""Steps of torch's optimizers, compiled: what parameters and states are after five steps.

The rule is that of ``numerics.md``: beside the same steps in fp64, fusec's error is at most three
times eager's, or a few roundings of the parameter's type.
"""

from __future__ import annotations

import pytest
import torch

import fusec
from tests.support import BACKEND, compile_with

SHAPES = [(0,), (1,), (3,), (17,), (1024,), (4097,), (3, 5, 2), (8, 16), (), (4, 16), (2, 16)]
STEPS = 5
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-52}


@pytest.fixture(autouse=True)
def _fresh():
    """Optimizers share the code of ``step``, of which Dynamo compiles so many variants."""
    torch._dynamo.reset()


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "sgd_momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd_dampened": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "sgd_nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd_maximize": (torch.optim.SGD, {"maximize": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw_amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "adamw_maximize": (torch.optim.AdamW, {"maximize": True}),
}


def parameters(dtypes=(torch.float32,), shapes=SHAPES):
    torch.manual_seed(0)
    made = [torch.randn(s, dtype=dtypes[k % len(dtypes)]) for k, s in enumerate(shapes)]
    made.append(torch.randn(6, 4, dtype=dtypes[0]).t())  # strides (1, 4)
    made.append(torch.randn(5, 8, dtype=dtypes[0])[:, ::2])  # with gaps between elements
    return [p.requires_grad_() for p in made]


def clones(params, dtype=None):
    """Return the parameters with the same strides, in another type if one is given."""
    made = []
    for p in params:
        new = torch.empty_strided(p.shape, p.stride(), dtype=dtype or p.dtype)
        made.append(new.copy_(p.detach()).requires_grad_())
    return made


def set_gradients(params, step):
    torch.manual_seed(step)
    for p in params:
        drawn = torch.randn(p.shape, dtype=torch.float32)
        p.grad = drawn.to(torch.bfloat16).to(p.dtype)  # the same number in every type


def states(optimizer, params):
    found = list(params)
    for p in params:
        found += [v for _, v in sorted(optimizer.state[p].items()) if isinstance(v, torch.Tensor)]
    return found


def assert_close(compiled, eager, exact):
    for mine, theirs, truth in zip(compiled, eager, exact, strict=True):
        assert mine.shape == theirs.shape and mine.dtype is theirs.dtype
        if not mine.numel():
            continue
        error = (mine.double() - truth.double()).abs().max().item()
        allowed = (theirs.double() - truth.double()).abs().max().item()
        size = truth.double().abs().max().item()
        assert error <= 3 * allowed + 2 * EPS[mine.dtype] * size, (error, allowed)


def steps_agree(cls, settings, dtypes=(torch.float32,)):
    eager = parameters(dtypes)
    mine, exact = clones(eager), clones(eager, torch.float64)
    sets = [eager, mine, exact]
    optimizers = [cls(s, lr=0.01, **settings) for s in sets]
    step = compile_with(optimizers[1].step, fullgraph=False)
    for count in range(STEPS):
        for params in sets:
            set_gradients(params, count)
        optimizers[0].step()
        optimizers[2].step()
        before = [(p, p._version, p.data_ptr()) for p in mine if p.numel()]
        step()
        for p, version, address in before:
            assert p._version > version and p.data_ptr() == address
    for one, other in zip(mine, eager, strict=True):
        assert one.stride() == other.stride()
    lists = [states(o, s) for o, s in zip(optimizers, sets, strict=True)]
    assert_close(lists[1], lists[0], lists[2])


@pytest.mark.sampled(29)
@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "loop"])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_five_steps_agree_with_eager_and_fp64(name, foreach):
    cls, settings = OPTIMIZERS[name]
    steps_agree(cls, {**settings, "foreach": foreach})


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "loop"])
def test_parameters_of_mixed_types(foreach):
    dtypes = (torch.float32, torch.bfloat16)
    steps_agree(torch.optim.AdamW, {"foreach": foreach}, dtypes)


def test_a_learning_rate_in_a_tensor_changes_without_a_recompile():
    eager = parameters(shapes=[(17,), (16, 4), (32,), (48,)])
    mine = clones(eager)
    optimizers = [torch.optim.AdamW(s, lr=torch.tensor(0.1), foreach=False) for s in (eager, mine)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in optimizers]
    step = compile_with(optimizers[1].step, fullgraph=False)
    compiles = []
    for count in range(4):
        set_gradients(eager, count)
        set_gradients(mine, count)
        optimizers[0].step()
        step()
        for scheduler in schedulers:
            scheduler.step()
        compiles.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiles[-1] == compiles[1]
    for one, other in zip(mine, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "loop"])
@pytest.mark.parametrize("kind", [2.0, float("inf"), 1.0])
def test_gradients_are_clipped_in_place(kind, foreach):
    eager = parameters(shapes=[(1,), (17,), (16, 4), (300,), (3000,)])
    mine = clones(eager)

    def clip(params):
        return torch.nn.utils.clip_grad_norm_(params, 1.0, norm_type=kind, foreach=foreach)

    compiled = compile_with(clip, fullgraph=False)
    for count in range(2):
        set_gradients(eager, count)
        set_gradients(mine, count)
        addresses = [p.grad.data_ptr() for p in mine]
        torch.testing.assert_close(compiled(mine), clip(eager), rtol=1e-5, atol=0)
        assert [p.grad.data_ptr() for p in mine] == addresses
        for one, other in zip(mine, eager, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)


def test_clipping_and_step_compile_together():
    eager = parameters(shapes=[(17,), (16, 4), (300,)])
    mine = clones(eager)
    optimizers = [torch.optim.SGD(s, lr=0.1, momentum=0.9, foreach=True) for s in (eager, mine)]

    def train(params, optimizer):
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()

    compiled = compile_with(train, fullgraph=False)
    for count in range(3):
        set_gradients(eager, count)
        set_gradients(mine, count)
        train(eager, optimizers[0])
        compiled(mine, optimizers[1])
    for one, other in zip(mine, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(7)  # a diagonal
@pytest.mark.skipif(BACKEND != "fusec", reason="counts what fusec launches")
@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "loop"])
def test_a_step_of_many_parameters_is_two_launches(foreach, target):
    shapes = [(64, 16), (64,), (48, 16), (16,), (128, 64), (32,), (16, 16, 3)]
    params = [torch.nn.Parameter(torch.zeros(s)) for s in shapes]
    set_gradients(params, 0)
    optimizer = torch.optim.AdamW(params, foreach=foreach)
    optimizer.step()
    (graph,) = fusec.explain(optimizer.step, target=target).graphs
    assert graph.launches == 2 and not graph.externs
    assert [kernel.members for kernel in graph.kernels] == [7, 7]
    assert graph.bytes_moved <= 1.001 * graph.bytes_floor
