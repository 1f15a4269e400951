"""Rows of tables, users and things, graphs, points: little arithmetic, much indexing."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.workload import Workload
from bench.workloads.deployed.model import measured

Made = tuple[nn.Module, tuple[Tensor, ...]]


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers = [
        part
        for k in range(len(widths) - 1)
        for part in (nn.Linear(widths[k], widths[k + 1]), nn.ReLU())
    ]
    return nn.Sequential(*layers[:-1])


class TableBlock(nn.Module):
    """A residual block of tables: norm over rows, wide, narrow (Gorishniy et al., 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Table(nn.Module):
    """Columns of numbers beside columns of categories."""

    def __init__(self, numbers: int, categories: int, width: int, depth: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(1000, 8) for _ in range(categories))
        self.first = nn.Linear(numbers + 8 * categories, width)
        self.blocks = nn.Sequential(*(TableBlock(width) for _ in range(depth)))
        self.norm, self.head = nn.BatchNorm1d(width), nn.Linear(width, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        columns = [f(categories[:, k]) for k, f in enumerate(self.embeddings)]
        x = self.blocks(self.first(torch.cat((numbers, *columns), 1)))
        return self.head(F.relu(self.norm(x)))


class Recommender(nn.Module):
    """Embeddings that are multiplied with each other in pairs: DLRM (Naumov et al., 2019)."""

    def __init__(self, numbers: int, tables: int, width: int, rows: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = mlp(numbers, 256, 64, width)
        pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", pairs[0] * (tables + 1) + pairs[1], persistent=False)
        self.top = mlp(width + pairs.shape[1], 256, 128, 1)

    def forward(self, numbers: Tensor, things: Tensor) -> Tensor:
        """Numbers [b, n], things [b, tables, several]: the sum of several of each table."""
        dense = self.bottom(numbers)
        sums = [f(things[:, k]).sum(1) for k, f in enumerate(self.embeddings)]
        stacked = torch.stack((dense, *sums), 1)
        products = (stacked @ stacked.transpose(1, 2)).flatten(1)[:, self.pairs]
        return self.top(torch.cat((dense, products), 1)).sigmoid()


class Graph(nn.Module):
    """Means over neighbours: GraphSAGE (Hamilton et al., 2017)."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.others = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairs)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        degree = x.new_zeros(len(x)).index_add(0, target, x.new_ones(len(target)))
        share = (1 / degree.clamp(min=1))[:, None]
        for k, (own, others) in enumerate(zip(self.own, self.others, strict=True)):
            sums = torch.zeros_like(x).index_add(0, target, x[source])
            x = own(x) + others(sums * share)
            x = F.relu(x) if k + 1 < len(self.own) else x
        return x


class Points(nn.Module):
    """The same layers for each point, then the largest of each channel: PointNet (Qi, 2017)."""

    def __init__(self, widths: tuple[int, ...], classes: int = 40) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU())
                for a, b in pairwise((3, *widths))
            )
        )
        self.head = mlp(widths[-1], 256, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).amax(2))


def table(shrink: int) -> Made:
    model = Table(32, 16, 256 // shrink, max(1, 4 // shrink))
    rows = 1024 // shrink
    return model, (torch.randn(rows, 32), torch.randint(1000, (rows, 16)))


def recommender(shrink: int) -> Made:
    rows, batch = 20000 // shrink, 512 // shrink
    model = Recommender(13, 26, 32, rows)
    return model, (torch.randn(batch, 13), torch.randint(rows, (batch, 26, 4)))


def graph(shrink: int) -> Made:
    nodes, edges = 4000 // shrink, 40000 // shrink
    model = Graph(128 // shrink, 128 // shrink, 128 // shrink, 40)
    ends = (torch.randint(nodes, (edges,)) for _ in range(2))
    return model, (torch.randn(nodes, 128 // shrink), *ends)


def points(shrink: int) -> Made:
    widths = (64, 64, 128, 1024) if shrink == 1 else (16, 32)
    return Points(widths), (torch.randn(4, 3, 1024 // shrink),)


def rows() -> list[Workload]:
    makes = {
        "table mlp 1024x48": table,
        "dlrm 512x26": recommender,
        "graphsage 4000x40000": graph,
        "pointnet 4x1024": points,
    }
    return [w for name, make in makes.items() for w in measured("further", name, make)]
