"""The interpreter's machines, each beside NumPy: branches, barriers, copies, tensor cores."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusec.tools.emulator import engine
from fusec.tools.emulator.decode import PARAM_WINDOW
from fusec.tools.emulator.faults import EmulationError
from fusec.tools.emulator.launch import Arguments, Code, TensorMap, launch
from tests.tools.emulator.ptx import kernel, run

STORE = "	mad.wide.u32 %d30, %r0, 4, %d0;\n	st.global.b32 [%d30], %r1;"
BASE = "	mov.b32 %r9, global_smem;\n"


def lines(*texts: str) -> str:
    return "\n".join(f"	{text}" for text in texts)


# -- control and barriers --------------------------------------------------------------------------


def test_lanes_part_and_meet_again() -> None:
    out = np.zeros(32, np.uint32)
    body = lines(
        "mov.b32 %r1, 0;",
        "mov.b32 %r2, 0;",
        "$L__loop:",
        "setp.ge.u32 %p1, %r2, %r0;",
        "@%p1 bra $L__end;",
        "add.s32 %r1, %r1, %r2;",
        "add.s32 %r2, %r2, 1;",
        "bra.uni $L__loop;",
        "$L__end:",
        "redux.sync.add.s32 %r3, %r1, -1;",
        "add.s32 %r1, %r1, %r3;",
    )
    run(body + "\n" + STORE, out)
    triangle = np.array([n * (n - 1) // 2 for n in range(32)])
    np.testing.assert_array_equal(out, triangle + triangle.sum())


def test_lanes_that_left_take_no_part() -> None:
    out = np.full(32, 9, np.uint32)
    run(
        lines("setp.lt.u32 %p1, %r0, 7;", "@%p1 ret;", "activemask.b32 %r1;", "popc.b32 %r1, %r1;")
        + "\n"
        + STORE,
        out,
    )
    np.testing.assert_array_equal(out, [9] * 7 + [25] * 25)


def test_a_table_of_branches() -> None:
    out = np.zeros(32, np.uint32)
    body = lines(
        "and.b32 %r2, %r0, 1;",
        "$L_brx_0: .branchtargets $L__a, $L__b;",
        "brx.idx %r2, $L_brx_0;",
        "$L__a:",
        "mov.b32 %r1, 10;",
        "bra.uni $L__end;",
        "$L__b:",
        "mov.b32 %r1, 20;",
        "$L__end:",
    )
    run(body + "\n" + STORE, out)
    np.testing.assert_array_equal(out, [10, 20] * 16)


def test_a_warp_sync_without_all_its_lanes_is_a_fault() -> None:
    body = lines(
        "setp.lt.u32 %p1, %r0, 7;",
        "@%p1 bra $L__end;",
        "shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;",
        "$L__end:",
    )
    with pytest.raises(EmulationError, match="divergent warp"):
        run(body, np.zeros(32, np.uint32))


EXCHANGE = BASE + lines(
    "shl.b32 %r2, %r0, 2;",
    "add.s32 %r3, %r9, %r2;",
    "st.shared.b32 [%r3], %r0;",
    "{barrier}",
    "xor.b32 %r4, %r2, 508;",
    "add.s32 %r4, %r9, %r4;",
    "ld.shared.b32 %r1, [%r4];",
)


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.sync 3, 128;"])
@pytest.mark.parametrize("seed", range(4))
def test_warps_exchange_values_at_a_barrier(barrier: str, seed: int) -> None:
    out = np.zeros(128, np.uint32)
    body = EXCHANGE.format(barrier=barrier) + "\n" + STORE
    run(body, out, threads=128, shared=512, seed=seed)
    np.testing.assert_array_equal(out, np.arange(128) ^ 127)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("barrier", ["", "bar.sync %r5, 64;", "bar.warp.sync -1;"])
def test_what_orders_too_few_warps_is_no_barrier(barrier: str, seed: int) -> None:
    body = EXCHANGE.format(barrier="shr.u32 %r5, %r0, 6;\n	add.s32 %r5, %r5, 1;\n	" + barrier)
    with pytest.raises(EmulationError, match=r"race|uninitialised"):
        run(body + "\n" + STORE, np.zeros(128, np.uint32), threads=128, shared=512, seed=seed)


def test_a_barrier_that_one_warp_misses_is_a_deadlock() -> None:
    body = lines("setp.lt.u32 %p1, %r0, 32;", "@%p1 bra $L__end;", "bar.sync 0;", "$L__end:")
    with pytest.raises(EmulationError, match="deadlock"):
        run(body, np.zeros(64, np.uint32), threads=64)


PIPELINE = BASE + lines(
    "setp.eq.u32 %p1, %r0, 0;",
    "@%p1 mbarrier.init.shared::cta.b64 [%r9], 32;",
    "bar.sync 0;",
    "shl.b32 %r2, %r0, 2;",
    "setp.ge.u32 %p2, %r0, 32;",
    "@%p2 bra $L__reader;",
    "add.s32 %r3, %r9, %r2;",
    "st.shared.b32 [%r3+16], %r0;",
    "mbarrier.arrive.shared::cta.b64 _, [%r9];",
    "ret;",
    "$L__reader:",
    "{{",
    ".reg .pred complete;",
    "waitLoop:",
    "mbarrier.try_wait.parity.shared::cta.b64 complete, [%r9], {parity};",
    "@!complete bra.uni waitLoop;",
    "}}",
    "add.s32 %r3, %r9, %r2;",
    "ld.shared.b32 %r1, [%r3+-112];",
)


@pytest.mark.parametrize("seed", range(4))
def test_an_mbarrier_orders_a_writer_and_a_reader(seed: int) -> None:
    out = np.zeros(64, np.uint32)
    run(PIPELINE.format(parity=0) + "\n" + STORE, out, threads=64, shared=256, seed=seed)
    np.testing.assert_array_equal(out[32:], np.arange(32))
    with pytest.raises(EmulationError, match=r"race|uninitialised|deadlock"):
        run(PIPELINE.format(parity=1) + "\n" + STORE, out, threads=64, shared=256, seed=seed)


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("red.global.add.u32 [%d0], %r0;", lambda lane: lane.sum()),
        ("atom.global.gpu.relaxed.max.u32 %r1, [%d0], %r0;", lambda lane: lane.max()),
        ("atom.global.or.b32 %r1, [%d0], %r0;", lambda lane: np.bitwise_or.reduce(lane)),
    ],
)
def test_lanes_add_up_in_memory(text: str, meaning: Any) -> None:
    out = np.zeros(1, np.uint32)
    run(lines(text), out)
    assert out[0] == meaning(np.arange(32))


@pytest.mark.parametrize("width", [2, 4])
def test_lanes_add_vectors_of_floats_in_memory(width: int) -> None:
    out, ones = np.zeros(width, np.float32), ", ".join(["%r1"] * width)
    add = f"red.global.gpu.relaxed.add.v{width}.f32 [%d0], {{{ones}}};"
    run(lines("mov.b32 %r1, 0f3F800000;", add), out)
    assert out.tolist() == [32.0] * width


BLOCKS = 4
EACH_BLOCK = lines(
    "mov.u32 %r1, %ctaid.x;", "mul.wide.u32 %d10, %r1, 4;", "add.u64 %d11, %d0, %d10;"
)
"""%d11 is the block's own place of an array of 32-bit numbers, %r1 the block."""
ELSEWHERE = {
    "all write one place": ("st.global.b32 [%d0], %r1;",),
    "all but one read what one writes": ("ld.global.b32 %r2, [%d0];", "st.global.b32 [%d11], %r0;"),
    "a neighbour's is read": ("ld.global.b32 %r2, [%d11+4];", "st.global.b32 [%d11], %r1;"),
    "an atomic, and a read": ("red.global.add.u32 [%d0], 1;", "ld.global.b32 %r2, [%d0];"),
    "an atomic, and a store": ("red.global.add.u32 [%d0], 1;", "st.global.b32 [%d0], %r1;"),
    "half of a word": (
        *("mov.b32 %r2, -1;", "st.global.b16 [%d11+2], %h0;", "st.global.b32 [%d11+4], %r2;"),
    ),
}
ALONE = {
    "the same is written": ("mov.b32 %r2, 7;", "st.global.b32 [%d0], %r2;"),
    "only read": ("ld.global.b32 %r2, [%d0];",),
    "its own": ("ld.global.b32 %r2, [%d11];", "st.global.b32 [%d11], %r1;"),
    "neighbouring bytes": ("st.global.b8 [%d12], %r1;",),
    "atomics": ("red.global.add.u32 [%d0], 1;",),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("body", ELSEWHERE.values(), ids=ELSEWHERE)
def test_two_blocks_that_touch_what_one_writes_are_a_race(body: tuple[str, ...], seed: int) -> None:
    numbers = np.full(BLOCKS + 1, 9, np.uint32)
    with pytest.raises(EmulationError, match=r"race between blocks.*nothing orders blocks"):
        run(
            EACH_BLOCK + lines("setp.eq.u32 %p1, %r0, 0;", *guarded(body)),
            numbers,
            blocks=BLOCKS,
            seed=seed,
        )


@pytest.mark.parametrize("body", ALONE.values(), ids=ALONE)
def test_blocks_share_what_none_changes(body: tuple[str, ...]) -> None:
    numbers = np.full(BLOCKS + 1, 9, np.uint32)
    own = ("cvt.u64.u32 %d13, %r1;", "add.u64 %d12, %d0, %d13;", "setp.eq.u32 %p1, %r0, 0;")
    run(EACH_BLOCK + lines(*own, *guarded(body)), numbers, blocks=BLOCKS)


def guarded(body: tuple[str, ...]) -> tuple[str, ...]:
    """Have one lane of each block do it."""
    return tuple(f"@%p1 {line}" for line in body)


WAIT, LAUNCH = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
OF_THE_FIRST_WARP = "setp.lt.u32 %p1, %r0, 32;"
IN_ORDER = {
    "first of all": (WAIT, LAUNCH, "ld.global.b32 %r1, [%d0];"),
    "behind what touches no memory": (OF_THE_FIRST_WARP, WAIT, "ld.global.b32 %r1, [%d0];"),
    "by one warp, for which the others wait": (
        *(OF_THE_FIRST_WARP, f"@%p1 {WAIT}", "bar.sync 0;", LAUNCH, "ld.global.b32 %r1, [%d0];"),
    ),
    "without an access": (WAIT,),
}
OUT_OF_ORDER = {
    "access before the wait": ("ld.global.b32 %r1, [%d0];", WAIT),
    "access before the wait: by other warps": (
        *(OF_THE_FIRST_WARP, f"@%p1 {WAIT}", "ld.global.b32 %r1, [%d0];"),
    ),
    "access before the wait: by an atomic": ("red.global.add.u32 [%d0], 1;", WAIT),
    "access before the wait: by a store": ("st.global.b32 [%d0], 9;", WAIT),
    "access before the wait: by a copy": (
        *(BASE, "cp.async.ca.shared.global [%r9], [%d0], 4;", "cp.async.commit_group;", WAIT),
        "cp.async.wait_group 0;",
    ),
    "dependents before the wait": (LAUNCH, WAIT),
    "no wait: never": ("mov.b32 %r1, 0;",),
    "no wait: of one block": (
        *("mov.u32 %r1, %ctaid.x;", "setp.eq.u32 %p1, %r1, 2;", "@%p1 ret;", WAIT),
    ),
    "divergent warp": ("setp.lt.u32 %p1, %r0, 7;", f"@%p1 {WAIT}"),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("body", IN_ORDER.values(), ids=IN_ORDER)
def test_a_launch_that_overlaps_waits_for_the_one_before(body: tuple[str, ...], seed: int) -> None:
    given = np.full(32, 9, np.uint32)
    run(lines(*body), given, threads=64, blocks=3, seed=seed, dependent=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", OUT_OF_ORDER)
def test_what_comes_before_that_wait_is_a_fault(kind: str, seed: int) -> None:
    given = np.full(32, 9, np.uint32)
    about = {"threads": 64, "blocks": 3, "shared": 64, "seed": seed}
    with pytest.raises(EmulationError) as raised:
        run(lines(*OUT_OF_ORDER[kind]), given, dependent=True, **about)
    assert raised.value.fault.kind == kind.partition(":")[0]
    if "divergent" not in kind:  # a launch without the attribute starts when all before have ended
        run(lines(*OUT_OF_ORDER[kind]), given, **about)


def test_local_memory_is_a_lanes_own() -> None:
    out = np.zeros(32, np.uint32)
    text = kernel(lines("st.local.b32 [%r5+4], %r0;", "ld.local.b32 %r1, [%r5+4];") + STORE, 1)
    depot = (
        ".local .align 8 .b8 __local_depot0[16];\n	mov.b32 %r5, __local_depot0;\n	mov.u32 %r0"
    )
    code = Code.of(text.replace("mov.u32 %r0", depot, 1))
    given = Arguments((out.ctypes.data,), ((out.ctypes.data, out.nbytes),))
    launch(code, (1, 1, 1), given, 0)
    np.testing.assert_array_equal(out, np.arange(32))


@pytest.mark.parametrize("wait", ["cp.async.wait_group 0;", "cp.async.wait_all;"])
@pytest.mark.parametrize("seed", range(4))
def test_copies_arrive_with_zeros_behind_what_is_read(wait: str, seed: int) -> None:
    source, out = np.arange(1, 129, dtype=np.uint32), np.zeros(128, np.uint32)
    body = BASE + lines(
        "shl.b32 %r2, %r0, 4;",
        "add.s32 %r3, %r9, %r2;",
        "cvt.u64.u32 %d5, %r2;",
        "add.s64 %d5, %d1, %d5;",
        "setp.lt.u32 %p1, %r0, 16;",
        "selp.b32 %r4, 16, 8, %p1;",
        "cp.async.cg.shared.global [ %r3 + 0 ], [ %d5 + 0 ], 0x10, %r4;",
        "cp.async.commit_group;",
        "{wait}",
        "ld.shared.v4.b32 {{%r5, %r6, %r7, %r8}}, [%r3];",
        "mad.wide.u32 %d6, %r0, 16, %d0;",
        "st.global.v4.b32 [%d6], {{%r5, %r6, %r7, %r8}};",
    )
    run(body.format(wait=wait), out, source, shared=512, seed=seed)
    expected = source.reshape(32, 4).copy()
    expected[16:, 2:] = 0
    np.testing.assert_array_equal(out.reshape(32, 4), expected)
    with pytest.raises(EmulationError, match=r"race|uninitialised"):
        run(body.format(wait="cp.async.wait_group 1;"), out, source, shared=512, seed=seed)


BOX = BASE + lines(
    "setp.eq.u32 %p1, %r0, 0;",
    "add.s32 %r8, %r9, 8192;",
    "@%p1 mbarrier.init.shared::cta.b64 [%r8], 1;",
    "bar.warp.sync -1;",
    "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r8], {bytes};",
    "mov.b64 %d5, k_param_0;",
    "@%p1 cp.async.bulk.tensor.{rank}d.shared::cta.global.mbarrier::complete_tx::bytes "
    "[%r9], [%d5, {{{at}}}], [%r8];",
    "{{",
    ".reg .pred complete;",
    "waitLoop:",
    "mbarrier.try_wait.parity.shared::cta.b64 complete, [%r8], 0;",
    "@!complete bra.uni waitLoop;",
    "}}",
    "mov.b64 %d6, k_param_1;",
    "@%p1 cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [%d6, {{{at}}}], [%r9];",
    "cp.async.bulk.commit_group;",
    "cp.async.bulk.wait_group.read 0;",
    "mov.b32 %r10, 0;",
    "$L__copy:",
    "shl.b32 %r2, %r0, 2;",
    "mad.lo.s32 %r2, %r10, 128, %r2;",
    "add.s32 %r3, %r9, %r2;",
    "ld.shared.b32 %r1, [%r3];",
    "cvt.u64.u32 %d7, %r2;",
    "add.s64 %d7, %d2, %d7;",
    "st.global.b32 [%d7], %r1;",
    "add.s32 %r10, %r10, 1;",
    "setp.lt.u32 %p2, %r10, {words};",
    "@%p2 bra $L__copy;",
)

BOXES = [
    ((70, 40), (64, 8), (10, 36), 128),
    ((70, 40), (32, 8), (-8, -3), 64),
    ((70, 40), (16, 8), (40, 10), 32),
    ((70, 40), (64, 8), (64, 0), 0),
    ((64, 5, 7), (64, 2, 3), (8, 4, 5), 128),
    ((64, 5, 3, 4), (32, 2, 2, 2), (0, 4, 2, -1), 64),
    ((64, 3, 3, 3, 3), (64, 1, 2, 1, 2), (0, 1, 2, 0, 2), 128),
]


@pytest.mark.parametrize("seed", range(3))
def test_blocks_add_boxes_to_one_place(seed: int) -> None:
    dims, box, at = (72, 40), (32, 8), (48, 36)
    numbers = np.random.default_rng(0)
    source, target = (numbers.integers(0, 99, (40, 72)).astype(np.float32) for _ in range(2))
    before, dense = target.copy(), np.zeros((8, 32), np.float32)
    text = BOX.format(bytes=dense.nbytes, rank=2, words=dense.nbytes // 128, at="48, 36")
    text = text.replace("cp.async.bulk.tensor.2d.global.shared::cta.", ADDED)
    code = Code.of(tensor_params(kernel(text, 3), 2), shared_bytes=8192 + 16)
    maps = [TensorMap(a.ctypes.data, dims, (4, 288), box, 4, 128) for a in (source, target)]
    buffers = tuple((array.ctypes.data, array.nbytes) for array in (source, target, dense))
    launch(code, (2, 1, 1), Arguments((*maps, dense.ctypes.data), buffers), seed)
    before[at[1] :, at[0] :] += 2 * source[at[1] :, at[0] :]
    np.testing.assert_array_equal(target, before)


ADDED = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add."


@pytest.mark.parametrize("case", BOXES, ids=str)
def test_a_box_is_copied_as_numpy_cuts_it(case: Any) -> None:
    dims, box, at, swizzle = case
    row = -(-dims[0] // 8) * 8  # rows begin at multiples of 16 bytes
    shape = tuple(reversed((row, *dims[1:])))
    source = np.random.default_rng(0).integers(1, 60000, shape, dtype=np.uint16)
    target, dense = np.zeros_like(source), np.zeros(tuple(reversed(box)), np.uint16)
    strides = tuple(reversed(source.strides))
    text = BOX.format(
        bytes=dense.nbytes, rank=len(dims), words=dense.nbytes // 128,
        at=", ".join(map(str, at)),
    )  # fmt: skip
    code = Code.of(tensor_params(kernel(text, 3), 2), shared_bytes=8192 + 16)
    maps = [
        TensorMap(array.ctypes.data, dims, strides, box, 2, swizzle) for array in (source, target)
    ]
    arrays = (source, target, dense)
    buffers = tuple((array.ctypes.data, array.nbytes) for array in arrays)
    launch(code, (1, 1, 1), Arguments((*maps, dense.ctypes.data), buffers), 3)
    inside, expected = np.zeros_like(source), np.zeros_like(dense)
    for index in np.ndindex(dense.shape):
        place = tuple(i + a for i, a in zip(index, reversed(at), strict=True))
        ends = tuple(reversed(dims))
        if all(0 <= p < e for p, e in zip(place, ends, strict=True)):
            expected[index] = source[place]
            inside[place] = source[place]
    np.testing.assert_array_equal(unswizzled(dense, swizzle), expected.reshape(-1))
    np.testing.assert_array_equal(target, inside)


def tensor_params(text: str, maps: int) -> str:
    """Make the first parameters tensor maps, which no instruction loads."""
    for n in range(maps):
        text = text.replace(f".param .u64 k_param_{n}", f".param .align 64 .b8 k_param_{n}[128]")
        text = text.replace(f"	ld.param.b64 %d{n}, [k_param_{n}];\n", "")
    return text


def unswizzled(dense: np.ndarray, span: int) -> np.ndarray:
    flat = dense.reshape(-1, 8)
    place = np.arange(len(flat)) * 16
    mask = {128: 7, 64: 3, 32: 1, 0: 0}[span]
    return flat[(place ^ (place >> 7 & mask) << 4) // 16].reshape(-1)


def test_the_window_of_parameters_is_what_the_interpreter_has() -> None:
    assert PARAM_WINDOW == 1 << 60


# -- tensor cores ----------------------------------------------------------------------------------


def tile(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


MMA = [
    ("m16n8k16", "bf16", torch.bfloat16, 4, 2),
    ("m16n8k16", "f16", torch.float16, 4, 2),
    ("m16n8k8", "bf16", torch.bfloat16, 2, 1),
    ("m16n8k8", "tf32", torch.float32, 4, 2),
    ("m16n8k32", "e4m3", torch.float8_e4m3fn, 4, 2),
]


@pytest.mark.parametrize("case", MMA, ids=lambda c: f"{c[0]}-{c[1]}")
def test_mma_is_a_product(case: Any) -> None:
    """Fragments are loaded from row-major tiles, as the table of the PTX manual says."""
    shape, name, dtype, left, right = case
    depth = int(shape.split("k")[1])
    a, b = tile(16, depth, dtype, 0), tile(8, depth, dtype, 1)  # b by columns
    if dtype is torch.float32:  # as many bits as tf32 has
        a, b = ((x.view(torch.int32) & -8192).view(torch.float32) for x in (a, b))
    each = depth * a.element_size()
    out = np.zeros((16, 8), np.float32)
    loads = ["shr.u32 %r1, %r0, 2;", "and.b32 %r2, %r0, 3;"]
    for base, count, step, first in ((1, left, 2, 10), (2, right, 1, 20)):
        for n in range(count):
            offset = 8 * (n % step) * each + 16 * (n // step)
            loads += [
                f"mad.lo.s32 %r3, %r1, {each}, {offset};",
                "mad.lo.s32 %r3, %r2, 4, %r3;",
                "cvt.u64.u32 %d5, %r3;",
                f"add.s64 %d5, %d{base}, %d5;",
                f"ld.global.b32 %r{first + n}, [%d5];",
            ]
    a_list = ", ".join(f"%r{10 + n}" for n in range(left))
    b_list = ", ".join(f"%r{20 + n}" for n in range(right))
    kinds = f"f32.{name}.{name}.f32"
    loads += [f"mov.b32 %r{30 + n}, 0f3F800000;" for n in range(4)]
    loads += [
        f"mma.sync.aligned.{shape}.row.col.{kinds} {{ %r30, %r31, %r32, %r33 }}, "
        f"{{ {a_list} }}, {{ {b_list} }}, {{ %r30, %r31, %r32, %r33 }};"
    ]
    for n in range(4):
        loads += [
            f"mad.lo.s32 %r3, %r1, 32, {256 * (n // 2) + 4 * (n % 2)};",
            "mad.lo.s32 %r3, %r2, 8, %r3;",
            "cvt.u64.u32 %d5, %r3;",
            "add.s64 %d5, %d0, %d5;",
            f"st.global.b32 [%d5], %r{30 + n};",
        ]
    run(lines(*loads), out, numbers(a), numbers(b))
    expected = a.double() @ b.double().T + 1
    least = 1e-5 if dtype.itemsize > 1 else depth * 2.0**-13 * 8
    np.testing.assert_allclose(out, expected.numpy(), rtol=1e-5, atol=least)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix_agree_with_a_transposition(transposed: bool) -> None:
    source = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    out = np.zeros_like(source)
    trans = ".trans" if transposed else ""
    body = BASE + lines(
        "shl.b32 %r2, %r0, 4;",
        "add.s32 %r3, %r9, %r2;",
        "mad.wide.u32 %d5, %r0, 16, %d1;",
        "ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d5];",
        "st.shared.v4.b32 [%r3], {%r4, %r5, %r6, %r7};",
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r3];",
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r3], {%r4, %r5, %r6, %r7};",
        "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3];",
        "mad.wide.u32 %d5, %r0, 16, %d0;",
        "st.global.v4.b32 [%d5], {%r4, %r5, %r6, %r7};",
    )
    run(body, out, source, shared=512)
    np.testing.assert_array_equal(out, source.transpose(0, 2, 1) if transposed else source)


@pytest.mark.parametrize("tiles", [1, 2])
def test_ldmatrix_of_bytes_turns_tiles(tiles: int) -> None:
    """Lane l gets rows 4(l%4) to 4(l%4) + 3 of columns l//4 and l//4 + 8."""
    source = np.arange(512, dtype=np.uint16).astype(np.uint8).reshape(32, 16)
    source[16:] ^= 85
    out = np.zeros((2 * tiles, 32, 4), np.uint8)
    registers = [f"%r{30 + n}" for n in range(2 * tiles)]
    body = BASE + lines(
        "shl.b32 %r2, %r0, 4;",
        "add.s32 %r3, %r9, %r2;",
        "mad.wide.u32 %d5, %r0, 16, %d1;",
        "ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d5];",
        "st.shared.v4.b32 [%r3], {%r4, %r5, %r6, %r7};",
        f"ldmatrix.sync.aligned.m16n16.x{tiles}.trans.shared.b8 {{{', '.join(registers)}}}, [%r3];",
        "mad.wide.u32 %d5, %r0, 4, %d0;",
        *(f"st.global.b32 [%d5+{128 * n}], {name};" for n, name in enumerate(registers)),
    )
    run(body, out, source, shared=512)
    expected = source.reshape(2, 16, 16)[:tiles].transpose(0, 2, 1).reshape(2 * tiles, 8, 4, 4)
    np.testing.assert_array_equal(out, expected.reshape(2 * tiles, 32, 4))


def place_tile(matrix: torch.Tensor, span: int, transposed: bool) -> tuple[np.ndarray, int, int]:
    """Return a tile (rows, depth) as wgmma reads it, and its leading and stride offsets."""
    rows, depth = matrix.shape
    each = matrix.element_size()
    contiguous, lines_ = (rows, depth) if transposed else (depth, rows)
    source = (matrix.T if transposed else matrix).contiguous().view(torch.uint8).numpy()
    source = source.reshape(lines_, contiguous * each)
    columns = contiguous * each // span
    column_bytes, group_bytes = lines_ * span, 8 * span
    out = np.zeros(lines_ * columns * span, np.uint8)
    for line in range(lines_):
        for byte in range(0, contiguous * each, 16):
            at = byte // span * column_bytes + line // 8 * group_bytes + line % 8 * span
            at += byte % span
            mask = {128: 7, 64: 3, 32: 1, 16: 0}[span]
            at ^= (at >> 7 & mask) << 4
            out[at : at + 16] = source[line, byte : byte + 16]
    return out, column_bytes, group_bytes


def descriptor(address: int, leading: int, stride: int, span: int) -> int:
    mode = {16: 0, 128: 1, 64: 2, 32: 3}[span]
    return address >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


def fill_shared(size: int) -> list[str]:
    """Return lines that copy an array (%d1) to shared memory, and order it before wgmma."""
    return [
        "mov.b32 %r10, 0;",
        "$L__fill:",
        "mad.lo.s32 %r2, %r10, 128, %r0;",
        "shl.b32 %r2, %r2, 2;",
        "add.s32 %r3, %r9, %r2;",
        "cvt.u64.u32 %d5, %r2;",
        "add.s64 %d5, %d1, %d5;",
        "ld.global.b32 %r4, [%d5];",
        "st.shared.b32 [%r3], %r4;",
        "add.s32 %r10, %r10, 1;",
        f"setp.lt.u32 %p2, %r10, {size // 512};",
        "@%p2 bra $L__fill;",
        "fence.proxy.async.shared::cta;",
        "bar.sync 0;",
    ]


WGMMA = [
    ("bf16", torch.bfloat16, 128, False, False),
    ("bf16", torch.bfloat16, 64, False, False),
    ("bf16", torch.bfloat16, 32, False, False),
    ("bf16", torch.bfloat16, 16, False, False),
    ("f16", torch.float16, 128, True, False),
    ("f16", torch.float16, 64, False, True),
    ("bf16", torch.bfloat16, 128, True, True),
    ("tf32", torch.float32, 128, False, False),
    ("e4m3", torch.float8_e4m3fn, 32, False, False),
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", WGMMA, ids=str)
def test_wgmma_is_a_product_of_swizzled_tiles(case: Any, seed: int) -> None:
    name, dtype, span, left_transposed, right_transposed = case
    n, depth = 32, 32 // torch.empty((), dtype=dtype).element_size()
    a, b = tile(64, depth, dtype, 0), tile(n, depth, dtype, 1)
    if dtype is torch.float32:
        a, b = ((x.view(torch.int32) & -8192).view(torch.float32) for x in (a, b))
    if span > 32 and not left_transposed:  # a swizzle's row is longer than the product is deep
        a = torch.cat([a, a.new_zeros(64, span // a.element_size() - depth)], 1)
    if span > 32 and not right_transposed:
        b = torch.cat([b, b.new_zeros(n, span // b.element_size() - depth)], 1)
    right_span = min(span, n * b.element_size()) if right_transposed else span
    left, a_column, a_group = place_tile(a, span, left_transposed)
    right, b_column, b_group = place_tile(b, right_span, right_transposed)
    packed = np.concatenate([left, right])
    packed = np.pad(packed, (0, -len(packed) % 512))
    first, second = (
        descriptor(1024 + at, column, group, s)
        for at, column, group, s in (
            (0, a_column, a_group, span), (len(left), b_column, b_group, right_span))
    )  # fmt: skip
    if span == 16:  # without a swizzle the offsets mean the other ones along the rows
        first = descriptor(1024, a_column, a_group, 16)
    registers = ",".join(f"%r{100 + k}" for k in range(n // 2))
    orders = f", {int(left_transposed)}, {int(right_transposed)}" if a.element_size() == 2 else ""
    out = np.zeros((64, n), np.float32)
    body = [*fill_shared(len(packed)), *(f"mov.b32 %r{100 + k}, 0;" for k in range(n // 2))]
    body += [
        f"mov.b64 %d6, {first};" if first < 1 << 63 else f"mov.b64 %d6, {first - (1 << 64)};",
        f"mov.b64 %d7, {second};" if second < 1 << 63 else f"mov.b64 %d7, {second - (1 << 64)};",
        "wgmma.fence.sync.aligned;",
        f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.f32.{name}.{name} "
        f"{{{registers}}}, %d6, %d7, 1, 1, 1{orders};",
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;",
        *store_accumulators(n),
    ]
    run(BASE + lines(*body), out, packed, threads=128, shared=len(packed), seed=seed)
    expected = (a.double() @ _padded(b, a.shape[1]).double().T)[:, :n]
    least = 1e-5 if dtype.itemsize > 1 else depth * 2.0**-13 * 8
    np.testing.assert_allclose(out, expected.numpy(), rtol=1e-5, atol=least)


FOURTEEN = [
    ([256.0], 0.03125, 256.03125),  # a term of 2^-13 of the largest counts
    ([448.0, 448.0], 2.0**-6, 896.0),  # one of less is cut off
    ([448.0], float("nan"), float("nan")),
]


@pytest.mark.parametrize(("larger", "least", "total"), FOURTEEN)
def test_sums_of_products_of_8_bits_have_14_bits(
    larger: list[float], least: float, total: float
) -> None:
    """Row 0 has the terms, and factors of 1; the types of the factors may differ."""
    a, b = torch.zeros(64, 32), torch.zeros(8, 32)
    a[0, : len(larger)], a[0, 31] = torch.tensor(larger), least
    b[:] = 1
    first, second = a.to(torch.float8_e4m3fn), b.to(torch.float8_e5m2)
    left, right = (numbers(x.reshape(-1, 8, 2, 16).transpose(1, 2)) for x in (first, second))
    packed = np.concatenate([left.reshape(-1), right.reshape(-1)])
    packed, out = np.pad(packed, (0, -len(packed) % 512)), np.zeros((64, 8), np.float32)
    sums = ",".join(f"%r{100 + k}" for k in range(4))
    body = [*fill_shared(len(packed)), *(f"mov.b32 %r{100 + k}, 0;" for k in range(4))]
    body += [
        f"mov.b64 %d6, {descriptor(1024, 128, 256, 16)};",
        f"mov.b64 %d7, {descriptor(1024 + left.size, 128, 256, 16)};",
        "wgmma.fence.sync.aligned;",
        f"wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e5m2 {{{sums}}}, %d6, %d7, 1, 1, 1;",
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;",
        *store_accumulators(8),
    ]
    run(BASE + lines(*body), out, packed, threads=128, shared=len(packed))
    np.testing.assert_array_equal(out[0], np.full(8, total, np.float32))
    assert not out[1:].any()


@pytest.mark.parametrize(
    ("between", "fault"),
    [
        ("mov.b32 %r100, %r50;", False),
        ("add.s32 %r100, %r50, 0;", True),
        ("add.s32 %r50, %r50, 0;", False),  # of the left operand: ptxas has a fence behind it
    ],
)
def test_accumulators_are_made_before_a_wgmma_fence(between: str, fault: bool) -> None:
    """A copy behind it is as old as what it copies."""
    packed, out = np.zeros(512, np.uint8), np.zeros(4, np.float32)
    place = f"mov.b64 %d6, {descriptor(1024, 128, 256, 16)};"
    body = [*fill_shared(512), *(f"mov.b32 %r{k}, 0;" for k in (50, 100, 101, 102, 103)), place]
    body += [
        "wgmma.fence.sync.aligned;",
        between,
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r100,%r101,%r102,%r103}, "
        "{%r50,%r50,%r50,%r50}, %d6, 1, 1, 1, 0;",
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;",
    ]
    if not fault:
        run(BASE + lines(*body), out, packed, threads=128, shared=512)
        return
    with pytest.raises(EmulationError, match="no wgmma fence"):
        run(BASE + lines(*body), out, packed, threads=128, shared=512)


def _padded(matrix: torch.Tensor, depth: int) -> torch.Tensor:
    missing = depth - matrix.shape[1]
    if missing < 0:
        return matrix[:, :depth]
    return torch.cat([matrix, matrix.new_zeros(matrix.shape[0], missing)], 1)


def store_accumulators(n: int) -> list[str]:
    """Return lines that store m64 x n accumulators (%r100..) in a row-major array (%d0)."""
    found = [
        "shr.u32 %r1, %r0, 5;",
        "shl.b32 %r1, %r1, 4;",
        "and.b32 %r2, %r0, 31;",
        "shr.u32 %r3, %r2, 2;",
        "add.s32 %r1, %r1, %r3;",
        "and.b32 %r2, %r0, 3;",
    ]
    for k in range(n // 2):
        offset = 4 * n * 8 * (k % 4 // 2) + 4 * (k // 4 * 8 + k % 2)
        found += [
            f"mad.lo.s32 %r3, %r1, {4 * n}, {offset};",
            "mad.lo.s32 %r3, %r2, 8, %r3;",
            "cvt.u64.u32 %d5, %r3;",
            "add.s64 %d5, %d0, %d5;",
            f"st.global.b32 [%d5], %r{100 + k};",
        ]
    return found


# -- building --------------------------------------------------------------------------------------


def test_the_engine_is_built_by_one_at_a_time(tmp_path: Path) -> None:
    inside: list[int] = []

    def build() -> None:
        with engine._one_at_a_time(tmp_path):
            inside.append(1)
            assert len(inside) == 1
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not inside


def test_the_engine_is_built_where_no_file_can_be_locked(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with engine._one_at_a_time(file):
        pass
