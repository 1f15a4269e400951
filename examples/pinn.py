"""A network that solves Burgers' equation, u_t + u u_x = nu u_xx: `fusec run examples/pinn.py`.

The residual is made of the network's own derivatives, so that training differentiates twice: all of
it, ``torch.func`` included, is one graph.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

VISCOSITY = 0.01 / math.pi


class Net(nn.Module):
    """u(t, x)."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        sizes = [2, *[width] * depth]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.out = nn.Linear(width, 1)

    def forward(self, point: Tensor) -> Tensor:
        for layer in self.hidden:
            point = layer(point).tanh()
        return self.out(point).squeeze(-1)


def loss_of(net: Net, inside: Tensor, edge: Tensor, known: Tensor) -> Tensor:
    """Return how far a network is from the equation inside, and from what is known at the edge."""
    weights = dict(net.named_parameters())

    def u(t: Tensor, x: Tensor) -> Tensor:
        return functional_call(net, weights, torch.stack([t, x]))

    def residual(t: Tensor, x: Tensor) -> Tensor:
        u_x = grad(u, 1)
        return grad(u, 0)(t, x) + u(t, x) * u_x(t, x) - VISCOSITY * grad(u_x, 1)(t, x)

    return vmap(residual)(*inside.unbind(1)).square().mean() + (net(edge) - known).square().mean()


def points(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return points inside, points at the edge, and u there: -sin(pi x) first, 0 at the sides."""
    inside = torch.rand(count, 2) * torch.tensor([1.0, 2.0]) - torch.tensor([0.0, 1.0])
    first = torch.stack([torch.zeros(count), torch.rand(count) * 2 - 1], 1)
    sides = torch.stack([torch.rand(count), torch.randint(2, (count,)) * 2.0 - 1], 1)
    known = torch.cat([-(math.pi * first[:, 1]).sin(), torch.zeros(count)])
    return inside, torch.cat([first, sides]), known


def main(steps: int = 20, count: int = 256) -> float:
    """Train, and return the last loss."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    compiled = torch.compile(loss_of, backend="fusec")
    for _ in range(steps):
        optimizer.zero_grad()
        loss = compiled(net, *points(count))
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f} after {steps} steps")
    return loss.item()


if __name__ == "__main__":
    main()
