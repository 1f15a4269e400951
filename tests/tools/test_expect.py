"""``fusec.expect``: a test of a user's passes, or fails with what is otherwise and the lines."""

from __future__ import annotations

import re

import pytest
import torch

import fusec
from fusec.errors import ContractBroken, UsageError

X = torch.randn(16, 64)


def scores(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    p = torch.softmax(x * scale, -1)
    return p / p.amax(0)


def ranked(x: torch.Tensor) -> torch.Tensor:
    return torch.sort(torch.tanh(x) * 2)[0]


def test_what_holds_returns_the_explanation() -> None:
    found = fusec.expect(
        torch.tanh, X, kernels=1, launches=(None, 1), bytes=(1, 2 * X.nbytes), externs=0
    )
    assert len(found.graphs[0].kernels) == 1
    fusec.expect(ranked, X, externs=["sort"], target="sm_90")
    fusec.expect(ranked, X, externs=["sort.default"], kernels=(1, None))


def test_a_message_names_numbers_lines_and_why_kernels_are_apart() -> None:
    with pytest.raises(AssertionError) as raised:
        fusec.expect(
            scores, torch.randn(64, 512), scale=2.0, kernels=1, launches=(None, 2), target="cpu"
        )
    assert isinstance(raised.value, ContractBroken)
    message = str(raised.value)
    assert message.startswith("kernels: 3, expected 1\nlaunches: 3, expected at most 2\n")
    assert re.search(
        r"    test_expect.py:\d+ in scores: p = torch.softmax\(x \* scale, -1\)\n", message
    )
    assert re.search(r"    test_expect.py:\d+ in scores: return p / p.amax\(0\)\n", message)
    assert re.search(r"does not fuse with .*: merging would close a cycle", message)


def test_a_message_names_eager_kernels_with_reason_and_line() -> None:
    with pytest.raises(ContractBroken) as raised:
        fusec.expect(ranked, X, externs=["topk"], bytes=(None, 10))
    message = str(raised.value)
    assert "bytes: " in message and "expected at most 10\n" in message
    assert "externs: 1 x sort, which was not expected\n" in message
    assert "externs: 1 x topk was expected, and is not there\n" in message
    assert re.search(r"eager kernel sort, .*: sorting\n    test_expect.py:\d+ in ranked", message)


def test_all_graphs_count_and_a_break_is_named() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        torch._dynamo.graph_break()
        return y * 2

    with pytest.raises(ContractBroken, match=r"kernels: 2, expected 1\n.*a graph ends"):
        fusec.expect(broken, X, kernels=1)


def test_training_has_the_backward_too() -> None:
    assert fusec.expect(torch.tanh, X, train=True, kernels=2).graphs[1].name == "backward"


@pytest.mark.parametrize(
    "expected",
    [{}, {"kernels": "one"}, {"bytes": (1, 2, 3)}, {"launches": True}, {"externs": "sort"}],
)
def test_what_is_no_expectation_is_refused(expected: dict) -> None:
    with pytest.raises(UsageError, match=r"nothing is expected|give a number"):
        fusec.expect(torch.tanh, X, **expected)
