"""Small kernels in PTX, written by hand: one instruction for each lane, or a few lines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fusec.tools.emulator.launch import Arguments, Code, Counts, launch

HEADER = """.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
"""
DECLARED = """
	.reg .pred %p<40>;
	.reg .b16 %h<40>;
	.reg .b32 %r<400>;
	.reg .b64 %d<40>;
"""


def kernel(body: str, params: int, threads: int = 32) -> str:
    """Return a module with a kernel ``k`` of 64-bit parameters; %r0 is the thread, %d0.. these."""
    listed = ",\n".join(f"	.param .u64 k_param_{n}" for n in range(params))
    loads = "\n".join(f"	ld.param.b64 %d{n}, [k_param_{n}];" for n in range(params))
    return (
        f"{HEADER}.visible .entry k(\n{listed}\n)\n.reqntid {threads}\n{{{DECLARED}"
        f"	mov.u32 %r0, %tid.x;\n{loads}\n{body}\n	ret;\n}}\n"
    )


def run(
    body: str,
    *arrays: NDArray[np.generic],
    threads: int = 32,
    shared: int = 0,
    seed: int = 0,
    blocks: int = 1,
    dependent: bool = False,
) -> Counts:
    """Run a kernel whose parameters are arrays, which it may read and write."""
    ptx = kernel(body, len(arrays), threads)
    code = Code.of(ptx, shared_bytes=shared, dependent=dependent)
    values = tuple(array.ctypes.data for array in arrays)
    buffers = tuple((array.ctypes.data, array.nbytes) for array in arrays)
    return launch(code, (blocks, 1, 1), Arguments(values, buffers), seed, limit=1_000_000)


_REGISTERS = {1: "%h", 2: "%h", 4: "%r", 8: "%d"}


def each_lane(text: str, result: type[np.generic], *arguments: NDArray[np.generic]) -> np.ndarray:
    """Return what one instruction makes of 32 lanes' arguments; it names them {0}, {1}..., {d}.

    A result of type bool is a predicate, and so is an argument.
    """
    lines, names = [], []
    for n, array in enumerate(arguments):
        size = array.dtype.itemsize
        register = f"{_REGISTERS[size]}{20 + n}"
        lines += [f"	mad.wide.u32 %d30, %r0, {size}, %d{n};"]
        lines += [f"	ld.global.b{8 * size} {register}, [%d30];"]
        if array.dtype == bool:
            lines += [f"	setp.ne.b16 %p{20 + n}, {register}, 0;"]
            register = f"%p{20 + n}"
        names.append(register)
    size = np.dtype(result).itemsize
    target = "%p35" if result is np.bool_ else f"{_REGISTERS[size]}35"
    lines.append("	" + text.format(*names, d=target))
    if result is np.bool_:
        lines.append("	selp.b16 %h35, 1, 0, %p35;")
    lines += [f"	mad.wide.u32 %d30, %r0, {size}, %d{len(arguments)};"]
    lines += [f"	st.global.b{8 * size} [%d30], {_REGISTERS[size]}35;"]
    out = np.zeros(32, result)
    run("\n".join(lines), *arguments, out)
    return out
