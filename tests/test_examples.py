"""The examples do what they say, at a small size."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusec.export import Call, build, weights_of
from fusec.native import flags
from fusec.options import Options

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_gpt_trains_alike_and_is_plotted(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from examples import train_gpt

    torch._dynamo.reset()
    plot = tmp_path / "curves.png"
    arguments = ["--steps=8", "--width=32", "--layers=1", "--length=16", "--device=cpu", "--plot"]
    runs = train_gpt.main([*arguments, str(plot)])
    (eager, _), (fused, _) = runs["eager"], runs["fusec"]
    assert fused[-1] < fused[0]
    assert all(abs(a - b) < 1e-4 for a, b in zip(eager, fused, strict=True))
    assert plot.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "eager", "fusec", "difference"]
    assert [line.split()[0] for line in lines[1:9]] == [str(k) for k in range(8)]


@pytest.mark.slow
def test_the_trainer_of_transformers_trains_alike(tmp_path):
    pytest.importorskip("accelerate")
    from examples import hf_trainer

    torch._dynamo.reset()
    eager, fused = (hf_trainer.train(name, str(tmp_path), steps=8) for name in (None, "fusec"))
    assert len(eager) == 8
    assert all(abs(a - b) < 2e-3 for a, b in zip(eager, fused, strict=True))  # logged as rounded


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_gpt2_in_c_writes_the_tokens_that_eager_would(tmp_path):
    transformers = pytest.importorskip("transformers")
    save_file = pytest.importorskip("safetensors.torch").save_file
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=500, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    window, seen = 6, [5, 3, 8, 2]
    torch._dynamo.reset()
    call = Call((torch.arange(window)[None],))
    content = build(model, call, [Options.from_compile(None, {"native": True})])
    (tmp_path / "gpt2.fusec").write_bytes(content)
    save_file(weights_of(model), tmp_path / "gpt2.safetensors")
    command = ["cc", str(EXAMPLES / "gpt2.c"), *flags(), "-o", "gpt2"]
    subprocess.run(command, check=True, cwd=tmp_path)
    command = ["./gpt2", "gpt2.fusec", "gpt2.safetensors", "2", *map(str, seen)]
    done = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        with torch.no_grad():
            logits = model(torch.tensor([seen[-window:]])).logits
        assert int(line) == logits[0, -1].argmax()
        seen.append(int(line))
    assert len(seen) == 4 + 8


@pytest.mark.slow
def test_two_processes_train_by_ddp_to_equal_weights():
    command = [sys.executable, str(EXAMPLES / "ddp.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first, last = (float(v) for v in done.stdout.splitlines()[-1].split("loss ")[1].split(" to "))
    assert last < first - 0.3
