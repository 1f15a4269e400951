"""Sound and recurrences: speech encoders, convolutions of one dimension, cells, linear scans."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.workload import Workload
from bench.workloads.blocks import Attention
from bench.workloads.deployed.model import Output, measured

Made = tuple[nn.Module, tuple[Tensor, ...]]


class HalfMlp(nn.Module):
    """x + mlp(norm(x)) / 2, as a Conformer begins and ends."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.body(x)


class ConformerBlock(nn.Module):
    """MLP, attention, gated depthwise convolution, MLP (Gulati et al., 2020)."""

    def __init__(self, width: int, side: int = 31) -> None:
        super().__init__()
        self.before, self.after = HalfMlp(width), HalfMlp(width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attention = Attention(width, max(1, width // 64), causal=False)
        self.wide, self.narrow = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.depthwise = nn.Conv1d(width, width, side, padding=side // 2, groups=width, bias=False)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = x + self.attention(self.norm1(x))
        y = F.glu(self.wide(self.norm2(x).transpose(1, 2)), 1)
        y = self.narrow(F.silu(self.batch_norm(self.depthwise(y))))
        return self.norm3(self.after(x + y.transpose(1, 2)))


class SeparatorBlock(nn.Module):
    """Wide, depthwise with holes, narrow: a temporal block of Conv-TasNet (Luo, 2019)."""

    def __init__(self, width: int, hidden: int, rate: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(width, hidden, 1), nn.PReLU(), nn.GroupNorm(1, hidden),
            nn.Conv1d(hidden, hidden, 3, padding=rate, dilation=rate, groups=hidden), nn.PReLU(),
            nn.GroupNorm(1, hidden), nn.Conv1d(hidden, width, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Separator(nn.Module):
    """Waves to frames, masks for two speakers, and back to waves."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.encode = nn.Conv1d(1, width, 16, 8, 4)
        self.norm = nn.GroupNorm(1, width)
        self.blocks = nn.Sequential(
            *(SeparatorBlock(width, 2 * width, 1 << k) for k in range(depth))
        )
        self.mask = nn.Conv1d(width, 2 * width, 1)
        self.decode = nn.ConvTranspose1d(width, 1, 16, 8, 4)

    def forward(self, wave: Tensor) -> Tensor:
        frames = F.relu(self.encode(wave))
        masks = self.mask(self.blocks(self.norm(frames))).sigmoid()
        masked = masks.unflatten(1, (2, -1)) * frames[:, None]
        return self.decode(masked.flatten(0, 1)).view(len(wave), 2, -1)


class Lstm(nn.Module):
    """The library's LSTM over a sequence, and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class GruLoop(nn.Module):
    """A GRU's cell in a loop over a sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), x.shape[2])
        made = []
        for step in x.unbind(1):
            h = self.cell(step, h)
            made.append(h)
        return torch.stack(made, 1)


class StateSpace(nn.Module):
    """A linear recurrence in chunks, with decays that depend on the input: Mamba-2 (Dao, 2024).

    h[t] = a[t] h[t - 1] + b[t] x[t];  y[t] = c[t] h[t], heads of width d, states of width n.
    Within a chunk it is a product with a triangle of decays; between chunks, a recurrence.
    """

    def __init__(self, width: int, heads: int, state: int, chunk: int) -> None:
        super().__init__()
        self.heads, self.state, self.chunk = heads, state, chunk
        self.norm = nn.RMSNorm(width, 1e-5)
        self.parts = nn.Linear(width, 2 * width + 2 * state + heads, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        b, t, width = u.shape
        shape = (width, width, self.state, self.state, self.heads)
        z, x, into, outof, rate = self.parts(self.norm(u)).split(shape, -1)
        cut = (b, t // self.chunk, self.chunk)
        x = x.reshape(*cut, self.heads, -1)
        into, outof = into.reshape(*cut, -1), outof.reshape(*cut, -1)
        decay = -F.softplus(rate).reshape(*cut, self.heads).permute(0, 3, 1, 2).cumsum(-1)
        triangle = torch.ones(self.chunk, self.chunk, dtype=torch.bool).tril()
        apart = decay[..., :, None] - decay[..., None, :]
        within = torch.exp(apart.masked_fill(~triangle, float("-inf")))
        near = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", outof, into, within, x)
        left = torch.exp(decay[..., -1:] - decay)
        chunks = torch.einsum("bcln,bhcl,bclhp->bchpn", into, left, x)
        before = self.before(chunks, torch.exp(decay[..., -1]))
        far = torch.einsum("bcln,bchpn,bhcl->bclhp", outof, before, torch.exp(decay))
        return u + self.out((near + far).reshape(b, t, width) * F.silu(z))

    @staticmethod
    def before(chunks: Tensor, decay: Tensor) -> Tensor:
        """Return the state in front of each chunk, [b, c, h, p, n]; decay [b, h, c]."""
        h = torch.zeros_like(chunks[:, 0])
        found = []
        for k in range(chunks.shape[1]):
            found.append(h)
            h = h * decay[:, :, k, None, None] + chunks[:, k]
        return torch.stack(found, 1)


def whisper(shrink: int) -> Made:
    """Whisper's smallest encoder, half a window of 30 seconds."""
    from transformers import WhisperConfig  # local: it takes a second
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    length = 750 // shrink
    config = WhisperConfig(
        d_model=384 // shrink, encoder_attention_heads=6, encoder_ffn_dim=1536 // shrink,
        encoder_layers=max(1, 4 // shrink), max_source_positions=length,
    )  # fmt: skip
    model = Output(WhisperEncoder(config), ("input_features",), "last_hidden_state")
    return model, (torch.randn(1, 80, 2 * length),)


def conformer(shrink: int) -> Made:
    width, depth = (256, 4) if shrink == 1 else (64, 1)
    model = nn.Sequential(*(ConformerBlock(width) for _ in range(depth)))
    return model, (torch.randn(4, 200 // shrink, width),)


def separator(shrink: int) -> Made:
    return Separator(128 // shrink, max(2, 8 // shrink)), (torch.randn(2, 1, 16000 // shrink),)


def lstm(shrink: int) -> Made:
    return Lstm(256 // shrink), (torch.randn(8, 64 // shrink, 256 // shrink),)


def gru(shrink: int) -> Made:
    return GruLoop(256 // shrink), (torch.randn(16, 32 // shrink, 256 // shrink),)


def state_space(shrink: int) -> Made:
    width, chunk = 512 // shrink, 64 // shrink
    model = nn.Sequential(*(StateSpace(width, 8, 64 // shrink, chunk) for _ in range(2)))
    return model, (torch.randn(2, 4 * chunk, width),)


def rows() -> list[Workload]:
    makes = {
        "whisper-tiny encoder 1x1500": whisper,
        "conformer 4x200x256": conformer,
        "conv-tasnet 2x16000": separator,
        "lstm 8x64x256": lstm,
        "gru cell, 32 steps 16x256": gru,
        "state space 2x256x512": state_space,
    }
    return [w for name, make in makes.items() for w in measured("further", name, make)]
