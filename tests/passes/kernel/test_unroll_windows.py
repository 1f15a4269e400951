"""Neighbouring windows are computed together, from elements that are loaded once."""

from __future__ import annotations

import numpy as np
import pytest

from fusec.codegen.targets import find_target
from fusec.ir.expr import Expr, Load, Op, Reduce, both, in_range, loads
from fusec.ir.graph import Def, FlatKernel
from fusec.ir.index import index
from fusec.ir.monoid import MAX, SUM, Monoid
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.kernel.unroll_windows import unroll_windows
from fusec.tools.interpreter.expression import Env
from fusec.tools.interpreter.graph import run_kernel, to_storage
from tests.ir.graphs import axes, buffer, graph, load
from tests.passes.pipelines import kernel_of

MACHINE = find_target("cpu:avx512").machine


def convolution(
    width: int = 12,
    channels: int = 16,
    side: int = 3,
    stride: int = 1,
    dilation: int = 1,
    monoid: Monoid = SUM,
    *,
    rows: int = 11,
    mean: bool = False,
) -> FlatKernel:
    """y[h, w, c] = reduce(k, l: x[h + k - 1, s*w + l - 1, c] * f[k, l, c]), and its mean over w."""
    x, f = buffer("x", rows, stride * width, channels), buffer("f", side, side, channels)
    y, m = buffer("y", rows, width, channels), buffer("m", rows, channels)
    h, w, c, k, place = axes("h w c k l", rows, width, channels, side, side)
    down = index(h) + index(k) - 1
    along = index(w) * stride + index(place) * dilation - 1
    guard = both(in_range(down, index(0), index(rows)), in_range(along, index(0), x.shape[1]))
    term = Op("mul", (Load(x, (down, along, index(c)), guard), load(f, k, place, c)))
    value: Expr = Reduce(monoid, (k, place), term)
    lines = [Def(y, (h, w, c), value)]
    if mean:
        lines.append(Def(m, (h, c), Reduce(SUM, (w,), load(y, h, w, c))))
    return coalesce(kernel_of(graph((x, f), tuple(lines), *(line.buffer for line in lines))))


def run(kernel: FlatKernel) -> dict[str, np.ndarray]:
    env, numbers = Env(sizes={}), np.random.default_rng(0)
    for made in sorted(kernel.reads, key=lambda b: b.name):
        given = numbers.standard_normal([n.const for n in made.shape]).astype(np.float32)
        to_storage(made, given, env)
    for made in kernel.writes:
        to_storage(made, np.full([n.const for n in made.shape], np.nan, np.float32), env)
    run_kernel(kernel, env.storage, {})
    return {made.name: env.storage[made] for made in kernel.writes}


CASES = {
    "three": ({}, 4),
    "five": ({"width": 10, "side": 5}, 5),
    "stride": ({"width": 14, "stride": 2}, 7),
    "two neighbours": ({"width": 22}, 2),
    "ragged channels": ({"channels": 24}, 4),
    "with a mean": ({"mean": True}, 4),
    "rows": ({"width": 11, "rows": 6}, 6),
}


@pytest.mark.parametrize("name", CASES)
def test_it_computes_the_same(name: str) -> None:
    how, count = CASES[name]
    kernel = convolution(**how)
    found = unroll_windows(kernel, MACHINE)
    assert sum(store.buffer.name == "y" for store in found.stores) == count
    made, wanted = run(found), run(kernel)
    assert made.keys() == wanted.keys()
    for buffer_ in made:
        np.testing.assert_allclose(made[buffer_], wanted[buffer_], rtol=1e-5, atol=1e-5)


def test_neighbours_share_elements_and_inner_ones_have_no_guard_along_them() -> None:
    found = unroll_windows(convolution(), MACHINE)
    reads = [n for n in loads([s.expr for s in found.stores]) if n.buffer.name == "x"]
    assert len(reads) == 4 + 2  # for 4 * 3 terms
    (across,) = (a for a in found.grid if a.extent == index(3))
    guarded = [n for n in reads if n.guard is not None and across in n.guard.axes]
    assert len(guarded) == 2  # the first and the last


@pytest.mark.parametrize(
    "how",
    [
        {"width": 11},  # no neighbours
        {"channels": 4},  # no vectors
        {"side": 8},  # a large window
        {"stride": 3},  # no overlap
        {"dilation": 2},
        {"monoid": MAX},
    ],
    ids=str,
)
def test_other_kernels_stay(how: dict) -> None:
    kernel = convolution(**how)
    assert unroll_windows(kernel, MACHINE) is kernel
