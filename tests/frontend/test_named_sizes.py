"""``fusec.name_size``: one compiled code for all values of a size."""

from __future__ import annotations

import pytest
import torch

import fusec
from fusec.errors import UsageError
from tests.support import BACKEND


def test_inputs_of_one_name_have_one_size() -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    call = torch.compile(lambda x, y: x + y, backend=keep, fullgraph=True)
    for size in (4, 1, 9):
        given = [fusec.name_size(torch.randn(size, 3), 0) for _ in range(2)]
        assert torch.equal(call(*given), given[0] + given[1])
    assert len(graphs) == 1


def test_the_last_axis_counts_from_the_end() -> None:
    torch._dynamo.reset()
    call = torch.compile(lambda x: x * 2, backend=BACKEND, fullgraph=True)
    for size in (3, 1):
        x = fusec.name_size(torch.randn(2, size), -1, "columns")
        assert torch.equal(call(x), x * 2)


@pytest.mark.parametrize(
    "shape, axis, said", [((3,), 1, "no axis 1"), ((3,), -2, "no axis -2"), ((0, 3), 0, "is 0")]
)
def test_an_axis_that_is_not_there_or_empty_is_refused(
    shape: tuple[int, ...], axis: int, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        fusec.name_size(torch.zeros(shape), axis)


@pytest.mark.parametrize("given", [([1], 0), (torch.ones(2), "0"), (torch.ones(2), True)], ids=str)
def test_other_arguments_are_refused(given: tuple[object, object]) -> None:
    with pytest.raises(UsageError, match="takes a tensor, an axis and a name"):
        fusec.name_size(*given)  # type: ignore[type-var, arg-type]
