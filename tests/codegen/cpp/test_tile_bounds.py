"""Loops over lanes end where their axis does, and products need no masked operands there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fusec
from fusec.codegen.cpp.tile_bounds import TileBounds, drop_operand_masks
from fusec.ir.dtype import F32
from fusec.ir.expr import Const, Dot, Expr
from fusec.ir.index import Axis, Index, Size, index
from fusec.ir.program import For, Let, Program
from tests.codegen.programs import Builder, buffer

LANE = Axis("ki", index(64))
TILE = Axis("ko", index(4))
COUNT = index(197) - 64 * index(TILE)


def bounds(*loops: For, count: Index = COUNT) -> TileBounds:
    return TileBounds({LANE: (count,)}, list(loops))


def loop(start: int, *stops: Index | int) -> For:
    return For(TILE, index(start), tuple(map(index, stops)), ())


def test_a_whole_tile_has_all_lanes_and_the_last_one_what_is_left() -> None:
    assert bounds(loop(0, 3)).elements(LANE) == (index(64),)
    last = bounds(loop(3, 4))
    assert last.elements(LANE) == (index(5),)
    assert last.groups(LANE, 16) == (index(1),)
    assert last.partial(LANE, 16) is index(5) and last.partial(LANE, 5) is None


def test_a_loop_over_all_tiles_asks_in_each_of_them() -> None:
    every = bounds(loop(0, 4))
    assert every.elements(LANE) == (index(64), COUNT)
    assert every.partial(LANE, 16) is COUNT


def test_tiles_of_a_symbolic_length_are_whole_up_to_its_quotient() -> None:
    n = Size("s0", 197)
    count = index(n) - 64 * index(TILE)
    assert bounds(loop(0, index(n) // 64), count=count).elements(LANE) == (index(64),)
    assert bounds(loop(0, index(n) // 64 + 1), count=count).elements(LANE) == (index(64), count)


def test_outside_its_loop_a_lane_axis_has_all_lanes() -> None:
    assert bounds().elements(LANE) == (index(64),)


def product(mask: str) -> tuple[Program, Expr, Expr]:
    """Return a product whose left operand is selected by a mask; that value, and the operand."""
    r, c, k = (Axis(name, index(16)) for name in "rck")
    b = Builder("k", (), (r, c, k))
    left = b.load_f32(buffer("a", F32, 256), index(r) * 16 + index(k))
    right = b.load_f32(buffer("b", F32, 256), index(k) * 16 + index(c))
    end = b.position(13 if mask == "another end" else 11)
    zero = Const(1.0 if mask == "another value" else 0.0, F32)
    held = b.select(b.op("lt", b.position(k), end), left, zero)
    b.let(Dot(held, right, (k,), None, False))
    counts = () if mask == "no end" else ((k, (index(11),)),)
    return replace(b.program(), counts=counts), left, held


@pytest.mark.parametrize("mask", ["its end", "another end", "another value", "no end"])
def test_an_operand_is_read_unmasked_where_the_mask_is_its_end(mask: str) -> None:
    program, value, held = product(mask)
    *_, last = drop_operand_masks(program, 8).body
    assert isinstance(last, Let) and isinstance(last.value, Dot)
    assert last.value.left is (value if mask == "its end" else held)


def test_rows_and_whole_vectors_at_an_edge_are_stored_without_a_mask() -> None:
    """Loops over rows stop there; a product stops at the last vector with a column."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(a @ b)

    (rows,) = fusec.kernels(product, torch.randn(150, 64), torch.randn(64, 128), race="fused")
    assert "stm_f32(" not in rows.source.split('extern "C"')[-1]
    (columns,) = fusec.kernels(product, torch.randn(96, 64), torch.randn(64, 208), race="fused")
    assert "f_multiply<APART>(" in columns.source.split('extern "C"')[-1]


AT_THE_END = """
import ctypes, mmap, torch, torch.nn.functional as F

def at_end(*shape):  # of a page, behind which nothing may be read
    values, size = torch.randn(*shape), 4 * torch.Size(shape).numel()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + 64 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    length = ctypes.c_size_t(64 * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + pages), length, 0) == 0
    last = torch.frombuffer(memory, dtype=torch.float32, count=size // 4, offset=pages - size)
    return last.view(shape).copy_(values)

def attention(q, k, v):
    return (q @ k.mT).softmax(-1) @ F.pad(v, (0, {pad}))

def turned(x, w, b):
    return (x @ w) * 2 + F.pad(b, (0, {pad})).t()

inputs = {{
    "attention": (torch.randn(2, 61, 32), torch.randn(2, 48, 32), at_end(2, 48, 16)),
    "turned": (torch.randn(48 + {pad}, 64), torch.randn(64, 64), at_end(64, 48)),
}}
options = {{"race": "fused", "strict": True, "cache": False}}
made = torch.compile({name}, backend="fusec", options=options)(*inputs["{name}"])
torch.testing.assert_close(made, {name}(*inputs["{name}"]), atol=1e-4, rtol=1e-4)
"""


@pytest.mark.parametrize(("name", "pad"), [("attention", 16), ("attention", 112), ("turned", 80)])
def test_nothing_is_read_behind_a_tensor_that_a_product_takes_padded(name: str, pad: int) -> None:
    code = AT_THE_END.format(name=name, pad=pad)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
