"""``fusec check --invariant``: bits at several sizes of a batch, on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fusec.errors import ModelError, UsageError
from fusec.tools.cli import main
from fusec.tools.report.comparison import check_invariance, compare

MODELS = """
import torch
from torch import nn

class Rows(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 48), nn.GELU(), nn.LayerNorm(48))

class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0), x.sum(1)

class Transformed(nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x).abs()
"""
SIZES = ("--input", "f32[1|7|33,64]")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path


def test_rows_have_the_same_bits(capsys: pytest.CaptureFixture[str], models: Path) -> None:
    assert main(["check", "--invariant", f"{models}:Rows", *SIZES, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (result,) = document["results"]
    assert result["calls"] == 3 and result["shape"] == [33, 48] and not document["faults"]


def test_a_sum_over_the_batch_is_named(capsys: pytest.CaptureFixture[str], models: Path) -> None:
    assert main(["check", "--invariant", f"{models}:Centred", *SIZES]) == 1
    said = capsys.readouterr().out
    assert "output[0]  float32  33x64" in said and "64 of 64 differ at 1x64" in said
    assert "the same bits" in said and "faults: 1" in said


def test_a_call_of_unknown_order_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], models: Path
) -> None:
    assert main(["check", "--invariant", f"{models}:Transformed", *SIZES]) == 2
    assert "_fft_r2c" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more, said",
    [
        (["--input", "f32[8,64]"], "1|2|33"),
        ([*SIZES, "--train"], "leave out --train"),
        ([*SIZES, "--static"], "leave out one of them"),
    ],
    ids=["one size", "training", "two checks"],
)
def test_a_line_that_asks_for_something_else_is_refused(
    capsys: pytest.CaptureFixture[str], models: Path, more: list[str], said: str
) -> None:
    assert main(["check", "--invariant", f"{models}:Rows", *more]) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_fails_by_itself_is_named() -> None:
    with pytest.raises(ModelError):
        check_invariance(nn.Linear(3, 4), [torch.randn(2, 5)], [torch.randn(3, 5)])


def test_sizes_of_all_inputs_are_as_many() -> None:
    with pytest.raises(UsageError, match="several sizes"):
        check_invariance(nn.Linear(3, 4), [torch.randn(2, 3)], [torch.randn(2, 3)])


CAST = {
    "float": lambda x: x.float().exp().log(),
    "to": lambda x: x.to(torch.float32).exp().log(),
    "type of a call": lambda x: torch.softmax(x, -1, dtype=torch.float32),
}


@pytest.mark.parametrize("name", CAST)
def test_a_cast_to_f32_in_the_model_is_none_in_the_reference(name: str) -> None:
    (result, _) = compare(CAST[name], [torch.randn(8, 64)]).results
    assert result.problem == "" and result.eager_error > 0.0, "f64 was rounded as eager is"


def into_f32(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(8, 64).index_add(0, torch.tensor([0, 1]), x.float()[:2].exp().log())


def bits_of_f32(x: torch.Tensor) -> torch.Tensor:
    return ((x.float() * 2).view(torch.int32) & -65536).view(torch.float32)


@pytest.mark.parametrize("fn", [into_f32, bits_of_f32])
def test_a_model_that_needs_its_f32_has_it_in_the_reference(fn) -> None:
    found = compare(fn, [torch.randn(8, 64, dtype=torch.bfloat16)]).results
    assert [result.problem for result in found] == ["", ""]
    assert found[0].eager_error is not None


def test_bits_read_as_f32_are_f32_in_the_reference() -> None:
    bits = torch.randn(64).view(torch.int32)
    found = compare(lambda x: x.view(torch.float32) * 2.0, [bits]).results
    assert not any(result.problem for result in found)
    assert found[0].eager_error == 0.0
