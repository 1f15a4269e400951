"""Random PyTorch functions over tensors: views, in-place updates, mixed dtypes, reductions.

``program(seed)`` returns a function of a few tensors and its inputs. Steps are drawn once, so that
the function does the same in every call; each takes earlier values by number.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tests.support import values

Step = Callable[[list[torch.Tensor]], torch.Tensor]
SHAPES = ((4, 6), (3, 8), (2, 3, 4), (5, 5), (1, 7), (6, 4), (17, 3), (33,), (2, 16))
FLOATS = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16)


class _Drawer:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.shapes: list[tuple[int, ...]] = []
        self.steps: list[Step] = []

    def pick(self) -> int:
        return len(self.shapes) - 1 - min(int(self.random.expovariate(0.5)), len(self.shapes) - 1)

    def add(self, shape: tuple[int, ...], step: Step) -> None:
        self.shapes.append(shape)
        self.steps.append(step)

    def draw(self) -> None:
        kind = self.random.choice(
            ("unary", "unary", "binary", "binary", "view", "view", "reduce", "reduce", "norm",
             "inplace", "cast", "cat", "where")
        )  # fmt: skip
        getattr(self, kind)()

    def unary(self) -> None:
        k = self.pick()
        fn = self.random.choice(
            (
                torch.tanh,
                torch.sigmoid,
                torch.relu,
                torch.nn.functional.gelu,
                torch.nn.functional.silu,
                torch.neg,
                lambda x: x * 0.5 + 1,
                lambda x: torch.exp(-x.abs()),
                lambda x: (x * x + 1).rsqrt(),
                lambda x: x.clamp(-0.5, 0.75),
            )
        )
        self.add(self.shapes[k], lambda v: fn(v[k]))

    def binary(self) -> None:
        k = self.pick()
        shape = self.shapes[k]
        fits = [j for j, s in enumerate(self.shapes) if _broadcasts(s, shape)]
        j = self.random.choice(fits)
        fn = self.random.choice(
            (torch.add, torch.sub, torch.mul, torch.maximum, lambda a, b: a / (b.abs() + 1))
        )
        self.add(shape, lambda v: fn(v[k], v[j]))

    def view(self) -> None:
        k = self.pick()
        shape = self.shapes[k]
        dim = self.random.randrange(len(shape))
        match self.random.choice(("t", "reshape", "slice", "flip", "roll", "pad", "expand", "sel")):
            case "t":
                order = list(range(len(shape)))
                self.random.shuffle(order)
                self.add(tuple(shape[i] for i in order), lambda v: v[k].permute(order))
            case "reshape" if len(shape) > 1:
                merged = (shape[0] * shape[1], *shape[2:])
                self.add(merged, lambda v: v[k].reshape(merged))
            case "reshape" if shape[0] % 2 == 0:
                cut = (2, shape[0] // 2)
                self.add(cut, lambda v: v[k].reshape(cut))
            case "slice" if shape[dim] > 2:
                new = tuple(n - 2 if i == dim else n for i, n in enumerate(shape))
                self.add(new, lambda v: v[k].narrow(dim, 1, shape[dim] - 2))
            case "flip":
                self.add(shape, lambda v: v[k].flip(dim))
            case "roll":
                self.add(shape, lambda v: v[k].roll(1, dim))
            case "pad":
                self.add(
                    (*shape[:-1], shape[-1] + 3),
                    lambda v: torch.nn.functional.pad(v[k], (1, 2), value=0.5),
                )
            case "expand":
                self.add((2, *shape), lambda v: v[k].expand(2, *shape))
            case "sel" if len(shape) > 1:
                new = shape[:dim] + shape[dim + 1 :]
                self.add(new, lambda v: v[k].select(dim, shape[dim] // 2))

    def reduce(self) -> None:
        k = self.pick()
        shape = self.shapes[k]
        dim, keep = self.random.randrange(len(shape)), self.random.random() < 0.6
        name = self.random.choice(("sum", "mean", "amax", "amin", "logsumexp", "var"))
        if name == "var" and shape[dim] < 2:
            name = "mean"
        kept = (*shape[:dim], 1, *shape[dim + 1 :]) if keep else shape[:dim] + shape[dim + 1 :]
        if kept:
            self.add(kept, lambda v: getattr(torch, name)(v[k], dim=dim, keepdim=keep))

    def norm(self) -> None:
        k = self.pick()
        width = self.shapes[k][-1]
        if width == 1:
            return
        fn = self.random.choice(
            (
                lambda x: torch.softmax(x, -1),
                lambda x: torch.log_softmax(x, 0),
                lambda x: torch.nn.functional.layer_norm(x, (width,)),
                lambda x: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5).to(x),
            )
        )
        self.add(self.shapes[k], lambda v: fn(v[k]))

    def inplace(self) -> None:
        k = self.pick()
        shape = self.shapes[k]

        def step(v: list[torch.Tensor]) -> torch.Tensor:
            out = v[k].clone()
            out.select(0, 0).mul_(2)
            out.t_() if out.dim() == 2 else out.add_(1)
            return out.add_(0.5)

        self.add(shape[::-1] if len(shape) == 2 else shape, step)

    def cast(self) -> None:
        k = self.pick()
        dtype = self.random.choice(FLOATS)
        self.add(self.shapes[k], lambda v: v[k].to(dtype))

    def cat(self) -> None:
        k = self.pick()
        shape = self.shapes[k]
        j = self.random.choice([i for i, s in enumerate(self.shapes) if s[1:] == shape[1:]])
        joined = (shape[0] + self.shapes[j][0], *shape[1:])
        self.add(joined, lambda v: torch.cat((v[k], v[j])))

    def where(self) -> None:
        k = self.pick()
        j = self.random.choice(
            [i for i, s in enumerate(self.shapes) if _broadcasts(s, self.shapes[k])]
        )
        self.add(self.shapes[k], lambda v: torch.where(v[j] > 0, v[k], v[k] * 0.25))


def _broadcasts(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    if len(small) > len(large):
        return False
    return all(a in (1, b) for a, b in zip(small[::-1], large[::-1], strict=False))


def program(seed: int, count: int = 6) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """Return a random function and its inputs."""
    drawer = _Drawer(seed)
    inputs = []
    for k in range(drawer.random.randint(1, 3)):
        shape = drawer.random.choice(SHAPES)
        dtype = drawer.random.choice((torch.float32, torch.float32, torch.bfloat16))
        inputs.append(values(*shape, dtype=dtype, seed=seed + k))
        drawer.shapes.append(shape)
    while len(drawer.steps) < count:
        if max(_numel(s) for s in drawer.shapes) > 4000:
            break
        drawer.draw()
    outputs = [len(drawer.shapes) - 1]
    outputs += [
        k for k in range(len(inputs), len(drawer.shapes) - 1) if drawer.random.random() < 0.2
    ]

    def run(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        held = list(args)
        for step in drawer.steps:
            held.append(step(held))
        return tuple(held[k] for k in outputs)

    return run, tuple(inputs)


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total
