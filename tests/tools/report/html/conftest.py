"""One small model for all tests of the report: three alike layers, trained, with hostile names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fusec.options import Options
from fusec.tools.report.breaks import Break, Place, Remedy
from fusec.tools.report.html.document import Document, document_of
from fusec.tools.report.observe import observe
from fusec.tools.report.run_report import Seen
from fusec.tools.report.stages import Staged, choose_target, take_through

HOSTILE = "</script><img src=x onerror=alert(1)>"
"""What ends a script, or a comment, if it is ever printed as it is."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.add_module(HOSTILE, nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = getattr(self, HOSTILE)(self.norm(x))
        return x + torch.fft.fft(up.tanh()).real  # </script><img src=x onerror=alert(2)>


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.h = nn.ModuleList([Layer() for _ in range(layers)])
        self.last = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = layer(x)
        return self.last(x)


def stage(
    fn: Callable[..., Any], inputs: Sequence[torch.Tensor], target: str = "cpu", train: bool = False
) -> list[Staged]:
    """Return the graphs of a call, compiled to source text."""
    row, options = choose_target(target), Options.from_compile(None, None)
    seen = observe(fn, inputs, train=train, target=row, options=options)
    return [take_through(one, row, options) for one in seen]


SEEN = Seen(
    HOSTILE,
    breaks=(Break(Place("a.py", 3, "forward", HOSTILE), HOSTILE, Remedy(HOSTILE, HOSTILE)),),
    unseen=HOSTILE,
    compile_seconds={HOSTILE: 1.5},
)


@pytest.fixture(scope="package")
def staged() -> list[Staged]:
    return stage(Net(3), [torch.randn(8, 64)], train=True)


@pytest.fixture(scope="package")
def document(staged: list[Staged]) -> Document:
    return document_of(HOSTILE, "cpu", staged, SEEN)


@pytest.fixture(scope="package")
def calm(staged: list[Staged]) -> Document:
    """The same report without breaks."""
    return document_of("net.py:Net", "cpu", staged, Seen("net.py"))
