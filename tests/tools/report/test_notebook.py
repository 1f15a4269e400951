"""What a notebook shows: the texts of reports and kernels, in which no name is markup."""

from __future__ import annotations

import torch
from torch import nn

import fusec

HOSTILE = "<img src=x onerror=alert(1)>"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module(HOSTILE, nn.Softplus())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = getattr(self, HOSTILE)(x).exp()
        print(y.shape)
        return y.sin()  # <img src=x onerror=alert(2)>


def test_an_explanation_is_its_text() -> None:
    shown = fusec.explain(Net(), torch.randn(8, 64))._repr_html_()
    assert shown.startswith("<pre>target ") and "graph breaks: 1" in shown
    assert "&lt;img" in shown and "<img" not in shown
    assert "test_notebook.py" in shown


def test_kernels_are_a_list_whose_names_open() -> None:
    kernels = fusec.kernels(lambda x: torch.softmax(x, -1), torch.randn(8, 64))
    assert isinstance(kernels, list) and len(kernels) == 1
    shown = kernels._repr_html_()
    assert shown.count("<details>") == 1 and "&lt;" in shown
    assert "<summary>inference k0</summary>" in shown
    assert fusec.kernels(lambda x: x, torch.randn(8))._repr_html_() == ""


def test_a_notebook_offers_what_there_is() -> None:
    shown = [name for name in dir(fusec) if not name.startswith("_")]
    assert shown == [name for name in fusec.__all__ if not name.startswith("_")]
