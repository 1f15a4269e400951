"""Nested values as data: what goes in comes out, and anything else is named."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from fusec.archive import trees
from fusec.errors import UsageError


@dataclass
class Output:
    logits: Any
    loss: Any = None


class Pair(NamedTuple):
    a: Any
    b: Any


def described(value: Any) -> tuple[trees.Tree, list[torch.Tensor]]:
    found: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor, path: str) -> trees.Tree:
        found.append(tensor)
        return {"tensor": len(found) - 1}

    return trees.describe(value, "x", leaf), found


ONE, TWO = torch.ones(1), torch.zeros(2)


@pytest.mark.parametrize(
    ("value", "made"),
    [
        ([ONE, (TWO, None)], [ONE, (TWO, None)]),
        ({"a": ONE, "b": {"c": [3, 0.5, True, "t"]}}, {"a": ONE, "b": {"c": [3, 0.5, True, "t"]}}),
        (Output(ONE), {"logits": ONE, "loss": None}),
        (OrderedDict(a=ONE), {"a": ONE}),
        (Pair(ONE, TWO), (ONE, TWO)),
    ],
)
def test_a_value_is_put_together_again(value: Any, made: Any) -> None:
    tree, tensors = described(value)
    assert trees.put(trees.checked(tree, len(tensors)), tensors, ()) == made
    assert type(trees.put(tree, tensors, ())) is type(made)


def test_tensors_are_taken_in_the_order_of_the_tree() -> None:
    tree, _ = described({"a": ONE, "b": TWO})
    taken: list[Any] = []
    trees.take(tree, {"b": TWO, "a": ONE}, "x", taken)
    assert taken[0] is ONE
    assert taken[1] is TWO


def test_what_is_no_data_is_named() -> None:
    with pytest.raises(UsageError, match=r"x\['a'\]\[1\] is a set"):
        described({"a": [1, set()]})
    with pytest.raises(UsageError, match="x has the key 3; in an archive keys are texts"):
        described({3: ONE})


@pytest.mark.parametrize(
    "tree",
    [
        {"tensor": 2}, {"tensor": -1}, {"tensor": True}, {"argument": 0}, {"value": []}, {}, [],
        {"tuple": [{"tensor": 5}]}, {"dict": [[3, {"tensor": 0}]]}, {"dict": {"a": 1}}, None,
        {"tensor": 0, "value": 1},
    ],
)  # fmt: skip
def test_no_other_tree_is_read(tree: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        trees.checked(tree, 2)
