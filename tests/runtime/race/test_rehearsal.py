"""First runs in a helper process: what crashes or hangs there, and what the race's process sees."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from fusec.errors import KernelFault
from fusec.runtime.race import rehearsal
from fusec.runtime.race.rehearsal import TensorSpec, rehearse
from tests.limits import descriptors_up_to

CPU = torch.device("cpu")
SPEC = TensorSpec((4, 8), (8, 1), torch.float32)

WRAPPERS = {
    "sound": "x, n = args; x.mul_(n)",
    "crash": "import os; os.abort()",
    "hang": "import time; time.sleep(1000)",
    "error": "raise RuntimeError('CUDA error: an illegal memory access was encountered')",
    "memory": "import torch; raise torch.OutOfMemoryError('CUDA out of memory')",
}


def run(kind: str, **limits: float) -> None:
    wrapper = f"def call(args):\n    {WRAPPERS[kind]}\n"
    rehearse(wrapper, {}, (SPEC, 3), CPU, **limits)


@pytest.fixture(scope="module", autouse=True)
def helper() -> Iterator[None]:
    yield
    for one in rehearsal._helpers:
        one.end()
    rehearsal._helpers.clear()


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    rehearsal._seen.clear()


def test_what_runs_well_runs_once_in_one_process() -> None:
    run("sound")
    (first,) = rehearsal._helpers
    run("sound")
    run("memory")  # the model has it: not tried there, and no fault of the candidate's
    assert rehearsal._helpers == [first] and first.process.pid != os.getpid()
    assert len(rehearsal._seen) == 2


def test_a_helper_that_ended_is_made_anew() -> None:
    run("sound")
    (before,) = rehearsal._helpers
    before.process.kill()
    before.process.wait()
    rehearsal._seen.clear()
    run("sound")
    (after,) = rehearsal._helpers
    assert after is not before and after.is_alive


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("crash", r"ended its process \(exit status -6\)"),
        ("hang", "did not end in 0.5 s"),
        ("error", "raised RuntimeError: CUDA error: an illegal memory access"),
    ],
)
def test_a_fault_ends_the_helper_and_not_this_process(kind: str, seen: str) -> None:
    run("sound")
    (before,) = rehearsal._helpers
    with pytest.raises(KernelFault, match=seen):
        run(kind, run_s=0.5 if kind == "hang" else 60.0)
    assert not before.is_alive and not rehearsal._helpers and len(rehearsal._seen) == 1


def test_without_a_second_process_the_race_goes_on() -> None:
    for one in rehearsal._helpers:
        one.end()
    rehearsal._helpers.clear()
    with descriptors_up_to(1):  # a pipe has two
        run("crash")
    assert not rehearsal._helpers


def test_random_tensors_have_the_strides_that_were_traced() -> None:
    made = TensorSpec((2, 3), (1, 2), torch.int64).random(CPU)
    assert (made.shape, made.stride(), made.any().item()) == ((2, 3), (1, 2), False)
    assert TensorSpec((64,), (1,), torch.bool).random(CPU).unique().tolist() == [False, True]
