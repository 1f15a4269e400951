"""The function that C calls: its text, and what has no such function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from fusec.archive.sizes import SizeFormula
from fusec.errors import UsageError
from fusec.export.native import Native, print_native
from fusec.export.native_code import NativeWrite, print_extent, print_formula, write_of
from fusec.ir.dtype import I64, NumberForm
from fusec.ir.expr import Buffer
from fusec.ir.extern import CopyInto, Fresh, WriteInto
from fusec.ir.graph import Extern, Schedule, View
from fusec.ir.index import Size, index
from fusec.passes.fusion.fuse import separate
from fusec.passes.memory.buffers import plan_host
from tests.codegen.host.test_wrapper import chain, unary
from tests.fuzz.pipeline import lower_all, small_target
from tests.ir.graphs import F32, buffer, graph, whole


def printed(schedule: Schedule, asked: Sequence[SizeFormula] = ()) -> Native:
    programs = lower_all(schedule, small_target("cpu"))
    return print_native(plan_host(schedule), programs, {name: name for name in programs}, asked)


def test_the_function_calls_kernels_and_copies_what_is_a_part(
    golden: Callable[[str, str], None],
) -> None:
    x, unread = buffer("x", 4, 6), buffer("unread", 3)
    first = unary("h", x)
    second = unary("y", first.buffer)
    made = graph((x, None, unread), (first, second))
    outputs = (whole(second.buffer), whole(second.buffer).transposed)
    native = printed(separate(replace(made, outputs=outputs)))
    golden("native_function", f"{native.signature}\n{native.source.partition('};')[2]}")


def test_a_chain_writes_its_result_where_the_caller_wants_it() -> None:
    native = printed(separate(chain(*[F32] * 4)[0]))
    assert "fusec_bytes(const long long *) {\n  return 128;" in native.source
    assert native.source.count(")(workspace + 0);") == 2  # t0, then t2
    assert native.source.count(")results[0];") == 2  # t1, then t3


def test_a_call_of_torch_is_refused_with_its_reason() -> None:
    x, e = buffer("x", 4, 6), buffer("e", 4, 6)
    call = Extern("e", "aten.f", (whole(x),), (), (e,), "sorting", effect=Fresh())
    with pytest.raises(UsageError, match=r"needs torch:\n  aten\.f: sorting$"):
        printed(separate(graph((x,), (call,), e)))


def test_many_calls_of_torch_are_counted() -> None:
    x = buffer("x", 4, 6)
    made = [buffer(f"e{k}", 4, 6) for k in range(15)]
    calls = [
        Extern(e.name, f"aten.f{k % 14}", (whole(x),), (), (e,), "", effect=Fresh())
        for k, e in enumerate(made)
    ]
    with pytest.raises(UsageError, match=r"aten\.f11\n  and 2 more$"):
        printed(separate(graph((x,), tuple(calls), *made)))


@pytest.mark.parametrize("form", NumberForm)
def test_tensors_with_a_bit_are_refused(form: NumberForm) -> None:
    z = Buffer("z", (index(4), index(2)), (index(2), index(1)), F32, form)
    made = unary("y", z)
    for outputs in ((whole(made.buffer),), (replace(whole(made.buffer), form=form),)):
        schedule = separate(replace(graph((z,), (made,)), outputs=outputs))
        if form.has_bit:
            with pytest.raises(UsageError, match=f"a {form.value} view as input or result"):
                printed(schedule)
        else:  # C has a complex tensor as its parts
            assert "argument f32 4 2\nresult f32 4 2" in printed(schedule).signature


def test_writes_are_along_the_axes_that_torch_has() -> None:
    z, part = (whole(buffer(name, 4, size, 2)) for name, size in (("z", 6), ("part", 1)))
    places = whole(Buffer("places", (index(1),), (index(1),), I64))
    other = buffer("other", 4, 6, 2)
    complex_z, complex_part = (replace(view, form=NumberForm.COMPLEX) for view in (z, part))

    def found(into: View, source: View) -> NativeWrite | None:
        args = (into, -1, places, source)
        effect = WriteInto(index(8))
        return write_of(Extern("e", "aten.index_copy_.default", args, (), (), "", effect=effect))

    made = found(complex_z, complex_part)
    assert made is not None and made.axis == 1
    assert found(complex_z, part) is None
    copied = [
        write_of(Extern("e", "aten.copy_.default", (z, source), (), (), "", effect=CopyInto()))
        for source in (whole(other), replace(whole(other), form=NumberForm.NEGATIVE))
    ]
    assert copied == [NativeWrite(z, whole(other)), None]


def test_places_and_the_signature_follow_from_sizes(golden: Callable[[str, str], None]) -> None:
    s = Size("s", 4)
    x = buffer("x", s, 6)
    first = unary("h", x)
    second = unary("g", first.buffer)
    third = unary("y", second.buffer)
    made = graph((s, x), (first, second, third), third.buffer)
    native = printed(separate(made), asked=((">=", "s", 1), ("<=", ("+", ("*", 2, "s"), -1), 64)))
    places = native.source.partition("// Where buffers lie")[2]
    golden("native_sizes", f"{native.signature}\n// Where buffers lie{places}")


def test_formulas_have_their_signs_in_front() -> None:
    s, t = index(Size("s", 4)), index(Size("t", 3))
    assert print_extent(2 * s + t * 3 - 1) == "+ * 2 s + * 3 t -1"
    assert print_extent((s + 1) // 2) == "// + s 1 2"
    assert print_extent(s * t * 8) == "* 8 * s t"
    assert print_formula(("or", ("==", "s", 1), ("<", "t", 8), ("!=", "s", "t"))) == (
        "or == s 1 or < t 8 != s t"
    )
