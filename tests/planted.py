"""Planted faults, to see that what shall find them does.

Each goes through a table of the compiler (``LOWERINGS``, ``BUILDS``, ``TARGETS``) or through the
observer of a compile. Entries of the cache would hide it, so the cache is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx

from fusec.codegen import targets
from fusec.driver import backend
from fusec.driver.build import BUILDS
from fusec.driver.context import CompileContext
from fusec.frontend.call import AtenCall
from fusec.frontend.ops.arithmetic import add
from fusec.frontend.ops.registry import LOWERINGS
from fusec.frontend.value import Value
from fusec.options import Options
from fusec.passes.stage import Observe, Stage


def adds_a_hundredth(launch: Callable[..., None]) -> Callable[..., None]:
    """Return a launcher that is off by 0.01 in what it writes."""

    def wrong(*args: object) -> None:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        before = [tensor.clone() for tensor in tensors]
        launch(*args)
        for tensor, old in zip(tensors, before, strict=True):
            if tensor.is_floating_point() and not torch.equal(tensor, old):
                tensor += 0.01

    return wrong


def lower(monkeypatch: pytest.MonkeyPatch, operation: Any, rule: Callable[..., Any]) -> None:
    """Lower an operation by another rule, which gets its own one first."""
    row = LOWERINGS[operation]
    monkeypatch.setitem(LOWERINGS, operation, replace(row, rule=partial(rule, row.rule)))
    monkeypatch.setenv("FUSEC_CACHE", "0")
    torch._dynamo.reset()


def plant(monkeypatch: pytest.MonkeyPatch, operation: Any) -> None:
    """Make what an operation is lowered to off by a hundredth."""

    def wrong(rule: Callable[..., Value], call: AtenCall, *args: Any, **named: Any) -> Value:
        return call.pointwise(lambda a: add(a, 0.01), rule(call, *args, **named))

    lower(monkeypatch, operation, wrong)


def fail(monkeypatch: pytest.MonkeyPatch, operation: Any, error: Exception) -> None:
    """Make each compile of a graph with an operation fail."""

    def failing(*_: Any, **__: Any) -> Value:
        raise error

    lower(monkeypatch, operation, failing)


def fail_to_build(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Make the build of each graph's C++ kernels fail."""

    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setitem(BUILDS, "cpp", failing)  # type: ignore[misc]
    monkeypatch.setenv("FUSEC_CACHE", "0")
    torch._dynamo.reset()


def recode(monkeypatch: pytest.MonkeyPatch, target: str, **codegen: Any) -> None:
    """Compile for a target with other parts of its code generation."""
    row = targets.TARGETS[target]
    row = replace(row, codegen=replace(row.codegen, **codegen))
    monkeypatch.setitem(targets.TARGETS, target, row)
    monkeypatch.setenv("FUSEC_CACHE", "0")
    torch._dynamo.reset()


def reprint(monkeypatch: pytest.MonkeyPatch, target: str, change: Callable[[str], str]) -> None:
    """Change the sources of a target's kernels."""
    printed = targets.TARGETS[target].codegen.print_functions

    def changed(*args: Any) -> dict[str, str]:
        return {name: change(source) for name, source in printed(*args).items()}

    recode(monkeypatch, target, print_functions=changed)


def before(name: str, change: Callable[[Any], None]) -> Observe:
    """Return the observer that changes in place what a stage takes."""

    def observe(stage: Stage, structure: Any) -> Callable[[Any], None]:
        if stage.name == name:
            change(structure)
        return lambda made: None

    return observe


def after(name: str, change: Callable[[Any], None]) -> Observe:
    """Return the observer that changes in place what a stage made."""
    return lambda stage, _: change if stage.name == name else lambda made: None


def observed(observe: Observe, **options: Any) -> Callable[..., Any]:
    """Return fusec as a backend whose stages before capture are observed."""
    return under(lambda context: replace(context, observe=(observe,)), **options)


def under(change: Callable[[CompileContext], CompileContext], **options: Any) -> Callable[..., Any]:
    """Return fusec as a backend whose stages before capture run in another context.

    Args:
        options: where ``torch.compile`` is given none.
    """

    def compile_graph(
        gm: fx.GraphModule, inputs: Sequence[Any], **given: Any
    ) -> Callable[..., Any]:
        asked = {"strict": True, "cache": False, **options, **given.get("options", {})}
        chosen = Options.from_compile(None, asked)
        context = change(backend.context_of(inputs, chosen))
        compile_one = partial(backend.compile_one_graph, options=chosen)
        whole = partial(backend.compile_with, gm, inputs, compile_one, context)
        return backend.splitting(compile_one, context).compile(gm, inputs, whole)

    return compile_graph
