"""A product of which others read parts is as many products."""

from __future__ import annotations

import pytest

from fusec.ir.contraction import factors
from fusec.ir.expr import Op, Reduce
from fusec.ir.graph import Def, kernel_nodes
from fusec.ir.index import IntoIndex, index
from fusec.ir.monoid import SUM
from fusec.passes.fusion.parts import cut_products
from fusec.passes.fusion.unify import Rejection, unify
from tests.ir.graphs import axes, buffer, load, total
from tests.passes.fusion.test_unify import check_kernel

M, K, J = 4, 6, 5
X, W = buffer("x", M, K), buffer("w", K, 2 * J)


def product() -> Def:
    """y[m, n] = sum(k: x[m, k] * w[k, n])"""
    m, n, k = axes("m n k", M, 2 * J, K)
    body = Op("mul", (load(X, m, k), load(W, k, n)))
    return Def(buffer("y", M, 2 * J), (m, n), total(SUM, k, body))


def gate(y: Def, first: IntoIndex, second: IntoIndex, step: int = 1) -> Def:
    """h[m, j] = y[m, step*j + first] * y[m, step*j + second]"""
    m, j = axes("m j", M, J)
    left, right = (load(y.buffer, m, index(j) * step + at) for at in (first, second))
    return Def(buffer("h", M, J), (m, j), Op("mul", (left, right)))


@pytest.mark.parametrize(("second", "step"), [(J, 1), (1, 2)], ids=["halves", "every other"])
def test_the_parts_of_a_product_are_products_in_one_loop(second: int, step: int) -> None:
    y = product()
    h = gate(y, 0, second, step)
    kernel = unify((y, h), frozenset((h.buffer,)))
    found = [n for n in kernel_nodes(kernel) if isinstance(n, Reduce)]
    assert len(found) == 2 and all(map(factors, found))
    assert len({n.over for n in found}) == 1
    assert {b.name for b in kernel.defs} == {"y", "h"}
    check_kernel(kernel, y, h, inputs=(X, W))


def test_a_part_alone_is_computed_alone() -> None:
    y = product()
    m, j = axes("m j", M, J)
    h = Def(buffer("h", M, J), (m, j), Op("neg", (load(y.buffer, m, index(j) + J),)))
    kernel = unify((y, h), frozenset((h.buffer,)))
    assert sum(isinstance(n, Reduce) for n in kernel_nodes(kernel)) == 1
    check_kernel(kernel, y, h, inputs=(X, W))


@pytest.mark.parametrize(
    ("first", "second", "step"), [(0, 4, 1), (1, 5, 1), (0, 1, 1)], ids=["apart", "late", "lapping"]
)
def test_what_are_no_equal_parts_stays_whole(first: int, second: int, step: int) -> None:
    y = product()
    h = gate(y, first, second, step)
    assert cut_products((y, h), frozenset((h.buffer,))).defs == (y, h)
    with pytest.raises(Rejection, match="h reads y at another place"):
        unify((y, h), frozenset((h.buffer,)))


@pytest.mark.parametrize(("second", "step"), [(J, 1), (1, 2)], ids=["halves", "every other"])
def test_a_product_that_is_stored_is_stored_in_parts(second: int, step: int) -> None:
    y = product()
    h = gate(y, 0, second, step)
    kernel = unify((y, h), frozenset((y.buffer, h.buffer)))
    assert [store.buffer.name for store in kernel.stores] == ["y", "y", "h"]
    check_kernel(kernel, y, h, inputs=(X, W))


def test_a_product_that_is_stored_stays_whole_if_a_part_is_not_read() -> None:
    y = product()
    m, j = axes("m j", M, J)
    h = Def(buffer("h", M, J), (m, j), Op("neg", (load(y.buffer, m, index(j) + J),)))
    assert cut_products((y, h), frozenset((y.buffer, h.buffer))).defs == (y, h)


def test_a_rejection_names_buffers_of_the_graph() -> None:
    y, t = product(), buffer("t", 3, 7, M, J)
    b, c, m, j = axes("b c m j", 3, 7, M, J)
    gated = Op("mul", (load(y.buffer, m, j), load(y.buffer, m, index(j) + J)))
    z = Def(buffer("z", 3, 7, M, J), (b, c, m, j), Op("add", (load(t, b, c, m, j), gated)))
    with pytest.raises(Rejection, match="y lacks the outer axis b"):
        unify((y, z), frozenset((z.buffer,)))
