"""First contact: a kernel of each family, launched and compared with fp64, in a process of its own.

An illegal address loses the device's context, and a hang never ends: so the families run in a
child, which prints a line of JSON after each. Where it dies or is silent for too long, the family
that it was at is what broke, and another child goes on behind it. Sizes are small and divide no
tile; products are fused whether or not that is fast.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench import gpu_measure
from bench.workload import Case, Workload

ROOT = Path(__file__).resolve().parent.parent
SILENT_S = 90.0
"""Seconds for one family: to import torch, to compile, and to run for some milliseconds."""
PEER = "fusec-fused"

Shapes = tuple[tuple[int, ...], ...]


def _gelu(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + b)


def _norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def _loss(x: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(x.float(), -1)


def _columns(x: torch.Tensor) -> torch.Tensor:
    return x.float().sum(0)


def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b))


def _swiglu(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.silu(x @ a) * (x @ b)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[-2] > 1)


def _family(
    name: str, call: Callable[..., torch.Tensor], *shapes: tuple[int, ...], train: bool = False
) -> Workload:
    def build(dtype: torch.dtype, device: str, shrink: int) -> Case:
        scaled = [torch.randn(*shape, device=device) * shape[-1] ** -0.25 for shape in shapes]
        return Case(call, tuple(tensor.to(dtype) for tensor in scaled))

    return Workload("first contact", name, build, train=train, dtype="bf16", peers=("eager", PEER))


FAMILIES = (
    _family("pointwise", _gelu, (1000, 1030), (1030,)),
    _family("rows", _norm, (300, 1000), (1000,), (1000,)),
    _family("very many rows, in turn", _norm, (70000, 520), (520,), (520,)),
    _family("rows in a loop", _loss, (20, 40001)),
    _family("columns", _columns, (3000, 520)),
    _family("rows beside column sums", _norm, (3000, 768), (768,), (768,), train=True),
    _family("product", _linear, (200, 264), (328, 264), (328,)),
    _family("product of odd sizes", _linear, (129, 65), (257, 65), (257,)),
    _family("product of few rows", _linear, (16, 4096), (1024, 4096), (1024,)),
    _family("two products", _swiglu, (136, 200), (200, 136), (200, 136)),
    _family("attention", _attention, *[(2, 4, 200, 64)] * 3),
    _family("attention, training", _attention, *[(2, 4, 200, 64)] * 3, train=True),
    _family("one query", _attention, (2, 4, 1, 64), *[(2, 4, 2000, 64)] * 2),
)
"""In the order in which what comes later needs what came before."""


def touch(family: Workload, device: str) -> dict[str, Any]:
    """Compile, run and compare one family; return its entry, as of a peer in ``record``."""
    found = gpu_measure.compare(family, device, PEER)
    if device == "cuda":
        torch.cuda.synchronize()
    return found


def contact(
    device: str,
    note: Callable[[dict[str, dict[str, Any]]], None],
    *,
    silent_s: float = SILENT_S,
    names: Sequence[str] = tuple(family.name for family in FAMILIES),
    command: Sequence[str] = (sys.executable, "-m", "bench.gpu_contact"),
) -> dict[str, dict[str, Any]]:
    """Return what became of each family, in children that end with the first fault.

    Args:
        note: gets all that is known after each family.
        command: of a child, which gets the device and the names of families.
    """
    found: dict[str, dict[str, Any]] = {}
    while left := names[len(found) :]:
        ended = _child((*command, device, *left), found, note, silent_s)
        if len(names) > len(found):
            found[names[len(found)]] = {"failed": ended}
            note(found)
    return found


def _child(
    command: Sequence[str],
    found: dict[str, dict[str, Any]],
    note: Callable[[dict[str, dict[str, Any]]], None],
    silent_s: float,
) -> str:
    """Run families in one child until it ends; return how it ended."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_hand_on, args=(process, lines), daemon=True).start()
    try:
        while line := lines.get(timeout=silent_s):
            name, entry = json.loads(line)
            found[name] = entry
            note(found)
        return f"its process ended with {process.wait()}"
    except queue.Empty:
        return f"silent for {silent_s:.0f} s"
    finally:
        process.kill()
        process.wait()


def _hand_on(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("["):  # what else libraries print is no result
            lines.put(line)
    lines.put("")


def main(device: str, names: Sequence[str]) -> None:
    """Touch families one after the other; a line of JSON each: its name, and what was found."""
    for family in FAMILIES:
        if family.name in names:
            print(json.dumps([family.name, touch(family, device)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
