"""Sums with constant factors are written out, all results of the same elements at once."""

from __future__ import annotations

import numpy as np
import pytest

from fusec.ir.expr import Buffer, Expr, Op, Reduce, loads, postorder
from fusec.ir.graph import Def, FlatKernel
from fusec.ir.index import index
from fusec.ir.monoid import MAX, SUM, Monoid
from fusec.ir.rewrite import rewrite
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.kernel.unroll_terms import SumWriter, unroll_terms
from fusec.tools.interpreter.expression import Env
from fusec.tools.interpreter.graph import run_kernel, to_storage
from tests.ir.graphs import axes, buffer, graph, load
from tests.passes.pipelines import kernel_of
from tests.passes.schedule.short_filters import entry

OF_WEIGHTS = ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))


def weights(
    terms: int = 4, places: int = 3, monoid: Monoid = SUM
) -> tuple[FlatKernel, Buffer, Buffer]:
    """u[a, n] = sum(k: G[a, k] * w[n, k])."""
    w, u = buffer("w", 20, places), buffer("u", terms, 20)
    a, n, k = axes("a n k", terms, 20, places)
    table = tuple((*row, 2, 3, 4, 5, 6, 7)[:places] for row in (OF_WEIGHTS * 5)[:terms])
    body = Op("mul", (entry(table, index(a), index(k)), load(w, n, k)))
    line = Def(u, (a, n), Reduce(monoid, (k,), body))
    return coalesce(kernel_of(graph((w,), (line,), u))), w, u


def run(kernel: FlatKernel, w: Buffer, u: Buffer, numbers: np.ndarray) -> np.ndarray:
    env = Env(sizes={})
    to_storage(w, numbers, env)
    to_storage(u, np.full([n.const for n in u.shape], np.nan, np.float32), env)
    run_kernel(kernel, env.storage, {})
    return env.storage[u]


def test_each_term_is_a_store_of_shared_elements() -> None:
    kernel, w, u = weights()
    found = unroll_terms(kernel)
    assert len(found.stores) == 4
    assert [a.extent.const for a in found.axes] == [20]
    exprs = [store.expr for store in found.stores]
    assert len(loads(exprs)) == 3
    assert not any(isinstance(node, Reduce) for node in postorder(exprs))
    numbers = np.random.default_rng(1).integers(-4, 5, (20, 3)).astype(np.float32)
    wanted = np.asarray(OF_WEIGHTS, np.float32) @ numbers.T
    assert np.array_equal(run(found, w, u, numbers), wanted.reshape(-1))
    assert np.array_equal(run(kernel, w, u, numbers), wanted.reshape(-1))


def test_terms_of_zero_count_where_elements_are_not_finite() -> None:
    kernel, w, u = weights()
    numbers = np.ones((20, 3), np.float32)
    numbers[:4] = [[1, np.nan, 1], [np.inf, 1, 1], [-0.0, -0.0, -0.0], [1, 1, -np.inf]]
    with np.errstate(invalid="ignore"):
        found, wanted = run(unroll_terms(kernel), w, u, numbers), run(kernel, w, u, numbers)
    assert np.array_equal(found, wanted, equal_nan=True)
    assert np.array_equal(np.signbit(found), np.signbit(wanted))
    assert np.isnan(found.reshape(4, 20)[0, 0]), "0 * NaN"


@pytest.mark.parametrize(
    "how", [{"terms": 9}, {"places": 9}, {"monoid": MAX}], ids=["terms", "places", "maximum"]
)
def test_long_axes_and_other_reductions_stay(how) -> None:
    kernel, *_ = weights(**how)
    assert unroll_terms(kernel) is kernel


def test_a_factor_that_is_added_stays() -> None:
    kernel, *_ = weights()

    def added(node: Expr) -> Expr:
        return Op("add", node.args) if isinstance(node, Op) and node.name == "mul" else node

    changed = FlatKernel(kernel.map(lambda exprs: rewrite(exprs, added)))
    assert unroll_terms(changed) is changed


def test_more_results_of_the_same_elements_than_registers_stay() -> None:
    w, u = buffer("w", 20, 3), buffer("u", 8, 4, 20)
    a, b, n, k = axes("a b n k", 8, 4, 20, 3)
    table = entry(OF_WEIGHTS, index(b), index(k))
    factor = Op("mul", (entry(OF_WEIGHTS * 2, index(a), index(k)), table))
    line = Def(u, (a, b, n), Reduce(SUM, (k,), Op("mul", (factor, load(w, n, k)))))
    kernel = coalesce(kernel_of(graph((w,), (line,), u)))
    assert unroll_terms(kernel) is kernel


def test_a_sum_without_constant_factors_stays() -> None:
    x, y = buffer("x", 8, 4, 20), buffer("y", 8, 20)
    a, n, k = axes("a n k", 8, 20, 4)
    line = Def(y, (a, n), Reduce(SUM, (k,), load(x, a, k, n)))
    kernel = coalesce(kernel_of(graph((x,), (line,), y)))
    assert unroll_terms(kernel) is kernel


def written(row: int, *, zeros: bool) -> str:
    k, r = axes("k r", 3, 3)
    table = ((0, 0, 0), (-1, 0, -2), (1, -1, 0))
    body = Op("mul", (entry(table, index(r), index(k)), load(buffer("x", 3), k)))
    total = Reduce(SUM, (k,), body)
    return repr(SumWriter(zeros=zeros)(total, {r: index(row)}))


def test_of_tables_of_our_own_terms_of_zero_are_left_out_and_signs_are_operations() -> None:
    assert written(0, zeros=False) == "0.0"
    assert written(1, zeros=False) == "(-1.0 * x[0]) - (2.0 * x[2])"
    assert written(2, zeros=False) == "x[0] - x[1]"
    assert written(2, zeros=True) == "((0.0 + x[0]) + (-1.0 * x[1])) + (0.0 * x[2])"


def test_one_axis_may_be_bound_twice() -> None:
    """Fusion unites axes of equal extents, one inside the other."""
    k, c = axes("k c", 2, 2)
    inner = Reduce(SUM, (k,), load(buffer("x", 2), k))
    total = Reduce(SUM, (k,), Op("mul", (load(buffer("y", 2), k), inner)))
    shown = repr(SumWriter(zeros=False)(total, {c: index(0)}))
    assert shown == "(y[0] * (x[0] + x[1])) + (y[1] * (x[0] + x[1]))"
