"""Whole graphs beside eager: sound ones agree, and a fault that is no kernel's is named."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fusec.driver import partition
from fusec.errors import WrongGraph
from fusec.passes.stage import Observe
from fusec.tools.verify import graphs
from tests.planted import after, observed
from tests.support import seeded, values

aten = torch.ops.aten
LOGGER = "fusec.verify.graphs"


class Codebook(nn.Module):
    """Reads a table and writes it: the backward must not read it again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", values(5, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        rows = self.table[i]
        with torch.no_grad():
            self.table.mul_(0.5)
        return F.mse_loss(self.linear(rows) * x, rows)


def step(model: nn.Module, *inputs: Any, observe: Observe | None = None, **options: Any) -> None:
    torch._dynamo.reset()
    options = {"verify": True, "strict": True, "cache": False, **options}
    if observe is None:
        call = torch.compile(model, backend="fusec", options=options)
    else:
        call = torch.compile(model, backend=observed(observe, **options))
    for number in range(2):
        made = call(values(6, 4, seed=number).requires_grad_(), *inputs)
        made.backward()


ROWS = torch.tensor([0, 1, 2, 3, 4, 0])


def agreed(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what of whole graphs agreed; nothing may be left out."""
    said = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert not [text for text in said if "left out" in text]
    return [text for text in said if " of graph " in text and text.endswith("agrees")]


def test_results_writes_and_gradients_of_a_sound_program_agree(caplog):
    with seeded(), caplog.at_level(logging.DEBUG, LOGGER):
        step(Codebook(), ROWS)
    said = agreed(caplog)
    assert said.count("result 0 of graph forward agrees") == 2
    assert said.count("table after the call of graph forward agrees") == 2
    for name in ("linear.weight", "linear.bias", "x"):
        assert said.count(f"the gradient of {name} of graph backward agrees") == 2


class Dropped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (F.dropout(x, 0.5) * x.sin()).sum()


@pytest.mark.parametrize("own", (True, False))
def test_random_numbers_are_those_of_the_call(caplog, own):
    with seeded(), caplog.at_level(logging.DEBUG, LOGGER):
        step(Dropped(), fallback_random=own)
    assert len(agreed(caplog)) == 4


def test_forwards_may_run_before_their_backwards(caplog):
    torch._dynamo.reset()
    call = torch.compile(
        lambda x: x.exp().sin().sum(), backend="fusec", options={"verify": True, "strict": True}
    )
    inputs = [values(4, seed=number).requires_grad_() for number in range(3)]
    with caplog.at_level(logging.DEBUG, LOGGER):
        for loss in [call(x) for x in inputs]:
            loss.backward()
    assert len(agreed(caplog)) == 6


def test_inference_is_compared_with_what_it_writes(caplog):
    def count(x, seen):
        seen.add_(1)
        return x * seen

    torch._dynamo.reset()
    with torch.no_grad(), caplog.at_level(logging.DEBUG, LOGGER):
        call = torch.compile(count, backend="fusec", options={"verify": True, "strict": True})
        call(values(4), torch.zeros(4))
    assert agreed(caplog) == [
        "result 0 of graph inference agrees",
        "seen after the call of graph inference agrees",
    ]


# -- planted faults --------------------------------------------------------------------------------


@pytest.fixture
def no_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backward read the memory of inputs that the forward has overwritten."""
    monkeypatch.setattr(partition, "take_snapshots", lambda *_: [])


def test_a_backward_that_reads_what_the_forward_wrote_is_found(no_snapshots):
    with seeded(), pytest.raises(WrongGraph, match=r"the gradient of (linear\.weight|x) ") as found:
        step(Codebook(), ROWS)
    text = str(found.value)
    assert "graph 'backward'" in text
    assert "test_graphs.py:" in text
    assert "fusec bisect --wrong" in text


def test_a_wrong_graph_is_a_warning_where_options_are_not_strict(no_snapshots):
    with seeded(), pytest.warns(UserWarning, match="graph 'backward' is off in the gradient of"):
        step(Codebook(), ROWS, strict=False)


def test_a_wrong_rewrite_of_the_joint_graph_is_found():
    def cosine(joint: fx.GraphModule) -> None:
        for node in joint.graph.find_nodes(op="call_function", target=aten.sin.default):
            node.target = aten.cos.default

    with pytest.raises(WrongGraph, match="result 0"):
        step(lambda x: x.sin().sum(), observe=after("softmax_gradients", cosine))


def test_other_strides_of_a_gradient_are_found():
    def transpose(joint: fx.GraphModule) -> None:
        (output,) = joint.graph.find_nodes(op="output")
        loss, gradient = output.args[0]
        with joint.graph.inserting_before(output):
            turned = joint.graph.call_function(aten.permute.default, (gradient, [1, 0]))
            turned.meta["val"] = gradient.meta["val"].t()
            dense = joint.graph.call_function(
                aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}
            )
            dense.meta["val"] = turned.meta["val"].contiguous()
            back = joint.graph.call_function(aten.permute.default, (dense, [1, 0]))
            back.meta["val"] = dense.meta["val"].t()
        output.args = ([loss, back],)

    wrong = after("softmax_gradients", transpose)
    with pytest.raises(WrongGraph, match=r"the gradient of x .* strides \[1, 6\], eager \[4, 1\]"):
        step(lambda x: (x.sin() * x).sum(), observe=wrong)


def test_a_graph_with_effects_is_left_out(caplog):
    @torch.library.custom_op("fusec_tests::tell", mutates_args=())
    def tell(x: torch.Tensor) -> None:
        return None

    tell.register_fake(lambda x: None)
    gm = fx.symbolic_trace(lambda x: (tell(x), x.sin())[1:])
    with caplog.at_level(logging.INFO, LOGGER), warnings.catch_warnings():
        assert graphs.Reference(gm, None, {}, strict=True).reason.endswith("has effects")


RELATED = {
    "rows of a cat": lambda x, y, n: torch.cat([x, y], 1)[:, :n] * 2,
    "as many as there are": lambda x, y, n: x[:, None, :] == y[:, : x.shape[1], None],
    "a pad before a product": lambda x, y, n: F.pad(x, (0, n)) @ y.new_ones(x.shape[1] + n, 3),
}
"""Programs in range by relations of sizes that Dynamo guards, and that no proof knows."""


@pytest.mark.parametrize("name", RELATED)
def test_a_relation_of_sizes_that_dynamo_guards_is_no_fault(name):
    torch._dynamo.reset()
    options = {"verify": True, "cache": False}
    compiled = torch.compile(RELATED[name], backend="fusec", dynamic=True, options=options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for rows in (5, 6):
            x, y = values(4, rows), values(4, rows + 3)
            torch.testing.assert_close(compiled(x, y, rows + 1), RELATED[name](x, y, rows + 1))
    assert not [str(warning.message) for warning in told if "fusec" in str(warning.message)]


def test_rows_apart_by_a_symbolic_stride_are_no_fault():
    """Nothing says that the stride of padded rows is at least their length."""

    def fn(x):
        x[..., 1:].mul_(2)
        return x.sum()

    torch._dynamo.reset()
    options = {"verify": True, "cache": False}
    compiled = torch.compile(fn, backend="fusec", dynamic=True, options=options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for rows in (5, 6):
            x, same = (values(8, rows + 3)[:, :rows] for _ in range(2))
            torch.testing.assert_close((compiled(x), x), (fn(same), same))
    assert not [str(warning.message) for warning in told if "fusec" in str(warning.message)]
