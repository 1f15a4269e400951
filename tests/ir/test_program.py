"""Programs written by hand: what they compute, how they print, and what is not legal in one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from fusec.errors import InternalError, InvalidIR
from fusec.ir.dtype import BF16, BOOL, F32, I64, DType
from fusec.ir.expr import Buffer, Cast, Const, Expr, IndexValue, Load, Op, Reduce, Select, Var
from fusec.ir.index import Axis, Index, IntoIndex, Runtime, Size, index
from fusec.ir.monoid import ARGMAX, MAX, SUM
from fusec.ir.program import (
    Carry,
    For,
    Let,
    Program,
    Put,
    Scratch,
    Statement,
    Update,
    print_program,
)
from fusec.ir.verify_program import verify_program
from fusec.tools.interpreter.program import run_program
from fusec.tools.interpreter.scalar import round_to
from tests.ir.graphs import buffer, f32

RNG = np.random.default_rng(0)
M = Size("M", 8)
m, loop = Axis("m", index(M)), Axis("co", index(3))
lane, other_lane = Axis("ci", index(16)), Axis("di", index(4))
COLUMNS = 40
x, out = buffer("x", M, COLUMNS), buffer("out", M)


def var(name: str, *lanes: Axis, dtype: DType = F32) -> Var:
    return Var(name, dtype, frozenset(lanes))


acc, total, v, here, inside = (
    var("acc", lane),
    var("total"),
    var("v", lane),
    var("here", lane, dtype=I64),
    var("inside", lane, dtype=BOOL),
)
column = index(loop) * 16 + lane


def program(
    *body: Statement,
    reads: Iterable[Buffer] = (x,),
    writes: Iterable[Buffer] = (out,),
    grid: tuple[Axis, ...] = (m,),
    lanes: tuple[Axis, ...] = (lane,),
    sizes: tuple[Size, ...] = (M,),
) -> Program:
    return Program("p", tuple(reads), tuple(writes), sizes, grid, lanes, body)


def put(value: Var | Const, offset: IntoIndex = m, guard: Var | None = None) -> Put:
    return Put(out.flat(), index(offset), value, guard)


def row_load(guard: Expr | None = None) -> Load:
    return Load(x.flat(), (index(m) * COLUMNS + column,), guard)


def masked_row_sum() -> Program:
    """The sum of a row of 40 in chunks of 16 lanes, the last one half empty."""
    return program(
        Carry(acc, f32(0)),
        For(
            loop,
            index(0),
            (index(3),),
            (
                Let(here, IndexValue(column, I64)),
                Let(inside, Op("lt", (here, Const(COLUMNS, I64)))),
                Let(v, row_load(inside)),
                Update(acc, Op("add", (acc, v))),
            ),
        ),
        Let(total, Reduce(SUM, (lane,), acc)),
        put(total),
    )


def peeled_row_sum() -> Program:
    """The same with a loop of full tiles, whose stop proves its loads, and a masked rest."""
    full = (Let(v, row_load()), Update(acc, Op("add", (acc, v))))
    rest = (
        Let(here, IndexValue(column, I64)),
        Let(inside, Op("lt", (here, Const(COLUMNS, I64)))),
        Let(v, row_load(inside)),
        Update(acc, Op("add", (acc, v))),
    )
    return program(
        Carry(acc, f32(0)),
        For(loop, index(0), (index(3), index(COLUMNS // 16)), full),
        For(loop, index(COLUMNS // 16), (index(3),), rest),
        Let(total, Reduce(SUM, (lane,), acc)),
        put(total),
    )


def scratch_softmax() -> Program:
    """exp(x - max) / sum of 16 columns; the exponentials are kept in a private array."""
    short, wide = buffer("x", M, 16), buffer("y", M, 16)
    kept = buffer("kept", 16)
    flat = index(m) * 16 + lane
    raw, top, centred, power, again, below, ratio = (
        var("raw", lane),
        var("top"),
        var("centred", lane),
        var("power", lane),
        var("again", lane),
        var("below"),
        var("ratio", lane),
    )
    body = (
        Scratch(kept, index(16)),
        Let(raw, Load(short.flat(), (flat,))),
        Let(top, Reduce(MAX, (lane,), raw)),
        Let(centred, Op("sub", (raw, top))),
        Let(power, Op("exp", (centred,))),
        Put(kept.flat(), index(lane), power, None),
        Let(again, Load(kept.flat(), (index(lane),))),
        Let(below, Reduce(SUM, (lane,), again)),
        Let(ratio, Op("div", (again, below))),
        Put(wide.flat(), flat, ratio, None),
    )
    return program(*body, reads=(short,), writes=(wide,))


def run(example: Program, rows: int, *inputs: np.ndarray) -> np.ndarray:
    """Return the last written buffer's storage."""
    verify_program(example)
    memory = {b: a.reshape(-1) for b, a in zip(example.reads, inputs, strict=True)}
    run_program(example, memory, {M: rows})
    return memory[example.writes[-1]]


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# -- meaning -------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", [masked_row_sum(), peeled_row_sum()], ids=["masked", "peeled"])
def test_row_sum_in_chunks(example: Program) -> None:
    values = normal(5, COLUMNS)
    np.testing.assert_allclose(run(example, 5, values), values.sum(1), rtol=1e-5)


def test_row_sum_prints_as_it_reads() -> None:
    assert print_program(masked_row_sum()).splitlines() == [
        "program p(x, out, M)    grid m:M    lanes ci:16",
        "  carry acc<ci> = 0.0",
        "  for co in 0 .. 3:",
        "    here<ci> = (16*co + ci):i64",
        "    inside<ci> = here < 40",
        "    v<ci> = x[40*m + 16*co + ci] if inside",
        "    acc := acc + v",
        "  total = sum(ci: acc)",
        "  out[m] = total",
    ]


def test_scratch_is_private_memory() -> None:
    values = normal(3, 16)
    powers = np.exp(values - values.max(1, keepdims=True))
    seen = run(scratch_softmax(), 3, values).reshape(3, 16)
    np.testing.assert_allclose(seen, powers / powers.sum(1, keepdims=True), rtol=1e-6)


def test_scratch_starts_unwritten_in_every_instance() -> None:
    kept, first = buffer("kept", 16), var("first", lane)
    flat = index(m) * 16 + lane
    wide = buffer("y", M, 16)
    body = (
        Scratch(kept, index(16)),
        Let(first, Load(kept.flat(), (index(lane),))),
        Put(kept.flat(), index(lane), f32(3), None),
        Put(wide.flat(), flat, first, None),
    )
    assert np.isnan(run(program(*body, reads=(), writes=(wide,)), 2)).all()


def test_loop_runs_while_it_is_below_every_stop() -> None:
    count, step = var("count"), Axis("s", index(10))
    one = Update(count, Op("add", (count, f32(1))))
    body = (
        Carry(count, f32(0)),
        For(step, index(2), (index(10), index(m) * 3), (one,)),
        put(count),
    )
    assert run(program(*body, reads=()), 5).tolist() == [0, 1, 4, 7, 8]


def test_carry_starts_again_in_each_iteration_that_declares_it() -> None:
    inner, outer, step = var("inner"), var("outer"), Axis("s", index(2))
    body = (
        Carry(outer, f32(0)),
        For(
            loop,
            index(0),
            (index(3),),
            (
                Carry(inner, f32(1)),
                For(step, index(0), (index(2),), (Update(inner, Op("add", (inner, inner))),)),
                Update(outer, Op("add", (outer, inner))),
            ),
        ),
        put(outer),
    )
    assert run(program(*body, reads=()), 1).tolist() == [12]


def test_value_without_lanes_is_written_once_and_lanes_each_once() -> None:
    wide = buffer("y", M, 16)
    body = (put(f32(7)), Put(wide.flat(), index(m) * 16 + lane, f32(1), None))
    memory: dict[Buffer, np.ndarray] = {}
    run_program(program(*body, reads=(), writes=(out, wide)), memory, {M: 2})
    assert memory[out].tolist() == [7, 7]
    assert memory[wide].tolist() == [1] * 32


def test_guarded_put_writes_the_lanes_that_are_true() -> None:
    wide = buffer("y", 10)
    body = (
        Let(here, IndexValue(index(lane), I64)),
        Let(inside, Op("lt", (here, Const(10, I64)))),
        Put(wide.flat(), index(lane), f32(5), inside),
    )
    memory = {wide: np.zeros(10, np.float32)}
    run_program(program(*body, reads=(), writes=(wide,), grid=()), memory, {M: 1})
    assert memory[wide].tolist() == [5] * 10


def test_bf16_is_rounded_where_it_is_cast() -> None:
    wide, half = buffer("y", M, 16, dtype=BF16), var("half", lane, dtype=BF16)
    source = buffer("x", M, 16)
    flat = index(m) * 16 + lane
    body = (
        Let(v, Load(source.flat(), (flat,))),
        Let(half, Cast(v, BF16)),
        Put(wide.flat(), flat, half, None),
    )
    values = normal(2, 16)
    seen = run(program(*body, reads=(source,), writes=(wide,)), 2, values)
    assert np.array_equal(seen.reshape(2, 16), round_to(BF16)(values))


def test_gather_reads_at_a_value_of_the_program() -> None:
    ids, table = buffer("ids", M, dtype=I64), buffer("table", 10)
    row, picked = var("row", dtype=I64), var("picked")
    body = (
        Let(row, Load(ids.flat(), (index(m),))),
        Let(picked, Load(table.flat(), (index(Runtime(row, index(10))),))),
        put(picked),
    )
    example = program(*body, reads=(ids, table))
    assert run(example, 3, np.array([9, 0, 9]), np.arange(10.0)).tolist() == [9, 0, 9]


# -- what an interpreter refuses -----------------------------------------------------------------


def refused(example: Program, message: str, rows: int = 2) -> None:
    memory = {b: np.zeros(rows * COLUMNS, np.float32) for b in example.reads}
    with pytest.raises(InternalError, match=message):
        run_program(example, memory, {M: rows})


def test_lane_out_of_range_is_an_error_in_a_program() -> None:
    tile = index(m) * COLUMNS + index(lane) * 3
    refused(program(Let(v, Load(x.flat(), (tile,)))), "out of range at ci=14, m=1")


def test_limit_of_a_lane_masks_nothing_in_a_program() -> None:
    ragged = Axis("r", index(16), limit=index(2))
    w = var("w", ragged)
    body = Let(w, Load(x.flat(), (index(m) * COLUMNS + index(ragged) * 3,)))
    refused(program(body, lanes=(ragged,)), "out of range")


def test_instances_that_write_one_element_race() -> None:
    refused(program(put(f32(1), 0)), "another instance wrote an element that this one touches")


def test_instances_may_add_to_one_element() -> None:
    added = program(Put(out.flat(), index(0), f32(1), None, adds=True), reads=())
    assert "out[0] += 1.0" in print_program(added)
    assert run(added, 3).tolist() == [3, 0, 0]


def test_instance_that_reads_what_another_one_wrote_races() -> None:
    body = (put(f32(1)), Let(total, Load(out.flat(), (index(0),))))
    refused(program(*body, reads=(x, out)), "another instance wrote")


def test_lanes_that_write_one_element_race() -> None:
    wide = buffer("y", 16)
    racing = Put(wide.flat(), index(lane) // 2, f32(1), None)
    refused(program(racing, writes=(wide,), grid=()), "two points store to one element of y")


# -- what a verifier refuses ---------------------------------------------------------------------

w = var("w")


def illegal_programs() -> dict[str, tuple[Program, str]]:
    one, two = f32(1), f32(2)
    wide, flag = var("wide", lane), var("flag", dtype=BOOL)
    twin = var("w")
    stranger = buffer("stranger", M)
    kept = buffer("kept", 16)
    nothing: tuple[Statement, ...] = ()
    inner = For(loop, index(0), (index(3),), (Let(w, Op("neg", (one,))),))
    known = Let(w, Op("neg", (one,)))
    return {
        "unknown name": (program(Let(w, Op("neg", (total,)))), "total is not defined here"),
        "name of another scope": (program(inner, put(w)), "w is not defined here"),
        "two definitions": (program(known, known), "w = ...: defined twice"),
        "two names alike": (program(known, Let(twin, Op("neg", (one,)))), "defined twice"),
        "a tree": (program(Let(w, Op("neg", (Op("neg", (one,)),)))), "more than one node"),
        "a type": (program(Let(w, Op("eq", (one, two)))), "a value of bool for a f32"),
        "an illegal operation": (
            program(Let(w, Op("neg", (Const(True, BOOL),)))),
            "bool for a f32",
        ),
        "an operation on bool": (
            program(Let(flag, Op("neg", (Const(True, BOOL),)))),
            "neg on bool",
        ),
        "a missing lane": (program(Carry(acc, one), Let(w, Op("neg", (acc,)))), "lanes .* missing"),
        "a lane of nobody": (program(Carry(acc, one), lanes=(other_lane,)), "that are no lanes"),
        "a reduction of pairs": (
            program(
                Carry(acc, one),
                Let(here, IndexValue(index(lane), I64)),
                Let(Var("p", I64, frozenset()), Reduce(ARGMAX, (lane,), acc, here)),
            ),
            "argmax of several values",
        ),
        "a reduced lane that is not there": (
            program(Let(w, Reduce(SUM, (lane,), one))),
            "reduces lanes that its value lacks",
        ),
        "a shaped load": (program(Let(w, Load(x, (index(m), index(0))))), "by an offset"),
        "a foreign buffer": (
            program(Let(w, Load(stranger.flat(), (index(m),)))),
            "stranger is not in scope",
        ),
        "an unguarded lane": (
            program(Let(wide, Load(out.flat(), (index(lane),)))),
            r"not provably in \[0, M\), nor guarded",
        ),
        "a guard that is no bool": (
            program(known, Let(total, Load(x.flat(), (index(m),), w))),
            "a guard of type f32",
        ),
        "an unknown guard": (
            program(Let(total, Load(x.flat(), (index(m),), flag))),
            "flag is not defined here",
        ),
        "an axis of nobody": (
            program(Let(w, Load(x.flat(), (index(loop),)))),
            r"an index varies along \['co'\]",
        ),
        "a position along nobody's axis": (
            program(Let(here, IndexValue(index(loop) + lane, I64))),
            "an index varies along",
        ),
        "a size that is not passed": (program(put(one), sizes=()), r"sizes \['M'\] are not passed"),
        "an unknown gather": (
            program(Let(w, Load(x.flat(), (index(Runtime(var("row"), index(2))),)))),
            "row is not defined here",
        ),
        "update of a let": (program(known, Update(w, Op("neg", (w,)))), "no carry in scope"),
        "update of another type": (
            program(Carry(w, one), Update(w, Op("eq", (one, two)))),
            "w := ...: a value of bool",
        ),
        "update from an unknown name": (
            program(Carry(w, one), Update(w, Op("neg", (total,)))),
            "total is not defined here",
        ),
        "carry of another type": (program(Carry(w, Const(1, I64))), "carry w: a value of i64"),
        "put into an input": (
            program(Put(x.flat(), index(m), one, None)),
            r"x\[m\] = ...: x is not written by this program",
        ),
        "put beside what is added": (
            program(put(one), Put(out.flat(), index(m), one, None, adds=True)),
            "added to in one place, and accessed in another",
        ),
        "a load of what is added to": (
            program(
                Put(out.flat(), index(m), one, None, adds=True),
                Let(total, Load(out.flat(), (index(m),))),
                reads=(x, out),
            ),
            "out is added to, and read",
        ),
        "put of another type": (
            program(put(Const(1, I64))),
            "a value of i64 for a buffer of f32",
        ),
        "put of an unknown name": (program(put(w)), "w is not defined here"),
        "put under an unknown guard": (program(put(one, m, flag)), "flag is not defined here"),
        "put out of range": (program(put(one, index(m) + 1)), "nor guarded"),
        "put under a float": (program(known, put(one, m, w)), "a guard of type f32"),
        "scratch twice": (
            program(Scratch(kept, index(16)), Scratch(kept, index(16))),
            "scratch kept: defined twice",
        ),
        "scratch of another length": (program(Scratch(kept, index(8))), "of another length"),
        "a bound axis again": (
            program(For(m, index(0), (index(3),), nothing)),
            "this axis is bound already",
        ),
        "a loop without an end": (program(For(loop, index(0), (), nothing)), "it never stops"),
        "a stop along lanes": (
            program(For(loop, index(0), (index(lane),), nothing)),
            "an index varies along",
        ),
        "an axis twice": (program(lanes=(m,)), "stands twice in grid and lanes"),
        "a symbolic number of lanes": (
            program(grid=(), lanes=(Axis("l", index(M)),)),
            "lane axis l has M points",
        ),
        "a flat argument": (program(reads=(x.flat(),)), "x is a flat form, not a tensor"),
    }


@pytest.mark.parametrize("name", illegal_programs())
def test_illegal_program(name: str) -> None:
    example, message = illegal_programs()[name]
    with pytest.raises(InvalidIR, match=message):
        verify_program(example)


def test_loop_axis_is_below_any_one_of_its_stops() -> None:
    short = buffer("x", 32)
    body = (Let(v, Load(short.flat(), (column,))),)

    def example(*stops: Index) -> Program:
        return program(For(loop, index(0), stops, body), reads=(short,))

    verify_program(example(index(3), index(2)))
    with pytest.raises(InvalidIR, match="nor guarded"):
        verify_program(example(index(3)))


def test_statements_of_a_loop_see_what_is_outside() -> None:
    body = (Let(w, Op("neg", (f32(1),))), For(loop, index(0), (index(3),), (put(w),)))
    verify_program(program(*body, reads=()))


def test_select_and_constants_are_values() -> None:
    chosen = Let(w, Select(Const(True, BOOL), f32(1), f32(2)))
    assert run(program(chosen, put(w), reads=()), 2).tolist() == [1, 1]
