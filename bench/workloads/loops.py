"""Loops of Python over a sequence, whose states are a recurrence."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bench.workload import Case, Workload

GROUP = "loops of Python on CPUs"


def recurrence(a: Tensor, b: Tensor) -> Tensor:
    h, states = torch.zeros_like(b[:, 0]), []
    for t in range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        states.append(h)
    return torch.stack(states, 1)


def selective_scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mamba's, as its reference writes it."""
    factors = torch.exp(torch.einsum("bdl,dn->bdln", delta, a))
    terms = torch.einsum("bdl,bnl,bdl->bdln", delta, b, u)
    h, ys = a.new_zeros((u.shape[0], *a.shape)), []
    for t in range(u.shape[2]):
        h = factors[:, :, t] * h + terms[:, :, t]
        ys.append(torch.einsum("bdn,bn->bd", h, c[:, :, t]))
    return torch.stack(ys, dim=2)


def of_length(dtype: torch.dtype, device: str, shrink: int, *, length: int) -> Case:
    shape = (8, max(8, length // shrink), 64)
    return Case(recurrence, (torch.rand(shape).to(dtype), torch.randn(shape).to(dtype)))


def mamba(dtype: torch.dtype, device: str, shrink: int, *, length: int) -> Case:
    """Channels of a model of 768, and 16 states of each."""
    steps, channels, states = max(8, length // shrink), 1536 // shrink, 16
    shapes = ((1, channels, steps), (1, channels, steps), (channels, states))
    u, delta, a = (torch.rand(shape).to(dtype) for shape in shapes)
    b, c = (torch.randn(1, states, steps).to(dtype) for _ in range(2))
    return Case(selective_scan, (u, delta, -a, b, c))


def cpu() -> list[Workload]:
    forms = (("recurrence 8x{}x64", of_length, (64, 512)), ("mamba 1x{}x1536", mamba, (64, 256)))
    return [
        Workload(GROUP, name.format(length), partial(make, length=length), train)
        for name, make, lengths in forms
        for length in lengths
        for train in (False, True)
    ]
