"""What later sweeps read from memory again counts again, where no cache keeps it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusec.codegen.targets import CPU_MACHINE, HOPPER_MACHINE
from fusec.ir.expr import Expr, Op, Reduce
from fusec.ir.graph import Def, Kernel
from fusec.ir.monoid import MAX, SUM
from fusec.passes.fusion.cost import moved_bytes
from fusec.passes.fusion.sweeps import sweeps_again
from tests.ir.graphs import axes, buffer, graph, load
from tests.passes.pipelines import unified


def centred(channels: int, images: int, points: int, *, softmax: bool = False) -> Kernel:
    """y[c, n, i] = x[n, c, i] - sum(n, i: x[n, c, i]), or the softmax over n and i."""
    x, y = buffer("x", images, channels, points), buffer("y", channels, images, points)
    c, n, i = axes("c n i", channels, images, points)
    whole: Expr = Reduce(MAX if softmax else SUM, (n, i), load(x, n, c, i))
    value: Expr = Op("sub", (load(x, n, c, i), whole))
    if softmax:
        value = Op("div", (Op("exp", (value,)), Reduce(SUM, (n, i), Op("exp", (value,)))))
    return unified(graph((x,), (Def(y, (c, n, i), value),), y))


@pytest.mark.parametrize("softmax", [False, True], ids=["sum", "softmax"])
def test_a_second_sweep_over_more_than_the_cache_reads_memory_again(softmax: bool) -> None:
    """A softmax has no third one: its sum runs beside its maximum."""
    kernel = centred(256, 256, 3136, softmax=softmax)
    assert list(sweeps_again(kernel, HOPPER_MACHINE).values()) == [1]
    assert moved_bytes(kernel, HOPPER_MACHINE) == 3 * 4 * 256 * 256 * 3136


def test_slices_that_the_cache_keeps_count_once() -> None:
    kernel = centred(256, 4, 3136)
    assert not sweeps_again(kernel, HOPPER_MACHINE)
    assert moved_bytes(kernel, HOPPER_MACHINE) == 2 * 4 * 256 * 4 * 3136
    rows = replace(HOPPER_MACHINE.rows, kept_bytes=1 << 20)
    assert sweeps_again(kernel, replace(HOPPER_MACHINE, rows=rows))


def test_on_cpus_nothing_counts_again() -> None:
    assert not sweeps_again(centred(256, 256, 3136), CPU_MACHINE)


def test_a_single_element_that_is_read_again_is_no_sweep() -> None:
    """Of a cross-entropy, the logit of each row's class."""
    x, y = buffer("x", 256, 256, 3136), buffer("y", 256)
    c, n, i = axes("c n i", 256, 256, 3136)
    value = Op("sub", (load(x, 0, c, 0), Reduce(SUM, (n, i), load(x, n, c, i))))
    assert not sweeps_again(unified(graph((x,), (Def(y, (c,), value),), y)), HOPPER_MACHINE)


def test_a_sum_of_exponentials_shares_the_sweep_of_its_maximum() -> None:
    x, y = buffer("x", 8192, 50257), buffer("y", 8192)
    m, c = axes("m c", 8192, 50257)
    top = Reduce(MAX, (c,), load(x, m, c))
    total = Reduce(SUM, (c,), Op("exp", (Op("sub", (load(x, m, c), top)),)))
    value = Op("add", (top, Op("log", (total,))))
    assert not sweeps_again(unified(graph((x,), (Def(y, (m,), value),), y)), HOPPER_MACHINE)
