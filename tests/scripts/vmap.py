"""An ensemble of networks by ``vmap``, their gradients for each sample, and a Hessian."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap


def main(steps: int = 10, members: int = 5) -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 3)) for _ in range(members)]
    weights, _ = stack_module_state(nets)
    skeleton = nets[0]

    def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(skeleton, weights, x[None]), y[None])

    @torch.compile
    def step(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        each = vmap(vmap(grad(loss_of), (None, 0, 0)), (0, None, None))(weights, x, y)
        clipped = {}
        for name, own in each.items():
            norm = own.flatten(2).norm(dim=2).view(*own.shape[:2], *[1] * (own.dim() - 2))
            clipped[name] = weights[name] - 0.1 * (own / norm.clamp(min=1.0)).mean(1)
        return clipped

    @torch.compile
    def curvature(x: Tensor) -> Tensor:
        return vmap(jacrev(grad(lambda v: skeleton(v).logsumexp(0))))(x)

    x, y = torch.randn(32, 8), torch.randint(3, (32,))
    weights = {name: value.detach() for name, value in weights.items()}
    for _ in range(steps):
        weights = step(weights, x, y)
    print(f"curvature {curvature(x).square().mean():.4f}")


if __name__ == "__main__":
    main()
