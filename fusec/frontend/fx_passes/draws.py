"""Rewrite an FX graph's random draws as stateless ones: ``fusec::random`` of a seed and a position.

Runs on the graphs that AOTAutograd makes, before its partitioner: one call draws a seed for each
draw of the graph, and every draw becomes a function of its seed. The partitioner is told to
recompute them in the backward rather than to save their results, so that a dropout's mask is never
in memory; the seeds are saved. Activation checkpointing sees no random operation either: its
recomputation has the same seeds.

    r = rand_like(x)          becomes   s = fusec.random_seeds(1, cpu)
                                        r = fusec.random([4, 8], [0, 1], s, 0, "uniform", f32)

Draws with a generator of their own, draws of a backward, and operations without a rule below stay
eager kernels, which follow eager's stream.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fusec.frontend.aot.refusals import may_refuse
from fusec.frontend.fx_passes.fx_nodes import (
    aten,
    call_like,
    cast_like,
    hint_of,
    replace,
    tensor_of,
)
from fusec.frontend.ops.random import LARGEST_RANGE
from fusec.torch_interior import FakeTensor

DrawRule: TypeAlias = "Callable[..., fx.Node | tuple[fx.Node, ...] | None]"

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_BACKWARD = ("is_backward", "must_be_in_backward")


def replace_draws(gm: fx.GraphModule) -> None:
    """Rewrite the draws of a graph of ATen operations in place; nodes carry ``meta["val"]``."""
    seeds: dict[torch.device, fx.Node] = {}
    for node in list(gm.graph.nodes):
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is None or not _is_replaceable(node):
            continue
        line = _DrawSite(node, seeds)
        with gm.graph.inserting_before(node):
            made = rule(line, *node.args, **{k: v for k, v in node.kwargs.items() if k in _NAMED})
        if isinstance(made, tuple):
            for user in node.users:
                if "recompute" in user.meta:
                    part: Any = made[user.args[1]]
                    part.meta.setdefault("recompute", user.meta["recompute"])
        if made is not None:
            replace(node, made)
    for node in seeds.values():
        node.meta["val"] = node.meta["val"].new_empty(node.args[:1])
    if seeds:
        gm.recompile()


_NAMED = ("p", "train", "low", "high", "lambd", "mean", "std", "from", "to")
"""Keywords that a rule takes; the others give the device, type and layout of the result."""


def _is_replaceable(node: fx.Node) -> bool:
    value = node.meta.get("val")
    made = value[0] if isinstance(value, tuple | list) else value
    return (
        isinstance(made, FakeTensor)
        and made.layout is torch.strided
        and made.device.type != "meta"
        and node.kwargs.get("generator") is None
        and not may_refuse(node.target, node.args, node.kwargs)
        and node.meta.get("partitioner_tag") not in _BACKWARD
    )


class _DrawSite:
    """One draw of the graph, and methods that insert nodes in its place.

    Attributes:
        seeds: the call that draws the seeds of a device's draws; its first argument counts them.
    """

    def __init__(self, node: fx.Node, seeds: dict[torch.device, fx.Node]) -> None:
        self.node, self.seeds = node, seeds
        value = node.meta["val"]
        self.result: FakeTensor = value[0] if isinstance(value, tuple | list) else value
        self.wide = _wide(self.result.dtype)  # fine enough to be compared with a probability

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call with the source lines and tags of the draw."""
        return call_like(self.node, target, *args, **kwargs)

    def again(self, node: fx.Node) -> fx.Node:
        """Return a node after telling the partitioner to recompute it in the backward."""
        node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        return node

    def draw(self, kind: str, dtype: torch.dtype, low: int = 0, high: int = 0) -> fx.Node:
        """Insert a draw of the result's shape."""
        device = self.result.device
        if device not in self.seeds:
            self.seeds[device] = self.call(torch.ops.fusec.random_seeds.default, 0, device)
            self.seeds[device].meta.pop("recompute", None)
        seeds = self.seeds[device]
        which: Any = seeds.args[0]
        seeds.args = (which + 1, device)
        strides = [hint_of(s) for s in self.result.stride()]
        order = sorted(range(len(strides)), key=lambda d: (-strides[d], d))
        size = [self.extent(d) for d in range(len(strides))]
        bounds = (low, high) if kind == "integer" else ()
        target = torch.ops.fusec.random.default
        return self.again(self.call(target, size, order, seeds, which, kind, dtype, *bounds))

    def extent(self, dimension: int) -> Any:
        """Return an extent of the result as an argument: a number, or a node that computes it."""
        extent: int | torch.SymInt = self.result.shape[dimension]
        if isinstance(extent, int):
            return extent
        for node in self.node.graph.nodes:
            value = node.meta.get("val")
            if node is self.node or node.op == "output":
                break
            if isinstance(value, torch.SymInt) and value.node.expr == extent.node.expr:
                return node
        tensors = ((node, tensor_of(node)) for node in self.node.all_input_nodes)
        like = next(n for n, t in tensors if t is not None and t.dim() == self.result.dim())
        return self.call(aten.sym_size.int, like, dimension)

    def number(self, value: float, dtype: torch.dtype) -> fx.Node:
        return self.call(aten.full.default, [], value, dtype=dtype, device=self.result.device)

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return cast_like(self.node, node, dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


# -- rules: what a draw becomes, or None where it stays --------------------------------------------


def _of_floats(rule: DrawRule) -> DrawRule:
    """Return a rule for draws of floats whose settings are plain numbers."""

    def checked(line: _DrawSite, *args: Any, **named: Any) -> Any:
        known = not any(isinstance(arg, fx.Node) for arg in (*args[1:], *named.values()))
        return rule(line, *args, **named) if known and line.result.dtype in _FLOATS else None

    return checked


def _dropout(line: _DrawSite, x: fx.Node, p: float, train: bool | None) -> tuple[fx.Node, ...]:
    """Return x * (1 / (1 - p) where u >= p, else 0), rounded once, and the mask ``u >= p``."""
    if train is False or p == 0:
        kept = line.call(aten.full_like.default, x, True, dtype=torch.bool)
        return line.call(aten.clone.default, x), kept
    if p == 1:
        kept = line.call(aten.full_like.default, x, False, dtype=torch.bool)
        return line.call(aten.mul.Scalar, x, 0.0), kept
    kept = line.again(line.call(aten.ge.Scalar, line.draw("uniform", torch.float32), p))
    scale, zero = line.number(1.0 / (1.0 - p), line.wide), line.number(0.0, line.wide)
    factor = line.again(line.call(aten.where.self, kept, scale, zero))
    product = line.call(aten.mul.Tensor, line.cast(x, line.wide), factor)
    return line.cast(product, line.result.dtype), kept


def _drawn(kind: str, line: _DrawSite, *_: Any) -> fx.Node:
    return line.draw(kind, line.result.dtype)


def _randint(line: _DrawSite, low: Any, high: Any) -> fx.Node | None:
    dtype = line.result.dtype
    static = isinstance(low, int) and isinstance(high, int)
    if not static or not 0 < high - low <= LARGEST_RANGE or dtype not in (*_FLOATS, *_INTEGERS):
        return None
    return line.draw("integer", dtype, low, high)


def _bernoulli(line: _DrawSite, x: fx.Node, p: Any = None) -> fx.Node | None:
    """Return u < p, as the result's type; the probabilities are ``x`` if ``p`` is None."""
    probability = x if p is None else p
    if isinstance(probability, fx.Node):
        value = probability.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in _FLOATS:
            return None
        wide = _wide(value.dtype)
        number = line.draw("uniform", wide)
        if value.device.type == "cpu":
            probability = line.call(torch.ops.fusec.probability.default, probability)
        drawn = line.call(aten.lt.Tensor, number, line.cast(probability, wide))
    else:
        drawn = line.call(aten.lt.Scalar, line.draw("uniform", line.wide), probability)
    return line.cast(line.again(drawn), line.result.dtype)


def _uniform(line: _DrawSite, x: fx.Node, low: float = 0.0, high: float = 1.0) -> fx.Node:
    """Return low + (high - low) * u; a value that rounds to ``high`` or above becomes ``low``."""
    dtype = line.result.dtype
    spread = line.call(aten.mul.Scalar, line.draw("uniform", line.wide), high - low)
    value = line.cast(line.call(aten.add.Scalar, spread, low), dtype)
    outside = line.call(aten.ge.Scalar, value, high)
    return line.call(aten.where.self, outside, line.number(low, dtype), value)


def _normal(line: _DrawSite, x: fx.Node, mean: float = 0.0, std: float = 1.0) -> fx.Node:
    spread = line.call(aten.mul.Scalar, line.draw("normal", line.wide), std)
    return line.cast(line.call(aten.add.Scalar, spread, mean), line.result.dtype)


def _exponential(line: _DrawSite, x: fx.Node, lambd: float = 1.0) -> fx.Node:
    """Return -log(1 - u) / lambd, at least 2^-25 / lambd: eager's is never 0 either."""
    uniform = line.draw("uniform", line.wide)
    log = line.call(aten.log1p.default, line.call(aten.neg.default, uniform))
    positive = line.call(aten.clamp.default, line.call(aten.neg.default, log), 2.0**-25)
    return line.cast(line.call(aten.mul.Scalar, positive, 1.0 / lambd), line.result.dtype)


_RULES: dict[Any, DrawRule] = {
    aten.native_dropout.default: _of_floats(_dropout),
    aten.rand.default: _of_floats(partial(_drawn, "uniform")),
    aten.rand_like.default: _of_floats(partial(_drawn, "uniform")),
    aten.randn.default: _of_floats(partial(_drawn, "normal")),
    aten.randn_like.default: _of_floats(partial(_drawn, "normal")),
    aten.randint.default: lambda line, high, size: _randint(line, 0, high),
    aten.randint.low: lambda line, low, high, size: _randint(line, low, high),
    aten.randint_like.default: lambda line, x, high: _randint(line, 0, high),
    aten.randint_like.low_dtype: lambda line, x, low, high: _randint(line, low, high),
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.uniform.default: _of_floats(_uniform),
    aten.normal_functional.default: _of_floats(_normal),
    aten.exponential.default: _of_floats(_exponential),
}
