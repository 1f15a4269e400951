"""Custom operations with a decomposition: fused, right, gradients as in eager; what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusec
from fusec.errors import UsageError
from fusec.export import Call, build
from fusec.frontend.aot.custom_operations import DECOMPOSITIONS
from fusec.options import Options
from tests.support import compile_with

LIBRARY = torch.library.Library("own", "DEF")
LIBRARY.define("gated(Tensor x) -> Tensor")
LIBRARY.define("norm(Tensor(a!) out, Tensor x, Tensor weight, *, float eps) -> ()")
LIBRARY.define("added_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight) -> ()")
LIBRARY.define("turned(Tensor x) -> (Tensor, Tensor)")
LIBRARY.define("gate_gradient(Tensor grad, Tensor x) -> Tensor")
LIBRARY.define("copied(Tensor x) -> Tensor")
LIBRARY.define("scaled_into(Tensor(a!) out, Tensor x, float by=2.0) -> Tensor")
LIBRARY.define("several(Tensor x) -> Tensor")
LIBRARY.define("several.scaled(Tensor x, float by) -> Tensor")


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def norm(out: Tensor, x: Tensor, weight: Tensor, *, eps: float) -> None:
    out.copy_(F.rms_norm(x, (x.shape[-1],), weight, eps))


def added_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    residual.add_(x)
    x.copy_(F.rms_norm(residual, (x.shape[-1],), weight, 1e-6))


def turned(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first result lies along its columns, which the decomposition does not know."""
    return (x * 2).t().contiguous().t(), x.sum(-1)


def gate_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """A gradient that is not the function's own, so that tests see which one was taken."""
    return torch.cat([grad, grad * 3], -1) * x


LIBRARY.impl("gated", gated, "CPU")
LIBRARY.impl("norm", norm, "CPU")
LIBRARY.impl("added_norm", added_norm, "CPU")
LIBRARY.impl("turned", turned, "CPU")
LIBRARY.impl("gate_gradient", gate_gradient, "CPU")
LIBRARY.impl("several", lambda x: x + 1, "CPU")
torch.library.register_fake("own::gated", lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))
torch.library.register_fake(
    "own::turned", lambda x: (x.new_empty(x.shape[::-1]).t(), x.new_empty(x.shape[:-1]))
)
LIBRARY.impl("copied", torch.clone, "CPU")
torch.library.register_fake("own::copied", torch.empty_like)
torch.library.register_fake("own::scaled_into", lambda out, x, by=2.0: torch.empty_like(x))
torch.library.register_fake("own::gate_gradient", lambda grad, x: torch.empty_like(x))
torch.library.register_autograd(
    "own::gated",
    lambda ctx, grad: torch.ops.own.gate_gradient(grad, ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.fixture(autouse=True)
def of_this_test() -> Iterator[None]:
    known = dict(DECOMPOSITIONS)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    DECOMPOSITIONS.clear()
    DECOMPOSITIONS.update(known)


def left(fn: Any, *inputs: Any, train: bool = False) -> list[str]:
    """Return what runs as eager kernels."""
    torch._dynamo.reset()
    found = fusec.explain(fn, *inputs, train=train)
    return [call.op for graph in found.graphs for call in graph.externs]


def gate_and_scale(x: Tensor) -> Tensor:
    return torch.ops.own.gated(x + 1) * 2


def test_an_operation_is_an_eager_kernel_until_it_is_decomposed() -> None:
    x = torch.randn(4, 16)
    assert left(gate_and_scale, x) == ["own.gated.default"]
    fusec.register_decomposition("own::gated")(gated)
    assert left(gate_and_scale, x) == []
    torch.testing.assert_close(compile_with(gate_and_scale)(x), gate_and_scale(x))


@pytest.mark.parametrize("named", [
    "own::gated", "own::gated.default", torch.ops.own.gated, torch.ops.own.gated.default,
])  # fmt: skip
def test_an_operation_has_several_names(named: Any) -> None:
    assert fusec.register_decomposition(named)(gated) is gated
    assert left(gate_and_scale, torch.randn(4, 16)) == []


def test_what_custom_op_returns_names_it() -> None:
    @torch.library.custom_op("own::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    fusec.register_decomposition(twice)(lambda x: x * 2)
    assert left(lambda x: twice(x) + 1, torch.randn(4)) == []


def test_a_registered_gradient_stays_and_is_fused_where_it_is_decomposed() -> None:
    ours, theirs = (torch.ones(4, 16, requires_grad=True) for _ in range(2))
    fusec.register_decomposition("own::gated")(gated)
    assert left(gate_and_scale, ours, train=True) == ["own.gate_gradient.default"]
    fusec.register_decomposition("own::gate_gradient")(gate_gradient)
    assert left(gate_and_scale, ours, train=True) == []
    compile_with(gate_and_scale)(ours).sum().backward()
    gate_and_scale(theirs).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert theirs.grad is not None and theirs.grad[0, 8] == 12  # 3 times, of 2 and of x + 1


def normed(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.ops.own.norm(out, x * 2, weight, eps=1e-6)
    return out + 1


def in_place(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    torch.ops.own.added_norm(x, residual, weight)
    return x * residual


@pytest.mark.parametrize(("fn", "count"), [(normed, 1), (in_place, 2)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_operations_that_write_their_arguments(fn: Any, count: int, dynamic: bool) -> None:
    fusec.register_decomposition("own::norm")(norm)
    fusec.register_decomposition("own::added_norm")(added_norm)
    compiled = compile_with(fn, dynamic=dynamic)
    for rows in (4, 7):
        given = [torch.randn(rows, 16) for _ in range(count)]
        ours, theirs = ([x.clone() for x in given] for _ in range(2))
        weight = torch.rand(16)
        torch.testing.assert_close(compiled(*ours, weight), fn(*theirs, weight))
        torch.testing.assert_close(ours, theirs)
    assert {*left(fn, *ours, weight)} <= {"copy_.default"}  # of two rows that each other reads


def test_a_write_has_no_gradient_as_in_eager() -> None:
    fusec.register_decomposition("own::norm")(norm)
    x, weight = torch.randn(4, 16, requires_grad=True), torch.rand(16, requires_grad=True)
    assert not compile_with(normed)(x, weight).requires_grad


def test_results_have_the_strides_that_the_operation_declares() -> None:
    fusec.register_decomposition("own::turned")(lambda x: (x * 2, x.sum(-1)))

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.own.turned(x)  # type: ignore[no-any-return]

    x = torch.randn(4, 6)
    for ours, theirs in zip(compile_with(fn)(x), fn(x), strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs)
    assert left(fn, x) == []


@pytest.mark.parametrize(("decomposed", "seen"), [
    (lambda x: x * 2, r"returns float32\[4, 16\], where the operation returns float32\[4, 8\]"),
    (lambda x: gated(x).half(), r"returns float16\[4, 8\], where"),
    (lambda x: (gated(x), x), r"returns float32\[4, 8\], float32\[4, 16\], where"),
    (lambda x: None, "returns nothing, where"),
    (lambda x: x.nothing(), "cannot be traced: AttributeError"),
])  # fmt: skip
@pytest.mark.parametrize("fn", [gate_and_scale, torch.ops.own.gated])
def test_other_results_and_what_it_raises_are_errors(fn: Any, decomposed: Any, seen: str) -> None:
    fusec.register_decomposition("own::gated")(decomposed)
    with pytest.raises(Exception, match=f"the decomposition of own.gated.default {seen}"):
        compile_with(lambda x: fn(x))(torch.randn(4, 16))


@pytest.mark.parametrize("decomposed", [
    lambda x: x.float(), lambda x: x.view(x.shape), lambda x: x.t().t(), lambda x: x.detach(),
])  # fmt: skip
def test_a_result_has_memory_of_its_own(decomposed: Any) -> None:
    fusec.register_decomposition("own::copied")(decomposed)

    def fn(x: Tensor) -> Tensor:
        y = torch.ops.own.copied(x)
        x.mul_(2)
        return y  # type: ignore[no-any-return]

    x = torch.ones(3, 3)
    y = compile_with(fn)(x)
    assert torch.equal(y, torch.ones(3, 3)) and torch.equal(x, torch.full((3, 3), 2.0))
    (alone,) = (compile_with(lambda x: torch.ops.own.copied(x))(x),)
    alone.mul_(2)
    assert torch.equal(x, torch.full((3, 3), 2.0))


def test_two_results_are_two_tensors() -> None:
    def same(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y.sum(-1, keepdim=True).expand(4, 6)[:, 0]

    fusec.register_decomposition("own::turned")(same)
    one, other = compile_with(lambda x: torch.ops.own.turned(x))(torch.ones(4, 6))
    one.add_(1)
    assert torch.equal(one, torch.full((4, 6), 3.0)) and torch.equal(other, torch.full((4,), 12.0))


def test_temporaries_may_be_written() -> None:
    def by_parts(x: Tensor) -> Tensor:
        out = torch.empty_like(x[:, : x.shape[1] // 2])
        out.copy_(gated(x))
        out += 0
        return out

    fusec.register_decomposition("own::gated")(by_parts)
    x = torch.randn(4, 16)
    for fn in (gate_and_scale, lambda x: torch.ops.own.gated(x)):
        torch.testing.assert_close(compile_with(fn)(x), fn(x))
        assert left(fn, x) == []


@pytest.mark.parametrize("decomposed", [
    lambda out, x, by: (out.copy_(x * by), x * by)[1],
    lambda target, source, factor: (target.copy_(source * factor), source * factor)[1],
    lambda out, x, by: out.copy_(x * by),
])  # fmt: skip
def test_arguments_come_in_order_with_their_defaults(decomposed: Any) -> None:
    fusec.register_decomposition("own::scaled_into")(decomposed)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        result = torch.ops.own.scaled_into(out=out, x=x)
        out.add_(1)
        return out, result

    ours, result = compile_with(fn)(torch.ones(3))
    assert torch.equal(ours, torch.full((3,), 3.0)) and torch.equal(result, torch.full((3,), 2.0))


def test_results_of_an_operation_that_writes_are_compared() -> None:
    fusec.register_decomposition("own::scaled_into")(lambda out, x, by: (x * by)[:1].double())
    with pytest.raises(Exception, match=r"returns float64\[1\], where the operation returns f"):
        compile_with(lambda x: torch.ops.own.scaled_into(torch.empty_like(x), x))(torch.ones(3))


def test_what_cannot_be_registered() -> None:
    with pytest.raises(UsageError, match="no operation 'own::nothing'"):
        fusec.register_decomposition("own::nothing")
    with pytest.raises(UsageError, match=r"add.Tensor is PyTorch's own"):
        fusec.register_decomposition(torch.ops.aten.add.Tensor)
    with pytest.raises(UsageError, match="several overloads: name one"):
        fusec.register_decomposition("own::several")
    with pytest.raises(UsageError, match="is no custom operation"):
        fusec.register_decomposition(torch.relu)
    with pytest.raises(UsageError, match=r"does not take the arguments of own::norm\("):
        fusec.register_decomposition("own::norm")(lambda out, x, weight: None)


def test_a_model_with_a_decomposition_is_shipped_without_the_operation(tmp_path: Path) -> None:
    fusec.register_decomposition("own::gated")(gated)
    x = torch.randn(4, 16)
    path = tmp_path / "gate.fusec"
    path.write_bytes(build(gate_and_scale, Call((x,)), [Options.from_compile(None, None)]))
    model = fusec.load(path)
    fusec.register_decomposition("own::gated")(lambda x: x[:, ::2] * 0)  # what is shipped stays
    torch.testing.assert_close(model(x), gate_and_scale(x))


# -- operations that are not what their fake kernels said ------------------------------------------

LIBRARY.define("unlike(Tensor x, str how) -> Tensor")
LIBRARY.define("many(Tensor x, int count) -> Tensor[]")
UNLIKE = {
    "shape": lambda x: x[:-1].clone(),
    "rank": lambda x: x.sum(),
    "type": lambda x: x.double(),
    "": lambda x: x.clone(),
}
LIBRARY.impl("unlike", lambda x, how: UNLIKE[how](x), "CPU")
LIBRARY.impl("many", lambda x, count: [x * k for k in range(count)], "CPU")
torch.library.register_fake("own::unlike", lambda x, how: torch.empty_like(x))
torch.library.register_fake("own::many", lambda x, count: [x.new_empty(x.shape) for _ in range(3)])


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("how", UNLIKE)
def test_a_result_that_is_not_its_fake_is_an_error(how: str, *, dynamic: bool) -> None:
    """Kernels would read behind it, or its elements as others."""

    def model(x: Tensor) -> Tensor:
        made: Tensor = torch.ops.own.unlike(x, how)
        return made * 2

    compiled, x = compile_with(model, dynamic=dynamic), torch.randn(3, 4)
    if not how:
        torch.testing.assert_close(compiled(x), x * 2)
        return
    with pytest.raises(
        UsageError, match=r"own.unlike.default returned .* correct its register_fake"
    ):
        compiled(x)


def test_fewer_results_than_the_fake_kernel_s_are_an_error() -> None:
    def model(x: Tensor, count: int) -> Tensor:
        made: Tensor = torch.ops.own.many(x, count)[1]
        return made + 1

    compiled, x = compile_with(model, dynamic=False), torch.randn(3)
    torch.testing.assert_close(compiled(x, 3), x + 1)
    with pytest.raises(UsageError, match="returned 2 results, and its fake kernel 3"):
        compiled(x, 2)


# -- decompositions beside the schema --------------------------------------------------------------

LIBRARY.define("tripled_(Tensor(a!) x) -> Tensor(a!)")
LIBRARY.define("doubled(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
LIBRARY.define("moved(Tensor(a!) out, Tensor x) -> ()")
LIBRARY.impl("tripled_", lambda x: x.mul_(3), "CPU")
LIBRARY.impl("doubled", lambda x, *, out: out.copy_(x * 2), "CPU")
LIBRARY.impl("moved", lambda out, x: (out.copy_(x * 2), None)[1], "CPU")
for written in ("tripled_", "doubled"):
    torch.library.register_fake(f"own::{written}", lambda x, out=None: x if out is None else out)
torch.library.register_fake("own::moved", lambda out, x: None)


def written_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    made = x * 2
    same = torch.ops.own.tripled_(made)
    same.add_(1)
    return made, same


def returned_out(x: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(x)
    same = torch.ops.own.doubled(x, out=out)
    out.add_(1)
    return out, same * 2


@pytest.mark.parametrize("model", (written_twice, returned_out))
def test_a_result_that_is_an_argument_stays_it(
    model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"tripled_": lambda x: x.mul_(3), "doubled": lambda x, *, out: out.copy_(x * 2)}
    for name, function in known.items():
        operation = getattr(torch.ops.own, name).default
        monkeypatch.setitem(DECOMPOSITIONS, operation, function)
    x = torch.randn(3)
    found = compile_with(model, dynamic=False, cache=False)(x.clone())
    for ours, wanted in zip(found, model(x.clone()), strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize(
    ("made", "seen"),
    [(lambda x: (gated(x), 3), r"float32\[2, 4\], int"), (lambda x: None, "nothing")],
)
def test_results_of_another_structure_are_an_error(
    made: Callable[..., Any], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DECOMPOSITIONS, torch.ops.own.gated.default, made)
    with pytest.raises(Exception, match=f"returns {seen}, where the operation returns"):
        compile_with(lambda x: torch.ops.own.gated(x) * 2, dynamic=False, cache=False)(
            torch.randn(2, 8)
        )


def test_a_decomposition_that_writes_more_than_its_operation_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def model(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.own.moved(out, x)
        return out

    def into(out: Tensor, x: Tensor) -> None:
        out.copy_(x.mul_(2))

    monkeypatch.setitem(DECOMPOSITIONS, torch.ops.own.moved.default, into)
    with pytest.raises(Exception, match="writes x, which the operation does not"):
        compile_with(model, dynamic=False, cache=False)(torch.randn(3))
