"""Run a function in several processes that talk through gloo, with a hard limit of time.

Ranks meet through a file, so that no port is taken, and share the run's cache of compiled kernels,
as the ranks of one machine do. They are forks of one process that has imported what all need.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from fusec.driver.compiler import RECENT
from fusec.driver.trace import Trace
from tests.quick_build import quick_compiles_as_told

LIMIT_S = 240.0
"""When ranks are ended, in seconds. They need about 20 on two idle cores; a rank that waits for one
that failed would wait for half an hour."""


def run_ranks(worker: Callable[..., None], *args: Any, world: int = 2) -> None:
    """Run ``worker(rank, *args)`` in each of ``world`` processes; fail if one raises or all hang.

    Args:
        worker: a function of a module, for each process imports it.
    """
    set_forkserver_preload([__name__, worker.__module__])
    with tempfile.TemporaryDirectory() as directory:
        given = worker, world, directory, args
        context = multiprocessing.start_processes(
            _run_rank, given, world, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + LIMIT_S
        while not context.join(timeout=1.0):  # raises what a rank raised
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                pytest.fail(f"the ranks were not done after {LIMIT_S:.0f} s")


def _run_rank(
    rank: int, worker: Callable[..., None], world: int, directory: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{Path(directory) / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    try:
        with quick_compiles_as_told():
            worker(rank, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def compiled_graphs(*, name: str) -> list[Trace]:
    """Return the traces of this rank's compiles of forwards, or backwards; none fell back."""
    assert all(trace.problem is None for trace in RECENT), [t.problem for t in RECENT]
    return [trace for trace in RECENT if trace.name == name]
