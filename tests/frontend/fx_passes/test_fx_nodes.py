"""The layouts with which calls of a rewritten FX graph were traced are those that they make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusec.errors import InvalidIR
from fusec.frontend.fx_passes.fx_nodes import results_of, verify_results, verify_values
from tests.frontend.tracing import traced

aten = torch.ops.aten


def turned(x: Tensor, y: Tensor) -> Tensor:
    return x.permute(1, 0).clone(memory_format=torch.contiguous_format) + y


def test_a_graph_as_it_was_traced_is_accepted() -> None:
    verify_values(traced(turned, torch.randn(3, 4), torch.randn(4, 3)))
    verify_values(traced(turned, torch.randn(3, 4), torch.randn(4, 3), dynamic=True))
    verify_values(traced(lambda x: x[:, :0].exp() + torch.rand(0), torch.randn(3, 1)))


def test_a_call_whose_argument_lies_otherwise_than_it_was_traced_with_is_found() -> None:
    gm = traced(turned, torch.randn(3, 4), torch.randn(3, 4).t())
    (clone,) = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    clone.replace_all_uses_with(clone.args[0])
    with pytest.raises(InvalidIR, match=r"add.* makes strides \(1, 4\).* traced with \(3, 1\)"):
        verify_values(gm)


def test_strides_of_one_element_alone_say_nothing() -> None:
    gm = traced(lambda x, y: x.permute(1, 0) + y, torch.randn(1, 4), torch.randn(4, 1))
    (permuted,) = gm.graph.find_nodes(op="call_function", target=aten.permute.default)
    with gm.graph.inserting_after(permuted):
        copied = gm.graph.call_function(aten.clone.default, (permuted,))
    copied.meta["val"] = permuted.meta["val"].contiguous()
    permuted.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)
    verify_values(gm)


@pytest.mark.parametrize("change", [Tensor.contiguous, Tensor.double, lambda x: x[:2]])
def test_a_result_that_is_made_otherwise_than_it_was_is_found(change: Any) -> None:
    gm = traced(lambda x, y: (x + y).permute(1, 0), torch.randn(3, 4), torch.randn(3, 4))
    before = results_of(gm)
    verify_results(before, gm)
    (permuted,) = gm.graph.find_nodes(op="call_function", target=aten.permute.default)
    permuted.meta["val"] = change(permuted.meta["val"])
    with pytest.raises(InvalidIR, match=r"result 0 is made as .*, and was "):
        verify_results(before, gm)
