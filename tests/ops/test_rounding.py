"""Roundings to 16 bits that a kernel must not drop: equal to eager, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

Function = Callable[[torch.Tensor, torch.Tensor], object]

FUNCTIONS: dict[str, Function] = {
    "a cast that the user wrote": lambda x, y: x.bfloat16().float() * 3,
    "a comparison of a sum": lambda x, y: (x.bfloat16() + y.bfloat16()) > y.bfloat16(),
    "the floor of a product": lambda x, y: (x.half() * y.half()).floor(),
    "a value that is also stored": lambda x, y: (h := x.half() + y.half(), h * 3),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_kernels_round_where_eager_is_seen_to_round(function: Function) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, y = torch.randn(2, 64, 64)
    compiled = torch.compile(function, backend="fusec", options={"strict": True})
    torch.testing.assert_close(compiled(x, y), function(x, y), rtol=0, atol=0)
