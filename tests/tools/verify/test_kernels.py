"""Kernels beside eager while a program runs: sound ones pass, a planted fault is named."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusec.errors import WrongKernel
from fusec.runtime.calls import executable
from fusec.tools.verify import kernels
from tests.planted import plant
from tests.support import seeded, tune, values
from tests.verdicts import decide_products

LOGGER = "fusec.verify"


class Block(nn.Module):
    """Kernels of rows and of columns, dropout, buffers that are written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(48), nn.Linear(48, 96)
        self.batch, self.drop = nn.BatchNorm1d(96), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(F.gelu(self.up(self.norm(x)), approximate="tanh"))
        return self.batch(h).square().sum()


def train(verify: bool) -> list[torch.Tensor]:
    """Return the losses, parameters and buffers of two steps of training."""
    torch._dynamo.reset()
    with seeded():
        model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    options = {"verify": verify, "strict": True}
    call = torch.compile(model, backend="fusec", options=options)
    step = torch.compile(optimizer.step, backend="fusec", options=options)
    losses = []
    with seeded():
        for number in range(2):
            losses.append(call(values(40, 48, seed=number)))
            losses[-1].backward()
            step()
            optimizer.zero_grad()
    return [*losses, *model.parameters(), *model.buffers()]


def launches_that_agree(caplog: pytest.LogCaptureFixture) -> set[str]:
    """Return the names of the launches that were compared, none of which may be off or left out."""
    said = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert all(text.endswith("agrees") for text in said), [t for t in said if "agrees" not in t]
    return {text.split()[3] for text in said}


def test_sound_kernels_and_foreach_kernels_agree_and_results_stay_the_same(caplog):
    with caplog.at_level(logging.DEBUG, LOGGER):
        watched = train(verify=True)
    assert {"k0", "k1", "b0"} <= launches_that_agree(caplog)
    for a, b in zip(watched, train(verify=False), strict=True):
        assert torch.equal(a, b)


def test_results_of_a_loop_over_rows_are_compared(caplog, monkeypatch):
    tune(monkeypatch, "fusion", chunk_bytes=16 * 200 * 4, chunk_rows=1)  # 16 of the 40 rows
    torch._dynamo.reset()
    options = {"verify": True, "strict": True, "chunk_bytes": 2000, "cache": False}
    call = torch.compile(
        lambda x, w, t: F.cross_entropy(x @ w, t), backend="fusec", options=options
    )
    x, w = values(40, 16).requires_grad_(), values(16, 200).requires_grad_()
    with caplog.at_level(logging.DEBUG, LOGGER):
        call(x, w, values(40, dtype=torch.int64, low=0, high=200)).backward()
    assert "rows_0" in launches_that_agree(caplog)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, torch.ops.aten.tanh.default)


def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x)
    return (h @ w).relu() * 0.5


def compiled(**options: object) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(scaled, backend="fusec", options={"verify": True, **options})


def test_a_wrong_kernel_is_named_with_its_line_and_its_readers_are_not(faulty):
    x, w = values(8, 16), values(16, 4)
    call = compiled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call(x, w)
        assert torch.equal(call(x, w), result)
    (text,) = [str(warning.message) for warning in caught if "fusec" in str(warning.message)]
    for part in (
        "kernel k0 of graph 'inference' is off in tanh (tanh.default): max error 0.01",
        "; at (",
        "h = torch.tanh(x)",
    ):
        assert part in text
    assert torch.allclose(result, ((torch.tanh(x) + 0.01) @ w).relu() * 0.5, atol=1e-6)


def test_at_its_end_a_process_says_what_agreed_and_how_often_a_kernel_was_off(faulty, capsys):
    tallies = kernels._tallies
    tallies.clear()
    x, w = values(8, 16), values(16, 4)
    call = compiled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            call(x, w)
    kernels.tell_at_exit()
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "fusec: verified: 3 results of 1 kernels agree with eager",
        "fusec: verified: kernel k0 of graph 'inference' was off in tanh: 3 of its calls",
    ]
    tallies[0].left_out = 2
    assert ", 2 left out (" in kernels.summary(tallies)[0]
    assert kernels.summary([]) == []


def test_the_place_that_is_named_is_not_one_where_both_are_nan_or_infinite():
    eager = torch.tensor([torch.nan, torch.inf, torch.nan, 1.0])
    found = torch.tensor([torch.nan, torch.inf, 3.0, 2.0])
    said = kernels.place_of(found, eager, found.double)
    assert said == "; at (2,): 3, eager nan, fp64 3"


def test_a_wrong_kernel_is_an_error_under_strict(faulty):
    with pytest.raises(WrongKernel, match="k0"):
        compiled(strict=True)(values(8, 16), values(16, 4))


def test_what_an_operation_of_the_users_wrote_in_place_is_read_by_what_is_compared(caplog):
    @torch.library.custom_op("fusec_test::double_in_place", mutates_args=("x",))
    def double_in_place(x: torch.Tensor) -> None:
        x.mul_(2)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        double_in_place(y)
        return y.cos()

    torch._dynamo.reset()
    with caplog.at_level(logging.DEBUG, LOGGER):
        x = values(40)
        options = {"verify": True, "strict": True}
        got = torch.compile(f, backend="fusec", options=options)(x)
    assert torch.allclose(got, (2 * x.sin()).cos())
    assert launches_that_agree(caplog) == {"k0", "k1"}


def test_a_scan_that_is_stored_in_the_order_of_its_reader_is_not_taken_for_eagers():
    torch._dynamo.reset()
    call = torch.compile(
        lambda x: x.cumsum(0).cumsum(1).sin().sum(1),
        backend="fusec",
        dynamic=True,
        options={"verify": True, "strict": True, "race": "fused"},
    )
    call(values(16, 17).requires_grad_()).sum().backward()


def test_a_library_whose_product_is_off_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    onednn = torch.ops.mkldnn._linear_pointwise.default

    def off(operator: object) -> object:
        return (lambda *args: onednn(*args) + 0.01) if operator is onednn else operator

    tune(monkeypatch, "races", product=1)
    inputs = values(8, 16), values(16, 4)
    decide_products(monkeypatch, tmp_path, "oneDNN", lambda: compiled(strict=True)(*inputs))
    monkeypatch.setattr(executable, "_quickest", off)
    with pytest.raises(WrongKernel, match=r"kernel oneDNN .* is off in mm"):
        compiled(strict=True)(*inputs)
