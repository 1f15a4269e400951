"""Proximal policy optimisation of a cart that balances a pole: `fusec run examples/ppo.py`.

Actor and critic are compiled twice: one row a time where the policy acts, minibatches where it
learns. Small graphs like these are where `fusec run` says whether compiling pays.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

ENVIRONMENTS, DISCOUNT, SMOOTHING, CLIP = 16, 0.99, 0.95, 0.2


class Policy(nn.Module):
    """Logits of two actions, and the value of a state."""

    def __init__(self, states: int = 4, width: int = 64) -> None:
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(states, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 2),
        )
        self.critic = nn.Sequential(
            nn.Linear(states, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 1),
        )

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(state), self.critic(state).squeeze(-1)


def move(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states of carts after a fiftieth of a second, and which of them have fallen."""
    x, speed, angle, turn = state.unbind(1)
    force = torch.where(action == 1, 10.0, -10.0)
    sine, cosine = angle.sin(), angle.cos()
    pushed = (force + 0.05 * turn**2 * sine) / 1.1
    turned = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    pushed = pushed - 0.05 * turned * cosine / 1.1
    after = [x + 0.02 * speed, speed + 0.02 * pushed, angle + 0.02 * turn, turn + 0.02 * turned]
    fallen = (after[0].abs() > 2.4) | (after[2].abs() > math.radians(12))
    fresh = torch.rand_like(state) * 0.1 - 0.05
    return torch.where(fallen[:, None], fresh, torch.stack(after, 1)), fallen


@torch.no_grad()
def play(policy: Any, state: Tensor, steps: int) -> tuple[Tensor, ...]:
    """Return states, actions, their log-probabilities, values, and where a pole fell."""
    rows = []
    for _ in range(steps):
        logits, value = policy(state)
        chosen = torch.distributions.Categorical(logits=logits)
        action = chosen.sample()
        after, fallen = move(state, action)
        rows.append((state, action, chosen.log_prob(action), value, fallen))
        state = after
    return *map(torch.stack, zip(*rows, strict=True)), state


def advantages(values: Tensor, fallen: Tensor, last: Tensor) -> Tensor:
    """Return how much better each action was than expected: GAE, backwards in time."""
    found, gain, following = [], torch.zeros_like(last), last
    for value, down in zip(values.flip(0), fallen.flip(0), strict=True):
        left = 1.0 - down.float()
        gain = 1.0 + DISCOUNT * following * left - value + DISCOUNT * SMOOTHING * left * gain
        following = value
        found.append(gain)
    return torch.stack(found[::-1])


def loss_of(
    policy: Policy, state: Tensor, action: Tensor, old: Tensor, gain: Tensor, target: Tensor
) -> Tensor:
    """Return the clipped loss of the policy, that of the values, and less of the entropy."""
    logits, value = policy(state)
    chosen = torch.distributions.Categorical(logits=logits, validate_args=False)
    ratio = (chosen.log_prob(action) - old).exp()
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    policy_loss = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
    return policy_loss + 0.5 * (value - target).pow(2).mean() - 0.01 * chosen.entropy().mean()


def main(rounds: int = 3, steps: int = 64) -> float:
    """Train, and return how many steps a pole stands in the last round."""
    torch.manual_seed(0)
    policy = Policy()
    acting = torch.compile(policy, backend="fusec")
    learning = torch.compile(loss_of, backend="fusec")
    optimizer = torch.optim.Adam(policy.parameters(), 2.5e-3, eps=1e-5)
    state = torch.rand(ENVIRONMENTS, 4) * 0.1 - 0.05
    for turn in range(rounds):
        states, actions, logs, values, fallen, state = play(acting, state, steps)
        gains = advantages(values, fallen, acting(state)[1].detach())
        data = [part.flatten(0, 1) for part in (states, actions, logs, gains, gains + values)]
        for _ in range(4):
            for rows in torch.randperm(len(data[0])).split(256):
                loss = learning(policy, *(part[rows] for part in data))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                optimizer.step()
        stands = ENVIRONMENTS * steps / max(int(fallen.sum()), 1)
        print(f"round {turn}: a pole stands for {stands:.1f} steps")
    return stands


if __name__ == "__main__":
    main()
