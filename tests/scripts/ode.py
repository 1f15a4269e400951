"""A neural ODE: Runge-Kutta in a loop of Python whose step size depends on the error."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Field(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y**3) * (1 + 0.1 * t)


def step(field: nn.Module, t: Tensor, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return what Bogacki and Shampine compute, and how far two orders are apart."""
    a = field(t, y)
    b = field(t + h / 2, y + h * a / 2)
    c = field(t + 3 * h / 4, y + 3 * h * b / 4)
    after = y + h * (2 * a + 3 * b + 4 * c) / 9
    d = field(t + h, after)
    lower = y + h * (7 * a / 24 + b / 4 + c / 3 + d / 8)
    return after, (after - lower).abs().max()


def solve(field: nn.Module, y: Tensor, end: float = 1.0) -> tuple[Tensor, int]:
    """Return y at the end, and how many steps that took."""
    t, h, count = torch.zeros(()), torch.tensor(0.1), 0
    while t.item() < end:
        after, error = step(field, t, y, h)
        if error.item() < 1e-3:
            t, y = t + h, after
        h = (h * (1e-3 / (error.detach() + 1e-9)) ** (1 / 3)).clamp(1e-3, 0.3)
        count += 1
    return y, count


def main(steps: int = 5) -> None:
    torch.manual_seed(0)
    field = Field()
    optimizer = torch.optim.Adam(field.parameters(), 1e-2)
    compiled = torch.compile(solve)
    y = torch.randn(64, 2)
    for _ in range(steps):
        after, count = compiled(field, y)
        loss = (after - y @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]])).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}, {count} steps")


if __name__ == "__main__":
    main()
