"""Transformed products, told from their sums."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusec.ir.dtype import F32
from fusec.ir.expr import Cast, Const, Op, Reduce
from fusec.ir.graph import Def, Kernel, Store
from fusec.ir.index import Axis, index
from fusec.ir.monoid import MAX, SUM
from fusec.ir.transformed import has_transformed, match_transformed
from tests.ir.graphs import axes, buffer, graph, load, position
from tests.passes.pipelines import kernel_of
from tests.passes.schedule.flat import products
from tests.passes.schedule.short_filters import filtered


def extents(axes: tuple[Axis, ...]) -> list[int]:
    return [axis.extent.const for axis in axes]


def test_each_axis_has_a_role() -> None:
    kernel, (_, u, *_) = filtered(3, 8, 32, 48)
    found = match_transformed(kernel)
    assert found is not None
    assert (extents(found.rows), extents(found.places), extents(found.terms)) == ([3, 4], [2], [4])
    assert found.groups is not None
    assert (found.groups.extent.const, found.lane.extent.const) == (3, 16)
    assert found.channels.extent.const == 32
    assert found.weights.buffer.base is u
    assert found.guard is None


def test_an_axis_that_tiles_do_not_divide_is_cut_and_guarded() -> None:
    kernel, _ = filtered(1, 7, 16, 16)
    found = match_transformed(kernel)
    assert found is not None
    assert (extents(found.rows), extents(found.places)) == ([4], [2])
    assert found.groups is None
    assert found.guard is not None
    assert found.guard.axes == {*found.rows, *found.places}


def test_a_plain_product_is_none() -> None:
    kernel = products(32, 32, 32, dtype=F32)
    assert not has_transformed(kernel)
    assert match_transformed(kernel) is None


def test_a_product_inside_of_another_sum_is_none() -> None:
    """Relative positions of an attention: a short product, summed over short axes around it."""
    x, w, v, y = buffer("x", 8, 4), buffer("w", 8, 4, 16), buffer("v", 8), buffer("y", 8, 16)
    m, n, a, k = axes("m n a k", 8, 16, 8, 4)
    inner = Reduce(SUM, (k,), Op("mul", (load(x, a, k), load(w, a, k, n))))
    line = Def(y, (m, n), Reduce(SUM, (a,), Op("mul", (load(v, a), inner))))
    assert not has_transformed(kernel_of(graph((x, w, v), (line,), y)))


def with_sum(kernel: Kernel, more: Reduce) -> Kernel:
    (store,) = kernel.stores
    both = Store(store.buffer, store.indices, Op("add", (store.expr, more)))
    inside = (*kernel.inside, *more.over)
    return replace(kernel, stores=(both,), inside=inside)


@pytest.mark.parametrize("monoid", (SUM, MAX), ids=str)
def test_a_kernel_that_computes_other_sums_is_none(monoid) -> None:
    kernel, _ = filtered(1, 8, 16, 16)
    r = Axis("r", index(100))
    other = Reduce(monoid, (r,), load(buffer("z", 100), r))
    assert has_transformed(kernel)
    assert match_transformed(with_sum(kernel, other)) is None


def test_a_guarded_weight_is_none() -> None:
    kernel, (_, u, *_) = filtered(1, 8, 16, 16)
    node = next(n for n in match_transformed(kernel).product.body.args if n.buffer.base is u)
    guarded = kernel.map(lambda exprs: tuple(_guard(e, node.buffer) for e in exprs))
    assert match_transformed(guarded) is None


def _guard(expr, source):
    from fusec.ir.expr import Load
    from fusec.ir.rewrite import rewrite

    def rule(node):
        if isinstance(node, Load) and node.buffer is source:
            return Load(node.buffer, node.indices, Op("lt", (Const(1.0, F32), Const(2.0, F32))))
        return node

    return rewrite((expr,), rule)[0]


@pytest.mark.parametrize("varies", (False, True))
def test_a_factor_of_all_products_is_no_transform(varies: bool) -> None:
    """Scores of grouped heads, summed over the heads of a group, have one scale."""
    x, w, y = buffer("x", 4, 64, 32), buffer("w", 4, 32, 48), buffer("y", 64, 48)
    m, n, a, k = axes("m n a k", 64, 48, 4, 32)
    inner = Reduce(SUM, (k,), Op("mul", (load(x, a, m, k), load(w, a, k, n))))
    factor = Cast(position(a), F32) if varies else Const(0.5, F32)
    line = Def(y, (m, n), Reduce(SUM, (a,), Op("mul", (inner, factor))))
    assert has_transformed(kernel_of(graph((x, w), (line,), y))) is varies
