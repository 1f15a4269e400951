"""Control flow, operations of the user's own, transforms: as eager runs them, and explained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.testing._internal.two_tensor import TwoTensor

import fusec
from fusec.driver.compiler import RECENT
from tests.support import check, compile_with, externs, values

Function: TypeAlias = Callable[..., Any]


def branches(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    chosen = torch.cond(
        x.sum() > 0, lambda x, y: (x.sin() * y).exp(), lambda x, y: x.cos() - y, (x, y)
    )
    return chosen * 2


def loop(i: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    def body(i: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return i + 1, torch.cond(x.sum() > 0, lambda x: x.sin() - 1, lambda x: x + 0.5, (x,))

    i, x = while_loop(lambda i, x: i < 5, body, (i, x))
    return x + 1, i


def cumulated(x: torch.Tensor) -> torch.Tensor:
    return associative_scan(lambda a, b: a + b, x.sin(), 0, combine_mode="generic") * 2


def mapped(rows: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return map_rows(lambda row, y: (row + y).sin(), rows.t(), y) * 2


@torch.compiler.nested_compile_region
def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sin() * 2


def regions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return region(region(x, w), w) + 1


X, Y, W = values(4, 4), values(4, 4, seed=1), values(4, 4, seed=2)
CONTROL: dict[str, tuple[Function, tuple[torch.Tensor, ...], bool, str]] = {
    "cond": (branches, (X, Y), True, "cond"),
    "while_loop": (loop, (torch.tensor(0), X), False, "while_loop"),
    "nested_compile_region": (regions, (X, W), True, "invoke_subgraph"),
}
"""Function, inputs, whether it has a backward, the operation that is left to torch."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONTROL)
def test_control_flow_matches_eager_and_its_parts_are_compiled(name):
    fn, inputs, train, operation = CONTROL[name]
    check(fn, *inputs, train=train)
    assert not [trace.problem for trace in RECENT if trace.problem]
    parts = {trace.name for trace in RECENT if "." in trace.name}
    assert parts, "branches and bodies are compiled"
    reasons = dict(externs(fn, *inputs, train=train))
    assert reasons[operation].startswith(f"the higher-order operation {operation}")
    explained = fusec.explain(fn, *inputs, train=train)
    named = {graph.name: graph for graph in explained.graphs if "." in graph.name}
    assert parts == set(named) and any(graph.kernels for graph in named.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROL)
def test_control_flow_matches_eager_with_symbolic_sizes(name):
    fn, inputs, train, _ = CONTROL[name]
    check(fn, *inputs, train=train, dynamic=True)


def sampled(h: torch.Tensor, xs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw in the body: torch's own loop calls it, with slices of what the user passed."""
    return scan(lambda h, x: (h + x + torch.rand(()) * 0, h * 2 + x), h, xs)


def test_a_loop_s_body_leaves_strides_and_versions_of_what_it_is_given():
    h, xs = values(1, 8), values(4, 3, 100)[:, :1, :8]
    assert xs.stride() == (300, 100, 1)
    torch._dynamo.reset()
    torch.testing.assert_close(compile_with(sampled)(h, xs), sampled(h, xs))
    assert [trace.name for trace in RECENT if "." in trace.name]
    assert (h._version, xs._version, xs.stride()) == (0, 0, (300, 100, 1))


def test_a_map_over_rows_is_a_loop_that_carries_nothing():
    check(mapped, X, Y[0], train=True)
    assert externs(mapped, X, Y[0], train=True) == []


def test_an_associative_scan_is_ordinary_operations():
    check(cumulated, X)
    assert externs(cumulated, X) == []


# -- operations of the user's own ------------------------------------------------------------------


@torch.library.custom_op("fusec_test::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


sine.register_fake(torch.empty_like)
sine.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("fusec_test::accumulate", mutates_args=("total",))
def accumulate(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    total.add_(x)
    return total.sum()


accumulate.register_fake(lambda total, x: total.new_empty(()))


def test_a_custom_operation_with_a_gradient_matches_eager():
    def fn(x: torch.Tensor) -> torch.Tensor:
        return sine(x * 2).exp()

    check(fn, X, train=True)
    reason = "the custom operation fusec_test.sine.default"
    assert ("fusec_test.sine.default", reason) in externs(fn, X, train=True)


def test_custom_operations_write_inputs_intermediates_and_views_as_in_eager():
    def fn(total: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = accumulate(total, x * 2)
        own = total * 3
        accumulate(own, x)
        accumulate(own[1:], x[1:])
        return own + first, own.t()

    check(fn, Y, X)


@pytest.fixture
def stride_readers() -> Iterator[list[Function]]:
    """Operations that return the strides of their argument, by what they require of them."""
    library = torch.library.Library("fusec_test_strides", "FRAGMENT")
    tags = {"plain": (), "exact": (torch.Tag.needs_exact_strides,)}
    tags["ordered"] = (torch.Tag.needs_fixed_stride_order,)
    for name, chosen in tags.items():
        library.define(f"{name}(Tensor x) -> Tensor", tags=chosen)
        library.impl(name, lambda x: torch.tensor(x.stride()), "CPU")
        torch.library.register_fake(
            f"fusec_test_strides::{name}",
            lambda x: torch.empty(x.dim(), dtype=torch.int64),
            lib=library,
        )
    yield [getattr(torch.ops.fusec_test_strides, name).default for name in tags]
    library._destroy()


def test_custom_operations_see_the_strides_of_eager(stride_readers):
    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        tensors = (
            (x * 2).t(),
            (x + 1).t() * 3,
            torch.nn.functional.pad(x, (0, 3))[:, :4],
            (x[0] * 2).expand(4, 4),
            torch.cat([x, y], 1).permute(1, 0),
            x[:, ::2] * 1,
            x.view(2, 2, 4).transpose(0, 2).contiguous() + 1,
            (x.view(1, 4, 2, 2) + 1).to(memory_format=torch.channels_last).sin(),
        )
        return [read(tensor) for tensor in tensors for read in stride_readers]

    torch._dynamo.reset()
    found = compile_with(fn)(X, Y)
    assert [t.tolist() for t in found] == [t.tolist() for t in fn(X, Y)]


# -- transforms and subclasses ---------------------------------------------------------------------


def tangents(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.func.jvp(lambda x: x.sin().exp().sum(-1), (x,), (y,))


TRANSFORMS: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "hessian": (torch.func.hessian(lambda x: (x.sin() ** 2).sum()), (X[0],)),
    "jacrev": (torch.func.jacrev(lambda x: x.sin().cumsum(0)), (X[0],)),
    "jvp": (tangents, (X, Y)),
    "vjp": (lambda x, y: torch.func.vjp(lambda x: x.sin() * x, x)[1](y)[0] * 2, (X, Y)),
    "vmap": (torch.vmap(lambda x, y: torch.softmax(x @ y, -1), in_dims=(0, None)), (X, Y)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "hessian" else pytest.mark.slow) for n in TRANSFORMS]
)
def test_transforms_inside_a_compiled_function_match_eager(name):
    fn, inputs = TRANSFORMS[name]
    check(lambda *args: fn(*args), *inputs)


def test_a_subclass_of_two_tensors_is_compiled_through():
    def fn(pair: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (pair * 2).sin() @ w

    torch._dynamo.reset()
    pair = TwoTensor(X.clone(), Y.clone())
    found, expected = compile_with(fn)(pair, W), fn(pair, W)
    for a, b in ((found.a, expected.a), (found.b, expected.b)):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.slow
def test_a_function_that_is_left_out_breaks_the_graph_and_nothing_else():
    @torch.compiler.disable
    def sine_outside(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    check(lambda x: sine_outside(x * 2) + 1, X, train=True, fullgraph=False)


def test_a_kernel_of_the_users_in_triton_is_captured_and_explained():
    import triton
    import triton.language as tl
    from torch.library import triton_op, wrap_triton

    @triton.jit
    def double_kernel(x, out, n, block: tl.constexpr):
        i = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(out + i, tl.load(x + i, i < n) * 2, i < n)

    @triton_op("fusec_test::double", mutates_args={})
    def double(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        wrap_triton(double_kernel)[(1,)](x, out, x.numel(), 64)
        return out

    operation = "triton_kernel_wrapper_functional"
    reason = f"the higher-order operation {operation}"
    assert (operation, reason) in externs(lambda x: double(x.sin()) + 1, X)
    # A tensor of the CPU: the launch is what fails, after the compile.
    torch._dynamo.reset()
    with pytest.raises((RuntimeError, ValueError)):
        compile_with(lambda x: double(x.sin()) + 1)(X)
    assert [trace.problem for trace in RECENT] == [None]
