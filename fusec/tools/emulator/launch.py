"""Launch a printed kernel with its arguments, by the emulator instead of a GPU's driver.

Tensors are on the CPU, and are read and written in place. A launch may touch the memory of its
tensors and nothing else. Blocks run one after the other, warps of a block in an order that
``seed`` decides.

Worked example::

    kernel = EmulatedKernel(source, seed=1)      # a runtime.triton_kernel.TritonSource
    kernel(x, y, 128)                            # as a loaded kernel: tensors, then sizes
    kernel.counts.instructions                   # of its warps, so far
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from fusec.errors import BuildError
from fusec.runtime.kernels import table
from fusec.runtime.kernels.triton_kernel import TritonSource, describe
from fusec.tools.assembly import assembly_of
from fusec.tools.emulator import engine
from fusec.tools.emulator.decode import PARAM_WINDOW, Program, decoded
from fusec.tools.emulator.engine import Counts
from fusec.tools.emulator.faults import KINDS, EmulationError, Fault, Place, meaning_of, notation_of
from fusec.tools.emulator.parse import parse
from fusec.tools.static_checks import PROCESSORS

TARGET = "sm_90"
STEP_LIMIT = 1 << 40
_SWIZZLES = (0, 32, 64, 128)
"""Bytes of a row of a swizzle pattern, by the driver's enumeration."""
_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A descriptor as the driver would make it; axes are the innermost first.

    Attributes:
        dims, strides, box: elements, bytes, elements; the first stride is an element.
        element, swizzle: bytes.
    """

    base: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element: int
    swizzle: int
    nan_fill: bool = False

    def problem(self) -> str:
        """Return the rule of ``cuTensorMapEncodeTiled`` that this breaks, or ""."""
        row = self.box[0] * self.element
        rules = {
            "the address is no multiple of 16": self.base % 16,
            "a stride is no multiple of 16": any(s % 16 for s in self.strides[1:]),
            "a dimension is empty": min(self.dims) < 1,
            "a box has more than 256 elements along an axis": not 0
            < min(self.box)
            <= max(self.box)
            <= 256,
            "a box's rows are no multiple of 16 bytes": row % 16,
            "a box's rows are wider than the swizzle's": self.swizzle and row > self.swizzle,
        }
        return next((text for text, broken in rules.items() if broken), "")


Argument = int | TensorMap


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a launch.

    Attributes:
        values: of each parameter in order.
        buffers: address and bytes of all memory that may be touched.
    """

    values: tuple[Argument, ...]
    buffers: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Code:
    """A kernel that is ready to run.

    Attributes:
        ptx, source: the texts that a fault's lines are from.
        shared_bytes: of each block of a launch.
        dependent: it is launched to start while the launch before it ends.
    """

    program: Program
    ptx: str
    source: str
    shared_bytes: int
    dependent: bool = False

    @staticmethod
    def of(ptx: str, source: str = "", shared_bytes: int = 0, *, dependent: bool = False) -> Code:
        """Parse and decode a kernel's PTX.

        Raises:
            UnknownPtx: for PTX that the emulator does not know.
        """
        program = decoded(parse(ptx))
        return Code(program, ptx, source, max(shared_bytes, program.shared_bytes), dependent)


def launch(
    code: Code,
    grid: Sequence[int],
    arguments: Arguments,
    seed: int,
    limit: int = STEP_LIMIT,
    events: ctypes.Array[engine.EventRecord] | None = None,
) -> Counts:
    """Run a kernel and return its counters.

    Args:
        grid: blocks along three axes.
        limit: instructions after which a launch is taken to be endless.
        events: takes as many of its first events as it has room for.
    Raises:
        EmulationError: for the kernel's first fault.
        EnvironmentProblem: if there is no C++ compiler.
    """
    events = events or (engine.EventRecord * 0)()
    program = code.program
    params, maps = _pack(code, arguments.values)
    constants = [(ctypes.addressof(c), len(c)) for c in program.constants.values()]
    ranges = sorted({*arguments.buffers, *constants})
    buffers = (engine.Buffer * len(ranges))(*(engine.Buffer(*one) for one in ranges))
    tables = program.tables
    made = engine.Launch(
        program.instructions.buffer_info()[0],
        program.operands.buffer_info()[0],
        tables.buffer_info()[0],
        ctypes.addressof(buffers),
        ctypes.addressof(maps),
        ctypes.addressof(params),
        program.presets.buffer_info()[0],
        ctypes.addressof(events),
        len(program.kernel.instructions) + 1,
        len(ranges),
        len(maps),
        len(params),
        len(program.presets) // 2,
        program.file_bytes,
        program.registers,
        code.shared_bytes,
        program.local_bytes,
        program.kernel.threads,
        program.kernel.thread_registers,
        code.dependent,
        len(events),
        (ctypes.c_int64 * 3)(*grid),
        seed + 1,
        limit,
    )
    fault, counts = engine.FaultRecord(), engine.CountRecord()
    engine.load_engine().fusec_emulate(
        ctypes.byref(made), ctypes.byref(fault), ctypes.byref(counts)
    )
    if fault.code:
        raise EmulationError(_fault(code, fault))
    return Counts(*(getattr(counts, field.name) for field in fields(Counts)))


def _pack(
    code: Code, values: Sequence[Argument]
) -> tuple[ctypes.Array[ctypes.c_char], ctypes.Array[engine.TensorMap]]:
    """Return the parameters' bytes, and the tensor maps, each known by its parameter's offset."""
    params = code.program.kernel.params
    end = max((offset + size for _, offset, size in params), default=0)
    packed = bytearray(end + 16)
    maps = []
    for (_, offset, size), value in zip(params, values, strict=True):
        if isinstance(value, TensorMap):
            maps.append(_encode(value, PARAM_WINDOW + offset))
        else:
            packed[offset : offset + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    params_type = ctypes.c_char * len(packed)
    return params_type.from_buffer(packed), (engine.TensorMap * len(maps))(*maps)


def _encode(one: TensorMap, handle: int) -> engine.TensorMap:
    five = ctypes.c_int64 * 5
    lists = (five(*one.dims), five(*one.strides), five(*one.box))
    return engine.TensorMap(
        handle, one.base, len(one.dims), *lists, one.element, one.swizzle, one.nan_fill
    )


def _fault(code: Code, record: engine.FaultRecord) -> Fault:
    kind, kernel = KINDS[record.code], code.program.kernel.name
    return Fault(
        kernel,
        kind,
        meaning_of(kind, record.address, record.detail),
        _place(code, record.instruction),
        None if record.other < 0 else _place(code, record.other),
        tuple(record.block),
        record.warp,
        None if record.lane < 0 else record.lane,
        notation_of(code.source),
    )


def _place(code: Code, index: int) -> Place:
    instructions = code.program.kernel.instructions
    one = instructions[min(index, len(instructions) - 1)]
    lines = code.source.splitlines()
    known = 0 < one.place <= len(lines)
    source = lines[one.place - 1].strip() if known else ""
    text = code.ptx.splitlines()[one.line - 1].strip()
    return Place(one.line, text, one.place if known else 0, source)


# -- kernels of fusec ------------------------------------------------------------------------------


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first element, and the bytes up to its last one's end."""
    if not tensor.numel():
        return tensor.data_ptr(), 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel's code for the emulator, and how its descriptors are encoded."""

    kernel: TritonSource
    code: Code
    tiles: tuple[Mapping[str, Any], ...]

    @staticmethod
    def of(kernel: TritonSource, target: str = TARGET) -> Compiled:
        """Compile a kernel for a GPU.

        Raises:
            BuildError: if Triton or ptxas rejects it, or the GPU has less shared or tensor memory.
            UnknownPtx: for PTX that the emulator does not know.
        """
        asm = assembly_of(kernel, target)
        shared, limit = asm.metadata["shared"], PROCESSORS[target].shared_bytes
        if shared > limit:
            said = f"{shared} bytes of shared memory; {target} has {limit}"
            raise BuildError((f"a launch of {kernel.name}", target), said)
        columns, most = asm.metadata.get("tmem_size", 0), PROCESSORS[target].tensor_columns
        if columns > most:
            said = f"{columns} columns of tensor memory; {target} has {most}"
            raise BuildError((f"a launch of {kernel.name}", target), said)
        texts = asm.text("ptx"), kernel.source
        launched = bool(asm.metadata.get("launch_pdl"))
        code = Code.of(*texts, asm.metadata["shared"], dependent=launched)
        return Compiled(kernel, code, tuple(asm.metadata.get("tensordesc_meta") or ()))

    def arguments(self, args: Sequence[Any]) -> Arguments:
        """Return the arguments of a launch for tensors, then sizes.

        Raises:
            ValueError: for a descriptor that no driver would encode.
        """
        named = {n: arg for (n, _), arg in zip(self.kernel.signature, args, strict=False)}
        tensors = {n: arg for n, arg in named.items() if isinstance(arg, torch.Tensor)}
        sizes = {n: arg for n, arg in named.items() if isinstance(arg, int)}
        values: list[Argument] = [a if isinstance(a, int) else a.data_ptr() for a in args]
        for made, tile in zip(describe(self.kernel, tensors, sizes), self.tiles, strict=True):
            encoded = encode(made.base, made.shape, made.strides, tile)
            if encoded.problem():
                raise ValueError(f"kernel {self.kernel.name}: a descriptor: {encoded.problem()}")
            values += [encoded, *made.shape, *made.strides]
        scratch = len(self.code.program.kernel.params) - len(values)
        return Arguments((*values, *[0] * scratch), tuple(map(span, tensors.values())))


def encode(
    base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], tile: Mapping[str, Any]
) -> TensorMap:
    """Return the descriptor that Triton's launcher asks the driver for.

    Args:
        tile: Triton's metadata of it: block_size, elem_size, swizzle.
    """
    element = int(tile["elem_size"])
    return TensorMap(
        base.data_ptr(),
        tuple(reversed(shape)),
        tuple(s * element for s in reversed(strides)),
        tuple(reversed(tile["block_size"])),
        element,
        _SWIZZLES[tile["swizzle"]],
    )


class EmulatedKernel:
    """A stand-in for a loaded kernel: called with tensors on the CPU, then sizes.

    Like a real launch, it runs code with fewer assumptions where an address or a size is not the
    multiple of 16 that the kernel assumes. ``seed`` is that of the next launch: each has an order
    of warps of its own.
    """

    def __init__(self, kernel: TritonSource, seed: int = 0, target: str = TARGET) -> None:
        self.kernel = kernel
        self.seed = seed
        self.target = target
        self.counts = Counts()
        self._variant = functools.cache(self._compile)

    def _compile(self, divisible: tuple[int, ...]) -> Compiled:
        if divisible == self.kernel.divisible:
            return Compiled.of(self.kernel, self.target)
        return Compiled.of(replace(self.kernel.by_pointers(), divisible=divisible), self.target)

    def __call__(self, *args: Any) -> None:
        args = self.kernel.given(args)
        values = [arg if isinstance(arg, int) else arg.data_ptr() for arg in args]
        kept = tuple(p for p in self.kernel.divisible if values[p] % _MULTIPLE == 0)
        variant = self._variant(kept)
        sizes = {
            name: arg
            for (name, _), arg in zip(variant.kernel.signature, args, strict=False)
            if isinstance(arg, int)
        }
        grid = [eval(extent, {}, dict(sizes)) for extent in self.kernel.grid]
        if 0 in grid:
            return
        self.counts += launch(variant.code, grid, variant.arguments(args), self.seed)
        self.seed += 1


class EmulatedTable:
    """A stand-in for a loaded kernel of a table: called with the rows' tensors and sizes."""

    def __init__(self, kernel: TritonSource, seed: int = 0, target: str = TARGET) -> None:
        self.kernel = kernel
        self.seed = seed
        self.counts = Counts()
        unaligned = replace(kernel, source=kernel.pointer_source, pointer_source="")
        self._variant = functools.cache(
            lambda aligned: Compiled.of(kernel if aligned else unaligned, target)
        )

    def __call__(self, rows: table.Rows, sizes: table.RowSizes) -> None:
        places = table.find_places(sizes, self.kernel.blocks or "1")
        addresses = table.addresses(rows)
        variant = self._variant(table.are_multiples(addresses, _MULTIPLE))
        arrays = (torch.tensor(addresses), places.sizes, places.places)
        given = variant.arguments(arrays)
        spans = tuple(span(tensor) for row in rows for tensor in row)
        given = replace(given, buffers=(*given.buffers, *spans))
        if places.count:
            self.counts += launch(variant.code, (places.count, 1, 1), given, self.seed)
            self.seed += 1


def emulated(
    kernel: TritonSource, seed: int = 0, target: str = TARGET
) -> EmulatedKernel | EmulatedTable:
    """Return the stand-in for a kernel that is loaded on a GPU."""
    made = EmulatedKernel if kernel.blocks is None else EmulatedTable
    return made(kernel, seed, target)
