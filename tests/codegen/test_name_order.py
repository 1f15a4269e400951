"""Wrappers in which a line reads what has no value are refused before they run."""

from __future__ import annotations

import pytest

from fusec.codegen.name_order import check_name_order
from fusec.errors import InternalError

HEAD = "def call(args):\n    x, n = args\n    args.clear()\n"


@pytest.mark.parametrize(
    "lines",
    [
        "y = empty((n,), (1,), f32)\n    k0(x, y, n)\n    del x\n    return (y,)",
        "y = x\n    del x\n    x = y\n    return (x,)",
        "m = x.shape[0]\n    return ([m for m in range(m)],)",
    ],
)
def test_what_has_a_value_may_be_read(lines: str) -> None:
    check_name_order(f"{HEAD}    {lines}\n")


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("y = empty((m,), (1,), f32)\n    m = y.shape[0]\n    return (y,)", "m"),
        ("y = empty((n,), (1,), f32)\n    del x\n    k0(x, y, n)\n    return (y,)", "x"),
        ("y = y + x\n    return (y,)", "y"),
    ],
)
def test_what_has_none_is_a_fault_of_the_compile(lines: str, name: str) -> None:
    with pytest.raises(InternalError, match=f"^.*{name} has no value"):
        check_name_order(f"{HEAD}    {lines}\n")
