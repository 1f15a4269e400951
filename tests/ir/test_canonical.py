"""Structures that differ in names alone have one canonical form, the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from fusec.ir.canonical import canonical, common
from fusec.ir.dtype import F16, I64
from fusec.ir.expr import Buffer, Cast, Expr, IndexValue, Load, Op
from fusec.ir.graph import Def, Extern, Graph, Kernel, Origin, Store, View
from fusec.ir.index import Axis, Runtime, Size, index
from fusec.ir.monoid import MAX, SUM
from fusec.ir.program import Program
from tests.codegen.programs import Builder
from tests.ir.graphs import axes, buffer, f32, graph, load, position, total

ROWS, COLUMNS = 64, 256


def added(name: str, *sources: Buffer, axis_names: str = "i j") -> Def:
    """name[i, j] = sources[0][i, j] + sources[1][i, j]"""
    own = axes(axis_names, ROWS, COLUMNS)
    return Def(buffer(name, ROWS, COLUMNS), own, Op("add", tuple(load(s, *own) for s in sources)))


X, Y = buffer("x", ROWS, COLUMNS), buffer("y", ROWS, COLUMNS)


def test_names_of_buffers_and_axes_are_no_part_of_a_form() -> None:
    a, b = added("a", X, Y), added("b", Y, X, axis_names="k l")
    assert canonical(a).form == canonical(b).form
    assert canonical(a).leaves == (a.buffer, *a.axes, Y, X)
    assert canonical(b).of_kind(Buffer) == (b.buffer, X, Y)


def test_sources_and_reasons_are_no_part_of_a_form() -> None:
    line = added("a", X, Y)
    assert canonical(replace(line, origin=Origin(("add",)))).form == canonical(line).form
    call = Extern("mm", "aten.mm.default", (View(X, X.shape, X.strides, index(0)), 2), (), (Y,), "")
    other = replace(call, node="mm_1", reason="contraction")
    assert canonical(call).form == canonical(other).form
    assert canonical(call).form != canonical(replace(call, args=(call.args[0], 3))).form
    assert canonical(call).form != canonical(replace(call, args=(call.args[0], 2.0))).form


def variants() -> dict[str, Expr]:
    i, j = axes("i j", ROWS, COLUMNS)
    (short,) = axes("j", COLUMNS - 1)
    ragged = Axis("j", index(COLUMNS), index(COLUMNS) - index(i))
    place = index(Runtime(IndexValue(index(j) + 1), index(COLUMNS)))
    return {
        "same buffer twice": Op("add", (load(X, i, j), load(X, i, j))),
        "other operation": Op("mul", (load(X, i, j), load(Y, i, j))),
        "other place": Op("add", (load(X, i, j), load(Y, i, COLUMNS - 1 - index(j)))),
        "other type": Cast(load(X, i, j), F16),
        "negative zero": Op("add", (load(X, i, j), f32(-0.0))),
        "zero": Op("add", (load(X, i, j), f32(0.0))),
        "guarded": Load(X, (index(i), index(j)), Op("lt", (position(i), position(j)))),
        "quotient": load(X, i, index(j) // 2),
        "remainder": load(X, i, index(j) % 2),
        "gather": Load(X, (index(i), place)),
        "sum": total(SUM, j, load(X, i, j)),
        "maximum": total(MAX, j, load(X, i, j)),
        "shorter sum": total(SUM, short, load(X, i, short)),
        "ragged sum": total(SUM, ragged, load(X, i, ragged)),
        "position": IndexValue(index(i), I64),
    }


def test_all_else_is_part_of_a_form() -> None:
    forms = {name: canonical(expr).form for name, expr in variants().items()}
    assert len(set(forms.values())) == len(forms)
    assert forms == {name: canonical(expr).form for name, expr in variants().items()}


def summed(name: str = "k", *, rows: int = 4, stop: int = 16, twice: bool = False) -> Program:
    """y[m] = sum(c: x[16*m + c]), in a loop; the second operand is y's old value if ``twice``."""
    (m,), (c,) = axes("m", rows), axes("c", 16)
    x, y = buffer(f"x_{name}", 64), buffer(f"y_{name}", 64)
    b = Builder(name, (m,))
    total = b.carry(f32(0.0))
    with b.loop(c, stop):
        b.update(total, Op("add", (total, b.load(x, index(m) * 16 + c))))
    b.put(y, index(m), b.op("add", total, b.load(y, index(m))) if twice else total)
    return b.program(notation=(name,))


def test_programs_have_forms() -> None:
    program = summed()
    assert canonical(program).form == canonical(summed("other")).form
    others = [
        summed(rows=5),
        summed(stop=8),
        summed(twice=True),
        replace(program, warps=8),
        replace(program, body=program.body[:-1]),
        replace(program, reads=program.writes, writes=program.reads),
    ]
    assert len({canonical(one).form for one in (program, *others)}) == 1 + len(others)


def test_kernels_have_forms() -> None:
    def kernel(name: str, out: Buffer) -> Kernel:
        own = axes("m c", ROWS, COLUMNS)
        store = Store(out, tuple(map(index, own)), load(X, *own))
        return Kernel(name, own, (), (store,))

    assert canonical(kernel("k0", Y)).form == canonical(kernel("k1", buffer("z", 1, 1))).form
    assert canonical(kernel("k0", Y)).form != canonical(kernel("k0", X)).form


def test_what_groups_have_in_common_is_part_of_their_key() -> None:
    a, b = added("a", X, Y), added("b", Y, X)
    groups = [(a, b), (b, a), (a, added("e", X, Y)), (a, added("f", a.buffer, Y))]
    one, other, same, chained = (common([canonical(d) for d in g]) for g in groups)
    assert one[0] == other[0]
    assert len({one, same, chained}) == 3


def test_a_form_is_the_same_in_every_process() -> None:
    """Though hashes of texts, and the numbers that axes get, are not."""
    code = """
import fusec.ir.index
for _ in range({skipped}): fusec.ir.index.Axis("a", fusec.ir.index.index(2))
from tests.ir import test_canonical as t
print(t.canonical(t.example(), tuple(t.variants().values())).form)
"""
    texts = set()
    for seed in (1, 2):
        env = {**os.environ, "PYTHONHASHSEED": str(seed)}
        run = [sys.executable, "-c", code.format(skipped=seed)]
        texts.add(subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout)
    assert len(texts) == 1
    assert len(texts.pop()) > 500


def example() -> Graph:
    """Two definitions, the second of which reads the first, and a size."""
    first = added("a", X, Y)
    second = added("b", first.buffer, Y)
    return graph((X, Y, Size("n", 8)), (first, second), second.buffer)
