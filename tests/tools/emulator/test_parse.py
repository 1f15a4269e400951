"""PTX as Triton prints it: what is read, and what an unknown form is told."""

from __future__ import annotations

import numpy as np
import pytest

from fusec.tools.emulator.decode import decoded
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
