"""Values over unified axes: what is learned of definitions serves the next unifications."""

from __future__ import annotations

from fusec.ir.expr import Op
from fusec.ir.graph import Def, Kernel
from fusec.ir.index import index
from fusec.ir.monoid import SUM
from fusec.ir.text import print_kernel
from fusec.passes.fusion.resolve import Learned
from fusec.passes.fusion.unify import unify
from tests.ir.graphs import axes, buffer, f32, load, total

X = buffer("x", 6, 8)


def chain() -> tuple[Def, ...]:
    """s[m] = sum(c: x[m, c]); y0 = x * s, y1 = y0 * 3, y2 = y1 * 3."""
    m, c = axes("m c", 6, 8)
    lines = [Def(buffer("s", 6), (m,), total(SUM, c, load(X, m, c)))]
    n, k = axes("n k", 6, 8)
    scaled = Op("mul", (load(X, n, k), load(lines[0].buffer, n)))
    lines.append(Def(buffer("y0", 6, 8), (n, k), scaled))
    for step in (1, 2):
        i, j = axes("i j", 6, 8)
        value = Op("mul", (load(lines[-1].buffer, i, j), f32(3.0)))
        lines.append(Def(buffer(f"y{step}", 6, 8), (i, j), value))
    return tuple(lines)


def reshaped() -> tuple[Def, ...]:
    """a[m] = exp(x[m // 8, m % 8]); b[i, j] = exp(x[i, j])."""
    (m,) = axes("m", 48)
    a = Def(buffer("a", 48), (m,), Op("exp", (load(X, index(m) // 8, index(m) % 8),)))
    i, j = axes("i j", 6, 8)
    return a, Def(buffer("b", 6, 8), (i, j), Op("exp", (load(X, i, j),)))


def together(lines: tuple[Def, ...], learned: Learned | None) -> Kernel:
    return unify(lines, frozenset((lines[-1].buffer,)), learned=learned)


def test_what_was_learned_changes_no_kernel() -> None:
    lines, learned = chain(), Learned()
    for count in (1, 2, 3, 4, 3, 2):
        alone, told = (together(lines[:count], known) for known in (None, learned))
        assert print_kernel(told) == print_kernel(alone)
        assert [s.expr for s in told.stores] == [s.expr for s in alone.stores]


def test_a_kernel_that_is_known_is_looked_up() -> None:
    lines, learned = chain(), Learned()
    first = together(lines, learned)
    known = len(learned.values), len(learned.simplify.new)
    again = together(lines, learned)
    assert (len(learned.values), len(learned.simplify.new)) == known
    assert [s.expr for s in again.stores] == [s.expr for s in first.stores]
    assert known[0] == len(lines)


def test_a_value_depends_on_what_is_stored_beside_it() -> None:
    lines, learned = chain(), Learned()
    for stored in (lines[-1:], lines[1:], lines):
        wanted = frozenset(d.buffer for d in stored)
        told, alone = unify(lines, wanted, learned=learned), unify(lines, wanted)
        assert [s.expr for s in told.stores] == [s.expr for s in alone.stores]


def test_an_axis_is_cut_into_the_same_parts_again() -> None:
    lines, learned = reshaped(), Learned()
    stored = frozenset(line.buffer for line in lines)
    first, again = (unify(lines, stored, learned=learned) for _ in range(2))
    assert set(first.axes).isdisjoint(a for line in lines for a in line.axes)
    assert first.axes == again.axes
    assert print_kernel(first) == print_kernel(unify(lines, stored))
