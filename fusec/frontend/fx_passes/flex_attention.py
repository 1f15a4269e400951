"""Decompose ``flex_attention`` into products, a score's modification, a mask, and a softmax.

The higher-order operation has two subgraphs, for one score ``s[b, h, m, n]`` and for whether query
m of head h in batch b sees key n. In Dynamo graphs the functions below replace it: they run those
subgraphs for all scores at once. AOTAutograd then traces products, modifications of scores, and a
softmax, and differentiates them; fusion makes one loop of them, as for every attention, and a
condition on positions bounds it. The list of empty blocks in a block mask is not needed for that,
and eager's kernel does not read it either.

Worked example: with ``score_mod = lambda s, b, h, m, n: s + bias[h, n]`` and a causal mask,
``scores[b, h, m, n] = m >= n ? sum(d: q[b, h, m, d] * k[b, h, n, d]) * scale + bias[h, n] : -inf``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fusec.frontend.aot.eager_strides import copied_in_order
from fusec.frontend.fx_passes.dynamo_graph import call_instead, graphs_in
from fusec.torch_interior import (
    FakeTensor,
    HigherOrderOperator,
    flex_scores,
    unset_fake_temporarily,
)

logger = logging.getLogger("fusec.capture")


def spell_out_attention(gm: fx.GraphModule) -> None:
    """Replace the ``flex_attention`` calls of a Dynamo graph by operations that fuse, in place.

    A call is kept if its functions cannot run for all scores at once.
    """
    for part in graphs_in(gm):
        opened = {n: decomposed_flex_attention for n in _calls(part) if _runs(part, n)}
        call_instead((part,), opened.get)


def decomposed_flex_attention(
    query: Tensor, key: Tensor, value: Tensor, *functions: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of torch's ``flex_attention``, computed by operations of ATen.

    Args:
        query: ``[B, H, M, D]``; key: ``[B or 1, H', N, D]``; value: ``[B or 1, H', N, E]``, where
            H' divides H.
        functions: ``(s, b, h, m, n, *buffers)`` -> a score, for scalars; a block mask, whose last
            item is ``(b, h, m, n, *buffers)`` -> whether m sees n; scale and options; the buffers
            of the one and of the other.
    Returns:
        The weighted values ``[B, H, M, E]``, in the queries' order of axes in memory; the base-two
        log-sum-exp of the rows, and their greatest scores over ln 2: ``[B, H, M]``. A row that sees
        no key is 0, and -inf in both.
    """
    batch, heads, *_ = query.shape
    key, value = (
        x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] != heads else x
        for x in (key, value)
    )
    key, value = (x.expand(batch, *x.shape[1:]) for x in (key, value))
    exact = torch.float64 if query.dtype is torch.float64 else torch.float32
    given = (*functions, (), ())[:6]
    _, scores = flex_scores(query.to(exact), key.to(exact), value, *given)
    modified = scores.to(exact)
    hidden = (modified == -math.inf).all(-1)
    sums = torch.where(hidden, -math.inf, modified.logsumexp(-1))
    weights = torch.ops.aten._safe_softmax.default(modified, -1).to(query.dtype)
    out, strides = weights @ value.to(query.dtype), query.stride()
    order = sorted(range(3), key=lambda axis: -strides[axis])
    out = out if order == [0, 1, 2] else copied_in_order(out, (*order, 3))
    return out, sums / math.log(2), modified.amax(-1) / math.log(2)


# -- which calls -----------------------------------------------------------------------------------


def is_flex_attention(target: Any) -> bool:
    """Return True for torch's higher-order operation ``flex_attention``."""
    return isinstance(target, HigherOrderOperator) and target.name() == "flex_attention"


def _calls(part: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield calls outside of ``torch.func`` transforms; a block mask's end before the call."""
    depth = 0
    for node in part.graph.nodes:
        name = getattr(node.target, "__name__", "")
        depth += name.endswith("increment_nesting")
        depth -= name.endswith("decrement_nesting")
        if is_flex_attention(node.target) and depth == 0:
            yield node


def _runs(part: fx.GraphModule, node: fx.Node) -> bool:
    """Return True if a call's functions run for all scores at once: tried on fake tensors."""
    found: list[Any] = []

    def given(source: fx.Node) -> Any:
        if source.op == "get_attr":
            return getattr(part, str(source.target))
        found.append(source.meta["example_value"])
        return found[-1]

    try:
        args: Any = fx.node.map_arg(node.args, given)
        kwargs: Any = fx.node.map_arg(node.kwargs, given)
        mode = next(value.fake_mode for value in found if isinstance(value, FakeTensor))
        with unset_fake_temporarily(), mode, torch.no_grad():
            decomposed_flex_attention(*args, **kwargs)
    except Exception as error:
        logger.info("flex_attention runs as eager kernels: %s: %s", type(error).__name__, error)
        return False
    return True
