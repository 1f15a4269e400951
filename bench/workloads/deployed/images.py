"""Networks that classify images: convolutions, windows, patches."""

from __future__ import annotations

from torch import Tensor, nn

from bench.workload import Workload
from bench.workloads.convnets import ConvNeXt, EfficientNet, MobileNet, ResNet
from bench.workloads.deployed.model import Make, Output, images, measured
from bench.workloads.vision import DenseNet


class MixerBlock(nn.Module):
    """An MLP over places, then one over channels (Tolstikhin et al., 2021)."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixes = self.mlp(places, width // 2)
        self.mlp2 = self.mlp(width, 4 * width)

    @staticmethod
    def mlp(width: int, hidden: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixes(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp2(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer of images of 224 x 224 in patches of 16."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.Sequential(*(MixerBlock(14 * 14, width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


def convnet(module: type[nn.Module], batch: int, size: int, shrink: int, **settings) -> tuple:
    """Return a network and its images; dry runs have small ones."""
    size = size if shrink == 1 else 64
    return module(**settings), images(batch if shrink == 1 else 2, size)


def swin(shrink: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Swin-T (Liu et al., 2021), one image."""
    from transformers import SwinConfig, SwinForImageClassification  # local: it takes a second

    settings = {} if shrink == 1 else {"depths": [2, 2], "num_heads": [3, 6]}
    size = 224 if shrink == 1 else 56
    config = SwinConfig(**settings, image_size=size, num_labels=1000, drop_path_rate=0.0)
    return Output(SwinForImageClassification(config), ("pixel_values",), "logits"), images(1, size)


def vit(shrink: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """ViT-Ti/16 (Touvron et al., 2021), two images."""
    from transformers import ViTConfig, ViTForImageClassification  # local: it takes a second

    size = 224 if shrink == 1 else 32
    config = ViTConfig(
        hidden_size=192, num_attention_heads=3, intermediate_size=768, image_size=size,
        num_hidden_layers=12 if shrink == 1 else 2, num_labels=1000,
    )  # fmt: skip
    return Output(ViTForImageClassification(config), ("pixel_values",), "logits"), images(2, size)


def mixer(shrink: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Mixer(512 // shrink, 8 if shrink == 1 else 1), images(2, 224)


def densenet(shrink: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    depths = (6, 12, 24, 16) if shrink == 1 else (2, 2)
    return DenseNet(depths), images(2, 160 if shrink == 1 else 64)


def sized(module: type[nn.Module], batch: int, size: int, **settings) -> Make:
    return lambda shrink: convnet(module, batch, size, shrink, **settings)


def rows() -> list[Workload]:
    atto = {"depths": (2, 2, 6, 2), "widths": (40, 80, 160, 320)}
    core = {
        "resnet-18 4x160": sized(ResNet, 4, 160),
        "mobilenetv3-small 4x224": sized(MobileNet, 4, 224, small=True),
        "efficientnet-b0 4x160": sized(EfficientNet, 4, 160),
        "convnext-atto 4x160": sized(ConvNeXt, 4, 160, **atto),
        "swin-tiny 1x224": swin,
        "vit-tiny 2x224": vit,
    }
    further = {"densenet-121 2x160": densenet, "mlp-mixer 2x224": mixer}
    return [
        *(w for name, make in core.items() for w in measured("core", name, make)),
        *(w for name, make in further.items() for w in measured("further", name, make)),
    ]
