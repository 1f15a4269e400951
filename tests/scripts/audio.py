"""Speech enhancement: a mel spectrogram by ``torch.stft``, a masking convnet, ``torch.istft``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE, HOP = 128, 64


class Block(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation)
        self.norm = nn.GroupNorm(1, channels)
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.act(self.conv(x)))


class Enhancer(nn.Module):
    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(SIZE))
        self.register_buffer("mel", torch.rand(20, SIZE // 2 + 1) / 20)
        self.encode = nn.Conv1d(20, channels, 1)
        self.blocks = nn.Sequential(*(Block(channels, 2**k) for k in range(3)))
        self.decode = nn.Conv1d(channels, SIZE // 2 + 1, 1)

    def forward(self, wave: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = torch.stft(wave, SIZE, HOP, window=self.window, return_complex=True)
        mel = (self.mel @ spectrum.abs().square() + 1e-5).log()
        mask = self.decode(self.blocks(self.encode(mel))).sigmoid()
        made = torch.istft(spectrum * mask, SIZE, HOP, window=self.window, length=wave.shape[1])
        return made, mask


def main(steps: int = 5) -> None:
    torch.manual_seed(0)
    model = Enhancer()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    compiled = torch.compile(model)
    for _ in range(steps):
        clean = torch.sin(torch.arange(4096) * torch.rand(4, 1))
        made, mask = compiled(clean + 0.3 * torch.randn_like(clean))
        loss = F.l1_loss(made, clean) + 0.01 * mask.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
