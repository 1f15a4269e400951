"""Which arguments a call of Dynamo's graphs writes, and where in memory it reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from fusec.frontend.aliasing.overlap import written_by
from tests.frontend.tracing import lowered
from tests.support import BACKEND, check, compile_with, values

A, W = values(3, 9, 5), values(5, 5, seed=2) * 0.5
INPLACE = [
    name
    for name, f in vars(F).items()
    if inspect.isfunction(f) and "inplace" in inspect.signature(f).parameters and name[0] != "_"
]


def call(function: Callable, *args: Any, **kwargs: Any) -> tuple[fx.Node, fx.Node]:
    """Return an argument, and a call of which it is the first argument."""
    graph = fx.Graph()
    given = graph.placeholder("x")
    return given, graph.call_function(function, (given, *args), kwargs)


@pytest.mark.parametrize("name", INPLACE)
def test_a_function_writes_its_argument_if_told_so_by_name_or_by_position(name: str) -> None:
    function = getattr(F, name)
    parameters = [*inspect.signature(function).parameters.values()]
    place = next(k for k, one in enumerate(parameters) if one.name == "inplace")
    between = [1.0 if p.default is inspect.Parameter.empty else p.default for p in parameters]
    for value in (True, False):
        x, by_position = call(function, *between[1:place], value)
        assert written_by(by_position) == ([x] if value else [None])
        x, by_name = call(function, *between[1:place], inplace=value)
        assert written_by(by_name) == ([x] if value else [None])


def test_an_embedding_with_a_greatest_norm_writes_its_weight() -> None:
    for function in (F.embedding, F.embedding_bag):
        graph = fx.Graph()
        places, weight = map(graph.placeholder, ("places", "weight"))
        assert written_by(graph.call_function(function, (places, weight, None, 0.5))) == [weight]
        assert written_by(graph.call_function(function, (places, weight))) == [None]


def test_a_greatest_norm_of_a_function_without_weight_writes_nothing() -> None:
    def clipped(x: Tensor, max_norm: float) -> Tensor:
        return x / x.norm().clamp(min=max_norm)

    _, node = call(clipped, 1.0)
    assert all(argument is None for argument in written_by(node))


@pytest.mark.skipif(BACKEND != "fusec", reason="about fusec's own rewrites of Dynamo's graphs")
def test_loops_in_which_a_function_writes_its_argument_match_eager() -> None:
    def activation(a: Tensor, w: Tensor) -> Any:
        h, before, states = a.new_zeros(3, 5), [], []
        for t in range(9):
            y = h @ w + a[:, t]
            h = F.relu(y, True) + y
            before.append(y)
            states.append(h)
        return torch.stack(before), torch.stack(states)

    def embedding(places: Tensor, table: Tensor, w: Tensor) -> Any:
        h, states = w.new_zeros(3, 5), []
        for t in range(9):
            other = F.embedding(places[:, (t + 3) % 9], table, None, 0.5)
            h = torch.tanh(h @ w + table[places[:, t]] + other)
            states.append(h)
        return torch.stack(states)

    check(activation, A, W)
    check(embedding, torch.arange(27).view(3, 9) % 7, values(7, 5), W)


# -- windows with an offset of their own, of inputs that begin anywhere ----------------------------


def window(x: Tensor) -> Tensor:
    return x.as_strided((2, 3), (4, 1), 1) * 2


def filled(x: Tensor) -> Tensor:
    x[1:] = 7
    return x.flatten(0, 1)


def selected(x: Tensor) -> Tensor:
    x[1] = 7
    return x.flatten(0, 1)


READ: dict[str, Callable[[Tensor], Tensor]] = {
    "window": window,
    "by name": lambda x: torch.as_strided(x, (2,), (1,), storage_offset=1) * 2,
    "at the beginning": lambda x: x.as_strided((2,), (1,), 0) * 2,
    "of a view": lambda x: x.view(-1).detach().as_strided((2,), (1,), 1) * 2,
    "of a part": lambda x: x[1:].as_strided((2,), (1,), 1) * 2,
    "of other numbers": lambda x: x.view(torch.int32).as_strided((2,), (1,), 1) * 2,
    "of a result": lambda x: (x * 2).as_strided((2,), (1,), 1) * 2,
    "in place": lambda x: x.view(-1).as_strided_((2,), (1,), 1) * 2,
    "copied": lambda x: torch.as_strided_copy(x, (2,), (1,), 1) * 2,
    "without an offset": lambda x: x.as_strided((2,), (3,)) * 2,
    "returned": lambda x: x.as_strided((2,), (1,), 1),
    "replaced": lambda x: torch.as_strided_scatter(x, torch.ones(2), (2,), (1,), 1) * 2,
    "replaced in a copy": lambda x: torch.as_strided_scatter(x * 1, torch.ones(2), (2,), (1,), 1),
    "in a branch": lambda x: torch.cond(x.sum() > -1, window, lambda x: x.new_ones(2, 3), (x,)),
}
WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "window": lambda x: x.as_strided((2,), (1,), 0).mul_(2) + 1,
    "before": lambda x: x.mul_(2).as_strided((2,), (1,), 0) + 1,
    "without an offset": lambda x: x.as_strided((2,), (3,)).mul_(2) + 1,
    "a slice that is replaced": filled,
    "a row that is replaced": selected,
}
TRAINED: dict[str, Callable[[Tensor], Tensor]] = {
    **READ,
    "recomputed": lambda x: checkpoint(window, x, use_reentrant=False),
    "transformed": lambda x: torch.func.grad(lambda x: window(x).square().sum())(x),
}
del TRAINED["of other numbers"], TRAINED["of a view"]  # which have no gradient


def run_at(fn: Callable[[Tensor], Tensor], start: int, train: bool) -> list[Any]:
    """Return what a function makes of a tensor that begins at a place, and of its memory."""
    memory = (torch.arange(40.0) + 1).requires_grad_(train)
    whole = memory * 1
    x = whole[start : start + 12].view(3, 2, 2)
    made = fn(x)
    shared = made.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    place = made.storage_offset() if shared else None
    if train:
        made.sum().backward()
    seen = (made.detach().clone(), whole.detach(), memory.grad)
    return [place, made.stride(), *(None if t is None else t.tolist() for t in seen)]


@pytest.mark.skipif(BACKEND != "fusec", reason="AOTAutograd alone traces for one place in memory")
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize(
    "table, name",
    [
        *(("read", name) for name in READ),
        *(("written", name) for name in WRITTEN),
        *(("trained", name) for name in TRAINED),
    ],
)
def test_an_input_may_begin_elsewhere_in_memory(table: str, name: str, dynamic: bool) -> None:
    fn = {"read": READ, "written": WRITTEN, "trained": TRAINED}[table][name]
    for anew, starts in ((False, (0, 4, 1, 12)), (True, (4, 0, 1, 12))):
        torch._dynamo.reset()
        compiled = compile_with(fn, dynamic=dynamic)
        for start in starts:
            if anew:  # which takes what an earlier one has left in the cache
                torch._dynamo.reset()
            train = table == "trained"
            assert run_at(compiled, start, train) == run_at(fn, start, train), (anew, start)


def test_a_window_of_an_input_is_an_eager_kernel_and_one_of_a_result_is_not() -> None:
    x = values(4, 6)
    (extern,) = lowered(window, x).externs
    assert extern.reason == "a strided window into memory around the tensor"
    assert not lowered(lambda x: window(x.sin()), x).externs
    assert not lowered(lambda x: x.as_strided((2, 3), (4, 1)) * 2, x).externs
