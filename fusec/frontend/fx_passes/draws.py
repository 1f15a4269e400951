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

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fusec.frontend.aot.refusals import may_refuse
from fusec.frontend.fx_passes.fx_nodes import call_like, cast_like, hint_of, tensor_of
from fusec.frontend.ops.random_ops import LARGEST_RANGE
from fusec.torch_interior import FakeTensor

aten = torch.ops.aten

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
        if made is not None:
            _replace(node, made)
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


def _replace(node: fx.Node, made: fx.Node | tuple[fx.Node, ...]) -> None:
    if isinstance(made, tuple):
        for user in list(node.users):
            assert user.target is operator.getitem
            part = made[user.args[1]]  # type: ignore[index]
            if "recompute" in user.meta and "recompute" not in part.meta:
                part.meta["recompute"] = user.meta["recompute"]
            user.replace_all_uses_with(part)
            node.graph.erase_node(user)
    else:
        node.replace_all_uses_with(made)
    node.graph.erase_node(node)


class _DrawSite:
    """One draw of the graph, and methods that insert nodes in its place.

    Attributes:
        seeds: the call that draws the seeds of a device's draws; its first argument counts them.
    """

    def __init__(self, node: fx.Node, seeds: dict[torch.device, fx.Node]) -> None:
        self.node, self.seeds = node, seeds
        value = node.meta["val"]
        self.result: FakeTensor = value[0] if isinstance(value, tuple | list) else value

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

    def uniform(self) -> fx.Node:
        """Insert uniform numbers that are fine enough to be compared with a probability."""
        wide = self.result.dtype is torch.float64
        return self.draw("uniform", torch.float64 if wide else torch.float32)

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return cast_like(self.node, node, dtype)


# -- rules: what a draw becomes, or None where it stays --------------------------------------------


def _dropout(
    line: _DrawSite, x: fx.Node, p: float, train: bool | None
) -> tuple[fx.Node, ...] | None:
    """Return x * (1 / (1 - p) where u >= p, else 0), rounded once, and the mask ``u >= p``."""
    dtype = line.result.dtype
    if dtype not in _FLOATS or not isinstance(p, float | int):
        return None
    if train is False or p == 0:
        kept = line.call(aten.full_like.default, x, True, dtype=torch.bool)
        return line.call(aten.clone.default, x), kept
    if p == 1:
        kept = line.call(aten.full_like.default, x, False, dtype=torch.bool)
        return line.call(aten.mul.Scalar, x, 0.0), kept
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    kept = line.again(line.call(aten.ge.Scalar, line.draw("uniform", torch.float32), p))
    scale, zero = line.number(1.0 / (1.0 - p), wide), line.number(0.0, wide)
    factor = line.again(line.call(aten.where.self, kept, scale, zero))
    product = line.call(aten.mul.Tensor, line.cast(x, wide), factor)
    return line.cast(product, dtype), kept


def _drawn(kind: str, line: _DrawSite, *_: Any) -> fx.Node | None:
    dtype = line.result.dtype
    return line.draw(kind, dtype) if dtype in _FLOATS else None


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
        wide = torch.float64 if value.dtype is torch.float64 else torch.float32
        number = line.draw("uniform", wide)
        if value.device.type == "cpu":
            probability = line.call(torch.ops.fusec.probability.default, probability)
        drawn = line.call(aten.lt.Tensor, number, line.cast(probability, wide))
    else:
        drawn = line.call(aten.lt.Scalar, line.uniform(), probability)
    return line.cast(line.again(drawn), line.result.dtype)


def _uniform(line: _DrawSite, x: fx.Node, low: float = 0.0, high: float = 1.0) -> fx.Node | None:
    """Return low + (high - low) * u; a value that rounds to ``high`` or above becomes ``low``."""
    dtype = line.result.dtype
    if dtype not in _FLOATS or not all(isinstance(v, float | int) for v in (low, high)):
        return None
    spread = line.call(aten.mul.Scalar, line.uniform(), high - low)
    value = line.cast(line.call(aten.add.Scalar, spread, low), dtype)
    outside = line.call(aten.ge.Scalar, value, high)
    return line.call(aten.where.self, outside, line.number(low, dtype), value)


def _normal(line: _DrawSite, x: fx.Node, mean: float = 0.0, std: float = 1.0) -> fx.Node | None:
    dtype = line.result.dtype
    if dtype not in _FLOATS or not all(isinstance(v, float | int) for v in (mean, std)):
        return None
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    spread = line.call(aten.mul.Scalar, line.draw("normal", wide), std)
    return line.cast(line.call(aten.add.Scalar, spread, mean), dtype)


def _exponential(line: _DrawSite, x: fx.Node, lambd: float = 1.0) -> fx.Node | None:
    """Return -log(1 - u) / lambd, at least 2^-25 / lambd: eager's is never 0 either."""
    dtype = line.result.dtype
    if dtype not in _FLOATS or not isinstance(lambd, float | int):
        return None
    log = line.call(aten.log1p.default, line.call(aten.neg.default, line.uniform()))
    positive = line.call(aten.clamp.default, line.call(aten.neg.default, log), 2.0**-25)
    return line.cast(line.call(aten.mul.Scalar, positive, 1.0 / lambd), dtype)


_RULES: dict[Any, DrawRule] = {
    aten.native_dropout.default: _dropout,
    aten.rand.default: partial(_drawn, "uniform"),
    aten.rand_like.default: partial(_drawn, "uniform"),
    aten.randn.default: partial(_drawn, "normal"),
    aten.randn_like.default: partial(_drawn, "normal"),
    aten.randint.default: lambda line, high, size: _randint(line, 0, high),
    aten.randint.low: lambda line, low, high, size: _randint(line, low, high),
    aten.randint_like.default: lambda line, x, high: _randint(line, 0, high),
    aten.randint_like.low_dtype: lambda line, x, low, high: _randint(line, low, high),
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.uniform.default: _uniform,
    aten.normal_functional.default: _normal,
    aten.exponential.default: _exponential,
}
