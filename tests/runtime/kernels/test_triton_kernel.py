"""Launches without a device: a driver that interprets kernels where a GPU would run them."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
import pickle
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from threading import Barrier, current_thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.tools.tensor_descriptor import TensorDescriptor

from fusec.errors import BuildError, EnvironmentProblem, UsageError
from fusec.runtime.kernels import triton_kernel
from fusec.runtime.kernels.triton_interior import load_function, parse_target
from fusec.runtime.kernels.triton_kernel import (
    MAX_SIZE,
    Binary,
    TileDescriptor,
    TritonKernel,
    TritonSource,
    TritonTable,
    build,
    compile_kernel,
    pack,
    unpack,
)
from tests.calls import calls_of
from tests.triton_interpreter import interpret

SCALE = """\
import triton
import triton.language as tl


@triton.jit
def scale(x, y, N):
    no = tl.program_id(0)
    ni = tl.arange(0, 512)
    inside = no * 512 + ni < N
    t = tl.load(x + no * 512 + ni, mask=inside, other=0.0)
    tl.store(y + no * 512 + ni, t * 2.0, mask=inside)
"""
KERNEL = TritonSource(
    "scale",
    SCALE,
    (("x", "*fp32"), ("y", "*fp32"), ("N", "i32")),
    (0, 1, 2),
    ("(N + 511) // 512", "1", "1"),
)

BY_POINTERS = """\
import triton
import triton.language as tl


@triton.jit
def scale(x, y, M, N):
    m = tl.program_id(0) * 16 + tl.arange(0, 16)[:, None]
    n = tl.arange(0, 32)[None, :]
    inside = (m < M) & (n < N)
    t = tl.load(x + m * N + n, mask=inside, other=0.0)
    tl.store(y + m * N + n, t * 2.0, mask=inside)
"""
BY_DESCRIPTORS = """\
import triton
import triton.language as tl


@triton.jit
def scale(x, y, M, N, x_tiles, y_tiles):
    m = tl.program_id(0)
    y_tiles.store([m * 16, 0], x_tiles.load([m * 16, 0]) * 2.0)
"""
TILED = TritonSource(
    "scale",
    BY_DESCRIPTORS,
    (
        *(("x", "*fp32"), ("y", "*fp32"), ("M", "i32"), ("N", "i32")),
        *(("x_tiles", "tensordesc<fp32[16,32]>"), ("y_tiles", "tensordesc<fp32[16,32]>")),
    ),
    (0, 1, 3),
    ("(M + 15) // 16", "1", "1"),
    descriptors=tuple(
        TileDescriptor(f"{name}_tiles", name, (16, 32), ("M", "N"), ("N", "1")) for name in "xy"
    ),
    pointer_source=BY_POINTERS,
)


class InterpretingDriver:
    """Stands in for Triton's driver: knows tensors by address, and records launches."""

    def __init__(self) -> None:
        self.utils = self
        self.current_device = 0
        self.memory: dict[int, torch.Tensor] = {}
        self.launches: list[tuple[Any, ...]] = []
        self.source = SCALE
        self.descriptors: list[TensorDescriptor] = []

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return ("module", (name, code, shared, device), 32, 0, 1024)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def run(
            x: int, y: int, z: int, stream: int, function: Any, packed: Any, *rest: Any
        ) -> None:
            hooks, args = rest[:3], rest[3:]
            assert hooks == (None, None, None)
            assert packed == (metadata.num_warps, metadata.num_ctas, metadata.shared)
            self.launches.append((function, stream, (x, y, z)))
            given = zip(source.signature.values(), args, strict=True)
            interpret(self.source, "scale", (x, y, z), [self.value(*one) for one in given])

        return run

    def value(self, kind: str, arg: Any) -> Any:
        if kind.startswith("tensordesc"):
            self.descriptors.append(arg)
            return replace(arg, base=self.memory[arg.base.data_ptr()])
        return self.memory[arg] if kind.startswith("*") else arg

    def get_current_stream(self, device: int) -> int:
        return 70 + device

    def get_current_device(self) -> int:
        return self.current_device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_interface(self) -> InterpretingDriver:
        return self

    @contextlib.contextmanager
    def device(self, device: int) -> Iterator[None]:
        before, self.current_device = self.current_device, device
        yield
        self.current_device = before

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        self.memory[values.data_ptr()] = values
        return values


@pytest.fixture
def driver() -> Iterator[InterpretingDriver]:
    """Make Triton's active driver one that interprets."""
    fake = InterpretingDriver()
    triton.runtime.driver.set_active(fake)
    yield fake
    triton.runtime.driver.set_active(None)  # found anew when it is needed


@pytest.fixture(scope="module")
def binary() -> Binary:
    return build([KERNEL], "sm_90")["scale"]


def aligned(driver: InterpretingDriver, count: int) -> torch.Tensor:
    storage = torch.zeros(count + 8)
    start = -(storage.data_ptr() // 4) % 4
    return driver.tensor(storage[start : start + count])


def test_launch_passes_grid_stream_and_arguments(
    driver: InterpretingDriver, binary: Binary
) -> None:
    x, y = aligned(driver, 640).fill_(3), aligned(driver, 640)
    TritonKernel(KERNEL, binary, device=0)(x, y, 640)
    assert y.tolist() == [6.0] * 640
    ((_, stream, grid),) = driver.launches
    assert (stream, grid) == (70, (2, 1, 1))


def test_launch_switches_to_its_device(driver: InterpretingDriver, binary: Binary) -> None:
    kernel = TritonKernel(KERNEL, binary, device=1)
    kernel(aligned(driver, 16), aligned(driver, 16), 16)
    ((function, stream, _),) = driver.launches
    assert function[3] == 1
    assert stream == 71
    assert driver.current_device == 0


def test_unaligned_tensor_and_size_take_variants_compiled_once(
    driver: InterpretingDriver, binary: Binary
) -> None:
    kernel = TritonKernel(KERNEL, binary, device=0)
    x, y = aligned(driver, 40).fill_(1), aligned(driver, 40)
    shifted = driver.tensor(x[1:])
    for _ in range(2):
        kernel(shifted, y, 32)
    kernel(x, y, 33)
    codes = [function[1] for function, _, _ in driver.launches]
    assert codes[0] == codes[1]
    assert len({binary.code, *codes}) == 3
    assert y[:33].tolist() == [2.0] * 33


def test_size_beyond_32_bits_is_refused(driver: InterpretingDriver, binary: Binary) -> None:
    x = aligned(driver, 16)
    with pytest.raises(UsageError, match=f"N={MAX_SIZE + 16} of kernel scale"):
        TritonKernel(KERNEL, binary, device=0)(x, x, MAX_SIZE + 16)


def test_binary_and_source_survive_pickling(binary: Binary) -> None:
    assert pickle.loads(pickle.dumps((KERNEL, binary))) == (KERNEL, binary)
    assert json.loads(binary.metadata)["num_warps"] == 4


def test_packed_kernel_is_loaded_without_compiling(
    driver: InterpretingDriver,
) -> None:
    blobs = pack([KERNEL], "sm_90")
    assert set(blobs) == {"triton.json", "scale.bin"}
    with calls_of(compile_kernel) as compiled:
        kernel = unpack(blobs, device=0)["scale"]
    assert not compiled
    assert kernel.kernel == KERNEL
    x, y = aligned(driver, 16).fill_(1), aligned(driver, 16)
    kernel(x, y, 16)
    assert y.tolist() == [2.0] * 16


@pytest.fixture(scope="module")
def tiled_binary() -> Binary:
    return build([TILED], "sm_90")["scale"]


@pytest.fixture
def tiled(driver: InterpretingDriver, tiled_binary: Binary) -> TritonKernel:
    driver.source = BY_DESCRIPTORS
    return TritonKernel(TILED, tiled_binary, device=0)


def test_launch_makes_descriptors_of_addresses_and_sizes(
    driver: InterpretingDriver, tiled: TritonKernel
) -> None:
    x, y = aligned(driver, 640).fill_(3), aligned(driver, 640)
    tiled(x, y, 20, 32)
    assert y.tolist() == [6.0] * 640
    assert [(d.shape, d.strides, d.block_shape) for d in driver.descriptors] == [
        ([20, 32], [32, 1], [16, 32])
    ] * 2
    assert [d.base.data_ptr() for d in driver.descriptors] == [x.data_ptr(), y.data_ptr()]


def test_launches_of_the_same_tensors_and_sizes_share_descriptors(
    driver: InterpretingDriver, tiled: TritonKernel
) -> None:
    x, y = aligned(driver, 640), aligned(driver, 640)
    for rows in (20, 20, 16):
        tiled(x, y, rows, 32)
    one, again, other = driver.descriptors[::2]
    assert one is again
    assert other is not one
    assert other.shape == [16, 32]


def test_descriptors_keep_no_tensor_alive(driver: InterpretingDriver, tiled: TritonKernel) -> None:
    x, y = aligned(driver, 640), aligned(driver, 640)
    tiled(x, y, 20, 32)
    alive = weakref.ref(x)
    driver.memory.clear()
    del x
    gc.collect(1)
    assert alive() is None


def test_no_more_descriptors_are_kept_than_a_limit() -> None:
    _, descriptors = triton_kernel._descriptors_by_address(TILED)
    for rows in range(1, 2 * triton_kernel._KEPT):
        x, y = descriptors((16, 32, rows, 32))
        assert x.shape == y.shape == [rows, 32]
        assert descriptors.cache_info().currsize <= triton_kernel._KEPT


def test_unaligned_tensors_and_sizes_go_by_pointers(
    driver: InterpretingDriver, tiled: TritonKernel, tiled_binary: Binary
) -> None:
    driver.source = BY_POINTERS
    x, y = aligned(driver, 641).fill_(1), aligned(driver, 640)
    tiled(driver.tensor(x[1:]), y, 20, 32)
    assert y.tolist() == [2.0] * 640
    tiled(x, y.zero_(), 20, 30)
    assert y.tolist() == [2.0] * 600 + [0.0] * 40
    assert not driver.descriptors
    assert tiled_binary.code not in {function[1] for function, _, _ in driver.launches}


def test_tritons_launcher_takes_these_descriptors(
    driver: InterpretingDriver, tiled: TritonKernel, tiled_binary: Binary
) -> None:
    x, y = aligned(driver, 640), aligned(driver, 640)
    tiled(x, y, 20, 32)
    filled = []
    driver.fill_tma_descriptor = driver.fill_tma_descriptor_tiled = lambda *fields: filled.append(
        fields
    )
    parameters = inspect.signature(make_tensordesc_arg).parameters
    unused = [None] * (len(parameters) - 2)  # one of Triton 3.9
    for meta in json.loads(tiled_binary.metadata)["tensordesc_meta"]:
        _, *rest = make_tensordesc_arg(driver.descriptors[0], meta, *unused)
        assert rest == [20, 32, 32, 1]
    address, _, size, _, block, shape, strides, padding = filled[0]
    assert (address, size, block) == (x.data_ptr(), 4, [16, 32])
    assert (shape, strides, padding) == ([20, 32], [32, 1], 0)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core makes one at a time")
def test_launchers_of_several_kernels_are_made_at_once(driver: InterpretingDriver) -> None:
    blobs = pack(
        [KERNEL, replace(TILED, name="tiled", source=TILED.source.replace("scale", "tiled"))],
        "sm_90",
    )
    both, make = threading.Barrier(2), driver.launcher_cls

    def made(source: Any, metadata: Any) -> Any:
        both.wait(timeout=60)  # broken, and an error, where one waits for the other to be made
        return make(source, metadata)

    driver.launcher_cls = made  # type: ignore[method-assign]
    assert set(unpack(blobs, device=0)) == {"scale", "tiled"}


def test_packed_kernel_keeps_its_descriptors(driver: InterpretingDriver) -> None:
    blobs = pack([TILED], "sm_90")
    driver.source = BY_DESCRIPTORS
    kernel = unpack(blobs, device=0)["scale"]
    assert kernel.kernel == TILED
    (row,) = json.loads(blobs["triton.json"])
    assert [meta["block_size"] for meta in json.loads(row["metadata"])["tensordesc_meta"]] == [
        [16, 32],
        [16, 32],
    ]
    x, y = aligned(driver, 640).fill_(1), aligned(driver, 640)
    kernel(x, y, 20, 32)
    assert y.tolist() == [2.0] * 640


def test_kernels_of_several_numbers_are_built_once(driver: InterpretingDriver) -> None:
    numbers = {"k0": 640, "k1": 33}
    sources = [replace(KERNEL, name=k, function="scale", number=n) for k, n in numbers.items()]
    blobs = pack(sources, "sm_90")
    assert set(blobs) == {"triton.json", "k0.bin"}
    x = aligned(driver, 640).fill_(1)
    for name, kernel in unpack(blobs, device=0).items():
        y = aligned(driver, 640)
        kernel(x, y)
        assert kernel.kernel.number == numbers[name] == y.sum() / 2  # 33 by a variant
    assert [grid for _, _, grid in driver.launches] == [(2, 1, 1), (1, 1, 1)]


def test_build_compiles_several_kernels() -> None:
    other = TritonSource("twice", SCALE.replace("scale", "twice"), *_rest(KERNEL))
    assert set(build([KERNEL, other], "sm_90")) == {"scale", "twice"}
    assert build([], "sm_90") == {}


@pytest.mark.parametrize("threads", (1, 3))
def test_no_more_kernels_are_built_at_a_time_than_was_asked(threads: int) -> None:
    names = [f"scale{n}_by_{threads}" for n in range(4)]
    kernels = [replace(KERNEL, name=n, source=SCALE.replace("scale", n)) for n in names]

    begun, together = count(), Barrier(threads)

    def builder() -> str:
        if next(begun) < threads:
            together.wait(timeout=60)  # an error where fewer build at a time
        return current_thread().name

    with calls_of(compile_kernel, note=builder) as calls:
        assert list(build(kernels, "sm_90", threads)) == names
    assert len({call.noted for call in calls}) == threads


def _rest(kernel: TritonSource) -> tuple[Any, ...]:
    return kernel.signature, kernel.divisible, kernel.grid


def test_unknown_target_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"Did you mean 'sm_90'\?"):
        parse_target("sm90")


def test_rejected_kernel_is_a_build_error() -> None:
    broken = TritonSource("scale", SCALE.replace("* 2.0", "* tl.nothing"), *_rest(KERNEL))
    with pytest.raises(BuildError, match="nothing"):
        compile_kernel(broken, "sm_90")


def test_interpreter_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(EnvironmentProblem, match="TRITON_INTERPRET"):
        load_function(SCALE, "scale")


class OnHost(TorchFunctionMode):
    """Memory of a device is a CPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{k: v for k, v in (kwargs or {}).items() if k != "device"})


@pytest.fixture
def tables() -> Iterator[tuple[TritonTable, SimpleNamespace]]:
    """Return a kernel of tables in a fake memory, and what it does: streams, what is stored."""
    seen = SimpleNamespace(stream=1, capturing=False, stored=[], read=[])

    class Launcher(SimpleNamespace):
        def __call__(self, table: torch.Tensor, *rest: Any) -> None:
            getattr(seen, self.into).append((table, *rest))

    of_device = {
        "device": 0,
        "current_device": lambda: 0,
        "stream": lambda device: seen.stream,
        "interface": SimpleNamespace(is_current_stream_capturing=lambda: seen.capturing),
    }
    kernel, filler = (Launcher(**of_device, into=into) for into in ("read", "stored"))
    launches = TritonTable(kernel, filler)  # type: ignore[arg-type]
    launches._places[((4,),)] = (None, None, 1)
    with OnHost():
        yield launches, seen


def at(*addresses: int) -> tuple[tuple[Any, ...], ...]:
    return (tuple(SimpleNamespace(data_ptr=lambda a=a: a) for a in addresses),)


def test_a_table_is_stored_once_for_each_stream(
    tables: tuple[TritonTable, SimpleNamespace],
) -> None:
    launches, seen = tables
    for stream in (1, 1, 2):
        seen.stream = stream
        launches(at(16), ((4,),))
    assert [one[1:4] for one in seen.stored] == [(0, 16, 0)] * 2
    first, again, other = (table for table, *_ in seen.read)
    assert first is again and first is not other


def test_no_more_tables_are_kept_than_a_limit(
    tables: tuple[TritonTable, SimpleNamespace],
) -> None:
    launches, seen = tables
    for number in (*range(17), 16, 0):
        launches(at(16 * number), ((4,),))
    assert len(seen.stored) == 18 and len(launches._kept) == 16


def test_a_recording_has_tables_of_its_own(tables: tuple[TritonTable, SimpleNamespace]) -> None:
    launches, seen = tables
    launches(at(16), ((4,),))
    seen.capturing = True
    launches(at(16), ((4,),))
    assert len(seen.stored) == 2 and len(launches._kept) == 1
    assert seen.read[0][0] is not seen.read[1][0]


def test_many_addresses_take_several_launches(
    tables: tuple[TritonTable, SimpleNamespace],
) -> None:
    launches, seen = tables
    launches(at(*range(0, 16 * 130, 16)), ((4,),))
    assert [(one[1], one[2], one[3]) for one in seen.stored] == [(0, 0, 16), (128, 2048, 2064)]
    assert {len(one) for one in seen.stored} == {2 + 128} and len(seen.read[0][0]) == 256


def test_a_launch_of_no_programs_does_nothing(
    driver: InterpretingDriver, tiled: TritonKernel, binary: Binary
) -> None:
    x, y = aligned(driver, 640), aligned(driver, 640)
    tiled(x, y, 0, 32)
    tiled(x, y, 0, 0)
    TritonKernel(KERNEL, binary, device=0)(x, y, 0)
    assert not driver.launches and not driver.descriptors


def test_tensors_without_elements_have_no_descriptors(
    driver: InterpretingDriver, tiled: TritonKernel
) -> None:
    """A sum of no terms is stored, all the same."""
    driver.source = BY_POINTERS
    tiled(aligned(driver, 640), aligned(driver, 640), 20, 0)
    assert [grid for _, _, grid in driver.launches] == [(2, 1, 1)] and not driver.descriptors
