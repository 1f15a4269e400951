"""A candidate's first run on a device happens in a process of its own.

An access out of bounds or a hang is no exception that a race can catch: the device's context is
lost for all of a process, eager kernels included. So a race has each candidate that this process
has not seen run once in a *helper*, on inputs of the same shapes: one that ends badly is dropped,
and its verdict says so. The helper is one process, started at the first race on a GPU (torch and
Triton take some seconds), made anew after a fault, and gone when it has had nothing to do for a
minute: its context takes some 500 MB of the device's memory.

What cannot be rehearsed is not: where there is no second context (a device in exclusive mode) or no
memory for another set of inputs and outputs, the race goes on as it would without a helper.

Worked example::

    rehearse(wrapper, blobs, (TensorSpec((4, 8), (8, 1), torch.bfloat16),), torch.device("cuda", 0))
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import TypeAlias

import torch

from fusec.errors import KernelFault
from fusec.runtime.calls import executable
from fusec.runtime.calls.outside import NOTHING

logger = logging.getLogger("fusec.race")

START_S = 120.0
"""Seconds for a helper to import torch and Triton and to make a context."""
RUN_S = 20.0
"""Seconds for one run, loading included: a kernel that takes longer hangs, or wins no race."""
IDLE_S = 60.0
"""Seconds without a task after which a helper ends."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of random numbers, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def random(self, device: torch.device) -> torch.Tensor:
        """Return one: normal numbers, integers 0 (in range of any gather)."""
        length = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        if self.dtype is torch.bool:
            flat = torch.rand(length, device=device) > 0.5
        elif self.dtype.is_floating_point:
            flat = torch.randn(length, device=device, dtype=torch.float32).to(self.dtype)
        else:
            flat = torch.zeros(length, device=device, dtype=self.dtype)
        return flat.as_strided(self.shape, self.strides)


Arguments: TypeAlias = Sequence[TensorSpec | int]


def rehearse(
    wrapper: str,
    blobs: Mapping[str, bytes],
    arguments: Arguments,
    device: torch.device,
    *,
    run_s: float = RUN_S,
) -> None:
    """Run a candidate once in the helper, unless this process has seen it run.

    Args:
        wrapper, blobs: as printed and built; a wrapper that calls kernels alone.
    Raises:
        KernelFault: if it crashed the helper, hung or raised an error.
    """
    task = pickle.dumps((wrapper, dict(blobs), tuple(arguments), device))
    key = hashlib.sha256(task).hexdigest()
    with _lock:
        if key not in _seen:
            _run(task, run_s)
            _seen.add(key)


_lock = threading.Lock()
_seen: set[str] = set()
_helpers: list[_Helper] = []
"""The helper of this process, if there is one."""


@dataclass(frozen=True, slots=True)
class _Helper:
    process: subprocess.Popen[bytes]
    connection: Connection

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """End the process, whatever it does."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def _run(task: bytes, run_s: float) -> None:
    helper = _ready_helper()
    if helper is None:
        return
    problem = "failed"
    try:
        helper.connection.send_bytes(task)
        if not helper.connection.poll(run_s):
            problem = f"did not end in {run_s:g} s"
        else:
            problem = helper.connection.recv()
    except (EOFError, OSError):
        problem = f"ended its process (exit status {helper.process.wait()})"
    if problem == _NO_MEMORY:
        logger.debug("a candidate was not rehearsed: there was no memory for it beside the model")
    elif problem:
        _helpers.clear()
        helper.end()
        raise KernelFault(problem)


def _ready_helper() -> _Helper | None:
    """Return a helper that waits for a task, a new one if need be; None if there can be none."""
    if _helpers and _helpers[0].is_alive:
        return _helpers[0]
    _helpers.clear()
    helper = None
    try:
        helper = _start()
        if helper.connection.poll(START_S) and helper.connection.recv() == _READY:
            _helpers.append(helper)
            return helper
    except (EOFError, OSError) as error:
        logger.debug("no process for first runs", exc_info=error)
    if helper is not None:
        helper.end()
    return None


def _start() -> _Helper:
    ours, theirs = Pipe()
    code = f"from fusec.runtime.race import rehearsal; rehearsal.serve({theirs.fileno()})"
    # As this process finds fusec, but without what its main module does.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's interrupt is this process's, no candidate's fault
    )
    theirs.close()
    return _Helper(process, ours)


# -- in the helper ---------------------------------------------------------------------------------

_READY = "ready"
_NO_MEMORY = "no memory"


def serve(file: int) -> None:
    """Run candidates that come through a pipe, until none does; answer what went wrong, or ""."""
    connection = Connection(file)
    if torch.cuda.is_available():
        torch.cuda.init()
    connection.send(_READY)
    with contextlib.suppress(EOFError, OSError):  # the other end is gone
        while connection.poll(IDLE_S):
            connection.send(_outcome(connection.recv_bytes()))


def _outcome(task: bytes) -> str:
    """Return what went wrong in a run, or ""."""
    try:
        _perform(*pickle.loads(task))
    except torch.OutOfMemoryError:
        return _NO_MEMORY
    except Exception as error:  # of the driver, of a launcher
        return f"raised {type(error).__name__}: {error}"
    return ""


def _perform(
    wrapper: str, blobs: Mapping[str, bytes], arguments: Arguments, device: torch.device
) -> None:
    kernels = {}
    if "triton.json" in blobs:
        # Local: the parent may have no use for Triton.
        from fusec.runtime.kernels import triton_kernel

        kernels = triton_kernel.unpack(blobs, device.index or 0)
    call = executable.bind(wrapper, kernels, NOTHING, device)
    given = [a.random(device) if isinstance(a, TensorSpec) else a for a in arguments]
    call(given)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
