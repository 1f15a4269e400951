"""A decoder writes by beam search, then by sampling: `fusec run examples/beam_search.py`.

Each token is one call of the same graph: keys and values go to their position in a cache of fixed
length, so that nothing is compiled again as the text grows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LETTERS, LENGTH, BEAMS = 96, 32, 4


class Layer(nn.Module):
    """Attention over what was written so far, and two linear layers."""

    def __init__(self, width: int, heads: int, rows: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("keys", torch.zeros(rows, heads, LENGTH, width // heads))
        self.register_buffer("values", torch.zeros(rows, heads, LENGTH, width // heads))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        rows, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, 3, self.heads, 1, -1).unbind(1)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        seen = torch.arange(LENGTH) <= position
        y = F.scaled_dot_product_attention(
            q, self.keys, self.values, attn_mask=seen[None, None, None]
        )
        x = x + self.out(y.reshape(rows, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Log-probabilities of the next letter, after those that the caches hold."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(LETTERS, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Layer(width, heads, BEAMS) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, LETTERS, bias=False)

    def forward(self, letters: Tensor, position: Tensor) -> Tensor:
        x = self.embed(letters) + self.places(position)
        for layer in self.layers:
            x = layer(x, position)
        return self.head(self.norm(x)).log_softmax(-1)


def reorder(model: Decoder, beams: Tensor) -> None:
    """Let each row of the caches go on with the beam that it was chosen from."""
    for layer in model.layers:
        layer.keys.copy_(layer.keys[beams])
        layer.values.copy_(layer.values[beams])


def best(scores: Tensor, logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores, beams and letters of the best continuations."""
    scores, chosen = (scores[:, None] + logs).flatten().topk(BEAMS)
    return scores, chosen // LETTERS, chosen % LETTERS


@torch.no_grad()
def search(model: Decoder, next_letter: Any, choose: Any, length: int) -> Tensor:
    """Return the most probable texts, ``[beams, length]``, as far as a beam sees."""
    texts = torch.zeros(BEAMS, 1, dtype=torch.int64)
    scores = torch.tensor([0.0, *[-torch.inf] * (BEAMS - 1)])
    for position in range(length):
        logs = next_letter(texts[:, -1].contiguous(), torch.tensor([position]))
        scores, beams, letters = choose(scores, logs)
        reorder(model, beams)
        texts = torch.cat([texts[beams], letters[:, None]], 1)
    return texts[:, 1:]


def drawn(logs: Tensor, temperature: float = 0.8, share: float = 0.9) -> Tensor:
    """Return letters drawn from the most probable ones, which have ``share`` together."""
    ranked, order = (logs / temperature).softmax(-1).sort(descending=True)
    ranked = torch.where(ranked.cumsum(-1) - ranked < share, ranked, 0.0)
    return order.gather(1, torch.multinomial(ranked, 1)).squeeze(1)


@torch.no_grad()
def sample(next_letter: Any, draw: Any, length: int) -> Tensor:
    """Return texts whose letters are drawn, ``[beams, length]``."""
    letters, written = torch.zeros(BEAMS, dtype=torch.int64), []
    for position in range(length):
        letters = draw(next_letter(letters, torch.tensor([position])))
        written.append(letters)
    return torch.stack(written, 1)


def main(length: int = 24) -> Tensor:
    """Write by both ways, and return what the search finds."""
    torch.manual_seed(0)
    model = Decoder().eval()
    next_letter, choose, draw = (torch.compile(f, backend="fusec") for f in (model, best, drawn))
    found = search(model, next_letter, choose, length)
    texts = sample(next_letter, draw, length)
    for name, rows in (("found", found), ("drawn", texts)):
        print(f"{name}: {''.join(chr(32 + int(letter) % 95) for letter in rows[0])}")
    return found


if __name__ == "__main__":
    main()
