"""A recommender as DLRM: bags of embeddings, pairwise products, click-through rate."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def tower(*sizes: int) -> nn.Sequential:
    """Return linear layers with ReLUs between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    def __init__(self, tables: int = 6, rows: int = 1000, width: int = 16) -> None:
        super().__init__()
        self.bottom = tower(8, 32, width)
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        pairs = (tables + 1) * tables // 2
        self.top = tower(width + pairs, 64, 1)
        self.register_buffer("rows", torch.tril_indices(tables + 1, tables + 1, -1)[0])
        self.register_buffer("columns", torch.tril_indices(tables + 1, tables + 1, -1)[1])

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        found = [table(ids) for table, ids in zip(self.tables, sparse.unbind(1), strict=True)]
        vectors = torch.stack([x, *found], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.rows, self.columns]
        return self.top(torch.cat([x, products], 1)).squeeze(1)


def main(steps: int = 20) -> None:
    torch.manual_seed(0)
    model = DLRM()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.05)
    compiled = torch.compile(model)
    for _ in range(steps):
        dense, sparse = torch.rand(128, 8), torch.randint(1000, (128, 6, 4))
        clicks = (dense[:, 0] > 0.5).float()
        loss = F.binary_cross_entropy_with_logits(compiled(dense, sparse), clicks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
