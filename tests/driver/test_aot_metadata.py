"""For which graphs AOTAutograd's wrapper stays, and why. What the others do:
tests/driver/test_warm.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fusec.driver.aot_metadata import NoConvention, convention_of
from fusec.runtime.calls.convention import Convention, Tangent
from fusec.torch_interior import TracingContext, aot_autograd
from tests.support import TORCH, values


def convention(fn: Callable[..., Any], *inputs: Any) -> Convention:
    """Return the convention of a function's one graph.

    Raises:
        NoConvention: if it has none.
    """
    graphs: dict[str, fx.GraphModule] = {}

    def compiler(name: str) -> Callable[..., Any]:
        def compile_one(gm: fx.GraphModule, given: Any) -> Callable[..., Any]:
            graphs[name] = gm
            call = lambda args: gm(*args)  # noqa: E731
            call._boxed_call = True  # type: ignore[attr-defined]
            return call

        return compile_one

    metadata: list[Any] = []

    def backend(gm: fx.GraphModule, given: Any) -> Callable[..., Any]:
        made = aot_autograd(
            fw_compiler=compiler("forward"), bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"), keep_inference_input_mutations=True,
        )(gm, given)  # fmt: skip
        context = TracingContext.try_get()
        assert context is not None
        metadata.append(context.fw_metadata)
        return made

    torch._dynamo.reset()
    result = torch.compile(fn, backend=backend, fullgraph=True)(*inputs)
    if "forward" in graphs:
        first = result if isinstance(result, torch.Tensor) else result[0]
        first.sum().backward()
    return convention_of(metadata[0], graphs.get("backward"), deterministic=False)


def test_a_page_of_facts() -> None:
    x, w = values(2, 3).requires_grad_(), values(3, 4, seed=1).requires_grad_()
    found = convention(lambda x, w: (torch.sin(x) @ w, x > 0), x, w)
    assert found.outputs == (None, None) and found.written == ()
    assert found.training is not None
    assert found.training.differentiable == (True, False)
    ((tangent,), saved) = found.training.tangents, found.training.saved
    strided = Tangent(0, "", (2, 4), (4, 1))  # torch 2.11 asks for a format, whatever the shape
    assert tangent == (strided if TORCH >= (2, 13) else Tangent(0, "contiguous"))
    assert saved + found.training.unchecked >= 2


def written(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + 1


def shared(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.sin(x)
    return y, y.view(-1), y[0]


NONE = {
    "a view of an input": (lambda x: (x * 2, x.view(-1)), values(2, 3), "is a view"),
    "an input that is written": (written, values(2, 3).requires_grad_() * 1, "replaced after"),
    "results that share memory": (shared, values(2, 3).requires_grad_(), "share memory|is a view"),
}


@pytest.mark.parametrize("name", NONE)
def test_what_there_is_more_to_it_is_said(name: str) -> None:
    fn, x, said = NONE[name]
    with pytest.raises(NoConvention, match=said):
        convention(fn, x)


def test_metadata_of_another_torch_is_no_error() -> None:
    with pytest.raises(NoConvention, match="this version of torch"):
        convention_of(object(), None, deterministic=False)
