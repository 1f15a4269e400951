"""Trees of slices that are a scan by a known function become that scan; others stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._higher_order_ops.associative_scan import associative_scan

from fusec.frontend.fx_passes.associative_scans import keep_scans_whole
from tests.support import values

Pair = tuple[Tensor, Tensor]


def recur(left: Pair, right: Pair) -> Pair:
    return left[0] * right[0], right[0] * left[1] + right[1]


def scanned(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    def scan(*xs: Tensor) -> Any:
        given = xs if len(xs) > 1 else xs[0]
        return associative_scan(function, given, how.get("dim", 0), how.get("reverse", False),
                                combine_mode="generic")  # fmt: skip

    return scan


def calls(fn: Callable[..., Any], *inputs: Tensor, train: bool = False) -> list[str]:
    """Return the calls of a function's graph behind the pass, without views; check its values."""
    found: list[str] = []

    def note(gm: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        keep_scans_whole(gm)
        gm.graph.lint()
        nodes = [node for node in gm.graph.nodes if node.op.startswith("call")]
        named = (getattr(node.target, "__name__", str(node.target)) for node in nodes)
        pairs = zip(named, nodes, strict=True)
        found.extend(f"scan_{node.args[1]}" if name == "scanned" else name for name, node in pairs)
        return gm.forward

    torch._dynamo.reset()
    given = [x.detach().clone().requires_grad_(train) for x in inputs]
    made = torch.compile(fn, backend=note, fullgraph=True)(*given)
    torch._dynamo.reset()
    expected = torch.compile(fn, backend="eager", fullgraph=True)(*given)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
    return [name for name in found if name != "movedim"]


A, B = values(13, 4, low=-1, high=1), values(13, 4, seed=1)
SINGLE: dict[str, tuple[Callable[..., Any], str]] = {
    "sum": (lambda a, b: a + b, "scan_add"),
    "product": (lambda a, b: torch.mul(b, a), "scan_mul"),
    "greatest": (torch.maximum, "scan_maximum"),
    "least": (lambda a, b: torch.minimum(b, a), "scan_minimum"),
    "logarithms": (torch.logaddexp, "scan_logaddexp"),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_scan_by_a_known_function_is_one_call(name: str) -> None:
    function, whole = SINGLE[name]
    assert calls(scanned(function), A) == [whole]


@pytest.mark.parametrize("length", [2, 3, 4, 7, 8, 13, 100])
def test_a_recurrence_of_any_length_is_one_call(length: int) -> None:
    a, b = values(3, length, low=-1, high=1), values(3, length, seed=1)
    found = calls(lambda a, b: scanned(recur, dim=1)(a, b)[1], a, b)
    assert [name for name in found if name != "scan_mul"] == ["recurring"]  # that is not read


def test_a_recurrence_from_the_end_is_not_turned_around() -> None:
    def last(a: Tensor, b: Tensor) -> Tensor:
        return scanned(recur, reverse=True)(a, b)[1]

    assert [name for name in calls(last, A, B) if name not in ("scan_mul", "flip")] == ["recurring"]


def test_of_several_fields_each_is_a_scan_of_its_own() -> None:
    def function(left: Any, right: Any) -> Any:
        a, x, b = left
        c, y, d = right
        return a * c, torch.maximum(x, y), d + b * c

    found = calls(scanned(function), A, A.exp(), B)
    assert found == ["scan_mul", "scan_maximum", "recurring"]


def test_factors_may_be_fewer_than_terms() -> None:
    found = calls(lambda a, b: scanned(recur)(a, b)[1], A[:, :1], B)
    assert "recurring" in found and "cat" not in found


OTHERS: dict[str, Callable[..., Any]] = {
    "a recurrence of the other order": lambda x, y: (x[0] * y[0], x[0] * y[1] + x[1]),
    "another sum": lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1] + x[0]),
    "a product of the terms": lambda x, y: (x[0] + y[0], y[0] * x[1] + y[1]),
    "a difference": lambda x, y: (x[0] - y[0], y[0] * x[1] - y[1]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_scan_by_another_function_stays(name: str) -> None:
    found = calls(lambda a, b: scanned(OTHERS[name])(a, b)[1], A, B)
    assert "recurring" not in found and found.count("cat") > 2


def test_greatest_elements_with_a_gradient_stay() -> None:
    assert "scan_maximum" not in calls(scanned(torch.maximum), A, train=True)


def test_other_types_stay() -> None:
    assert calls(scanned(torch.add), A.int()) == ["scan_add"]
    assert "recurring" not in calls(scanned(recur), A.int(), B.int())
    assert "scan_add" not in calls(scanned(torch.add), torch.complex(A, B))


def test_functions_under_another_vmap_stay_as_they_are() -> None:
    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        other = torch.vmap(lambda x, y: x * y + x)(a, b)
        return other, scanned(torch.add)(a)

    found = calls(fn, A, B)
    assert found.count("scan_add") == 1
    assert found.count("_vmap_increment_nesting") == found.count("_vmap_decrement_nesting") == 1


def test_products_that_torch_func_differentiates_stay_torch_s() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: (torch.cumprod(y, 0) ** 2).sum())(x)

    assert "product_so_far" not in calls(fn, A)
    assert "product_so_far" in calls(lambda x: torch.cumprod(x, 0), A)


def test_slices_that_are_no_scan_stay() -> None:
    def fn(x: Tensor) -> Tensor:
        pairs = torch.vmap(torch.add)(torch.ops.aten.slice(x, 0, 0, -1, 2), x[1::2])
        evens = torch.ops.aten.slice(x, 0, 0, None, 2)
        return torch.flatten(torch.stack((evens[:6], pairs), dim=1), start_dim=0, end_dim=1)

    assert "scan_add" not in calls(fn, A)
