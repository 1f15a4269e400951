"""An EfficientNet-like network, as timm writes them: depthwise, squeeze and excitation, EMA."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_reduce = nn.Conv2d(channels, channels // 4, 1)
        self.conv_expand = nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.conv_expand(F.silu(self.conv_reduce(x.mean((2, 3), keepdim=True))))
        return x * scale.sigmoid()


class InvertedResidual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int, drop: float) -> None:
        super().__init__()
        wide = 4 * channels
        self.conv_pw = nn.Conv2d(channels, wide, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide)
        self.conv_dw = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.se = SqueezeExcite(wide)
        self.conv_pwl = nn.Conv2d(wide, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.skip, self.drop = channels == out and stride == 1, drop

    def drop_path(self, x: Tensor) -> Tensor:
        if not self.training or self.drop == 0:
            return x
        keep = 1 - self.drop
        return x * x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(keep).div_(keep)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.bn1(self.conv_pw(x)))
        y = self.se(F.silu(self.bn2(self.conv_dw(y))))
        y = self.bn3(self.conv_pwl(y))
        return x + self.drop_path(y) if self.skip else y


class Net(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv_stem = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(
            nn.Sequential(InvertedResidual(16, 24, 2, 0.0), InvertedResidual(24, 24, 1, 0.1)),
            nn.Sequential(InvertedResidual(24, 40, 2, 0.0), InvertedResidual(40, 40, 1, 0.1)),
        )
        self.classifier = nn.Linear(40, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.silu(self.bn1(self.conv_stem(x))))
        return self.classifier(F.dropout(x.mean((2, 3)), 0.2, self.training))


def main(steps: int = 6) -> None:
    torch.manual_seed(0)
    model = Net()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3, momentum=0.9)
    compiled = torch.compile(model)
    for _ in range(steps):
        images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
        loss = F.cross_entropy(compiled(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    compiled.eval()
    with torch.no_grad():
        for _ in range(3):
            compiled(torch.randn(8, 3, 64, 64))
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
