"""An LSTM cell, written out, that reads sequences of several lengths, with packed batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Cell(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.x2h, self.h2h = nn.Linear(inputs, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = (self.x2h(x) + self.h2h(h)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class Reader(nn.Module):
    def __init__(self, letters: int = 30, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.embed = nn.Embedding(letters, width)
        self.cell = Cell(width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        x = self.embed(text)
        h = c = x.new_zeros(len(text), self.width)
        for step in range(text.shape[1]):
            new_h, new_c = self.cell(x[:, step], h, c)
            reads = (step < lengths)[:, None]
            h, c = torch.where(reads, new_h, h), torch.where(reads, new_c, c)
        return self.head(h)


def main(steps: int = 8) -> None:
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    compiled = torch.compile(model)
    for step in range(steps):
        text = torch.randint(30, (16, 6 if step < steps // 2 else 8))
        lengths = torch.randint(1, text.shape[1], (16,))
        loss = F.cross_entropy(compiled(text, lengths), text[:, 0] % 2)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        print(f"{step}: {loss.item():.3f}")


if __name__ == "__main__":
    main()
