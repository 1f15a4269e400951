"""What is read from compiled code, on kernels written by hand: products, copies, loops, spills."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fusec.runtime.kernels.triton_kernel import TritonSource
from fusec.tools import static_checks
from fusec.tools.assembly import assembly_of
from fusec.tools.static_checks import DotTile, GlobalAccess, StaticReport, inspect_kernel

DOT = """\
import triton
import triton.language as tl


@triton.jit
def product(a, b, c, N, K):
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    n = tl.program_id(1) * 128 + tl.arange(0, 128)[None, :]
    total = tl.zeros((ROWS, 128), tl.float32)
    for ko in range(0, K, 64):
        k = ko + tl.arange(0, 64)
        left = tl.load(a + m * K + k[None, :])
        right = tl.load(b + k[:, None] * N + n)
        total = tl.dot(left, right, total)
    tl.store(c + m * N + n, total.to(tl.bfloat16))
"""

SPILLING = """\
import triton
import triton.language as tl


@triton.jit
def many(x, y):
    i = tl.arange(0, 8192)
    t = tl.load(x + i * 3).to(tl.float32)
    tl.store(y + i * 3, t / tl.sum(t))
"""


def product(target: str, *, rows: int = 128, stages: int = 3) -> StaticReport:
    pointers: Mapping[str, str] = dict.fromkeys("abc", "*bf16")
    signature = (*pointers.items(), ("N", "i32"), ("K", "i32"))
    text = DOT.replace("ROWS", str(rows))
    kernel = TritonSource("product", text, signature, tuple(range(5)), ("1", "1", "1"), 4, stages)
    return inspect_kernel(assembly_of(kernel, target))


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_product_on_amd_is_mfma_without_scratch(target: str) -> None:
    found = product(target, stages=2)
    assert found.dots == (DotTile(128, 128, 64, "bf16"),)
    assert found.mma > 0 and found.wgmma == 0
    assert found.spill_bytes == 0
    assert found.threads == 4 * 64
    assert found.dot_loops == 1
    assert found.widths("load").keys() == {16}


def test_product_on_sm_90_is_wgmma_fed_by_copies() -> None:
    found = product("sm_90")
    assert found.dots == (DotTile(128, 128, 64, "bf16"),)
    assert found.wgmma == 8
    assert found.mma == 0
    assert found.copies == 48
    assert (found.loops, found.dot_loops, found.idle_dot_loops) == (1, 1, 0)
    assert found.serialised == ()
    assert found.wide_share == 1.0
    assert found.threads == 128


def test_product_on_sm_80_is_mma_fed_by_copies() -> None:
    found = product("sm_80")
    assert found.wgmma == 0
    assert found.mma == 128
    assert found.copies == 48
    assert (found.dot_loops, found.idle_dot_loops) == (1, 0)


def test_product_of_one_stage_waits_for_memory() -> None:
    found = product("sm_90", stages=1)
    assert found.copies == 0
    assert (found.dot_loops, found.idle_dot_loops) == (1, 1)


def test_product_of_few_rows_has_no_wgmma() -> None:
    found = product("sm_90", rows=32)
    assert found.dots == (DotTile(32, 128, 64, "bf16"),)
    assert found.wgmma == 0
    assert found.mma > 0


def test_product_on_blackwell_is_tcgen05() -> None:
    found = product("sm_100")
    assert found.tcgen05 > 0
    assert found.wgmma == found.mma == 0


def test_accesses_carry_the_line_that_asks_for_them() -> None:
    found = product("sm_90")
    lines = DOT.splitlines()
    asked = {lines[a.line - 1].split("=")[0].strip() for a in found.accesses if a.kind == "copy"}
    assert asked == {"left", "right"}
    (store,) = (a for a in found.accesses if a.kind == "store")
    assert lines[store.line - 1].strip().startswith("tl.store")
    assert store == GlobalAccess(store.line, "store", 16, 16)
    assert store.bytes == 256


def test_spills_and_narrow_accesses_are_seen() -> None:
    signature = (("x", "*bf16"), ("y", "*bf16"))
    kernel = TritonSource("many", SPILLING, signature, (0, 1), ("1", "1", "1"), 1)
    found = inspect_kernel(assembly_of(kernel, "sm_90"))
    assert found.spill_bytes > 0
    assert found.registers == 255
    assert (found.widest, found.narrowest, found.wide_share) == (2, 2, 0.0)
    assert set(found.widths("load")) == set(found.widths("store")) == {2}


SAID = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due\
 to insufficient register resources for the wgmma pipeline in the function 'product'
ptxas info    : Compiling entry function 'product' for 'sm_90a'
ptxas info    : Used 168 registers, used 1 barriers, 24 bytes spill stores, 8 bytes spill loads
"""


def test_remarks_and_resources_are_read_from_the_assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton takes another assembler by TRITON_PTXAS_PATH, but not in each of its versions.
    monkeypatch.setattr(static_checks, "_assembler_output", lambda ptx: SAID)
    found = product("sm_90")
    (remark,) = found.serialised
    assert "C7510" in remark
    assert found.registers == 168
    assert found.spill_bytes == 32


def test_product_beyond_the_registers_is_serialised() -> None:
    found = product("sm_90", rows=256)
    assert found.wgmma > 0
    assert found.spill_bytes > 16
    assert any("C75" in remark for remark in found.serialised)


SASS = """\
.text.k:
        /*0000*/                   LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64] ;
.L_x_1:
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/              @P0  BRA `(.L_x_0) ;
        /*0040*/              @!P1 BRA `(.L_x_1) ;
        /*0050*/                   NOP ;
.L_x_0:
        /*0060*/                   EXIT ;
.L_x_2:
        /*0070*/                   BRA `(.L_x_2);
"""


LOADS = """\
.text.k:
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/                   LDG.E.64 R8, desc[UR4][R2.64+0x100] ;
        /*0020*/                   FADD R12, R7, R9 ;
.L_x_1:
        /*0030*/                   FADD R12, R12, R20 ;
        /*0040*/                   LDG.E.U16 R20, desc[UR4][R2.64] ;
        /*0050*/              @!P1 BRA `(.L_x_1) ;
        /*0060*/                   LDG.E R14, desc[UR4][R2.64] ;
        /*0070*/                   LDG.E R16, desc[UR4][R14.64] ;
        /*0080*/                   STG.E [R2.64], R16 ;
        /*0090*/                   EXIT ;
"""
"""Two loads that arrive together; one that is read an iteration later; one whose address loads."""


def test_code_waits_for_loads_where_it_reads_what_they_return() -> None:
    around, loop = static_checks._Code.parse(LOADS).sections()
    assert (around.waits, loop.waits) == (3, 1)
    assert (around.loaded, loop.loaded) == (16 + 8 + 4 + 4, 2)


def test_loops_of_machine_code_are_branches_back_but_not_traps() -> None:
    code = static_checks._Code.parse(SASS)
    assert code.loops == ((1, 5),)
    assert code.has((1, 5), ("HMMA",))
    assert not code.has((1, 5), ("LDGSTS",))
    assert len(code.opcodes) == 8
