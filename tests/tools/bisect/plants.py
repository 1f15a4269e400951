"""Faults of fusec for ``fusec bisect`` to find, planted when a process starts.

A bisection runs programs in processes of their own, so a test writes a ``sitecustomize`` that calls
one of these, and every Python process has the fault, as it would have a real one.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import fx

from fusec.driver import backend, compiler, stages
from fusec.ir.choice import Decided
from fusec.ir.expr import Expr, Op
from fusec.ir.graph import Def, Graph, Line
from fusec.ir.rewrite import rewrite
from fusec.runtime.calls import executable
from tests.planted import adds_a_hundredth

Launch = Callable[..., None]


def wrong_kernel() -> None:
    """Each kernel with a tanh is off by a hundredth, however it was built."""
    _around_kernels(adds_a_hundredth)


def wrong_for_large() -> None:
    """Each kernel with a tanh is off by a hundredth where it is given a value over 50."""
    _around_kernels(_for_large(adds_a_hundredth))


def failing_for_large() -> None:
    """Each kernel with a tanh raises where it is given a value over 50."""
    _around_kernels(_for_large(lambda launch: lambda *args: int("a planted crash")))


def killing_for_large() -> None:
    """Each kernel with a tanh ends its process by a signal where it is given a value over 50."""
    _around_kernels(_for_large(lambda launch: lambda *args: os.kill(os.getpid(), signal.SIGFPE)))


def _for_large(change: Callable[[Launch], Any]) -> Callable[[Launch], Launch]:
    """Return a change of those launches alone that read, and do not write, a value over 50."""

    def around(launch: Launch) -> Launch:
        off = change(launch)

        def run(*args: Any) -> None:
            floats = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
            before = [one.clone() for one in floats]
            launch(*args)
            read = [one for one, old in zip(floats, before, strict=True) if torch.equal(one, old)]
            if any(bool((one > 50).any()) for one in read):
                for one, old in zip(floats, before, strict=True):
                    one.copy_(old)
                off(*args)

        return run

    return around


def slow_kernel() -> None:
    """Each kernel with a tanh takes two milliseconds more."""

    def slow(launch: Launch) -> Launch:
        def run(*args: Any) -> None:
            end = time.perf_counter() + 2e-3
            while time.perf_counter() < end:
                pass
            launch(*args)

        return run

    _around_kernels(slow)


def _wait() -> None:
    end = time.perf_counter() + 2e-3
    while time.perf_counter() < end:
        pass


def slow_library() -> None:
    """Each product of the library's that fusec calls takes two milliseconds more."""
    multiply = torch.mm

    def slow(a: torch.Tensor, b: torch.Tensor, **more: Any) -> torch.Tensor:
        _wait()
        return multiply(a, b, **more)

    quickest, product = executable._quickest, torch.ops.aten.mm.default
    executable._quickest = lambda called: slow if called is product else quickest(called)


def slow_layout() -> None:
    """Convolutions of channels-last images take two milliseconds more, and are said to gain."""
    library = torch.library.Library("aten", "IMPL")

    def slow(images: torch.Tensor, *more: Any) -> torch.Tensor:
        last = torch.channels_last
        if images.is_contiguous(memory_format=last) and not images.is_contiguous():
            _wait()
        return torch.ops.aten._convolution.default(images, *more, False, False, False, False)

    library.impl("convolution", slow, "CPU")
    _KEPT.append(library)
    _gaining()


def _gaining() -> None:
    """Let each convolution be said to gain a second by channels-last images."""

    def judge(*_: Any, **__: Any) -> Callable[..., Decided]:
        return lambda choice: Decided("channels-last", "as told", 1e6)

    compiler.format_judge = judge  # type: ignore[assignment]
    backend.format_judge = judge  # type: ignore[attr-defined, assignment]


_KEPT: list[Any] = []
"""What has to live as long as the process."""


def killing_kernel() -> None:
    """Each kernel with a tanh ends its process by a signal."""
    _around_kernels(lambda launch: lambda *args: os.kill(os.getpid(), signal.SIGFPE))


def wrong_merge() -> None:
    """A kernel that a merge made of a tanh and something else is off by a hundredth."""
    _around_kernels(adds_a_hundredth, stores=2)


def launched(name: str) -> set[str]:
    """Return the kernels that a call launches: k0 to k2 of "k0_to_k2"."""
    first, _, last = name.partition("_to_")
    if not last:
        return {name}
    return {f"k{number}" for number in range(int(first[1:]), int(last[1:]) + 1)}


def _around_kernels(change: Callable[[Launch], Launch], stores: int = 1) -> None:
    load = compiler._load

    def planted(blobs: dict[str, bytes], *rest: Any) -> dict[str, Launch]:
        rows = json.loads(blobs["manifest.json"])["summary"]["kernels"]
        many = [row for row in rows if len(row["nodes"]) >= stores]
        spoilt = {row["code"] for row in many if "tanh.default" in row["ops"]}
        kernels = load(blobs, *rest)
        return {n: change(k) if spoilt & launched(n) else k for n, k in kernels.items()}

    compiler._load = planted  # type: ignore[assignment]


def crashing_pass() -> None:
    """The stage `share` fails at a tanh."""

    def share(graph: Graph) -> Graph:
        for line in graph.nodes:
            if "tanh.default" in line.origin.ops:
                raise ValueError("a planted crash")
        return graph

    _run_before(stages, "FUSE", "share", share)


def wrong_pass() -> None:
    """The stage `simplify` takes tanh for a sine."""

    def sine(node: Expr) -> Expr:
        return Op("sin", node.args) if isinstance(node, Op) and node.name == "tanh" else node

    def simplify(graph: Graph) -> Graph:
        def changed(line: Line) -> Line:
            is_line = isinstance(line, Def)
            return line.map(lambda exprs: rewrite(exprs, sine)) if is_line else line

        return replace(graph, nodes=tuple(map(changed, graph.nodes)))

    _run_before(stages, "FUSE", "simplify", simplify)


def _run_before(module: ModuleType, listed: str, name: str, function: Callable[[Any], Any]) -> None:
    """Let a function run before the stage of a name, in a module's list of stages."""
    with_function = (
        replace(stage, run=lambda made, context, run=stage.run: run(function(made), context))
        if stage.name == name
        else stage
        for stage in getattr(module, listed)
    )
    setattr(module, listed, tuple(with_function))


def wrong_rewrite() -> None:
    """The stage `masked_writes`, on Dynamo's graph, takes tanh for a sine."""

    def sine(gm: fx.GraphModule) -> fx.GraphModule:
        for node in gm.graph.nodes:
            node.target = torch.sin if node.target is torch.tanh else node.target
        gm.recompile()
        return gm

    _run_before(backend, "DYNAMO", "masked_writes", sine)


def wrong_joint_graph() -> None:
    """The stage `draws`, on the graph of a training step, takes products for sums."""

    def sums(gm: fx.GraphModule) -> fx.GraphModule:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            node.target = torch.ops.aten.add.Tensor
        return gm

    _run_before(backend, "JOINT", "draws", sums)
