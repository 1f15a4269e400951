"""The snippets of README, and of the pages that it was parted into, run as they are written."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.docs.console import run
from tests.docs.pages import Command, commands, python

PAGES = ["README.md", "docs/options.md", "docs/products.md", "docs/training.md"]
COMMANDS = [command for page in PAGES for command in commands(page)]


def test_python_runs_and_computes_what_eager_does() -> None:
    layer = nn.Sequential(nn.Linear(6, 9), nn.GELU())
    namespace: dict[str, object] = {}
    for text in (text for page in PAGES for text in python(page)):
        namespace["model"] = layer
        exec(text, namespace)
        model = namespace["model"]
        assert callable(model) and model is not layer
        x = torch.randn(5, 6)
        torch.testing.assert_close(model(x), layer(x))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.argv))
def test_a_console_line_works(command: Command) -> None:
    run(command)
