"""Planted faults: kernels that are off, to see that what shall find them does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusec.driver import compiler


def adds_a_hundredth(launch: Callable[..., None]) -> Callable[..., None]:
    """Return a launcher that is off by 0.01 in what it writes."""

    def wrong(*args: object) -> None:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        before = [tensor.clone() for tensor in tensors]
        launch(*args)
        for tensor, old in zip(tensors, before, strict=True):
            if tensor.is_floating_point() and not torch.equal(tensor, old):
                tensor += 0.01

    return wrong


def plant(monkeypatch: pytest.MonkeyPatch, graph: str) -> None:
    """Make the first kernel of the graphs of a name wrong, whatever comes from the cache.

    So is the call that launches it and those behind it.
    """
    compile_one, load = compiler._compile, compiler._load

    def load_wrong(*args: object) -> dict[str, Callable[..., None]]:
        kernels = dict(load(*args))
        first = {n for n in kernels if n == "k0" or n.startswith("k0_to_")}
        return {n: adds_a_hundredth(k) if n in first else k for n, k in kernels.items()}

    def compile_planted(gm: object, name: str, *rest: object) -> object:
        monkeypatch.setattr(compiler, "_load", load_wrong if name == graph else load)
        return compile_one(gm, name, *rest)

    monkeypatch.setattr(compiler, "_compile", compile_planted)
