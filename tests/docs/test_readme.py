"""README's snippets run as they are written, and print what it shows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.docs.console import run
from tests.docs.pages import Command, commands, python

PAGE = "README.md"


def test_python_runs_and_computes_what_eager_does() -> None:
    layer = nn.Sequential(nn.Linear(6, 9), nn.GELU())
    namespace: dict[str, object] = {}
    for text in python(PAGE):
        namespace["model"] = layer
        exec(text, namespace)
        model = namespace["model"]
        assert callable(model) and model is not layer
        x = torch.randn(5, 6)
        torch.testing.assert_close(model(x), layer(x))


@pytest.mark.parametrize("command", commands(PAGE), ids=lambda command: " ".join(command.argv))
def test_a_console_line_works(command: Command) -> None:
    run(command)
