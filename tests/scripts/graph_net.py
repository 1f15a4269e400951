"""A graph network, as PyG writes them: messages gathered, summed by ``index_add`` and attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def softmax(scores: Tensor, at: Tensor, nodes: int) -> Tensor:
    """Return the softmax over the edges that end at one node."""
    most = scores.new_full((nodes, scores.shape[1]), -torch.inf)
    most = most.scatter_reduce(0, at[:, None].expand_as(scores), scores, "amax")
    weights = (scores - most[at]).exp()
    total = weights.new_zeros(nodes, scores.shape[1]).index_add(0, at, weights)
    return weights / (total[at] + 1e-16)


class GCNConv(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.lin = nn.Linear(channels, out, bias=False)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degree = x.new_zeros(len(x)).index_add(0, target, torch.ones_like(target, dtype=x.dtype))
        scale = degree.clamp(min=1).rsqrt()
        messages = self.lin(x)[source] * (scale[source] * scale[target])[:, None]
        return x.new_zeros(len(x), messages.shape[1]).index_add(0, target, messages) + self.bias


class GATConv(nn.Module):
    def __init__(self, channels: int, out: int, heads: int) -> None:
        super().__init__()
        self.heads, self.out = heads, out
        self.lin = nn.Linear(channels, heads * out, bias=False)
        self.att = nn.Parameter(torch.randn(2, heads, out) / 10)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.lin(x).view(-1, self.heads, self.out)
        of_source, of_target = (h * self.att[0]).sum(-1), (h * self.att[1]).sum(-1)
        weights = softmax(F.leaky_relu(of_source[source] + of_target[target], 0.2), target, len(x))
        messages = h[source] * weights[:, :, None]
        return x.new_zeros(len(x), self.heads, self.out).index_add(0, target, messages).flatten(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(16, 32), GATConv(32, 8, 4)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 7)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.conv1(x, edges)), 0.1, self.training)
        return self.head(F.elu(self.norm(self.conv2(x, edges))))


def main(steps: int = 20) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    compiled = torch.compile(model)
    x, edges, labels = torch.randn(200, 16), torch.randint(200, (2, 800)), torch.randint(7, (200,))
    mask = torch.rand(200) < 0.5
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(compiled(x, edges)[mask], labels[mask])
        loss.backward()
        optimizer.step()
    compiled.eval()
    with torch.no_grad():
        found = compiled(x, edges).argmax(1)
    print(f"loss {loss.item():.3f}, right {(found == labels)[~mask].float().mean():.2f}")


if __name__ == "__main__":
    main()
