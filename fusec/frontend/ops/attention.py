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
from typing import Any

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Indices, read
from fusec.frontend.fallbacks import ATTENTION
from fusec.frontend.ops.products import contraction, exact, is_matrix
from fusec.frontend.ops.registry import aten, lowers
from fusec.frontend.value import Value
from fusec.ir.dtype import BOOL, F32, DType
from fusec.ir.expr import Const, Expr, IndexValue, Reduce, op, select
from fusec.ir.index import Axis, Index, floordiv, index
from fusec.ir.monoid import MAX, SUM, Monoid
from fusec.ir.scalar import ROUND

_LOWEST = Const(-math.inf, F32)


class _Attention:
    """The scores of one call: ``s[b, h, m, n]``, scaled and masked, in f32."""

    def __init__(
        self,
        tensors: tuple[Value, Value, Value],
        mask: Value | None,
        causal: bool,
        scale: float | None,
        dropout: float,
    ) -> None:
        self.q, self.k, self.v = q, k, v = tensors
        self.mask, self.causal = mask, causal
        if dropout:
            raise Unsupported("dropout of the library's attention: its random numbers are its own")
        if not all(map(is_matrix, tensors)) or len(q.shape) != 4:
            raise Unsupported("attention of a type without tensor cores")
        *self.row, self.depth = q.shape
        self.keys, self.width = k.shape[2], v.shape[3]
        self.groups = floordiv(q.shape[1], k.shape[1])
        """The number of query heads that use one head of keys and values."""
        if scale is None and not self.depth.is_constant:
            raise Unsupported("attention with a symbolic head dimension")
        self.scale = 1.0 / math.sqrt(self.depth.const) if scale is None else scale

    def head(self, h: Index) -> Index:
        """Return the head of keys and values that query head ``h`` uses."""
        return h if self.groups is index(1) else floordiv(h, self.groups)

    def scores(self, at: Indices) -> Expr:
        b, h, m, n = at
        product = contraction(
            self.depth,
            lambda d: (exact(self.q, (b, h, m, d)), exact(self.k, (b, self.head(h), n, d))),
        )
        score = product * self.scale
        if self.mask is not None and self.mask.dtype is BOOL:
            score = select(read(self.mask, at, BOOL), score, _LOWEST)
        elif self.mask is not None:
            score = score + read(self.mask, at, F32)
        return (
            select(op("le", IndexValue(n), IndexValue(m)), score, _LOWEST) if self.causal else score
        )

    def over_queries(self, head: Index, term: Callable[[Index, Index], tuple[Expr, Expr]]) -> Expr:
        """Return the sum of products over the queries of all heads that use one head of keys."""
        rows = self.row[2]
        if self.groups is index(1):
            return contraction(rows, lambda m: term(head, m))
        group, row = Axis("g", self.groups), Axis("m", rows)
        factors = term(head * self.groups + index(group), index(row))
        return Reduce(SUM, (group, row), op("mul", *factors))


def _weight(value: Expr, dtype: DType) -> Expr:
    """Return an f32 value as the operand of a product: rounded to a 16-bit type."""
    return op(ROUND[dtype], value) if dtype in ROUND else value


def _forward(call: AtenCall, a: _Attention, *, statistics: bool) -> None:
    """Emit the result and, if ``statistics``, the logarithms of the rows' sums (log-sum-exp).

    Raises:
        Unsupported: if the traced statistics are not one number per row.
    """
    row = tuple(a.row)
    statistics = statistics and len(call.results) > 1
    if statistics and call.results[1].shape != row:
        raise Unsupported("statistics of another shape")

    def of_rows(name: str, monoid: Monoid, x: Value) -> Value:
        def body(at: Indices) -> Expr:
            axis = Axis("n", a.keys)
            return Reduce(monoid, (axis,), x.at((*at, index(axis))))

        return call.scratch(name, row, F32, body)

    shape = (*row, a.keys)
    scores = call.scratch("scores", shape, F32, a.scores)
    top = of_rows("top", MAX, scores)
    weight = call.scratch(
        "weight", shape, F32, lambda at: op("exp", scores.at(at) - top.at(at[:3]))
    )
    total = of_rows("total", SUM, weight)

    def unless_hidden(at: Indices, value: Expr) -> Expr:
        """Return 0 for a row whose keys are all masked, as the library does, else ``value``."""
        return value if a.mask is None else select(op("eq", top.at(at), _LOWEST), 0.0, value)

    def output(at: Indices) -> Expr:
        b, h, m, e = at

        def term(n: Index) -> tuple[Expr, Expr]:
            share = weight.at((b, h, m, n)) / total.at((b, h, m))
            return _weight(share, a.v.dtype), exact(a.v, (b, a.head(h), n, e))

        return unless_hidden((b, h, m), contraction(a.keys, term))

    call.define(output, 0)
    if statistics:
        call.define(lambda at: unless_hidden(at, top.at(at) + op("log", total.at(at))), 1)


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
    statistics: bool = True,
) -> None:
    """Emit flash attention; only the CPU's operation takes a mask."""
    attention = _Attention((q, k, v), attn_mask, is_causal, scale, dropout_p)
    _forward(call, attention, statistics=statistics)


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
    *settings: Any,
    scale: float | None = None,
) -> None:
    """Emit the same; its settings are those of flash attention."""
    flash(call, q, k, v, *settings, attn_mask=attn_bias, scale=scale, statistics=compute_log_sumexp)


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
    """Emit the gradients of one call: each definition recomputes the scores it needs."""
    a = _Attention((q, k, v), attn_mask, is_causal, scale, dropout_p)

    def row_sum(at: Indices) -> Expr:
        axis = Axis("e", a.width)
        here = (*at, index(axis))
        return Reduce(SUM, (axis,), read(grad, here, F32) * read(out, here, F32))

    delta = call.scratch("delta", tuple(a.row), F32, row_sum)

    def weight(*at: Index) -> Expr:
        return op("exp", a.scores(at) - read(statistics, at[:3], F32))

    def change(b: Index, h: Index, m: Index, n: Index) -> Expr:
        """Return the gradient of a scaled score; the scale multiplies sums of its products."""
        back = contraction(
            a.width, lambda e: (exact(grad, (b, h, m, e)), exact(v, (b, a.head(h), n, e)))
        )
        return weight(b, h, m, n) * (back - delta.at((b, h, m)))

    def of_query(at: Indices) -> Expr:
        b, h, m, d = at
        head = a.head(h)
        total = contraction(
            a.keys, lambda n: (_weight(change(b, h, m, n), k.dtype), exact(k, (b, head, n, d)))
        )
        return total * a.scale

    def of_key(at: Indices) -> Expr:
        b, head, n, d = at
        total = a.over_queries(
            head, lambda h, m: (_weight(change(b, h, m, n), q.dtype), exact(q, (b, h, m, d)))
        )
        return total * a.scale

    def of_value(at: Indices) -> Expr:
        b, head, n, e = at
        return a.over_queries(
            head, lambda h, m: (_weight(weight(b, h, m, n), v.dtype), exact(grad, (b, h, m, e)))
        )

    for result, body in enumerate((of_query, of_key, of_value)):
        call.define(body, result)
