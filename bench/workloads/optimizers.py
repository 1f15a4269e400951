"""A step of an optimizer over all parameters of a model, each of them read and written once."""

from __future__ import annotations

import torch
from torch.optim.adamw import adamw

from bench.workload import Case, Workload, shrunk

GROUP = "optimizers"
LAYERS = 12


def gpt2_shapes(width: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Return the shapes of GPT-2's 148 parameters: embeddings, 12 blocks, the last norm."""
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    linear = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    mlp = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    block = [*norm, *linear, *norm, *mlp]
    return [(vocabulary, width), (1024, width), *(block * LAYERS), *norm]


def adamw_step(width: int, vocabulary: int, dtype: torch.dtype, device: str) -> Case:
    """AdamW in place, as torch chooses between a loop and lists on the device.

    The states are where equal gradients leave them, and the learning rate is far below a rounding:
    so the step can be repeated, and each repetition has the same results.
    """
    shapes = gpt2_shapes(width, vocabulary)
    count = len(shapes)
    params, grads = ([torch.randn(s, device=device, dtype=dtype) for s in shapes] for _ in "pg")
    averages, squares = [g.clone() for g in grads], [g * g for g in grads]
    steps = [torch.tensor(100.0, device=device) for _ in shapes]

    def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        p, g, m, v, s = (list(tensors[k * count : (k + 1) * count]) for k in range(5))
        adamw(
            p, g, m, v, [], s, capturable=device == "cuda", amsgrad=False, beta1=0.9, beta2=0.999,
            lr=1e-9, weight_decay=0.0, eps=1e-8, maximize=False,
        )  # fmt: skip
        return (*p, *m, *v)

    return Case(step, (*params, *grads, *averages, *squares, *steps))


def cpu() -> list[Workload]:
    """A quarter of GPT-2's width and vocabulary: 148 parameters, 8 million elements."""
    return [
        Workload(
            GROUP,
            "AdamW, 148 parameters of GPT-2 / 4",
            lambda dtype, device, shrink: adamw_step(
                shrunk(192, shrink), shrunk(12564, shrink), dtype, device
            ),
        )
    ]


def gpu() -> list[Workload]:
    """GPT-2 small itself: 124 million elements."""
    return [
        Workload(
            GROUP,
            "AdamW, 148 parameters of GPT-2",
            lambda dtype, device, shrink: adamw_step(
                shrunk(768, shrink), shrunk(50257, shrink), dtype, device
            ),
            seconds=60.0,
        )
    ]
