"""Find the first stage that is wrong: record each stage's input and output, and run both.

An observer of the context (``CompileContext.observe``) keeps each run that changed something. The
structure of any stage is run by its interpreter, on inputs that fit it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from fusec.codegen.lowering.lower import lower
from fusec.codegen.parametrize import Functions
from fusec.codegen.triton.form import Form
from fusec.driver.backend import compile_with
from fusec.driver.context import CompileContext
from fusec.driver.partition import Joint
from fusec.driver.pipeline import compile_to_source
from fusec.driver.structures import Planned
from fusec.driver.trace import Trace
from fusec.errors import InternalError
from fusec.frontend.fx_passes.dynamo_graph import copied
from fusec.frontend.fx_passes.freezing import RECIPE
from fusec.frontend.fx_passes.fx_nodes import hint_of
from fusec.ir.expr import Buffer
from fusec.ir.extern import Constant
from fusec.ir.graph import Graph, Kernel, Schedule, View
from fusec.ir.host import HostProgram
from fusec.ir.index import Size, index
from fusec.ir.program import Program
from fusec.passes.stage import Observe, Stage
from fusec.tools.dumps import printed
from fusec.tools.interpreter.expression import Env, allocate
from fusec.tools.interpreter.graph import run_graph, run_kernel
from fusec.tools.interpreter.program import run_program

# -- the steps of a compile ------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One run of a stage that changed something.

    Attributes:
        graph: its name: "inference", "forward", "backward"; "joint" before capture.
        text: ``before``, printed before the run: stages change FX graphs in place.
        captured: the FX graph that was captured; None before capture.
        inputs: the arguments of the graph, once it has run.
    """

    stage: str
    graph: str
    before: Any
    after: Any
    text: str
    captured: fx.GraphModule | None
    inputs: list[Any]


def recording(
    steps: list[Step], graph: str, captured: fx.GraphModule | None, inputs: list[Any]
) -> Observe:
    """Return an observer that appends each run of a stage that changed something to ``steps``."""

    def observe(stage: Stage, structure: Any) -> Callable[[Any], None]:
        before, text = structure, printed(structure)()
        if isinstance(structure, fx.GraphModule) and structure is not captured:
            # Stages before capture change it in place.
            before = copied(structure)
        elif isinstance(structure, Joint):
            before = copied(structure.module)

        def done(made: Any) -> None:
            if stage.takes != stage.gives or printed(made)() != text:
                steps.append(Step(stage.name, graph, before, made, text, captured, inputs))

        return done

    return observe


def record_steps(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    context: CompileContext,
    *,
    train: bool = False,
    dynamic: bool | None = False,
) -> tuple[Step, ...]:
    """Return the runs of stages that changed something while a function was compiled.

    Args:
        train: a backward runs, too.
    """
    found: list[Step] = []
    joint = replace(context, observe=(recording(found, context.trace.name, None, []),))

    def compile_one(gm: fx.GraphModule, _: Any, *, name: str) -> Callable[..., Any]:
        given: list[Any] = []
        observe = recording(found, name, gm, given)
        compile_to_source(gm, replace(context, trace=Trace(name), observe=(observe,)))

        def call(args: list[Any]) -> Any:
            given[:] = [a.clone() if isinstance(a, Tensor) else a for a in args]
            return gm(*args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    torch.compiler.reset()
    compiled = torch.compile(
        fn, backend=lambda gm, inputs: compile_with(gm, inputs, compile_one, joint), dynamic=dynamic
    )
    with torch.set_grad_enabled(train):
        result = compiled(*inputs)
    if train:
        result.float().sum().backward()
    return tuple(found)


# -- what a structure computes ---------------------------------------------------------------------


def differs(step: Step, made: Any, tolerance: float = 2e-2) -> str | None:
    """Return how a stage's output differs in value from its input, or None if they agree.

    Args:
        tolerance: relative to an element, and to the largest one.
    Raises:
        InternalError: from an interpreter, for a structure that only a compiler bug makes.
    """
    if has_twins(made) or step.stage == "draws":  # which draws other numbers on purpose
        return None
    with np.errstate(all="ignore"):
        expected, found = computed(step.before, step), computed(made, step)
    if isinstance(made, HostProgram):
        expected = expected[: len(found)]  # without the inputs, which may be freed
    if len(expected) != len(found):
        return f"{len(found)} results, not {len(expected)}"
    for a, b in zip(expected, found, strict=True):
        greatest = np.abs(a, where=np.isfinite(a), out=np.zeros_like(a)).max(initial=0)
        try:
            np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance * greatest)
        except AssertionError as error:
            return str(error)
    return None


def has_twins(made: Any) -> bool:
    """Return True for forms with products, where an axis has several names, one for each layout.

    The interpreter runs programs, where an axis has one name.
    """
    forms = made.values() if isinstance(made, Mapping) else ()
    return any(isinstance(form, Form) and form.program.multiplies for form in forms)


def computed(structure: Any, step: Step) -> list[Any]:
    """Return the arrays that a structure computes: its results, or what its kernels store."""
    match structure:
        case fx.GraphModule():
            return run_module(structure, step.inputs if structure is step.captured else None)
        case tuple():
            return run_halves(*structure)
        case Graph():
            return run_graph(watched(structure), arrays(structure, step.inputs), call)
        case Schedule():
            seen = replace(structure, graph=watched(structure.graph))
            return run_graph(seen, arrays(structure.graph, step.inputs), call)
        case HostProgram():
            return run_graph(structure, arrays(structure.graph, step.inputs), call)
        case Functions():
            return [array for name in structure.calls for array in stored(structure.instance(name))]
        case Mapping():
            return [array for one in structure.values() for array in stored(one)]
        case _:
            return stored(structure)


# -- graphs ----------------------------------------------------------------------------------------


def arrays(graph: Graph, inputs: list[Any]) -> list[Any]:
    """Convert a graph's inputs to arrays and integers for the interpreters."""
    return [
        int(given) if isinstance(item, Size) else to_array(given)
        for item, given in zip(graph.inputs, inputs, strict=True)
    ]


def watched(graph: Graph) -> Graph:
    """Return a graph that also returns its inputs, which it may write to."""
    inputs = [item for item in graph.inputs if isinstance(item, Buffer)]
    wholes = [View(item, item.shape, item.strides, index(0)) for item in inputs]
    return replace(graph, outputs=(*graph.outputs, *wholes))


def call(extern: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Run a library call by its name on the interpreter's arrays; draw a ``Constant`` at random."""
    match extern:
        case Constant():
            shape = [extent.hint() for extent in extern.buffer.shape]
            draws = np.random.default_rng(sum(extern.node.encode()))
            return [(draws.integers(-8, 9, shape) / 4).astype(np.float32)]
    operation: Any = functools.reduce(getattr, extern.target.split("."), torch.ops)
    made = operation(
        *[tensors(a) for a in args], **{name: tensors(a) for name, a in kwargs.items()}
    )
    results = made if extern.many else [made]
    return [to_array(r) if isinstance(r, Tensor) else r for r in results if extern.outputs]


def tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.asarray(value))
    return [tensors(one) for one in value] if isinstance(value, tuple) else value


def run_module(gm: fx.GraphModule, inputs: list[Any] | None = None) -> list[Any]:
    """Run an FX graph, on random inputs if ``inputs`` is None, and return its results as arrays.

    Its inputs, which it may write to, follow the results.
    """
    if inputs is None:
        given = [drawn(node) for node in gm.graph.find_nodes(op="placeholder")]
    else:
        given = [one.clone() if isinstance(one, Tensor) else one for one in inputs]
    if recipe := gm.meta.get(RECIPE):
        recipe.keep(recipe.compute(*[given[k] for k in recipe.positions]))
    return [to_array(t) for t in (*run(gm, given), *given) if isinstance(t, Tensor)]


def run(gm: fx.GraphModule, given: list[Any]) -> list[Any]:
    with torch.no_grad():
        result = gm(*given)
    return list(result) if isinstance(result, tuple | list) else [result]


def run_halves(forward: fx.GraphModule, backward: fx.GraphModule) -> list[Any]:
    """Run forward and backward as their joint graph would; saved values are matched by name."""
    given = [drawn(node) for node in forward.graph.find_nodes(op="placeholder")]
    results = run(forward, given)
    made: Any = forward.graph.output_node().args[0]
    known = {node.name: value for node, value in zip(made, results, strict=True) if node}
    wanted = backward.graph.find_nodes(op="placeholder")
    tangents = [drawn(node) for node in wanted if node.name not in known]
    left = iter(tangents)
    gradients = run(backward, [known[n.name] if n.name in known else next(left) for n in wanted])
    outputs = results[: len(tangents)]
    return [to_array(t) for t in (*outputs, *gradients, *given, *tangents) if isinstance(t, Tensor)]


def drawn(node: fx.Node) -> Any:
    """Return a random value of a placeholder, the same for the same name."""
    like = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(like, Tensor):
        return 7
    generator = torch.Generator().manual_seed(sum(node.name.encode()))
    numbers = torch.randn([*map(hint_of, like.shape)], generator=generator)
    return numbers > 0 if like.dtype is torch.bool else numbers.to(like.dtype)


# -- kernels ---------------------------------------------------------------------------------------


def stored(structure: Any) -> list[Any]:
    """Run a kernel, captured, planned or lowered, and return the arrays that it writes."""
    match structure:
        case Kernel():
            reads = [load.buffer for load in structure.loads]
            writes = [store.buffer for store in structure.stores]
        case Planned():
            return stored(lower(structure.kernel, structure.plan))
        case Form():
            return stored(structure.program)
        case Program():
            reads, writes = list(structure.reads), list(structure.writes)
        case _:
            raise InternalError(structure, stage="bisect")
    env = Env(sizes={})
    for buffer in (*reads, *writes):
        fill(buffer.base, env)
    match structure:
        case Kernel():
            run_kernel(structure, env.storage, env.sizes)
        case _:
            run_program(structure, env.storage, env.sizes)
    bases = sorted({buffer.base for buffer in writes}, key=lambda buffer: buffer.name)
    return [env.storage[buffer] for buffer in bases]


def fill(buffer: Buffer, env: Env) -> None:
    """Give a buffer storage with random numbers, the same for the same name."""
    if buffer not in env.storage:
        allocate(buffer, env)
        held = env.storage[buffer]
        drawn = np.random.default_rng(sum(buffer.name.encode())).integers(-8, 9, held.shape)
        held[...] = (drawn / 4).astype(held.dtype)


def to_array(tensor: Tensor) -> Any:
    """Convert a tensor to an array for the interpreters, bf16 to f32."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
