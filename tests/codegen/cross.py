"""Kernels of another processor: built by a cross-compiler, run by an emulator of that processor.

The executable is a server. It reads the number of a kernel, the lengths and bytes of its buffers
and its sizes from standard input, runs it, and writes its status and all buffers back.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fusec.codegen.cpp.prelude import prelude_of
from fusec.ir.program import Program
from fusec.runtime.kernels.cpp_kernel import FLAGS, OPTIMISE

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
"""What a machine lacks: the packages g++-aarch64-linux-gnu and qemu-user of Debian have both."""

_ELSEWHERE = {"-march=native", "-fopenmp", "-shared", "-fPIC"}
_SERVER = """
#include <cstdio>
#include <cstdlib>
template <class T> static bool take(T *to, size_t n = 1) {
  return fread(to, sizeof(T), n, stdin) == n;
}
int main() {
  long long head[3];
  while (take(head, 3)) {
    void *buffers[64]; long long bytes[64], sizes[64]; int status = 0;
    for (int k = 0; k < head[1]; ++k) {
      if (!take(&bytes[k])) return 1;
      buffers[k] = aligned_alloc(64, (bytes[k] + 127) / 64 * 64);
      if (bytes[k] && !take((char *)buffers[k], bytes[k])) return 1;
    }
    if (head[2] && !take(sizes, head[2])) return 1;
    switch (head[0]) {
%s
    }
    fwrite(&status, sizeof status, 1, stdout);
    for (int k = 0; k < head[1]; ++k) fwrite(buffers[k], 1, bytes[k], stdout), free(buffers[k]);
    fflush(stdout);
  }
}
"""


class Elsewhere:
    """Printed kernels on a 64-bit Arm processor, with vectors of four lanes.

    Args:
        sources: C++ by program.
    """

    def __init__(self, sources: Mapping[str, str], programs: Sequence[Program], at: Path) -> None:
        self.places = {program.name: k for k, program in enumerate(programs)}
        unit = prelude_of(4, programs)
        unit += "\n".join(sources[program.name] for program in programs)
        unit += _SERVER % "\n".join(map(self._case, programs))
        (at / "kernels.cpp").write_text(unit)
        flags = [flag for flag in FLAGS if flag not in _ELSEWHERE]
        command = [COMPILER, *flags, *OPTIMISE, "-static", "kernels.cpp", "-o", "kernels"]
        subprocess.run(command, cwd=at, check=True)
        self.process = subprocess.Popen(
            [EMULATOR, str(at / "kernels")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def _case(self, program: Program) -> str:
        given = [f"any{{buffers[{k}]}}" for k in range(len(program.buffers))]
        given += [f"sizes[{k}]" for k in range(len(program.sizes))]
        call = f"{program.name}({', '.join([*given, '&status'])})"
        return f"      case {self.places[program.name]}: {call}; break;"

    def launcher(self, program: Program) -> Callable[..., None]:
        """Return what runs a kernel in place: called with contiguous tensors, then sizes."""
        return lambda *args: self._run(program, args)

    def _run(self, program: Program, args: tuple[Any, ...]) -> None:
        tensors, sizes = args[: len(program.buffers)], args[len(program.buffers) :]
        raw = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in tensors]
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(struct.pack("<3q", self.places[program.name], len(raw), len(sizes)))
        for content in raw:
            stdin.write(struct.pack("<q", content.nbytes) + content.tobytes())
        stdin.write(struct.pack(f"<{len(sizes)}q", *sizes))
        stdin.flush()
        (status,) = struct.unpack("<i", stdout.read(4))
        assert status == 0, f"{program.name} reports {status}"
        for content in raw:
            content[:] = memoryview(stdout.read(content.nbytes))

    def close(self) -> None:
        self.process.communicate(timeout=60)
