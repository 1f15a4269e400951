"""A Kalman filter in a loop of Python: matrices of 2 x 2, inverted, for tens of steps."""

from __future__ import annotations

import torch
from torch import Tensor


def smooth(seen: Tensor, move: Tensor, drift: Tensor, look: Tensor, noise: Tensor) -> Tensor:
    """Return the log-likelihood of what was seen."""
    state, cov = torch.zeros(2), torch.eye(2)
    total = torch.zeros(())
    for value in seen:
        state, cov = move @ state, move @ cov @ move.T + drift.exp() * torch.eye(2)
        wrong = value - look @ state
        spread = look @ cov @ look.T + noise.exp() * torch.eye(2)
        gain = cov @ look.T @ torch.linalg.inv(spread)
        state, cov = state + gain @ wrong, (torch.eye(2) - gain @ look) @ cov
        total = total - 0.5 * (wrong @ torch.linalg.solve(spread, wrong) + torch.logdet(spread))
    return total


def main(steps: int = 4, length: int = 8) -> None:
    torch.manual_seed(0)
    turn = torch.tensor(0.3)
    move = torch.stack([turn.cos(), -turn.sin(), turn.sin(), turn.cos()]).view(2, 2)
    drift, noise = (torch.tensor(-1.0, requires_grad=True) for _ in range(2))
    seen = torch.randn(length, 2)
    optimizer = torch.optim.LBFGS([drift, noise], 0.1, max_iter=2)
    compiled = torch.compile(smooth)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -compiled(seen, move, drift, torch.eye(2), noise)
        loss.backward()
        return loss

    for _ in range(steps):
        loss = optimizer.step(closure)
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
