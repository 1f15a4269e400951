"""Build the sources of a compiled graph into the blobs that the cache keeps, for each language."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from fusec.codegen.host.wrapper import print_blocks
from fusec.codegen.targets import find_target
from fusec.codegen.triton import arguments, gluon
from fusec.driver.pipeline import Compiled, cpp_units
from fusec.errors import UsageError
from fusec.options import Options
from fusec.processors import PROCESSORS
from fusec.runtime.kernels import cpp_kernel
from fusec.runtime.progress import say

if TYPE_CHECKING:
    from fusec.runtime.kernels.triton_kernel import TritonSource


def _build_cpp(compiled: Compiled, target: str, options: Options) -> Mapping[str, bytes]:
    named = PROCESSORS.get(target)
    if named is not None and named.features.split()[0] != platform.machine():
        raise UsageError(f"{target} is built on x86_64 alone, and this is {platform.machine()}")
    width = cpp_kernel.vector_width() if named is None else named.lanes
    most = min(options.threads or os.cpu_count() or 1, torch.get_num_threads())
    least_text = find_target(target).machine.code.unit_text
    unit, *more = cpp_units(compiled, width, most, least_text)
    say(f"the C++ compiler builds kernels: {len(compiled.functions.functions)}")
    flags = (cpp_kernel.NATIVE,) if named is None else named.flags
    return {"kernels.so": cpp_kernel.build(unit, options, flags, more)}


def _build_triton(compiled: Compiled, target: str, options: Options) -> Mapping[str, bytes]:
    # Local: Triton takes 0.2 s to import, and only GPU graphs need it.
    from fusec.runtime.kernels import triton_kernel

    sources = [triton_source(compiled, name) for name in compiled.distinct]
    return triton_kernel.pack(sources, target, options.threads)


def triton_source(compiled: Compiled, name: str) -> TritonSource:
    """Return a GPU kernel as its build takes it."""
    from fusec.runtime.kernels import triton_kernel  # local, as above

    call = compiled.functions.calls[name]
    program, form = compiled.functions.functions[call.function], compiled.forms[call.function]
    descriptors = arguments.print_descriptors(form)
    unpromised = ""
    if program.table:
        unpromised = gluon.print_kernel(form, aligned=False)
    elif descriptors:
        unpromised = gluon.print_kernel(compiled.pointers[name])
    return triton_kernel.TritonSource(
        name,
        compiled.sources[name],
        tuple(arguments.signature(form).items()),
        arguments.divisible_by_16(program),
        arguments.print_grid(program),
        program.warps,
        program.stages,
        tuple(triton_kernel.TileDescriptor(*fields) for fields in descriptors),
        unpromised,
        print_blocks(program) if program.table else None,
        program.registers,
        program.name,
        call.number,
        program.dependent,
    )


BUILDS: Mapping[str, Callable[[Compiled, str, Options], Mapping[str, bytes]]] = {
    "cpp": _build_cpp,
    "triton": _build_triton,
}
"""The build of each language, from sources to the blobs that the cache keeps."""
