"""What the key of a graph of Dynamo tells apart, and what has none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fusec.frontend.aot.dynamo_key import NoKey, dynamo_key, shares_memory
from tests.support import values


def key_of(fn: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> str:
    """Return the key of the one graph of a function."""
    found: list[Any] = []

    def backend(gm: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        try:
            found.append(dynamo_key(gm, given))
        except NoKey as reason:
            found.append(reason)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    (key,) = found
    if isinstance(key, NoKey):
        raise key
    return str(key)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2.5


def same(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2.5


def test_equal_graphs_have_one_key() -> None:
    assert key_of(scaled, values(3, 4)) == key_of(same, values(3, 4, seed=1))


X = values(4, 4)
OTHERS: dict[str, Callable[[], str]] = {
    "an operation": lambda: key_of(lambda x: torch.cos(x) * 2.5, X),
    "a number": lambda: key_of(lambda x: torch.sin(x) * 2.75, X),
    "its type": lambda: key_of(lambda x: torch.sin(x) * 2, X),
    "the order": lambda: key_of(lambda x: 2.5 * torch.sin(x), X),
    "more results": lambda: key_of(lambda x: (torch.sin(x) * 2.5, x + 1), X),
    "a shape": lambda: key_of(scaled, values(4, 5)),
    "strides": lambda: key_of(scaled, values(4, 4).t()),
    "a type": lambda: key_of(scaled, values(4, 4, dtype=torch.bfloat16)),
    "a gradient": lambda: key_of(scaled, values(4, 4).requires_grad_()),
    "a parameter": lambda: key_of(scaled, nn.Parameter(values(4, 4))),
    "a leaf": lambda: key_of(scaled, values(4, 4).requires_grad_() * 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_graph_or_input_has_another_key(name: str) -> None:
    assert OTHERS[name]() != key_of(scaled, X)


def test_a_tuple_of_indices_is_no_list_of_them() -> None:
    one, rows = key_of(lambda x: x[0, 1], X), key_of(lambda x: x[[0, 1]], X)
    assert one == key_of(lambda x: x[0, 1], X) != rows == key_of(lambda x: x[[0, 1]], X)


def no_gradients() -> Any:
    return torch.no_grad()


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("state", (no_gradients, autocast))
def test_the_state_of_torch_is_in_the_key(state: Callable[[], Any]) -> None:
    before = key_of(scaled, X)
    with state():
        assert key_of(scaled, X) != before


def test_deterministic_algorithms_and_settings_of_aotautograd_are_in_the_key() -> None:
    before = key_of(scaled, X)
    torch.use_deterministic_algorithms(True)
    try:
        assert key_of(scaled, X) != before
    finally:
        torch.use_deterministic_algorithms(False)
    with torch._functorch.config.patch(view_replay_for_aliased_outputs=True, cse=False):
        assert key_of(scaled, X) != before


@pytest.mark.parametrize("part", ("matmul", "conv"))
def test_each_precision_of_f32_is_in_the_key(part: str) -> None:
    """Torch's own getter of all of them raises where they differ."""
    before = key_of(scaled, X)
    setting = getattr(torch.backends.mkldnn, part)
    kept = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        assert key_of(scaled, X) != before
    finally:
        setting.fp32_precision = kept


def test_modules_are_in_the_key_by_their_paths() -> None:
    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name
            setattr(self, name, nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(self, self.name)(x)

    assert key_of(Named("up"), X) == key_of(Named("up"), X) != key_of(Named("down"), X)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Thrice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3


GRADIENT = values(4, 4).requires_grad_()
checkpoint = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


def chosen() -> Any:
    policy = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    make = torch.utils.checkpoint.create_selective_checkpoint_contexts
    return make(lambda ctx, op, *args, **kwargs: policy)


def test_bodies_that_are_inlined_are_in_the_key() -> None:
    assert key_of(Doubled.apply, GRADIENT) != key_of(Thrice.apply, GRADIENT)
    first, second, third = (
        key_of(lambda x, fn=fn: checkpoint(fn, x), GRADIENT) for fn in (scaled, same, torch.sin)
    )
    assert first == second != third


@torch.library.custom_op("fusec_test_key::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


KEYLESS: dict[str, tuple[Callable[[], str], str]] = {
    "a checkpoint that chooses": (
        lambda: key_of(lambda x: checkpoint(scaled, x, context_fn=chosen), GRADIENT), "saves"),
    "a condition": (
        lambda: key_of(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), X), "cond"),
    "symbolic sizes": (lambda: key_of(scaled, X, dynamic=True), "SymInt"),
    "a size that depends on data": (lambda: key_of(lambda x: x.nonzero() + 1, X), "symbolic"),
}  # fmt: skip


def test_an_operation_of_the_users_has_no_key() -> None:
    assert key_of(twice, X) == "None"


@pytest.mark.parametrize("name", KEYLESS)
def test_what_a_key_cannot_hold_has_none(name: str) -> None:
    make, said = KEYLESS[name]
    captured = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with captured, pytest.raises(NoKey, match=said):
        make()


def test_hooks_of_saved_tensors_and_modes_have_none() -> None:
    def saved() -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)

    gm = fx.symbolic_trace(scaled)
    for context in (saved, torch.autograd.graph.save_on_cpu):
        with context(), pytest.raises(NoKey, match="hooks"):
            dynamo_key(gm, [X])


def test_inputs_in_one_storage_are_seen() -> None:
    a, b = X.chunk(2)
    assert shares_memory([a, b]) and shares_memory([X, X]) and not shares_memory([X, X.clone(), 3])


def test_a_subclass_of_tensor_has_none() -> None:
    class Own(torch.Tensor):
        pass

    with pytest.raises(NoKey, match="Own"):
        dynamo_key(fx.symbolic_trace(scaled), [X.as_subclass(Own)])


def test_functions_that_torch_makes_at_import_are_known_by_name() -> None:
    images = values(1, 2, 8, 8)
    first, second, third = (
        key_of(fn, images)
        for fn in (
            lambda x: F.max_pool2d(x, 2),
            lambda x: F.max_pool2d(x, 2),
            lambda x: F.avg_pool2d(x, 2),
        )
    )
    assert first == second != third
