"""Runs: which kernels one call launches, its function, and that an error says where it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fusec.codegen.host.runs import print_run, run_codes
from fusec.codegen.host.wrapper import print_wrapper
from fusec.codegen.targets import find_target
from fusec.errors import IndexOutOfRange
from fusec.ir.dtype import F32
from fusec.ir.host import NativeRun
from fusec.ir.program import Program
from fusec.passes.fusion.fuse import separate
from fusec.passes.memory.buffers import plan_host
from fusec.runtime.kernels.cpp_kernel import CppKernel
from tests.calls import Call, calls_of
from tests.codegen.host.test_wrapper import chain
from tests.fuzz.pipeline import lower_all

FEW = 1 << 18
"""Bytes of a run."""


def lowered(count: int) -> tuple[str, dict[str, Program]]:
    """Return the wrapper of a chain of kernels, and their programs."""
    schedule = separate(chain(*[F32] * count)[0])
    programs = lower_all(schedule, find_target("cpu"))
    host = plan_host(schedule, run_bytes=FEW)
    return print_wrapper(host, programs, {k: k for k in programs}), programs


def test_kernels_that_follow_each_other_are_one_call() -> None:
    text, programs = lowered(3)
    launches = [line.strip() for line in text.splitlines() if "(x" in line]
    assert launches == ["k0_to_k2(x, t0, t1, t2)"]
    assert text.index("t2 = t0  # memory reused") < text.index("k0_to_k2") < text.index("del t1")
    schedule = separate(chain(*[F32] * 3)[0])
    host = plan_host(schedule, run_bytes=FEW)
    ((_, code),) = run_codes(host, programs, {k: k for k in programs}).items()
    function = print_run(code, {n: replace(p, name=f"neg_{n}") for n, p in programs.items()})
    assert function.splitlines() == [
        'extern "C" void k0_to_k2(any b0, any b1, any b2, any b3, int *status) {',
        "  neg_k0(b0, b1, status);",
        "  if (*status) { return; }",
        "  neg_k1(b1, b2, status);",
        "  if (*status) { *status += 4; return; }",
        "  neg_k2(b2, b3, status);",
        "  if (*status) { *status += 8; return; }",
        "}",
    ]


def test_runs_of_alike_kernels_share_a_function() -> None:
    schedule = separate(chain(*[F32] * 6)[0])
    programs = lower_all(schedule, find_target("cpu"))
    host = plan_host(schedule, run_bytes=FEW)
    (run,) = (s for s in host.statements if isinstance(s, NativeRun))
    apart = replace(host, statements=(NativeRun(run.kernels[:3]), NativeRun(run.kernels[3:])))
    alike = run_codes(apart, programs, dict.fromkeys(programs, "k0"))
    assert [code.name for code in alike.values()] == ["k0_to_k2", "k0_to_k2"]
    different = run_codes(apart, programs, {k: k for k in programs})
    assert [code.name for code in different.values()] == ["k0_to_k2", "k3_to_k5"]


def scans(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Three kernels: what a scan returns, the next reads elsewhere."""
    first = torch.softmax(x, -1).cumsum(0)
    second = torch.softmax(first[places], -1).cumsum(0)
    return torch.softmax(second, -1)


@pytest.fixture
def launched() -> Iterator[list[Call]]:
    with calls_of(CppKernel.__call__) as calls:
        yield calls


def names(launched: list[Call]) -> list[str]:
    return [call.arguments["self"].name for call in launched]


def test_a_run_computes_what_its_kernels_do_and_says_which_failed(launched: list[Call]) -> None:
    x, places = torch.randn(8, 16), torch.tensor([3, 0, 7, 7])
    compiled = torch.compile(scans, backend="fusec")
    torch.testing.assert_close(compiled(x, places), scans(x, places))
    (name,) = names(launched)
    assert "_to_" in name
    with pytest.raises(IndexOutOfRange, match=r"index out of range in \w+_k\d .*test_runs\.py.*"):
        compiled(x, torch.tensor([3, 0, 8, 7]))
    torch.testing.assert_close(compiled(x, places), scans(x, places))


def test_kernels_of_much_memory_are_launched_each_by_itself(launched: list[Call]) -> None:
    """Those behind them allocate nothing: they write what the first ones left."""
    torch._dynamo.reset()  # whatever sizes an earlier test has called it with
    x, places = torch.randn(256, 512), torch.arange(256)
    torch.testing.assert_close(torch.compile(scans, backend="fusec")(x, places), scans(x, places))
    first, second, *_ = names(launched)
    assert "_to_" not in first + second
