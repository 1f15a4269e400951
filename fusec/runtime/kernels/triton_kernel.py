"""Build printed Triton kernels, on any machine, and launch them.

A kernel may copy tiles by tensor descriptors (TMA): a launch makes them from addresses and sizes,
and caches them.

A kernel is compiled for arguments that are multiples of 16 where codegen expects it: addresses,
which allows 16-byte accesses, and sizes. A launch with other arguments runs a variant without that
assumption and without descriptors, compiled at its first use: correct, slower, and no copy of the
user's tensor.

Worked example::

    blobs = pack([kernel], device_target(0))            # built in parallel; what a cache keeps
    kernels = unpack(blobs, device=0)
    kernels["k0"](x, y, 128)                            # tensors, then sizes
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fusec.errors import BuildError, UsageError
from fusec.runtime.from_json import read
from fusec.runtime.interior import current_device_getter
from fusec.runtime.kernels import table
from fusec.runtime.kernels.triton_interior import (
    MULTIPLE,
    TensorDescriptor,
    compile_function,
    device_target,
    load,
    load_function,
    make_launcher,
    parse_target,
)
from fusec.runtime.progress import say

MAX_SIZE = 2**31 - 2**20
"""The greatest size that a launch may pass: what ``ir.atoms.MAX_SIZE`` assumes."""

_KEPT = 256
"""Combinations of addresses and sizes for which a kernel caches its descriptors."""
_DESCRIPTOR = "tensordesc<"
_KEPT_TABLES = 16
"""Tables of addresses that a kernel caches on the device."""
_FILLED = 128
"""Addresses that one launch stores in a table: 1 KB of the 4 KB of parameters that it may have."""
_ELEMENTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class TileDescriptor:
    """A parameter by which a kernel copies tiles of a tensor, in elements.

    Attributes:
        pointer: the parameter that has the tensor's address.
        tile: what one copy takes along each axis.
        shape, strides: Python expressions over the sizes' names; the last stride is 1.
    """

    name: str
    pointer: str
    tile: tuple[int, ...]
    shape: tuple[str, ...]
    strides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TritonSource:
    """A printed kernel, as codegen hands it over: plain data.

    Attributes:
        source: a module with the kernel.
        signature: name and Triton type of each parameter: pointers, sizes, descriptors.
        divisible: positions of arguments that are multiples of 16 (addresses in bytes).
        grid: the launch grid, three Python expressions over the sizes' names: ("M", "1", "1").
        descriptors: the last parameters, which the launcher creates.
        pointer_source: the module without descriptors, for a kernel that has some; for a table's
            kernel, the module that does not assume aligned addresses.
        blocks: of a kernel that runs for each row of a table, how many blocks a row has.
        registers: limit of a thread's registers; 0: the compiler chooses.
        function: the kernel's name in the module, and in traces; by default ``name``.
        number: the integer of a parametrized function, its last size; the code is built once.
        dependent: launched so that it may start while the launch before it ends: it waits itself.
    """

    name: str
    source: str
    signature: tuple[tuple[str, str], ...]
    divisible: tuple[int, ...]
    grid: tuple[str, str, str]
    num_warps: int = 4
    num_stages: int = 1
    descriptors: tuple[TileDescriptor, ...] = ()
    pointer_source: str = ""
    blocks: str | None = None
    registers: int = 0
    function: str = ""
    number: int | None = None
    dependent: bool = False

    def given(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return a launch's arguments: a call's tensors and sizes, and ``number`` if set."""
        return (*args, *(() if self.number is None else (self.number,)))

    def by_pointers(self) -> TritonSource:
        """Return the same kernel without descriptors, which require aligned addresses.

        It needs more registers than one with descriptors.
        """
        if not self.descriptors:
            return self
        kept = tuple(p for p in self.signature if not p[1].startswith(_DESCRIPTOR))
        source = self.pointer_source
        bare = replace(self, descriptors=(), pointer_source="", registers=0)
        return replace(bare, source=source, signature=kept)


@dataclass(frozen=True, slots=True)
class Binary:
    """Machine code (a cubin, or an hsaco), as a cache keeps it.

    Attributes:
        metadata: what a launch needs to know of it, JSON.
    """

    code: bytes
    metadata: str

    @staticmethod
    def of(compiled: Any) -> Binary:
        """Return the binary and plain metadata of a kernel that Triton has compiled."""
        plain = (bool, int, float, str, tuple, list, type(None))
        kept = {k: v for k, v in compiled.metadata._asdict().items() if isinstance(v, plain)}
        return Binary(bytes(compiled.kernel), json.dumps(kept, sort_keys=True, default=str))


# -- building ------------------------------------------------------------------------------------


def compile_kernel(kernel: TritonSource, target: str) -> Any:
    """Compile a kernel with Triton for ``target``, such as "sm_90"; no device is needed.

    Raises:
        BuildError: if Triton or ptxas rejects the kernel.
        UsageError: if there is no such target.
    """
    gpu = parse_target(target)
    function = load_function(kernel.source, kernel.function or kernel.name)
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages}
    if kernel.registers:
        options["maxnreg"] = kernel.registers
    if kernel.dependent:
        options["launch_pdl"] = True
    try:
        return compile_function(function, dict(kernel.signature), kernel.divisible, gpu, options)
    except Exception as error:  # of many unrelated types
        command = ("triton.compile", kernel.name, f"--target={target}")
        raise BuildError(command, f"{type(error).__name__}: {error}") from error


def build(kernels: Sequence[TritonSource], target: str, threads: int = 0) -> dict[str, Binary]:
    """Compile the kernels of a graph and return their binaries by name; equal code once.

    In threads: ptxas is a process of its own and MLIR's passes hold no lock, so that eight kernels
    take 0.87 s instead of 1.51 s on two cores (LayerNorm, sm_90, 2026-11).

    Args:
        threads: how many kernels at a time; 0: one for each core.
    Raises:
        BuildError: of the first kernel that Triton or ptxas rejects.
    """
    codes = _codes(kernels)
    wanted = [kernel for kernel in kernels if codes[kernel.name] == kernel.name]
    workers = max(1, min(len(wanted), threads or os.cpu_count() or 1))
    with ThreadPoolExecutor(workers, thread_name_prefix="fusec-build") as pool:
        built = {}
        made = pool.map(lambda kernel: compile_kernel(kernel, target), wanted)
        for kernel, compiled in zip(wanted, made, strict=True):
            built[kernel.name] = Binary.of(compiled)
            say(f"{len(built)} of {len(wanted)} kernels built")
        return {name: built[code] for name, code in codes.items()}


def _codes(kernels: Sequence[TritonSource]) -> dict[str, str]:
    """Return kernel -> the first kernel that equals it up to name and number."""
    first: dict[TritonSource, str] = {}
    alike = ((kernel.name, replace(kernel, name="", number=None)) for kernel in kernels)
    return {name: first.setdefault(code, name) for name, code in alike}


def pack(kernels: Sequence[TritonSource], target: str, threads: int = 0) -> dict[str, bytes]:
    """Build the kernels of a graph and return the blobs that `unpack` loads them from.

    Args:
        threads: as in `build`.
    Raises:
        BuildError: of the first kernel that Triton or ptxas rejects.
    """
    if any(kernel.blocks is not None for kernel in kernels):
        kernels = [*kernels, _filler()]
    binaries, codes = build(kernels, target, threads), _codes(kernels)
    built = {name: {"code": codes[name], "metadata": b.metadata} for name, b in binaries.items()}
    rows = [{**asdict(kernel), **built[kernel.name]} for kernel in kernels]
    files = {f"{name}.bin": binaries[name].code for name in codes.values()}
    return {"triton.json": json.dumps(rows, sort_keys=True).encode(), **files}


def unpack(blobs: Mapping[str, bytes], device: int) -> dict[str, TritonKernel | TritonTable]:
    """Load packed kernels on a device and return them by name; no kernel is compiled.

    Launchers are made in threads: Triton 3.6 builds one for each signature with gcc, a process
    of 112 to 131 ms (2026-11).
    """
    rows = json.loads(blobs["triton.json"])
    binaries = [Binary(blobs[f"{row.pop('code')}.bin"], row.pop("metadata")) for row in rows]
    kernels: list[TritonSource] = [read(TritonSource, row, "a kernel") for row in rows]
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="fusec-launcher") as pool:
        launchers = list(pool.map(_launcher_of, kernels, binaries))
    loaded = {
        kernel.name: TritonKernel(kernel, binary, device, launcher)
        for kernel, binary, launcher in zip(kernels, binaries, launchers, strict=True)
    }
    filler = loaded.pop(_FILLER, None)
    return {
        name: one if filler is None or one.kernel.blocks is None else TritonTable(one, filler)
        for name, one in loaded.items()
    }


def _launcher_of(kernel: TritonSource, binary: Binary) -> Callable[..., None]:
    return make_launcher(binary.metadata, dict(kernel.signature))


# -- launching -----------------------------------------------------------------------------------

Launch = Callable[..., None]


@dataclass(frozen=True, slots=True)
class _Address:
    """The part of a tensor that a descriptor needs; it keeps no memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def describe(
    kernel: TritonSource, tensors: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[TensorDescriptor, ...]:
    """Return the descriptors of a launch.

    Args:
        tensors: objects with ``data_ptr`` and ``dtype``, by the parameters' names.
        sizes: by the parameters' names.
    """

    def values(texts: tuple[str, ...]) -> list[int]:
        return [eval(text, {}, dict(sizes)) for text in texts]

    return tuple(
        TensorDescriptor(tensors[d.pointer], values(d.shape), values(d.strides), list(d.tile))
        for d in kernel.descriptors
    )


def _descriptors_by_address(
    kernel: TritonSource,
) -> tuple[tuple[str, ...], Callable[[tuple[int, ...]], tuple[TensorDescriptor, ...]]]:
    """Return the parameters on which a kernel's descriptors depend, and a cache of these.

    The cache is called with the addresses and sizes that a launch passes for these parameters.
    """
    types = dict(kernel.signature)
    pointers = tuple(dict.fromkeys(d.pointer for d in kernel.descriptors))
    names = (*pointers, *(name for name, kind in kernel.signature if kind == "i32"))

    @functools.lru_cache(_KEPT)
    def descriptors(key: tuple[int, ...]) -> tuple[TensorDescriptor, ...]:
        passed = dict(zip(names, key, strict=True))
        elements = {p: _ELEMENTS[types[p].removeprefix("*")] for p in pointers}
        return describe(kernel, {p: _Address(passed[p], e) for p, e in elements.items()}, passed)

    return names, descriptors


class TritonKernel:
    """A kernel on one device: called with tensors, then sizes, in the order of its signature.

    Runs on the device's current stream, whatever the current device is. Thread-safe.

    Args:
        binary: built from ``kernel`` for this device's target.
        device: number of the device.
        launcher: its launcher, if that has been made.
    """

    __slots__ = (
        *("_lock", "_variants", "current_device", "device", "interface", "kernel", "launch"),
        "stream",
    )

    def __init__(
        self,
        kernel: TritonSource,
        binary: Binary,
        device: int,
        launcher: Callable[..., None] | None = None,
    ) -> None:
        self.kernel = kernel
        self.device = device
        self._lock = threading.Lock()
        self.launch = self._loaded(kernel, binary, launcher or _launcher_of(kernel, binary))
        # A kernel with descriptors is no variant by pointers, whatever it assumes.
        self._variants = {} if kernel.descriptors else {kernel.divisible: self.launch}

    def __call__(self, *args: Any) -> None:
        self.launch(*args)

    def _loaded(
        self, kernel: TritonSource, binary: Binary, launcher: Callable[..., None]
    ) -> Launch:
        """Return a function that launches this code if the arguments are as it assumes."""
        loaded = load(binary.code, binary.metadata, launcher, self.device)
        self.stream, self.interface = loaded.stream, loaded.interface
        self.current_device = current_device_getter(loaded.current_device)
        namespace: dict[str, Any] = {
            "_run": loaded.run,
            "_function": loaded.function,
            "_metadata": loaded.packed,
            "_device": self.device,
            "_current_device": self.current_device,
            "_stream": loaded.stream,
            "_other": self._launch_variant,
            "_elsewhere": self._launch_from_elsewhere,
        }
        key: tuple[str, ...] = ()
        if kernel.descriptors:
            key, namespace["_descriptors"] = _descriptors_by_address(kernel)
        exec(_launcher_source(kernel, key), namespace)
        launch: Launch = namespace["launch"]
        return launch

    def _launch_from_elsewhere(self, *args: Any) -> None:
        """Launch while another device is the current one."""
        with self.interface.device(self.device):
            self.launch(*args)

    def _launch_variant(self, *args: Any) -> None:
        """Launch a variant for arguments that break an assumption of the code.

        Raises:
            UsageError: for a size beyond ``MAX_SIZE``.
        """
        given = self.kernel.given(args)
        values = [arg if isinstance(arg, int) else arg.data_ptr() for arg in given]
        plain = self.kernel.by_pointers()
        for value, (name, kind) in zip(values, plain.signature, strict=True):
            if kind == "i32" and value > MAX_SIZE:
                raise UsageError(
                    f"size {name}={value} of kernel {self.kernel.name} is beyond {MAX_SIZE}; "
                    "compile with dynamic=False, which makes sizes constants."
                )
        divisible = tuple(p for p in self.kernel.divisible if values[p] % MULTIPLE == 0)
        with self._lock:
            variant = self._variants.get(divisible)
            if variant is None:
                kernel = replace(plain, divisible=divisible)
                binary = Binary.of(compile_kernel(kernel, device_target(self.device)))
                made = self._loaded(kernel, binary, _launcher_of(kernel, binary))
                variant = self._variants[divisible] = made
        variant(*args)


class TritonTable:
    """A kernel that runs for each row of a table: called with the rows' tensors and sizes.

    Sizes and places are copied to the device at the first call. Addresses are passed to a kernel
    that stores them in a table: a copy from the host would wait for the stream, and a capture
    forbids it. Tables of the last launches are cached, for parameters and states keep their
    addresses. A table filled in a capture belongs to the recording: each replay fills it again.

    Args:
        kernel: takes addresses, sizes, places, and the number of places.
        filler: stores addresses.
    """

    __slots__ = ("_kept", "_other", "_places", "filler", "kernel")

    def __init__(self, kernel: TritonKernel, filler: TritonKernel) -> None:
        self.kernel = kernel
        self.filler = filler
        # By stream: another one might read the table before it is stored.
        self._kept: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        self._places: dict[table.RowSizes, tuple[Any, Any, int]] = {}
        self._other: TritonKernel | None = None

    def __call__(self, rows: table.Rows, sizes: table.RowSizes) -> None:
        device = self.kernel.device
        if self.kernel.current_device() != device:
            with self.kernel.interface.device(device):
                self(rows, sizes)
            return
        found = self._places.get(sizes)
        if found is None:
            made = table.find_places(sizes, self.kernel.kernel.blocks or "1")
            there = torch.device("cuda", device)
            arrays = made.sizes.to(there), made.places.to(there)
            found = self._places[sizes] = (*arrays, made.count)
        addresses = table.addresses(rows)
        aligned = table.are_multiples(addresses, MULTIPLE)
        (self.kernel if aligned else self._unaligned())(self._table(addresses), *found)

    def _table(self, addresses: tuple[int, ...]) -> torch.Tensor:
        """Return addresses on the device: a cached table, or a new one."""
        if self.kernel.interface.is_current_stream_capturing():
            return self._filled(addresses)
        key = self.kernel.stream(self.kernel.device), addresses
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _KEPT_TABLES:
                self._kept.pop(next(iter(self._kept)))
            found = self._kept[key] = self._filled(addresses)
        return found

    def _filled(self, addresses: tuple[int, ...]) -> torch.Tensor:
        padded = (*addresses, *[0] * (-len(addresses) % _FILLED))
        device = torch.device("cuda", self.kernel.device)
        made = torch.empty(len(padded), dtype=torch.int64, device=device)
        for first in range(0, len(padded), _FILLED):
            self.filler(made, first, *padded[first : first + _FILLED])
        return made

    def _unaligned(self) -> TritonKernel:
        """Return the kernel for addresses that are not all multiples of 16."""
        if self._other is None:
            made = self.kernel
            kernel = replace(made.kernel, source=made.kernel.pointer_source, pointer_source="")
            binary = Binary.of(compile_kernel(kernel, device_target(made.device)))
            self._other = TritonKernel(kernel, binary, made.device)
        return self._other


_FILLER = "store_addresses"


def _filler() -> TritonSource:
    """Return the kernel that stores addresses in a table, from its element ``first`` on."""
    names = [f"address{k}" for k in range(_FILLED)]
    lines = [f"    tl.store(table + first + {k}, {name})" for k, name in enumerate(names)]
    head = [
        "import triton",
        "import triton.language as tl",
        "",
        "",
        "@triton.jit",
        f"def {_FILLER}(table, first, {', '.join(names)}):",
    ]
    signature = (("table", "*i64"), ("first", "i32"), *((name, "i64") for name in names))
    source = "\n".join([*head, *lines]) + "\n"
    return TritonSource(_FILLER, source, signature, (0, 1), ("1", "1", "1"), num_warps=1)


def _launcher_source(kernel: TritonSource, described: tuple[str, ...]) -> str:
    """Return the source of ``launch``: straight-line code, as it runs at every call.

    Names of its own begin with an underscore, which parameters of kernels never do.

    Args:
        described: the parameters on which descriptors depend; none where there are no descriptors.
    """
    names = [name for name, kind in kernel.signature if not kind.startswith(_DESCRIPTOR)]
    own = [] if kernel.number is None else [names[-1]]
    pointers = [name for name, kind in kernel.signature if kind.startswith("*")]
    sizes = [name for name, kind in kernel.signature if kind == "i32"]
    counts = [] if kernel.blocks is None else [kernel.grid[0]]
    values = {name: f"_at_{name}" if name in pointers else name for name in names}
    passed = list(values.values())
    parameters = ", ".join((*names[: len(names) - len(own)], *counts))
    conditions = [f"{size} > {MAX_SIZE}" for size in sizes]
    if described:  # of a tensor without elements there is no descriptor
        conditions += [f"{size} == 0" for size in sizes]
    if kernel.divisible:
        facts = " | ".join(passed[position] for position in kernel.divisible)
        conditions.insert(0, f"({facts}) & {MULTIPLE - 1}")
    lines = [f"{name} = {kernel.number}" for name in own]
    if sizes or counts:
        lines += [f"if not ({' and '.join(f'({side})' for side in kernel.grid)}):", "    return"]
    lines += [f"{values[name]} = {name}.data_ptr()" for name in pointers]
    if conditions:
        lines += [f"if {' or '.join(conditions)}:", f"    return _other({parameters})"]
    lines += ["if _current_device() != _device:", f"    return _elsewhere({parameters})"]
    if described:
        key = ", ".join(values[name] for name in described)
        passed.append(f"*_descriptors(({key},))")
    lines.append(
        f"_run({', '.join(kernel.grid)}, _stream(_device), _function, _metadata, None, None, None, "
        f"{', '.join(passed)})"
    )
    return "\n    ".join([f"def launch({parameters}):", *lines]) + "\n"
