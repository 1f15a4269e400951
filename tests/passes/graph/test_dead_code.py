"""Dead code: what nobody reads goes, what writes its arguments stays."""

from __future__ import annotations

from hypothesis import given

from fusec.ir.expr import Buffer, Op
from fusec.ir.graph import Def, Extern
from fusec.ir.index import index
from fusec.passes.graph.dead_code import dead_code
from tests.fuzz.graphs import Example, without_outputs
from tests.ir.graphs import axes, buffer, graph, load, whole
from tests.passes.pipelines import BOUNDED, check_same, names, numbers, random_graphs


def twice(name: str, source: Buffer) -> Def:
    (i,) = axes("i", 4)
    return Def(buffer(name, 4), (i,), Op("add", (load(source, i), load(source, i))))


def test_a_chain_that_ends_nowhere_goes_as_a_whole() -> None:
    x = buffer("x", 4)
    a = twice("a", x)
    b = twice("b", a.buffer)
    y = twice("y", x)
    before = graph((x,), (a, y, b), y.buffer)
    after = dead_code(before)
    assert names(after) == ["y"]
    check_same(before, after, (numbers(4),))


def test_what_an_output_reads_stays_in_order() -> None:
    x = buffer("x", 4)
    a = twice("a", x)
    b = twice("b", x)
    dead = twice("dead", a.buffer)
    y = twice("y", b.buffer)
    after = dead_code(graph((x,), (a, b, dead, y), y.buffer, a.buffer))
    assert names(after) == ["a", "b", "y"]


def copy_of(source: Buffer, *outputs: Buffer | None, impure: bool = False) -> Extern:
    return Extern("e", "copy", (whole(source),), (), outputs, "a copy", impure=impure)


def test_an_extern_goes_with_its_last_reader_unless_it_writes_its_arguments() -> None:
    x, e = buffer("x", 4), buffer("e", 4)
    a, y = twice("a", x), twice("y", x)
    pure = graph((x,), (a, copy_of(a.buffer, e), y), y.buffer)
    assert dead_code(pure).nodes == (y,)
    impure = copy_of(a.buffer, e, impure=True)
    before = graph((x,), (a, impure, y), y.buffer)
    assert dead_code(before) is before


def test_an_extern_stays_for_one_of_its_results() -> None:
    x, e, f = buffer("x", 4), buffer("e", 4), buffer("f", 4)
    y = twice("y", f)
    before = graph((x,), (copy_of(x, None, e, f), y), y.buffer)
    assert dead_code(before) is before


def test_an_extern_s_views_keep_what_they_look_at() -> None:
    x, e = buffer("x", 4), buffer("e", 4)
    a = twice("a", x)
    before = graph((x,), (a, copy_of(a.buffer, e)), e)
    assert dead_code(before) is before


@BOUNDED
@given(drawn=random_graphs())
def test_random_graphs_keep_their_last_output(drawn: Example) -> None:
    before = without_outputs(drawn.graph, -1)
    after = dead_code(before)
    assert dead_code(after) is after
    check_same(before, after, drawn.inputs)


def prefix(name: str, source: Buffer, length: int) -> Def:
    """Return ``name[i, j] = source[i, j]`` of fewer columns."""
    i, j = axes("i j", 4, length)
    return Def(buffer(name, 4, length), (i, j), Op("neg", (load(source, i, j),)))


def test_elements_that_nobody_reads_are_not_computed() -> None:
    x = buffer("x", 4, 9)
    a = prefix("a", x, 9)
    y, z = prefix("y", a.buffer, 6), prefix("z", a.buffer, 6)
    before = graph((x,), (a, y, z), y.buffer, z.buffer)
    after = dead_code(before)
    assert [[n.const for n in line.buffer.shape] for line in after.defs] == [[4, 6]] * 3
    check_same(before, after, (numbers(4, 9),))


def test_a_definition_that_is_read_to_its_end_or_returned_stays_whole() -> None:
    x = buffer("x", 4, 9)
    a = prefix("a", x, 9)
    y, z = prefix("y", a.buffer, 6), prefix("z", a.buffer, 8)
    i, j = axes("i j", 4, 6)
    end = Def(buffer("end", 4, 6), (i, j), load(a.buffer, i, index(j) + 3))
    for lines, returned in (((a, y, z), (y, z)), ((a, y), (a, y)), ((a, y, end), (y, end))):
        before = graph((x,), lines, *(line.buffer for line in returned))
        assert dead_code(before) is before
