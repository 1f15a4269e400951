"""Train a small GPT on the text beside this file: eagerly and with fusec, from the same weights.

    python examples/train_gpt.py                     # a table of losses and times
    python examples/train_gpt.py --plot out.png      # both loss curves, by matplotlib
    python examples/train_gpt.py --steps 200 --bf16 --device cuda

Both runs see the same batches, dropout is 0, and one token is one byte. Steps are timed without the
first, which compiles.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

TEXT = Path(__file__).parent / "text.txt"
VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """The size of a model: layers, heads, width of the residual stream, longest text in tokens."""

    layers: int = 2
    heads: int = 4
    width: int = 128
    length: int = 64


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A language model of bytes; returns the mean loss of the next byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        at_least_f32 = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(at_least_f32), following.flatten())


def batches(
    steps: int, batch: int, length: int, device: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of i64[batch, length], tokens and those that follow, drawn from the text."""
    text = torch.tensor(list(TEXT.read_bytes()), device=device)
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(steps):
        starts = torch.randint(len(text) - length - 1, (batch,), generator=generator).tolist()
        rows = torch.stack([text[start : start + length + 1] for start in starts])
        made.append((rows[:, :-1], rows[:, 1:]))
    return made


def train(
    shape: Shape,
    data: list[tuple[torch.Tensor, torch.Tensor]],
    compile_model: Callable[[nn.Module], Callable[..., torch.Tensor]],
    *,
    device: str = "cpu",
    bf16: bool = False,
    rate: float = 1e-3,
) -> tuple[list[float], list[float]]:
    """Train a new model from the seed 0 by AdamW, one step a batch.

    Returns:
        The loss and the seconds of each step.
    """
    torch.manual_seed(0)
    model = Gpt(shape).to(device)
    call = compile_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses, seconds = [], []
    for ids, following in data:
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16):
            loss = call(ids, following)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - start)
    return losses, seconds


def print_table(runs: dict[str, tuple[list[float], list[float]]], rows: int = 8) -> None:
    """Print some losses of both runs side by side, then the first step's time and the median."""
    names = list(runs)
    steps = len(runs[names[0]][0])
    print(f"{'step':>8}" + "".join(f"{name:>12}" for name in names) + f"{'difference':>14}")
    shown = sorted({round(k * (steps - 1) / (rows - 1)) for k in range(rows)})
    for step in shown:
        values = [runs[name][0][step] for name in names]
        difference = values[1] - values[0]
        print(f"{step:8d}" + "".join(f"{v:12.4f}" for v in values) + f"{difference:14.1e}")
    first = [runs[name][1][0] for name in names]
    later = [1e3 * statistics.median(runs[name][1][1:]) for name in names]
    print("first, s" + "".join(f"{value:12.2f}" for value in first))
    print("then, ms" + "".join(f"{value:12.2f}" for value in later))


def write_plot(path: Path, runs: dict[str, tuple[list[float], list[float]]]) -> None:
    """Write both loss curves as one picture; the suffix of the path says its format."""
    import matplotlib  # only who wants a picture needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    for (name, (losses, _)), style in zip(runs.items(), ("-", "--"), strict=True):
        axes.plot(losses, style, label=name)
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="A small GPT, from the same seed")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, tuple[list[float], list[float]]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="texts a step")
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--length", type=int, default=Shape.length, help="tokens a text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bf16", action="store_true", help="compute under autocast")
    parser.add_argument("--plot", type=Path, help="write both loss curves to this file")
    chosen = parser.parse_args(arguments)
    if chosen.steps < 2:
        parser.error("--steps must be at least 2: the first one compiles")
    if chosen.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error('--plot wants matplotlib: pip install -e ".[demo]"')
    shape = Shape(chosen.layers, Shape.heads, chosen.width, chosen.length)
    data = batches(chosen.steps, chosen.batch, chosen.length, chosen.device)
    settings: dict[str, Any] = {"device": chosen.device, "bf16": chosen.bf16}
    runs = {
        "eager": train(shape, data, lambda model: model, **settings),
        "fusec": train(shape, data, lambda m: torch.compile(m, backend="fusec"), **settings),
    }
    print_table(runs)
    if chosen.plot is not None:
        write_plot(chosen.plot, runs)
        print(f"wrote {chosen.plot}")
    return runs


if __name__ == "__main__":
    main()
