"""Which operations fusec lowers: those that the other files compare must not all run eagerly.

The captured graph tells what is left to eager kernels. Contractions, scatters, scans and sorting
may be; a name that appears here besides them is an operation that lost its lowering. Of tables of
operations, the tests that compare them say so, too (``check(..., left=)``).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusec.codegen.targets import find_target
from fusec.driver.context import CompileContext
from fusec.driver.stages import CAPTURE
from fusec.driver.trace import Trace
from fusec.options import Options
from fusec.tools.report.observe import observe
from tests.ops import test_indexing as indexing
from tests.support import BACKEND, TORCH, check, externs, values

pytestmark = pytest.mark.skipif(BACKEND != "fusec", reason="asks fusec alone")

# What is lowered with its gradient is lowered without: training has both graphs.
MODES = pytest.mark.parametrize(
    "train", (pytest.param(False, marks=pytest.mark.slow), True), ids=("forward", "training")
)
SCATTERS = {"index_put.default", "scatter.src", "scatter.value", "scatter_add.default",
            "put.default"}  # fmt: skip


def left_to_eager(fn, *inputs, train=False):
    """Return the calls that capture leaves: what comes after it lowers nothing more."""
    context = CompileContext(find_target("cpu"), Options(), Trace("lowered"))
    seen = observe(fn, inputs, train=train)
    graphs = [CAPTURE.run(one.graph, context)[0] for one in seen]
    return {call.target.removeprefix("aten.") for graph in graphs for call in graph.externs}


@pytest.mark.first
@pytest.mark.parametrize(
    ("mode", "name"), [("reflect", "reflection"), ("replicate", "replication")]
)
def test_pads_by_what_is_inside_are_the_library_s_where_rows_are_contiguous(mode, name):
    def fn(x):
        return F.pad(x * 2, (2, 1, 1, 2), mode=mode) + 1

    x = values(2, 3, 5, 6)
    rows, last = f"{name}_pad2d.default", x.to(memory_format=torch.channels_last)
    gradient = f"{name}_pad2d_backward.default"
    assert left_to_eager(fn, x) == {rows} and left_to_eager(fn, last) == set()
    assert left_to_eager(fn, x, train=True) == {rows, gradient}
    assert left_to_eager(fn, last, train=True) == {gradient}
    for images in (x, last) if TORCH >= (2, 13) else (x,):  # strides: see docs/numerics.md
        check(fn, images, train=True)


def test_gradients_of_gathers_are_scatters():
    def gather(x, i):
        return {name: op(x.exp(), i) * 2 for name, op in indexing.GATHERS.items()}

    inputs = values(6, 9), indexing.indices(8, below=6)
    assert left_to_eager(gather, *inputs, train=True) <= SCATTERS


@MODES
def test_norms_and_losses_are_lowered(train):
    def norms(x, w, t):
        return (F.layer_norm(x, (33,), w, w), F.rms_norm(x, (33,), w), F.cross_entropy(x, t),
                F.group_norm(x, 3), x.softmax(0), F.batch_norm(x, None, None, training=True),
                F.binary_cross_entropy_with_logits(x, x.sigmoid()), F.huber_loss(x, x * 2),
                F.cross_entropy(x, t, label_smoothing=0.1, ignore_index=3))  # fmt: skip

    targets = indexing.indices(17, below=33)
    assert left_to_eager(norms, values(17, 33), values(33, seed=1), targets, train=train) == set()


@MODES
def test_dropout_is_lowered(train):
    def drop(x):
        return F.dropout(x.relu(), 0.3, True) * 2

    assert left_to_eager(drop, values(17, 33), train=train) == {"fusec.random_seeds.default"}


def test_random_numbers_are_lowered():
    def draw(x):
        return (torch.rand_like(x), torch.randn(5, 7), torch.randint(3, 9, (11,)),
                torch.bernoulli(x.sigmoid()), x.clone().uniform_(2, 3), x.clone().normal_(),
                x.clone().exponential_(), x.clone().bernoulli_(0.3), F.alpha_dropout(x, 0.2, True),
                F.dropout2d(x[None, None], 0.3, True), F.gumbel_softmax(x))  # fmt: skip

    eager = left_to_eager(draw, values(17, 33))
    assert eager - {"empty.memory_format", "empty_permuted.default"} == {
        "fusec.random_seeds.default"
    }


def test_contractions_are_left_to_libraries_with_a_reason():
    found = dict(externs(lambda x, w: F.gelu(x @ w), values(5, 8), values(8, 9, seed=1)))
    assert list(found) == ["mm.default"]
    assert found["mm.default"]
