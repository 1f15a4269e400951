"""A product in Gluon whose warps have roles: one loads, the others multiply and store.

``y[m, n] = max(sum(k: x[m, k] * w[n, k]), 0)``. Blocks stay for several tiles. The loader fills a
ring of stages by TMA and runs ahead over the end of a tile; mbarriers say when a stage is full and
when it is free; the tile's result leaves by TMA, and is waited for only before the next one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fusec.tools.emulator.launch import Arguments, Code, encode, span

TILE_M, TILE_N, TILE_K, STAGES = 64, 64, 32, 3
_OLD = hasattr(tma, "async_copy_global_to_shared") and not hasattr(tma, "async_load")
_load = tma.async_copy_global_to_shared if _OLD else tma.async_load
_store = tma.async_copy_shared_to_global if _OLD else tma.async_store


@gluon.jit
def load_tiles(x, w, xs, ws, full, free, rows, columns, depth, STAGES: gl.constexpr):
    bm: gl.constexpr = x.block_shape[0]
    bn: gl.constexpr = w.block_shape[0]
    bk: gl.constexpr = x.block_shape[1]
    across = gl.cdiv(columns, bn)
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(rows, bm) * across, gl.num_programs(0)):
        for k in range(0, depth, bk):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * bk * (bm + bn))
            _load(x, [tile // across * bm, k], full.index(stage), xs.index(stage))
            _load(w, [tile % across * bn, k], full.index(stage), ws.index(stage))
            step += 1


@gluon.jit
def multiply(y, xs, ws, ys, full, free, rows, columns, depth, STAGES: gl.constexpr):
    bm: gl.constexpr = y.block_shape[0]
    bn: gl.constexpr = y.block_shape[1]
    bk: gl.constexpr = xs.shape[2]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, bn, 16])
    across = gl.cdiv(columns, bn)
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(rows, bm) * across, gl.num_programs(0)):
        total = gl.zeros([bm, bn], gl.float32, sums)
        for _ in range(0, depth, bk):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            right = ws.index(stage).permute((1, 0))
            under_way = warpgroup_mma(xs.index(stage), right, total, is_async=True)
            total = warpgroup_mma_wait(0, deps=[under_way])
            mbarrier.arrive(free.index(stage), count=1)
            step += 1
        tma.store_wait(0)
        ys.store(gl.maximum(total, 0.0).to(gl.bfloat16))
        fence_async_shared()
        _store(y, [tile // across * bm, tile % across * bn], ys)
    tma.store_wait(0)


@gluon.jit
def product(x, w, y, rows, columns, depth, STAGES: gl.constexpr):
    xs = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, x.block_shape[0], x.block_shape[1]], x.layout
    )
    ws = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, w.block_shape[0], w.block_shape[1]], w.layout
    )
    ys = gl.allocate_shared_memory(gl.bfloat16, y.block_shape, y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    gl.warp_specialize(
        [
            (multiply, (y, xs, ws, ys, full, free, rows, columns, depth, STAGES)),
            (load_tiles, (x, w, xs, ws, full, free, rows, columns, depth, STAGES)),
        ],
        [1],
        [24],
    )


@dataclass(frozen=True, slots=True)
class Compiled:
    """The kernel's PTX, and how its three descriptors are encoded."""

    ptx: str
    shared_bytes: int
    tiles: tuple[dict[str, object], ...]

    def code(self) -> Code:
        return Code.of(self.ptx, "", self.shared_bytes)

    def arguments(self, code: Code, x: Tensor, w: Tensor, y: Tensor) -> Arguments:
        values: list[object] = []
        for tensor, tile in zip((x, w, y), self.tiles, strict=True):
            made = encode(tensor, tensor.shape, tensor.stride(), tile)
            assert made.problem() == ""
            values += [made, *tensor.shape, *tensor.stride()]
        values += [*y.shape, x.shape[1]]
        scratch = len(code.program.kernel.params) - len(values)
        return Arguments((*values, *[0] * scratch), tuple(map(span, (x, w, y))))


@functools.cache
def compiled() -> Compiled:
    """Compile the product for sm_90."""
    boxes = {"x": (TILE_M, TILE_K), "w": (TILE_N, TILE_K), "y": (TILE_M, TILE_N)}
    signature = {name: _descriptor(*box) for name, box in boxes.items()}
    signature |= {"rows": "i32", "columns": "i32", "depth": "i32", "STAGES": "constexpr"}
    source = GluonASTSource(product, signature, {(6,): STAGES}, {})
    made = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 128}
    )
    return Compiled(made.asm["ptx"], made.metadata.shared, tuple(made.metadata.tensordesc_meta))


def _descriptor(rows: int, columns: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return f"tensordesc<bf16[{rows},{columns}],{layout!r}>"


def expected(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x.double() @ w.double().T)
