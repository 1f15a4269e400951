"""The examples do what they say, at a small size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
def test_two_processes_train_by_ddp_to_equal_weights():
    command = [sys.executable, str(EXAMPLES / "ddp.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first, last = (float(v) for v in done.stdout.splitlines()[-1].split("loss ")[1].split(" to "))
    assert last < first - 0.3
