"""Every operation of PyTorch's table against eager, and its row in ``docs/operations.md``.

The names are the page's: collecting the tests does not import the table, which takes 4 s.
"""

from __future__ import annotations

import pytest

from tests.ops.operations_page import recorded_rows, recorded_version, release, row_of
from tests.support import BACKEND

pytestmark = pytest.mark.skipif(BACKEND != "fusec", reason="looks at fusec's graphs")

ROWS = recorded_rows()
SAMPLE = tuple(ROWS)[5::150]  # for each run of the tests; a stride that meets every kind
BETWEEN = ("unfold", "cumsum", "index_put", "std.unbiased")


def check_operation(name: str, types: int | None = None) -> None:
    """Compare the operation in so many types, or all; then what ran eagerly with the page."""
    pytest.importorskip("expecttest", reason="the table imports it")
    from tests.ops.op_db import check_case, dtypes_of, find_op

    operation = find_op(name)
    if operation is None:
        pytest.skip("this version of torch has no such operation")
    outcomes = [check_case(operation, dtype) for dtype in dtypes_of(operation)[:types]]
    if release() == recorded_version():
        assert row_of(*outcomes[:1]) == ROWS[name], "docs/operations.md is out of date"


def test_sample_of_operations_matches_eager_and_the_page():
    for name in SAMPLE:
        check_operation(name, types=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_operation_matches_eager_and_the_page(name):
    check_operation(name)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in BETWEEN else pytest.mark.slow) for n in ROWS]
)
def test_operation_matches_eager_between_neighbours(name):
    pytest.importorskip("expecttest", reason="the table imports it")
    from tests.ops.op_db import check_between, dtypes_of, find_op

    operation = find_op(name)
    if operation is None:
        pytest.skip("this version of torch has no such operation")
    if not dtypes_of(operation):
        pytest.skip("no type on CPUs")
    check_between(operation)


@pytest.mark.slow
def test_page_has_every_operation():
    pytest.importorskip("expecttest", reason="the table imports it")
    from tests.ops.op_db import op_db

    if release() == recorded_version():
        assert list(ROWS) == [operation.full_name for operation in op_db]
