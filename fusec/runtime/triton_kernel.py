"""Build printed Triton kernels, down to SASS on any machine, and launch them.

The only module that knows Triton's Python interface; written for Triton 3.6 and 3.7, whose compile
and ``compiled.run`` interfaces are the same.
"""

from __future__ import annotations

import hashlib
import linecache
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from fusec.errors import BuildError, EnvironmentProblem, UsageError

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
"""Targets that a test covers; others of the same families may work."""


@dataclass(frozen=True)
class CompiledAsm:
    """A kernel compiled for a target, with the text of every stage."""

    name: str
    target: str
    compiled: Any

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What Triton says of the kernel: ``num_warps``, ``shared`` (bytes) and more."""
        fields: Mapping[str, Any] = self.compiled.metadata._asdict()
        return fields

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that ``text`` knows for this target, in order."""
        if self.target.startswith("sm_"):
            return ("ttir", "ttgir", "llir", "ptx", "sass")
        return ("ttir", "ttgir", "llir", "amdgcn")

    def text(self, stage: str) -> str:
        """Return the text of a stage.

        Raises:
            UsageError: for a stage that the target does not have.
        """
        if stage not in self.stages:
            raise UsageError.unknown("stage", stage, self.stages)
        return str(self.compiled.asm[stage])

    @cached_property
    def binary(self) -> bytes:
        """The machine code: a cubin, or an hsaco."""
        return bytes(self.compiled.kernel)


def parse_target(target: str) -> GPUTarget:
    """Return Triton's target for "sm_90", "gfx942"...

    Raises:
        UsageError: for anything else.
    """
    if match := re.fullmatch(r"sm_(\d{2,3})a?", target):
        return GPUTarget("cuda", int(match[1]), 32)
    if match := re.fullmatch(r"gfx([0-9a-f]{3,4})", target):
        return GPUTarget("hip", target, 64 if match[1].startswith("9") else 32)
    raise UsageError.unknown("target", target, TARGETS)


def load_function(source: str, name: str) -> JITFunction[Any]:
    """Return the kernel ``name`` of a printed module.

    Raises:
        EnvironmentProblem: where TRITON_INTERPRET makes Triton hand out no kernel that compiles.
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


def compile_offline(
    source: str,
    name: str,
    signature: Mapping[str, str],
    divisible: Sequence[int],
    target: str,
    *,
    num_warps: int = 4,
    num_stages: int = 1,
) -> CompiledAsm:
    """Compile a printed kernel for ``target``; no device is needed.

    Args:
        signature: Triton type of each parameter, in order.
        divisible: positions of the arguments that are multiples of 16 (addresses in bytes).
    Raises:
        BuildError: if Triton or ptxas rejects the kernel.
    """
    compiled = _compile(
        source, name, signature, divisible, parse_target(target), num_warps, num_stages
    )
    return CompiledAsm(name, target, compiled)


def _compile(
    source: str,
    name: str,
    signature: Mapping[str, str],
    divisible: Sequence[int],
    target: GPUTarget,
    num_warps: int,
    num_stages: int,
) -> Any:
    attributes = {(position,): [["tt.divisibility", 16]] for position in divisible}
    ast = ASTSource(load_function(source, name), dict(signature), {}, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    try:
        return triton.compile(ast, target=target, options=options)
    except Exception as error:  # Triton's front end, MLIR and ptxas raise many unrelated types
        command = ("triton.compile", name, f"--target={target.backend}:{target.arch}")
        raise BuildError(command, f"{type(error).__name__}: {error}") from error
