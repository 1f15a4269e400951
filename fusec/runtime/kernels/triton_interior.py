"""Triton's private interfaces: the only module that uses them.

Written for Triton 3.6 (installed with torch 2.11), 3.7 (2.13) and 3.9 (2.15), which are tested. All
agree on ``ASTSource``, on the drivers' ``load_binary`` and on how a launcher is called. They
differ in:

* ``ptxas``. 3.6 and 3.7 use ``ptxas`` below sm_100 and ``ptxas-blackwell`` from there on; 3.9 uses
  the second from sm_90 on, and prints PTX that the first rejects. `assembler` returns Triton's own.
* Contraction of ``a * b + c`` into one rounding. On by default to 3.9, which warns that 3.10 turns
  it off. `compile_function` says that it is on: numbers shall not depend on the release.
* Launchers. 3.6 compiles C for each signature, the others have one for all; all are made by
  ``launcher_cls(source, metadata)`` and pass descriptors by ``make_tensordesc_arg``, which has a
  third parameter from 3.9 on.
* Gluon's copies of tiles: 3.9 has new names for them.

Worked example::

    function = load_function(source, "k0")
    sm_90 = parse_target("sm_90")
    compiled = compile_function(function, {"x": "*fp32", "N": "i32"}, (0,), sm_90, {"num_warps": 4})
    run = make_launcher(metadata, signature)
    loaded = load(code, metadata, run, device=0)
    loaded.run(4, 1, 1, loaded.stream(0), loaded.function, loaded.packed, None, None, None, x, n)
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import linecache
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from fusec.errors import EnvironmentProblem, UsageError
from fusec.processors import DEVICES

__all__ = ["JITFunction", "TensorDescriptor"]

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""Copies of tiles by descriptor, which Gluon kernels import by these names."""


MULTIPLE = 16
"""Divisor of the addresses and sizes that kernels assume aligned: ``ir.program.MULTIPLE``."""


def disassembler() -> str:
    """Return the path of the nvdisasm that comes with Triton."""
    return str(triton.knobs.nvidia.nvdisasm.path)


def assembler(target: str) -> str:
    """Return the path of the ptxas that Triton runs for an NVIDIA target."""
    # Local: builds of Triton for AMD alone have no such backend.
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(parse_target(target).arch).path)


def parse_target(target: str) -> GPUTarget:
    """Return Triton's target for "sm_90", "gfx942"...

    Raises:
        UsageError: for anything else.
    """
    if match := re.fullmatch(r"sm_(\d{2,3})", target):
        return GPUTarget("cuda", int(match[1]), 32)
    if match := re.fullmatch(r"gfx([0-9a-f]{3,4})", target):
        return GPUTarget("hip", target, 64 if match[1].startswith("9") else 32)
    raise UsageError.unknown("target", target, DEVICES)


def device_target(device: int) -> str:
    """Return the target name of a GPU of this machine."""
    driver = triton.runtime.driver.active
    with driver.get_device_interface().device(device):
        gpu = driver.get_current_target()
    return f"sm_{gpu.arch}" if gpu.backend == "cuda" else str(gpu.arch)


def load_function(source: str, name: str) -> JITFunction[Any]:
    """Return the kernel ``name`` of a printed module.

    Raises:
        EnvironmentProblem: if TRITON_INTERPRET is set, with which no function can be compiled.
    """
    # Triton reads a kernel's text through inspect, which finds it in linecache.
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    filename = f"<fusec {name} {digest}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"fusec_kernel_{digest}"}
    exec(compile(source, filename, "exec"), namespace)
    function = namespace[name]
    if not isinstance(function, JITFunction):
        raise EnvironmentProblem("TRITON_INTERPRET is set: unset it to compile Triton kernels.")
    return function


def compile_function(
    function: JITFunction[Any],
    signature: Mapping[str, str],
    divisible: Sequence[int],
    target: GPUTarget,
    options: Mapping[str, int],
) -> Any:
    """Return Triton's ``CompiledKernel`` of a function; no device is needed.

    Args:
        signature: Triton's type of each parameter by name.
        divisible: positions of arguments that are multiples of ``MULTIPLE``.
        options: Triton's, as ``num_warps``.
    Raises:
        Exception: Triton's front end, MLIR and ptxas raise many unrelated types.
    """
    attributes = {(position,): [["tt.divisibility", MULTIPLE]] for position in divisible}
    if function.is_gluon():
        types = {name: _with_layout(kind) for name, kind in signature.items()}
        source = GluonASTSource(function, types, {}, attributes)
    else:
        source = ASTSource(function, dict(signature), {}, attributes)
    chosen = {**options, "enable_fp_fusion": True}
    try:
        return triton.compile(source, target=target, options=chosen)
    except SystemError:  # CPython 3.11's ast.parse in several threads (python/cpython#106905)
        return triton.compile(source, target=target, options=chosen)


def _with_layout(kind: str) -> str:
    """Return the type of a Gluon kernel's parameter; a descriptor's has the tile's layout."""
    found = re.fullmatch(r"tensordesc<(\w+)\[([\d,]+)\]>", kind)
    if found is None:
        return kind
    shape = [int(extent) for extent in found[2].split(",")]
    element = {"u8": "uint8"}.get(found[1], found[1])
    layout = gl.NVMMASharedLayout.get_default_for(shape, tl.dtype(element))
    return f"{kind[:-1]},{layout!r}>"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Machine code on a device, and how Triton's driver launches it.

    Attributes:
        run: called with the grid, a stream, ``function``, ``packed``, three hooks or None, then the
            kernel's arguments: addresses, sizes, descriptors.
        stream: the current stream of a device.
        current_device: the number of the current device.
        interface: what torch has for this kind of devices: ``torch.cuda``.
    """

    run: Callable[..., None]
    function: Any
    packed: Any
    stream: Callable[[int], int]
    current_device: Callable[[], int]
    interface: Any


def make_launcher(metadata: str, signature: Mapping[str, str]) -> Callable[..., None]:
    """Return the launcher of a kernel, ``Loaded.run``. Touches no device; runs in any thread.

    Args:
        metadata: Triton's metadata of the kernel, as JSON.
    """
    fields = SimpleNamespace(**json.loads(metadata))
    described = SimpleNamespace(signature=dict(signature), constants={})
    launcher: Callable[..., None] = triton.runtime.driver.active.launcher_cls(described, fields)
    return launcher


def load(code: bytes, metadata: str, run: Callable[..., None], device: int) -> Loaded:
    """Load machine code on a device.

    Args:
        metadata, run: as in `make_launcher`.
    """
    fields = SimpleNamespace(**json.loads(metadata))
    driver = triton.runtime.driver.active
    interface = driver.get_device_interface()
    with interface.device(device), _relaxed_capture():
        loaded = driver.utils.load_binary(fields.name, code, fields.shared, device)
        packed = make_backend(driver.get_current_target()).pack_metadata(fields)
    run_on = driver.get_current_stream, driver.get_current_device, interface
    return Loaded(run, loaded[1], packed, *run_on)


_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Let this thread load code while one of its streams captures, which is an error otherwise.

    Loaded code is no part of the recording. (CUDA driver API, cuThreadExchangeStreamCaptureMode)
    """
    driver = _cuda_driver()
    if driver is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:  # ``mode`` holds the previous one
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@functools.cache
def _cuda_driver() -> ctypes.CDLL | None:
    """Return CUDA's driver; None on machines without one."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
