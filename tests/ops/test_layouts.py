"""Operations of ``op_db`` are traced with eager's strides, whatever the layout of arguments."""

from __future__ import annotations

import pytest

from tests.ops.operations_page import recorded_rows
from tests.support import BACKEND

ROWS = recorded_rows()
LEFT_OUT = {
    "normal": "draws are not tried: a mean and a deviation of two layouts keep the trace's strides",
    "_segment_reduce.lengths": "eager writes outside of memory where lengths are strided",
    "_segment_reduce.offsets": "eager writes outside of memory where offsets are strided",
    "view_copy": "torch's decomposition refuses strides that eager takes: the graph runs as eager",
}
"""Operations that are not looked at, and why."""
CALLS_ONLY = (
    "istft", "max.reduction_no_dim", "minimum", "nn.functional.rrelu",
    "nn.functional.triplet_margin_loss",
)  # fmt: skip
"""Each call has eager's strides; a whole trace of some samples, mostly of gradients, has not: its
formula, AOTAutograd's, calls other operations than eager's does."""
SAMPLE = (
    "roll", "xlogy", "div.floor_rounding", "copysign", "nn.functional.logsigmoid",
    "_batch_norm_with_update",
)  # fmt: skip


def check_operation(name: str, *, whole: bool) -> None:
    """Assert that an operation's calls are traced with eager's strides, its gradient's, too.

    Args:
        whole: look at results and gradients of whole traces, too. That takes a second or more.
    """
    pytest.importorskip("expecttest", reason="the table imports it")
    from tests.ops import op_db  # local: the table takes 4 s to import
    from tests.ops.layouts import calls_unlike_eager, results_unlike_eager

    operation = op_db.find_op(name)
    if operation is None:
        pytest.skip("this version of torch has no such operation")
    if name in LEFT_OUT:
        pytest.skip(LEFT_OUT[name])
    if not (dtypes := op_db.dtypes_of(operation)):
        pytest.skip("no type on CPUs")
    dtype = dtypes[0]
    with op_db.unseeded():
        assert calls_unlike_eager(operation, dtype) == {}
        if whole and name not in CALLS_ONLY:
            assert results_unlike_eager(operation, dtype, count=12) == []


@pytest.mark.skipif(BACKEND != "fusec", reason="looks at fusec's graphs")
@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.sampled(3)
def test_operation_is_traced_with_eager_strides(name):
    check_operation(name, whole=True)


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "fusec", reason="looks at fusec's graphs")
@pytest.mark.parametrize("name", ROWS)
def test_every_operation_is_traced_with_eager_strides(name):
    check_operation(name, whole=list(ROWS).index(name) % 8 == 0)
