"""Names are identifiers, all different, and a thing keeps the one that it got."""

from __future__ import annotations

import pytest

from fusec.ir.index import Axis, index
from fusec.ir.names import Names, identifier


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("x.weight", "x_weight"), ("_x", "x"), ("3d", "v3d"), ("größe", "gr__e"), ("", "v")],
)
def test_any_text_becomes_an_identifier(text: str, wanted: str) -> None:
    assert identifier(text) == wanted


def test_a_name_that_is_taken_gets_the_first_free_number() -> None:
    names = Names(("for", "x_2"))
    assert [names.new(t) for t in ("x", "x", "x", "for", "x_1")] == [
        "x", "x_1", "x_3", "for_1", "x_1_1",
    ]  # fmt: skip
    assert [Names(("x",), "_v").new("x")] == ["x_v1"]


def test_a_thing_keeps_its_name() -> None:
    names = Names()
    a, b = Axis("i", index(3)), Axis("i", index(3))
    assert [names(a), names(b, "n_"), names(b), names(a)] == ["i", "n_i", "n_i", "i"]
    assert a in names and index(3) not in names
    assert names.all() == ("i", "n_i")
