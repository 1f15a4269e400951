"""PTX as Triton prints it: what is read, and what an unknown form is told."""

from __future__ import annotations

import numpy as np
import pytest

from fusec.tools.emulator.decode import decoded, unordered
from fusec.tools.emulator.faults import UnknownPtx
from fusec.tools.emulator.launch import Arguments, Code, launch
from fusec.tools.emulator.parse import Address, Literal, Register, Symbol, Vector, parse
from tests.tools.emulator.ptx import HEADER, kernel, run

INLINE = """
	{
	.reg .pred complete;
	waitLoop:
	setp.ne.s32 complete, %r1, 0;
	@!complete bra.uni next;
	add.s32 %r1, %r1, -1;
	bra.uni waitLoop;
	next:
	}
"""


def test_operands_have_types() -> None:
    body = (
        "	ld.global.v2.b32 {%r1, %r2}, [%d0+8];\n	@!%p1 setp.lt.f32 %p2|%p3, %r1, 0f3F800000;"
    )
    load, compare = parse(kernel(body, 1)).instructions[2:4]
    assert load.opcode == ("ld", "global", "v2", "b32")
    assert load.operands == (
        Vector((Register("%r1"), Register("%r2"))),
        Address(Register("%d0"), 8),
    )
    assert compare.guard == Register("%p1", negated=True)
    pair = Vector((Register("%p2"), Register("%p3")))
    assert compare.operands == (pair, Register("%r1"), Literal(0x3F800000))


def test_a_box_has_coordinates() -> None:
    body = (
        "	cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes "
        "[%r1], [%d0, {%r2, %r3}], [%r4];"
    )
    copy = parse(kernel(body, 1)).instructions[2]
    assert copy.opcode[5] == "shared_cta"
    assert copy.operands[1] == Address(Register("%d0"), 0, (Register("%r2"), Register("%r3")))


def test_parameters_have_offsets_and_lines_are_counted() -> None:
    text = kernel("	bra.uni $L__BB0_1;\n$L__BB0_1:", 2)
    parsed = parse(text)
    assert parsed.params == (("k_param_0", 0, 8), ("k_param_1", 8, 8))
    branch = next(i for i in parsed.instructions if i.opcode[0] == "bra")
    assert "bra.uni" in text.splitlines()[branch.line - 1]
    assert branch.operands == (Symbol("$L__BB0_1"),)


def test_names_of_inline_assembly_belong_to_their_braces() -> None:
    out = np.zeros(32, np.int32)
    count = "	mov.b32 %r1, 5;\n" + INLINE + "	mov.b32 %r1, 7;\n" + INLINE
    run(count + "	mad.wide.u32 %d1, %r0, 4, %d0;\n	st.global.b32 [%d1], %r1;", out)
    assert (out == 0).all()


CALLED = """
.func  (.param .b64 func_retval0) twice_or_zero(
	.param .b64 twice_or_zero_param_0,
	.param .b32 twice_or_zero_param_1
)                                       // -- Begin function
{
	.local .align 8 .b8 	__local_depot1[8];
	.reg .pred %p<2>;
	.reg .b32 %r<2>;
	.reg .b64 %rd<4>;
	ld.param.b64 %rd1, [twice_or_zero_param_0];
	ld.param.b32 %r1, [twice_or_zero_param_1];
	mov.b64 %rd3, __local_depot1;
	st.local.b64 [%rd3], %rd1;
	mov.b64 %rd2, 0;
	st.param.b64 [func_retval0], %rd2;
	setp.eq.b32 %p1, %r1, 0;
	@%p1 ret;
	ld.local.b64 %rd2, [%rd3];
	add.s64 %rd2, %rd2, %rd1;
	st.param.b64 [func_retval0], %rd2;
	ret;
}
"""
CALL = """
	{ // callseq 0, 0
	.param .b64 	param0;
	.param .b32 	param1;
	.param .b64 	retval0;
	st.param.b64 	[param0], %d5;
	st.param.b32 	[param1], %r1;
	call.uni (retval0), twice_or_zero, (param0, param1);
	ld.param.b64 	%d5, [retval0];
	} // callseq 0
"""


def test_a_function_runs_where_it_is_called() -> None:
    """Odd lanes get four times their number: two calls, each with registers of its own."""
    body = (
        "	and.b32 %r1, %r0, 1;\n	cvt.u64.u32 %d5, %r0;\n" + 2 * CALL +
        "	mad.wide.u32 %d1, %r0, 8, %d0;\n	st.global.b64 [%d1], %d5;"
    )  # fmt: skip
    text = kernel(body, 1).replace(HEADER, HEADER + CALLED)
    out = np.zeros(32, np.int64)
    buffers = ((out.ctypes.data, out.nbytes),)
    launch(Code.of(text), (1, 1, 1), Arguments((out.ctypes.data,), buffers), 0)
    lanes = np.arange(32)
    np.testing.assert_array_equal(out, np.where(lanes % 2, 4 * lanes, 0))


def test_registers_of_inline_assembly_may_be_numbered() -> None:
    body = """
	{
	.reg .s8 s<2>;
	.reg .b16 %unused;
	mov.b16 {s0, s1}, 0xff02;
	cvt.s32.s8 %r1, s1;
	}
	mad.wide.u32 %d1, %r0, 4, %d0;
	st.global.b32 [%d1], %r1;"""
    out = np.zeros(32, np.int32)
    run(body, out)
    assert (out == -1).all()


def test_a_module_array_can_be_read() -> None:
    text = kernel(
        "	mov.b64 %d1, table;\n	ld.global.b32 %r1, [%d1+4];\n	st.global.b32 [%d0], %r1;", 1
    )
    text = text.replace(HEADER, HEADER + ".global .align 4 .b8 table[8] = {1, 2, 3, 4, 5, 6};\n")
    out = np.zeros(1, np.uint32)
    buffers = ((out.ctypes.data, out.nbytes),)
    launch(Code.of(text), (1, 1, 1), Arguments((out.ctypes.data,), buffers), 0)
    assert out[0] == 0x0605


@pytest.mark.parametrize(
    "line",
    [
        "frobnicate.b32 %r1, %r2;",
        "add.magic.s32 %r1, %r2, %r3;",
        "ld.global.v16.b32 %r1, [%d0];",
        "mma.sync.aligned.m16n8k16.row.row.f32.bf16.bf16.f32 {%r1}, {%r2}, {%r3}, {%r4};",
        "cp.async.bulk.tensor.2d.shared::cta.global.im2col.mbarrier [%r1], [%d0, {%r2}], [%r4];",
        "mov.b32 %r1, unknown_name;",
    ],
)
def test_an_unknown_form_is_told_with_its_line(line: str) -> None:
    text = kernel(f"	{line}", 1)
    with pytest.raises(UnknownPtx) as told:
        decoded(parse(text))
    assert told.value.kernel == "k"
    assert line.split()[0] in text.splitlines()[told.value.line - 1]


WAIT, LOAD = "	griddepcontrol.wait;", "	ld.global.b32 %r1, [%d0];"
BRANCH = ("	setp.eq.u32 %p1, %r0, 0;", "	@%p1 bra $L__a;")
ORDERS = {
    "the wait comes first": ((WAIT, LOAD), ()),
    "in a branch that all threads take": (
        ("	bra.uni $L__a;", "$L__a:", WAIT, LOAD), ()),
    "shared memory is touched before": (("	ld.shared.b32 %r1, [%r0];", WAIT, LOAD), ()),
    "the wait comes behind an access": ((LOAD, WAIT), ("ld",)),
    "an atomic comes before": (("	red.global.add.u32 [%d0], 1;", WAIT), ("red",)),
    "a copy comes before": (
        ("	cp.async.ca.shared.global [%r1], [%d0], 4;", WAIT), ("cp",)),
    "a path leads around the wait": ((*BRANCH, WAIT, "$L__a:", LOAD), ("ld", "ret")),
    "a thread may not wait": ((f"	@%p1{WAIT}", LOAD), ("ld", "ret")),
    "in a loop, twice": (
        ("$L__a:", WAIT, *BRANCH, LOAD), ("griddepcontrol",)),
    "the next launch starts before": (
        ("	griddepcontrol.launch_dependents;", WAIT, LOAD), ("griddepcontrol",)),
    "no wait": (("	mov.b32 %r1, 0;",), ("ret",)),
    "an end before it": (("	@%p1 ret;", WAIT, LOAD), ("ret",)),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_what_no_wait_for_the_launch_before_precedes_is_found(name: str) -> None:
    body, found = ORDERS[name]
    ptx = kernel("\n".join(body), 1)
    assert tuple(one.opcode[0] for one in unordered(parse(ptx))) == found
