"""Faults planted in printed text are found where it runs: kernels beside their programs' meaning.

See ``tests/test_planted.py`` for those of the stages before.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusec.archive.graph import load_kernels
from fusec.codegen.cpp import printer as cpp
from fusec.codegen.cpp.prelude import prelude
from fusec.codegen.triton import gluon
from fusec.driver.build import BUILDS
from fusec.driver.compiler import target_for
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import compile_to_source, kernel_rows
from fusec.driver.trace import Trace
from fusec.ir.program import Program
from fusec.options import Options
from fusec.runtime.calls import executable
from fusec.runtime.calls.executable import BoxedCall
from fusec.runtime.calls.outside import of_graph
from fusec.runtime.kernels import cpp_kernel
from fusec.tools.bisect.interpret import fill
from fusec.tools.interpreter.expression import Env
from fusec.tools.interpreter.program import run_program
from fusec.tools.report.observe import observe
from tests.codegen.programs import form_of
from tests.fuzz.kernels import launch_on
from tests.stages import step_of
from tests.triton_interpreter import interpret

Launch = Callable[..., None]

NORM = {16: "norm", 8: "norm of 8 lanes"}
"""Lanes of this machine's vectors -> the example whose kernel runs here."""
LANES = cpp_kernel.vector_width()

# What is printed -> what is not meant.
CPP = {
    "another operation": (" - v_f32(", " + v_f32("),
    "a store that goes elsewhere": ("st_bf16(p_to_copy_1 + (", "st_bf16(p_to_copy_1 + 0 * ("),
    "lanes folded by another monoid": ("f_hsum(", "f_hmax("),
    "a loop that ends early": (f"i_i1o < {64 // LANES};", "i_i1o < 3;"),
    "another number": ("0.015625f", "0.03125f"),
    "a load of another buffer": ("ld_bf16(p_arg0_1 + ", "ld_bf16(p_arg1_1 + "),
}
TRITON = {
    "another operation": ("v_sum_1 - v_amax", "v_amax - v_sum_1"),
    "rows that overlap": ("i0 * 512 + r1i)", "i0 * 511 + r1i)"),
    "lanes folded by another monoid": ("= tl.sum(", "= tl.max("),
    "another number": ("1.0 - tail", "0.5 - tail"),
    "a lane too many": ("tl.arange(0, 512)", "1 + tl.arange(0, 512)"),
}


def program_of(example: str) -> Program:
    (program,) = step_of("lower", example).after.values()
    return program


def agree(program: Program, launch: Launch) -> bool:
    """Return whether a printed kernel stores what its program means."""
    runs: list[dict[Any, Any]] = []
    for run in (
        lambda env: run_program(program, env.storage, {}),
        lambda env: launch_on(env, program, launch),
    ):
        env = Env(sizes={})
        for buffer in program.buffers:
            fill(buffer.base, env)
        run(env)
        runs.append(env.storage)
    return all(
        np.allclose(runs[0][b.base], runs[1][b.base], rtol=2e-2, atol=2e-2) for b in program.writes
    )


@pytest.fixture(scope="module")
def kernels() -> dict[str, Launch]:
    """Return the C++ kernel as it is printed and with each fault, built in one unit."""
    program = program_of(NORM[LANES])
    text = cpp.print_kernel(program)
    named = {"": f" {program.name}("} | {f: f" wrong{n}(" for n, f in enumerate(CPP)}
    unit = prelude(LANES)
    for fault, name in named.items():
        right, wrong = CPP.get(fault, ("", ""))
        assert right in text, f"the kernel has no {right}"
        unit += text.replace(f" {program.name}(", name).replace(right, wrong)
    folder = Path(tempfile.mkdtemp(prefix="fusec-test-"))
    (folder / "kernels.so").write_bytes(cpp_kernel.build(unit, Options()))
    row = {
        "buffers": len(program.buffers),
        "sizes": 0,
        "parts": [(program.name, "test.py:1")],
        "blocks": None,
    }
    names = [name.strip(" (") for name in named.values()]
    rows = [{"name": name, "function": name, **row} for name in names]
    loaded = cpp_kernel.load(folder / "kernels.so", rows)
    return {fault: loaded[name.strip(" (")] for fault, name in named.items()}


@pytest.mark.skipif(cpp_kernel.find_compiler(None) is None, reason="needs a C++ compiler")
@pytest.mark.skipif(LANES not in NORM, reason="no x86-64 with AVX2")
@pytest.mark.parametrize("fault", ("", *CPP))
def test_a_fault_of_a_cpp_kernel_is_found(fault: str, kernels: dict[str, Launch]) -> None:
    assert agree(program_of(NORM[LANES]), kernels[fault]) == (fault == "")


@pytest.mark.sampled(13)
@pytest.mark.parametrize("fault", ("", *TRITON))
def test_a_fault_of_a_triton_kernel_is_found(fault: str) -> None:
    program = program_of("statistics")
    right, wrong = TRITON.get(fault, ("", ""))
    text = gluon.print_kernel(form_of(program))
    assert right in text, f"the kernel has no {right}"
    spoilt = text.replace(right, wrong)

    def launch(*args: Any) -> None:
        interpret(spoilt, program.name, (256, 1, 1), args)

    assert agree(program, launch) == (fault == "")


# -- the wrapper -----------------------------------------------------------------------------------

WRAPPER = {
    "arguments of a kernel exchanged": ("k3(sort_0, add)", "k3(add, sort_0)"),
    "a kernel left out": ("    k0_to_k2(arg0_1, sum_1_part, sum_1, sum_2)\n", ""),
    "memory of a live value given away": ("empty((40000,), (1,), f32)", "arg0_1.view(-1)[-40000:]"),
    "outputs in another order": ("return (sum_2, add)", "return (add, sum_2)"),
    "other strides": ("sum_2 = empty((40000,), (1,)", "sum_2 = empty((40000,), (2,)"),
}


def chain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = (x * 2).sum(0)
    return (x - y).sum(1), torch.sort(y)[0] * 3 + 1


ROWS = torch.arange(160000.0).view(40000, 4).sin()


@pytest.fixture(scope="module")
def bound() -> Callable[[str, str], BoxedCall]:
    """Return what binds the kernels of `chain` to its wrapper, with one text put for another."""
    (seen,) = observe(chain, [ROWS], train=False, dynamic=False)
    options, cpu = Options(), torch.device("cpu")
    target = target_for(cpu, options)
    compiled = compile_to_source(seen.graph, CompileContext(target, options, Trace("chain")))
    kernels = load_kernels(BUILDS["cpp"](compiled, "cpu", options), kernel_rows(compiled), cpu)

    def bind(right: str, wrong: str) -> BoxedCall:
        assert right in compiled.wrapper, f"the wrapper has no {right}"
        wrapper = compiled.wrapper.replace(right, wrong) if right else compiled.wrapper
        return executable.bind(wrapper, kernels, of_graph(seen.graph), cpu)

    return bind


@pytest.mark.parametrize("fault", ("", *WRAPPER))
def test_a_fault_of_the_wrapper_is_found(
    fault: str, bound: Callable[[str, str], BoxedCall]
) -> None:
    found = bound(*WRAPPER.get(fault, ("", "")))([ROWS.clone()])
    expected = chain(ROWS)
    same = all(
        a.shape == b.shape and a.stride() == b.stride() and torch.allclose(a, b, 1e-4, 1e-2)
        for a, b in zip(found, expected, strict=True)
    )
    assert same == (fault == "")
