"""Launches without a device: a driver that interprets kernels where a GPU would run them."""

from __future__ import annotations

import contextlib
import json
import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from fusec.errors import BuildError, EnvironmentProblem, UsageError
from fusec.runtime import triton_kernel
from fusec.runtime.triton_kernel import (
    MAX_SIZE,
    Binary,
    TritonKernel,
    TritonSource,
    build,
    compile_kernel,
    load_function,
    pack,
    parse_target,
    unpack,
)
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


class InterpretingDriver:
    """Stands in for Triton's driver: knows tensors by address, and records launches."""

    def __init__(self) -> None:
        self.utils = self
        self.current_device = 0
        self.memory: dict[int, torch.Tensor] = {}
        self.launches: list[tuple[Any, ...]] = []

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
            values = [self.memory[a] if kind.startswith("*") else a for kind, a in given]
            interpret(SCALE, "scale", (x, y, z), values)

        return run

    def get_current_stream(self, device: int) -> int:
        return 70 + device

    def get_current_device(self) -> int:
        return self.current_device

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        self.memory[values.data_ptr()] = values
        return values


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> InterpretingDriver:
    fake = InterpretingDriver()

    @contextlib.contextmanager
    def on_device(device: int) -> Iterator[None]:
        before, fake.current_device = fake.current_device, device
        yield
        fake.current_device = before

    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", fake.get_current_device, raising=False)
    monkeypatch.setattr(triton_kernel, "device_target", lambda device: "sm_90")
    monkeypatch.setattr(triton.runtime.driver, "_active", fake)
    return fake


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
    driver: InterpretingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = pack([KERNEL], "sm_90")
    assert set(blobs) == {"triton.json", "scale.bin"}
    monkeypatch.setattr(triton_kernel, "compile_kernel", None)
    kernel = unpack(blobs, device=0)["scale"]
    assert kernel.kernel == KERNEL
    x, y = aligned(driver, 16).fill_(1), aligned(driver, 16)
    kernel(x, y, 16)
    assert y.tolist() == [2.0] * 16


def test_build_compiles_several_kernels() -> None:
    other = TritonSource("twice", SCALE.replace("scale", "twice"), *_rest(KERNEL))
    assert set(build([KERNEL, other], "sm_90")) == {"scale", "twice"}
    assert build([], "sm_90") == {}


def test_no_more_kernels_are_built_at_a_time_than_was_asked(monkeypatch) -> None:
    running: list[int] = []
    seen: list[int] = []

    def compile_slowly(kernel: TritonSource, target: str) -> SimpleNamespace:
        running.append(1)
        time.sleep(0.01)
        seen.append(len(running))
        running.pop()
        return SimpleNamespace(name=kernel.name, binary=target)

    monkeypatch.setattr(triton_kernel, "compile_kernel", compile_slowly)
    kernels = [replace(KERNEL, name=f"k{n}") for n in range(6)]
    assert len(build(kernels, "sm_90", 1)) == 6
    assert max(seen) == 1
    build(kernels, "sm_90", 3)
    assert 1 < max(seen) <= 3


def _rest(kernel: TritonSource) -> tuple[Any, ...]:
    return kernel.signature, kernel.divisible, kernel.grid


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_every_stage_of_every_target_has_text(target: str) -> None:
    asm = compile_kernel(KERNEL, target)
    for stage in asm.stages:
        assert "scale" in asm.text(stage)
    assert len(asm.binary.code) > 1000


def test_unknown_target_and_stage_name_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"Did you mean 'sm_90'\?"):
        parse_target("sm90")
    with pytest.raises(UsageError, match="unknown stage 'asm'"):
        compile_kernel(KERNEL, "sm_90").text("asm")


def test_rejected_kernel_is_a_build_error() -> None:
    broken = TritonSource("scale", SCALE.replace("* 2.0", "* tl.nothing"), *_rest(KERNEL))
    with pytest.raises(BuildError, match="nothing"):
        compile_kernel(broken, "sm_90")


def test_interpreter_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(EnvironmentProblem, match="TRITON_INTERPRET"):
        load_function(SCALE, "scale")
