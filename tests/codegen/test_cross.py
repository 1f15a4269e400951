"""Kernels for a 64-bit Arm processor, built by a cross-compiler, run by an emulator of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fusec.codegen.cpp import printer as cpp
from fusec.errors import InvalidIR
from fusec.tools.interpreter.graph import run_graph
from tests.codegen.cpp.test_vector_tiles import alibi, causal, compiled, heads, tensor
from tests.codegen.cross import MISSING, Elsewhere
from tests.fuzz.graphs import copy_extern, example
from tests.fuzz.kernels import compile_example, run_kernels
from tests.fuzz.pipeline import small_target

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"this machine has no {MISSING}")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def built(programs: list[Any], at: Path) -> Elsewhere:
    return Elsewhere({p.name: cpp.print_kernel(p) for p in programs}, programs, at)


def test_kernels_of_random_graphs_compute_what_the_graphs_do(tmp_path: Path) -> None:
    cases = {}
    for seed in range(3000, 3012):
        drawn = example(seed, count=2 + seed % 6)
        try:
            schedule, lowered = compile_example(drawn, small_target("cpu", 4))
        except InvalidIR as error:  # the prover's limits, on some gathers below divisions
            assert "not provably" in str(error)
            continue
        programs = {k: replace(p, name=f"g{seed}_{k}") for k, p in lowered.items()}
        cases[seed] = drawn, schedule, programs
    machine = built([p for _, _, programs in cases.values() for p in programs.values()], tmp_path)
    wrong = []
    for seed, (drawn, schedule, programs) in cases.items():
        expected = run_graph(drawn.graph, drawn.inputs, copy_extern)
        found = run_kernels(schedule, programs, drawn.inputs, machine.launcher)
        if not all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True)):
            wrong.append(seed)
    machine.close()
    assert wrong == []


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.layer_norm(x, x.shape[-1:], w)) + x.cumsum(-1)


def halves(x: torch.Tensor) -> torch.Tensor:
    return (torch.softmax(x.half() * 2, -1).bfloat16() + x.int().bfloat16()).float()


def pooled(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(F.relu(x), 3, 2, 1).argmax(-1)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "norm": (norm, (tensor(6, 37), tensor(37, seed=1))),
    "16 bits": (halves, (tensor(5, 21),)),
    "pooling": (pooled, (tensor(2, 3, 9, 11),)),
    "few rows": (lambda w, x: F.silu(x @ w.t()), (tensor(24, 40), tensor(3, 40, seed=1))),
    "attention": (causal, heads(1, 2, 70, 24)),
    "ALiBi": (alibi, heads(1, 2, 33, 16)),
    "f64": (lambda x: torch.tanh(x).exp().sum(0), (tensor(9, 13, dtype=torch.float64),)),
}


def test_kernels_of_functions_agree_with_the_interpreter(tmp_path: Path) -> None:
    made = {name: compiled(fn, *inputs, width=4)[1] for name, (fn, inputs) in FUNCTIONS.items()}
    forms = {
        (name, kernel): replace(form, name=f"f{position}_{kernel}")
        for position, (name, one) in enumerate(made.items())
        for kernel, form in one.forms.items()
    }
    machine = built(list(forms.values()), tmp_path)
    for name, one in made.items():
        programs = {
            k: replace(p, name=forms[name, one.code[k]].name) for k, p in one.programs.items()
        }
        inputs = tuple(t.numpy() for t in FUNCTIONS[name][1])
        expected = run_graph(one.schedule, inputs)
        found = run_kernels(one.schedule, programs, inputs, machine.launcher)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5, err_msg=name)
    machine.close()
