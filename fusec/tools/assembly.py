"""The texts of a Triton kernel's stages, down to SASS on any machine.

Worked example::

    asm = assembly_of(kernel, "sm_90")
    asm.text("ptx")
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fusec.errors import BuildError, UsageError
from fusec.runtime.kernels.triton_interior import disassembler
from fusec.runtime.kernels.triton_kernel import TritonSource, compile_kernel


@dataclass(frozen=True)
class Assembly:
    """A kernel compiled for a target, with the text of every stage."""

    name: str
    target: str
    compiled: Any

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Triton's metadata of the kernel: ``num_warps``, ``shared`` (bytes) and more."""
        fields: Mapping[str, Any] = self.compiled.metadata._asdict()
        return fields

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that ``text`` knows for this target, in order."""
        asm = self.compiled.asm
        printed = (stage for stage in ("ttir", "ttgir", "llir", "ptx", "amdgcn") if stage in asm)
        return (*printed, "sass") if "cubin" in asm else tuple(printed)

    def text(self, stage: str) -> str:
        """Return the text of a stage.

        Raises:
            UsageError: for a stage that the target does not have.
        """
        if stage not in self.stages:
            raise UsageError.unknown("stage", stage, self.stages)
        return self.sass if stage == "sass" else str(self.compiled.asm[stage])

    @cached_property
    def sass(self) -> str:
        """The disassembled machine code of an NVIDIA target."""
        with tempfile.NamedTemporaryFile(prefix="fusec-", suffix=".cubin") as file:
            file.write(self.compiled.kernel)
            file.flush()
            command = [disassembler(), "-c", file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(command, done.stderr, done.returncode)
        return done.stdout


def assembly_of(kernel: TritonSource, target: str) -> Assembly:
    """Compile a kernel for ``target``, such as "sm_90"; no device is needed.

    Raises:
        BuildError: if Triton or ptxas rejects the kernel.
        UsageError: if there is no such target.
    """
    return Assembly(kernel.name, target, compile_kernel(kernel, target))
