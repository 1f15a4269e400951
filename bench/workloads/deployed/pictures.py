"""Networks whose result is made of places: segmentation, detection, poses, pixels, noise."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.workload import Workload
from bench.workloads.convnets import Residual, convolution
from bench.workloads.deployed.model import images, measured
from bench.workloads.unet import Unet
from bench.workloads.vision import UNet

Made = tuple[nn.Module, tuple[Tensor, ...]]


class Backbone(nn.Module):
    """ResNet-18 without its head: features at strides 8, 16, and 32 of its three stages."""

    def __init__(self, width: int, stages: int = 3) -> None:
        super().__init__()
        self.stem = convolution(3, width, 7, 2, nn.ReLU)
        self.first = nn.Sequential(Residual(width, width, 1), Residual(width, width, 1))
        widths = [width << stage for stage in range(stages + 1)]
        self.stages = nn.ModuleList(
            nn.Sequential(Residual(a, b, 2), Residual(b, b, 1)) for a, b in pairwise(widths)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.first(F.max_pool2d(self.stem(x), 3, 2, 1))
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return found


class Segmenter(nn.Module):
    """Dilated convolutions of several rates side by side, then larger: DeepLabV3 (Chen, 2017)."""

    def __init__(self, width: int, classes: int = 21) -> None:
        super().__init__()
        self.backbone = Backbone(width, 2)
        inputs, made = 4 * width, 2 * width
        self.branches = nn.ModuleList([
            convolution(inputs, made, 1, 1, nn.ReLU),
            *(self.dilated(inputs, made, rate) for rate in (2, 4, 6)),
        ])  # fmt: skip
        self.whole = nn.Sequential(nn.Conv2d(inputs, made, 1), nn.ReLU())
        self.project = convolution(5 * made, made, 1, 1, nn.ReLU)
        self.head = nn.Conv2d(made, classes, 1)

    @staticmethod
    def dilated(inputs: int, made: int, rate: int) -> nn.Sequential:
        conv = nn.Conv2d(inputs, made, 3, padding=rate, dilation=rate, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(made), nn.ReLU())

    def forward(self, image: Tensor) -> Tensor:
        x = self.backbone(image)[1]
        whole = self.whole(F.adaptive_avg_pool2d(x, 1)).expand(-1, -1, *x.shape[2:])
        x = self.head(self.project(torch.cat([*(f(x) for f in self.branches), whole], 1)))
        return F.interpolate(x, size=image.shape[2:], mode="bilinear", align_corners=False)


class Detector(nn.Module):
    """Features of three sizes, added from coarse to fine, and heads that they share: RetinaNet."""

    def __init__(self, width: int, made: int, classes: int = 80, anchors: int = 9) -> None:
        super().__init__()
        self.backbone = Backbone(width)
        widths = [width << stage for stage in (1, 2, 3)]
        self.lateral = nn.ModuleList(nn.Conv2d(w, made, 1) for w in widths)
        self.smooth = nn.ModuleList(nn.Conv2d(made, made, 3, padding=1) for _ in widths)
        self.kinds, self.boxes = self.tower(made), self.tower(made)
        self.kind = nn.Conv2d(made, anchors * classes, 3, padding=1)
        self.box = nn.Conv2d(made, anchors * 4, 3, padding=1)
        self.classes = classes

    @staticmethod
    def tower(width: int) -> nn.Sequential:
        layers = ((nn.Conv2d(width, width, 3, padding=1), nn.ReLU()) for _ in range(4))
        return nn.Sequential(*(part for layer in layers for part in layer))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        fine, middle, coarse = (
            f(x) for f, x in zip(self.lateral, self.backbone(image), strict=True)
        )
        middle = middle + F.interpolate(coarse, scale_factor=2.0)
        fine = fine + F.interpolate(middle, scale_factor=2.0)
        levels = [f(x) for f, x in zip(self.smooth, (fine, middle, coarse), strict=True)]
        kinds = [self.rows(self.kind(self.kinds(x)), self.classes) for x in levels]
        boxes = [self.rows(self.box(self.boxes(x)), 4) for x in levels]
        return torch.cat(kinds, 1).sigmoid(), torch.cat(boxes, 1)

    @staticmethod
    def rows(x: Tensor, width: int) -> Tensor:
        """[n, anchors * width, h, w] as [n, h * w * anchors, width]."""
        return x.permute(0, 2, 3, 1).reshape(len(x), -1, width)


class Poses(nn.Module):
    """Transposed convolutions to heat maps, and where each is warmest (Xiao et al., 2018)."""

    def __init__(self, width: int, joints: int = 17) -> None:
        super().__init__()
        self.backbone = Backbone(width)
        inputs, made = 8 * width, 4 * width
        self.larger = nn.Sequential(
            *(self.twice(inputs if k == 0 else made, made) for k in range(3))
        )
        self.head = nn.Conv2d(made, joints, 1)

    @staticmethod
    def twice(inputs: int, made: int) -> nn.Sequential:
        conv = nn.ConvTranspose2d(inputs, made, 4, 2, 1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(made), nn.ReLU())

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        heat = self.head(self.larger(self.backbone(image)[2]))
        share = heat.flatten(2).softmax(-1).view(heat.shape)
        down = torch.linspace(0, 1, heat.shape[2], dtype=heat.dtype)
        across = torch.linspace(0, 1, heat.shape[3], dtype=heat.dtype)
        places = ((share.sum(3) * down).sum(-1), (share.sum(2) * across).sum(-1))
        return heat, torch.stack(places, -1)


class Sharpener(nn.Module):
    """Residual convolutions without norms, then pixels out of channels: EDSR (Lim et al., 2017)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
            )
            for _ in range(depth)
        )  # fmt: skip
        self.larger = nn.ModuleList(nn.Conv2d(width, 4 * width, 3, padding=1) for _ in range(2))
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.first(x)
        for block in self.blocks:
            x = x + 0.1 * block(x)
        x = x + first
        for conv in self.larger:
            x = F.pixel_shuffle(conv(x), 2)
        return self.last(x)


def segmenter(shrink: int) -> Made:
    return Segmenter(64 // shrink), images(1, 256 if shrink == 1 else 64)


def detector(shrink: int) -> Made:
    return Detector(64 // shrink, 128 // shrink), images(1, 256 if shrink == 1 else 64)


def poses(shrink: int) -> Made:
    return Poses(64 // shrink), images(1, 256, 192) if shrink == 1 else images(2, 64)


def sharpener(shrink: int) -> Made:
    return Sharpener(64 // shrink, max(1, 8 // shrink)), images(1, 64 if shrink == 1 else 16)


def denoiser(shrink: int) -> Made:
    """A U-Net of diffusion: images of 32 x 32, and the step that each is at."""
    widths = (64, 128, 256) if shrink == 1 else (16, 16, 32)
    return Unet(widths), (*images(2, 32), torch.tensor([10.0, 400.0]))


def unet(shrink: int) -> Made:
    return UNet(32 // shrink if shrink < 4 else 8), images(2, 128 if shrink == 1 else 32)


def rows() -> list[Workload]:
    makes = {
        "deeplab 1x256": segmenter,
        "retinanet 1x256": detector,
        "heat maps of poses 1x256x192": poses,
        "edsr 1x64, 4 times larger": sharpener,
        "diffusion unet 2x32": denoiser,
        "unet 2x128": unet,
    }
    return [w for name, make in makes.items() for w in measured("further", name, make)]
