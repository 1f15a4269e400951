"""Lower the calls behind ``scaled_dot_product_attention`` to index notation.

``q[b, h, m, d]``, ``k[b, h', n, d]``, ``v[b, h', n, e]`` with h' the head of keys and values
that query head h uses. Scores stay in f32; the weights are rounded to the values' type before they
multiply, as in the library's kernels. A row whose keys are all masked gives 0, as there, and the
logarithm of its sum is 0: in the gradient its weights, ``exp(-inf - 0)``, are 0 again.

Source of the gradient: Dao et al., "FlashAttention" (2022), appendix B: with the weights p from the
logarithm of the row's sum, ``ds = p * (dp - delta)`` and ``delta[m] = sum(e: do[m, e]*o[m, e])``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Body, Indices, read
from fusec.frontend.fallbacks import ATTENTION
from fusec.frontend.ops.products import contraction, exact, is_matrix
from fusec.frontend.ops.registry import lowers
from fusec.frontend.value import Value
from fusec.ir.dtype import BOOL, F32, DType
from fusec.ir.expr import Const, Expr, IndexValue, Op, Reduce, Select
from fusec.ir.index import Axis, Index, floordiv, index
from fusec.ir.monoid import MAX, SUM, Monoid
from fusec.ir.scalar import ROUND

aten = torch.ops.aten
_LOWEST = Const(-math.inf, F32)
_ZERO = Const(0.0, F32)


class _Attention:
    """The scores of one call: ``s[b, h, m, n]``, scaled and masked, in f32."""

    def __init__(
        self, q: Value, k: Value, v: Value, mask: Value | None, causal: bool, scale: float | None
    ) -> None:
        if not all(map(is_matrix, (q, k, v))) or len(q.shape) != 4:
            raise Unsupported("attention of a type without tensor cores")
        self.q, self.k, self.v, self.mask, self.causal = q, k, v, mask, causal
        self.batch, self.heads, self.rows, self.depth = q.shape
        self.keys, self.width = k.shape[2], v.shape[3]
        if scale is None and not self.depth.is_constant:
            raise Unsupported("attention with a symbolic head dimension")
        self.scale = 1.0 / math.sqrt(self.depth.const) if scale is None else scale

    @property
    def shape(self) -> Indices:
        return (self.batch, self.heads, self.rows, self.keys)

    @property
    def groups(self) -> Index:
        """The number of query heads that use one head of keys and values."""
        return floordiv(self.heads, self.k.shape[1])

    def head(self, h: Index) -> Index:
        """Return the head of keys and values that query head ``h`` uses."""
        return h if self.groups is index(1) else floordiv(h, self.groups)

    def scores(self, at: Indices) -> Expr:
        b, h, m, n = at
        product = contraction(
            self.depth,
            lambda d: (exact(self.q, (b, h, m, d)), exact(self.k, (b, self.head(h), n, d))),
        )
        score: Expr = Op("mul", (product, Const(self.scale, F32)))
        if self.mask is not None:
            score = self._masked(score, self.mask, at)
        if self.causal:
            keep = Op("le", (IndexValue(n), IndexValue(m)))
            score = Select(keep, score, _LOWEST)
        return score

    def _masked(self, score: Expr, mask: Value, at: Indices) -> Expr:
        if mask.dtype is BOOL:
            keep = read(mask, at, BOOL)
            return Select(keep, score, _LOWEST)
        return Op("add", (score, read(mask, at, F32)))


def _weight(value: Expr, dtype: DType) -> Expr:
    """Return an f32 value as the operand of a product: rounded to a 16-bit type."""
    return Op(ROUND[dtype], (value,)) if dtype in ROUND else value


def _forward(call: AtenCall, a: _Attention, *, statistics: bool = True) -> None:
    """Emit the result and, if ``statistics``, the logarithms of the rows' sums (log-sum-exp).

    Raises:
        Unsupported: if the traced statistics are not one number per row.
    """
    row = (a.batch, a.heads, a.rows)
    statistics = statistics and len(call.results) > 1
    if statistics and call.results[1].shape != row:
        raise Unsupported("statistics of another shape")

    def over_keys(at: Indices, monoid: Monoid, term: Callable[[Index], Expr]) -> Expr:
        axis = Axis("n", a.keys)
        return Reduce(monoid, (axis,), term(index(axis)))

    scores = call.scratch("scores", a.shape, F32, a.scores)
    top = call.scratch(
        "top", row, F32, lambda at: over_keys(at, MAX, lambda n: scores.at((*at, n)))
    )
    weight = call.scratch(
        "weight",
        a.shape,
        F32,
        lambda at: Op("exp", (Op("sub", (scores.at(at), top.at(at[:3]))),)),
    )
    total = call.scratch(
        "total", row, F32, lambda at: over_keys(at, SUM, lambda n: weight.at((*at, n)))
    )

    def unless_hidden(at: Indices, value: Expr) -> Expr:
        """Return 0 for a row whose keys are all masked, as the library does, else ``value``."""
        if a.mask is None:
            return value
        return Select(Op("eq", (top.at(at), _LOWEST)), _ZERO, value)

    def output(at: Indices) -> Expr:
        b, h, m, e = at

        def term(n: Index) -> tuple[Expr, Expr]:
            share = Op("div", (weight.at((b, h, m, n)), total.at((b, h, m))))
            return _weight(share, a.v.dtype), exact(a.v, (b, a.head(h), n, e))

        return unless_hidden((b, h, m), contraction(a.keys, term))

    def logarithm(at: Indices) -> Expr:
        return unless_hidden(at, Op("add", (top.at(at), Op("log", (total.at(at),)))))

    call.define(output, 0)
    if statistics:
        call.define(logarithm, 1)


@lowers(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    library=lambda *_: ATTENTION,
)
def flash(
    call: AtenCall,
    q: Value,
    k: Value,
    v: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> None:
    """Emit flash attention; only the CPU's operation takes a mask."""
    _without_dropout(dropout_p)
    attention = _Attention(q, k, v, attn_mask, is_causal, scale)
    _forward(call, attention)


@lowers(
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    library=lambda *_: ATTENTION,
)
def efficient(
    call: AtenCall,
    q: Value,
    k: Value,
    v: Value,
    attn_bias: Value | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> None:
    _without_dropout(dropout_p)
    attention = _Attention(q, k, v, attn_bias, is_causal, scale)
    _forward(call, attention, statistics=compute_log_sumexp)


def _without_dropout(probability: float) -> None:
    if probability:
        raise Unsupported("dropout of the library's attention: its random numbers are its own")


def _row_delta(a: _Attention, grad: Value, out: Value) -> Body:
    def body(at: Indices) -> Expr:
        axis = Axis("e", a.width)
        here = (*at, index(axis))
        product = Op("mul", (read(grad, here, F32), read(out, here, F32)))
        return Reduce(SUM, (axis,), product)

    return body


class _Gradient:
    """The gradients of one call: each definition recomputes the scores it needs."""

    def __init__(self, attention: _Attention, grad: Value, statistics: Value, delta: Value) -> None:
        self.attention, self.grad = attention, grad
        self.statistics, self.delta = statistics, delta

    def weight(self, at: Indices) -> Expr:
        scores = self.attention.scores(at)
        return Op("exp", (Op("sub", (scores, read(self.statistics, at[:3], F32))),))

    def change(self, at: Indices) -> Expr:
        """Return the gradient of an unscaled score: that of the scaled score, times the scale."""
        a = self.attention
        b, h, m, n = at
        values = (b, a.head(h), n)
        back = contraction(
            a.width, lambda e: (exact(self.grad, (b, h, m, e)), exact(a.v, (*values, e)))
        )
        difference = Op("sub", (back, self.delta.at((b, h, m))))
        return Op("mul", (Op("mul", (self.weight(at), difference)), Const(a.scale, F32)))

    def query(self, at: Indices) -> Expr:
        a = self.attention
        b, h, m, d = at
        keys = (b, a.head(h))
        return contraction(
            a.keys,
            lambda n: (_weight(self.change((b, h, m, n)), a.k.dtype), exact(a.k, (*keys, n, d))),
        )

    def key(self, at: Indices) -> Expr:
        a = self.attention
        b, head, n, d = at
        return self.over_queries(
            head,
            lambda h, m: (
                _weight(self.change((b, h, m, n)), a.q.dtype),
                exact(a.q, (b, h, m, d)),
            ),
        )

    def value(self, at: Indices) -> Expr:
        b, head, n, e = at
        kind = self.attention.v.dtype
        return self.over_queries(
            head,
            lambda h, m: (_weight(self.weight((b, h, m, n)), kind), exact(self.grad, (b, h, m, e))),
        )

    def over_queries(self, head: Index, term: Callable[[Index, Index], tuple[Expr, Expr]]) -> Expr:
        """Return the sum of products over the queries of all heads that use one head of keys."""
        a = self.attention
        if a.groups is index(1):
            return contraction(a.rows, lambda m: term(head, m))
        group, row = Axis("g", a.groups), Axis("m", a.rows)
        factors = term(head * a.groups + index(group), index(row))
        return Reduce(SUM, (group, row), Op("mul", factors))


@lowers(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default, library=lambda *_: ATTENTION
)
def flash_cpu_backward(
    call: AtenCall,
    grad: Value,
    q: Value,
    k: Value,
    v: Value,
    out: Value,
    statistics: Value,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> None:
    _without_dropout(dropout_p)
    a = _Attention(q, k, v, attn_mask, is_causal, scale)
    delta = call.scratch("delta", (a.batch, a.heads, a.rows), F32, _row_delta(a, grad, out))
    gradient = _Gradient(a, grad, statistics, delta)
    for result, body in enumerate((gradient.query, gradient.key, gradient.value)):
        call.define(body, result)
