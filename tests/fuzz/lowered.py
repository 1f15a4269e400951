"""Random programs of torch operations for any target: their kernels run in the NumPy interpreter.

``torch.compile(fn, backend="captured_sm_90")`` takes a function through all stages up to the
lowered programs of its kernels, each verified, on a target of low limits (`small_target`), and
interprets these: programs meet rewrites of kernels that are made for no processor here. Left out
are writes of inputs in place, and launches of several kernels at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx
from torch._dynamo import register_backend
from torch._functorch.aot_autograd import make_boxed_func

from fusec.codegen.targets import Target
from fusec.driver.backend import compile_with
from fusec.driver.stages import PASSES
from fusec.errors import Unsupported
from fusec.frontend.capture import capture
from fusec.passes.memory.buffers import plan_host
from fusec.passes.stage import fold
from tests.frontend.tracing import run
from tests.fuzz.pipeline import context, lower_all, run_programs, small_target

TARGETS = ("sm_90", "sm_120", "gfx942", "cpu:avx2", "cpu:avx512", "cpu:amx")
RACES = ("fused", "library")
STAGES = tuple(s for s in PASSES if s.name not in ("in_place", "fuse_horizontally"))


def backend_of(target: str, race: str = "fused") -> str:
    """Return the name of the backend for a target."""
    return f"captured_{target}_{race}"


def _compile(
    gm: fx.GraphModule, given: Sequence[Any], *, target: Target, race: str, **_: Any
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's for a target, and run its kernels by interpreter."""
    # What is proven for the traced sizes alone is no error: ``strict`` is for graphs that are.
    chosen = {"race": race, "strict": False}
    compile_one = partial(_compile_one, target=target, chosen=chosen)
    return compile_with(gm, given, compile_one, context(target, **chosen))


def _compile_one(
    gm: fx.GraphModule, _: Sequence[Any], *, name: str, target: Target, chosen: dict[str, Any]
) -> Callable[..., Any]:
    capturing = context(target, **chosen)
    try:
        graph = capture(gm, name, capturing.empty_graph())[0]
    except Unsupported:
        return make_boxed_func(gm.forward)
    schedule = fold(STAGES, graph, capturing)
    programs = lower_all(schedule, target, **chosen)
    host = plan_host(schedule, target.codegen.overwritable)

    def interpret(_: Any, inputs: Sequence[Any], call: Any) -> list[Any]:
        return run_programs(host, programs, tuple(inputs), call)

    return make_boxed_func(lambda *args: run(gm, graph, args, interpret))


for _name in TARGETS:
    for _race in RACES:
        _backend = partial(_compile, target=small_target(_name), race=_race)
        register_backend(_backend, name=backend_of(_name, _race))
