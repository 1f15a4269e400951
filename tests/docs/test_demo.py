"""The demo finds a kernel to show, whatever shares a kernel with a norm."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers", reason="the demo's model is of transformers")


def demo() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "demo_gpt2.py"
    spec = importlib.util.spec_from_file_location("demo_gpt2", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tokens", (16, 128, 1024))
def test_the_demo_shows_a_norm_and_a_load_of_its_machine_code(tokens, capsys):
    from transformers import GPT2Config, GPT2LMHeadModel  # local: it takes a second

    made = demo()
    config = GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=512)
    model = made.Forward(GPT2LMHeadModel(config).eval())
    made.show_kernel(model, made.make_tokens(1, tokens, "cpu") % 512)
    shown = capsys.readouterr().out
    assert "@triton.jit" in shown and "mean" in shown and "LDG" in shown
