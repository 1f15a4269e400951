"""Sums with constant factors are written out, all results of the same elements at once."""

from __future__ import annotations

import numpy as np
import pytest

from fusec.ir.dtype import F32
from fusec.ir.expr import Buffer, Const, Expr, Load, Op, Reduce, loads, postorder
from fusec.ir.graph import Def, FlatKernel
from fusec.ir.index import index
from fusec.ir.monoid import MAX, SUM, Monoid
from fusec.passes.graph.simplify import simplifier
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.kernel.short_sums import unroll_terms, written_out
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
    assert isinstance(exprs[0], Load) and isinstance(exprs[3], Load)
    assert not any(isinstance(node, Reduce) for node in postorder(exprs))
    numbers = np.random.default_rng(1).integers(-4, 5, (20, 3)).astype(np.float32)
    wanted = np.asarray(OF_WEIGHTS, np.float32) @ numbers.T
    assert np.array_equal(run(found, w, u, numbers), wanted.reshape(-1))
    assert np.array_equal(run(kernel, w, u, numbers), wanted.reshape(-1))


@pytest.mark.parametrize(
    "how", [{"terms": 9}, {"places": 9}, {"monoid": MAX}], ids=["terms", "places", "maximum"]
)
def test_long_axes_and_other_reductions_stay(how) -> None:
    kernel, *_ = weights(**how)
    assert unroll_terms(kernel) is kernel


def test_a_sum_without_constant_factors_stays() -> None:
    x, y = buffer("x", 8, 4, 20), buffer("y", 8, 20)
    a, n, k = axes("a n k", 8, 20, 4)
    line = Def(y, (a, n), Reduce(SUM, (k,), load(x, a, k, n)))
    kernel = coalesce(kernel_of(graph((x,), (line,), y)))
    assert unroll_terms(kernel) is kernel


def written(row: int) -> Expr:
    (k,) = axes("k", 3)
    table = ((0, 0, 0), (-1, 0, -2), (1, -1, 0))
    body = Op("mul", (entry(table, index(row), index(k)), load(buffer("x", 3), k)))
    return written_out(Reduce(SUM, (k,), body), simplifier())


def test_terms_of_zero_are_left_out_and_signs_become_operations() -> None:
    assert written(0) is Const(0.0, F32)
    assert repr(written(1)) == "(-1.0 * x[0]) - (2.0 * x[2])"
    assert repr(written(2)) == "x[0] - x[1]"
