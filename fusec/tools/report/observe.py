"""Find the graphs that a call compiles to, without computing anything.

The callable runs on fake tensors under ``torch.compile`` with a backend that keeps the graphs from
AOTAutograd. A module is copied without its weights' memory, so that its size does not matter, and
neither its state nor its gradients change.

Where the model reads the values of its tensors (after a graph break, say), fake tensors do not
suffice: the rest is not seen, and torch's trace gets the place (``UNSEEN``). With ``run`` all is
seen, on real tensors. Graph breaks and their reasons are in torch's trace, too (``watching.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusec.codegen.targets import Target, find_target
from fusec.driver.backend import leave_to_eager, splitting, tell_kept
from fusec.driver.compiler import explain_fallback, format_judge, run_eagerly
from fusec.driver.context import CompileContext
from fusec.driver.trace import Trace
from fusec.errors import (
    FusecError,
    ModelError,
    Unsupported,
    UsageError,
    describe_failure,
    describe_frame,
)
from fusec.frontend.modules import calling, name_in_model
from fusec.frontend.origin import input_names, user_name
from fusec.frontend.parts import find_parts
from fusec.ir.expr import reach
from fusec.options import Options
from fusec.runtime.heap import settled_heap
from fusec.tools.dumps import Record, Records
from fusec.tools.report.arguments import Arguments, Given, leaf_of, plain
from fusec.tools.report.eager_cost import EagerCost, count_eager, graph_cost
from fusec.torch_interior import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    GuardOnDataDependentSymNode,
    compile_id,
    dynamo_config,
    forgetting_code,
    tensors_in,
    trace_artifact,
    tracing,
    unset_fake_temporarily,
)

NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
"""The errors of a fake tensor whose value a program reads."""
UNSEEN = "fusec_unseen"
"""The artifact of torch's trace with the place where an observation on fake tensors ended."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One graph that a call compiles to.

    Attributes:
        name: "forward", "backward" or "inference"; the second of a kind is "forward_1", a branch
            or body of a higher-order operation "forward.true_graph_0".
        graph: functional ATen, as the compiler gets it.
        eager: the eager cost of the same part of the model.
        rewrites: the record of the stages before capture, shared by forward and backward.
        names: placeholder -> its name in the program: "net.1.running_mean", "x".
        compile: Dynamo's number of the compile, "0/1".
        called: the module that is compiled by itself, after a graph break: "h.3 (Block)", or "".
    """

    name: str
    graph: fx.GraphModule
    eager: EagerCost
    rewrites: Mapping[str, Record]
    names: Mapping[str, str] = field(default_factory=dict)
    compile: str = ""
    called: str = ""


class _Observer:
    """A ``torch.compile`` backend that keeps graphs and runs them as they are.

    Args:
        run: on the program's real tensors, else on fake ones.
    """

    def __init__(
        self, mode: FakeTensorMode, context: CompileContext, *, texts: bool, run: bool
    ) -> None:
        self.mode, self.context, self.texts, self.run = mode, context, texts, run
        self.observed: list[Observed] = []
        self.untraced: list[Exception] = []

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        name_in_model(gm)
        if leave_to_eager(gm, self.context.options):
            return gm.forward
        called = calling()
        part = called if "(" in called else ""
        plain = [i.node.hint if isinstance(i, torch.SymInt) else self.fake(i) for i in inputs]
        # In Dynamo's context, branches would be traced with fake tensors of its mode.
        with tracing(None), self.counting():
            forward, backward = count_eager(gm, plain)

        rewrites = Records()
        observe = (rewrites.observe,) if self.texts else ()
        given = [user_name(node) for node in gm.graph.find_nodes(op="placeholder")]

        def keep(graph: fx.GraphModule, _: Sequence[Any], *, name: str) -> Callable[..., Any]:
            cost = backward if name == "backward" else forward
            whole = [o.name for o in self.observed if "." not in o.name]
            count = sum(label.partition("_")[0] == name for label in whole)
            label = f"{name}_{count}" if count else name
            names = input_names(graph, given)
            seen = Observed(label, graph, cost, rewrites.kept, names, compile_id(), part)
            self.observed.append(seen)
            self.keep_parts(label, graph, rewrites.kept)
            return self.boxed(graph)

        split = splitting(keep, replace(self.context, observe=observe))
        try:
            first = len(self.observed)
            call = split.compile(gm, inputs)
            tell_kept(split, self.context.options)
            if split.kept:  # eager's cost of the whole is none of its parts'
                parts = self.observed[first:]
                self.observed[first:] = [replace(p, eager=graph_cost(p.graph)) for p in parts]
            return call
        except DynamicOutputShapeException as error:  # Dynamo would silently break the graph
            self.untraced.append(error)
            return gm.forward

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Let fake tensors make symbols for all sizes that depend on data: eager may run any.

        In training, eager's gradient of ``h[mask] = token`` needs the places where the mask is
        true. A fake tensor caches how many of its elements are true, but only for one epoch.
        """
        symbols, self.mode.shape_env = self.mode.shape_env, ShapeEnv()
        self.mode.epoch += 1
        try:
            yield
        finally:
            self.mode.shape_env = symbols
            self.mode.epoch += 1

    def keep_parts(self, label: str, graph: fx.GraphModule, rewrites: Mapping[str, Record]) -> None:
        """Keep the graphs that higher-order operations of a graph call: they are compiled, too."""
        for attribute, (part, _) in find_parts(graph).items():
            name = f"{label}.{attribute}"
            self.observed.append(
                Observed(name, part, graph_cost(part), rewrites, compile=compile_id())
            )
            self.keep_parts(name, part, rewrites)

    def fake(self, value: Any) -> Any:
        """Return a fake tensor for a real one, such as a parameter that a function refers to."""
        real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return self.mode.from_tensor(plain(value)) if real else value

    def boxed(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        def on_fakes(args: list[Any]) -> Any:
            inputs = [self.fake(arg) for arg in args]
            args.clear()
            with self.mode:
                return graph(*inputs)

        call = run_eagerly(graph) if self.run else on_fakes
        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def new_fake_mode() -> FakeTensorMode:
    """Return a mode under which tensors have no memory, and real ones may be used beside them."""
    # Loops on tensors need a shape environment, though sizes are static here.
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=_symbols(), static_shapes=True)


def _symbols() -> ShapeEnv:
    """Return a shape environment with symbols for the values that Dynamo captures in a graph.

    Elsewhere, after a graph break, reading such a value ends an observation on fake tensors.
    """
    return ShapeEnv(
        allow_scalar_outputs=dynamo_config.capture_scalar_outputs,
        allow_dynamic_output_shape_ops=dynamo_config.capture_dynamic_output_shape_ops,
    )


@settled_heap()
def observe(
    fn: Callable[..., Any],
    inputs: Given,
    *,
    train: bool = False,
    dynamic: bool = False,
    mode: FakeTensorMode | None = None,
    options: Options | None = None,
    target: Target | None = None,
    texts: bool = False,
    adapt: Callable[[CompileContext], CompileContext] = lambda context: context,
    run: bool = False,
) -> tuple[Observed, ...]:
    """Return the graphs that ``fn(*inputs)`` compiles to, in the order in which they are compiled.

    Args:
        train: call the backward, too; floating inputs then require gradients.
        dynamic: symbolic sizes; without, they are static whatever shapes were seen before.
        options: those of the compile; by default those of the environment.
        target: for which they are compiled; by default the CPU. The partition of a training step
            into forward and backward depends on what its kernels can recompute.
        texts: keep the texts of the stages before capture.
        adapt: changes the context of the compile, such as its judges.
        mode: the mode of ``fn``'s and ``inputs``' fake tensors, if they have any.
        run: on real tensors, with values to read.
    Raises:
        ModelError: what the model itself raised.
        Unsupported: if AOTAutograd traces none of the call's graphs.
        UsageError: for a nested tensor.
    """
    fn = _uncompiled(fn)
    mode = mode or new_fake_mode()
    mode.shape_env = _symbols()  # after the settings of torch in the model's file
    chosen = options or Options.from_compile(None, None)
    target = target or find_target("cpu")
    known = format_judge(target, replace(chosen, race_budget_s=0.0))  # from earlier races only
    context = adapt(CompileContext(target, chosen, Trace("joint"), judge=known))
    observer = _Observer(mode, context, texts=texts, run=run)
    on = nullcontext() if run else mode
    with on, torch.set_grad_enabled(train), _many_compiles(), forgetting_code():
        called = fn if run else _without_memory(fn, mode)
        given = partial(leaf_of if run else partial(_fake_input, mode=mode), train=train)
        args = Arguments.of(inputs).mapped(given)
        compiled = torch.compile(called, backend=observer, dynamic=dynamic)
        try:
            _call(compiled, args, train)
        except Exception as error:
            inner = getattr(error, "inner_exception", None)
            if isinstance(inner, FusecError):
                raise inner from error
            if isinstance(error, NEEDS_VALUES):
                trace_artifact(UNSEEN, partial(describe_frame, error))
            else:
                _blame_model(called, args, train)
                raise
    for untraced in observer.untraced:
        if not observer.observed:
            raise Unsupported(f"nothing is compiled: {describe_failure(untraced)}")
        explain_fallback("a graph, forward and backward,", untraced, chosen)
    return tuple(observer.observed)


def _call(fn: Callable[..., Any], args: Arguments, train: bool) -> None:
    result = args.call(fn)
    if train:
        _backward(result)


def _blame_model(fn: Callable[..., Any], args: Arguments, train: bool) -> None:
    """Raise the error that the model itself raises, without ``torch.compile``, if there is one."""
    try:
        _call(fn, args, train)
    except Exception as error:
        raise ModelError.raised(error) from error


def _uncompiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the original of a result of ``torch.compile``; any other function as it is."""
    original = getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", None)
    return fn if original is None else original


def _many_compiles() -> AbstractContextManager[Any]:
    """Lift Dynamo's limit of recompiles, as each observation compiles the same code again."""
    many = 1 << 20
    patched: AbstractContextManager[Any] = dynamo_config.patch(
        recompile_limit=many, accumulated_recompile_limit=many
    )
    return patched


def _without_memory(fn: Callable[..., Any], mode: FakeTensorMode) -> Callable[..., Any]:
    """Return a copy of a module whose tensors are fake; a function as it is."""
    if not isinstance(fn, nn.Module):
        return fn
    with FakeCopyMode(mode):
        return copy.deepcopy(fn)


def _fake_input(value: Any, mode: FakeTensorMode, train: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_nested:
        raise UsageError("a nested tensor cannot be traced without memory; give its values.")
    fake = value if isinstance(value, FakeTensor) else mode.from_tensor(plain(value).detach())
    if train and (fake.is_floating_point() or fake.is_complex()):
        return fake.detach().requires_grad_()
    return fake.detach()


def _backward(result: Any) -> None:
    """Run the backward from the sum of every output that has one."""
    roots = [t for t in tensors_in(result) if t.requires_grad]
    if not roots:
        raise RuntimeError("no output requires a gradient, so there is no backward to compile")
    leaves = [root for root in roots if root.is_leaf] + _leaves(roots)
    gradients = [torch.ones_like(root) for root in roots]
    # AOTAutograd copies a backward's graph before it compiles it, and with it constants of the
    # model, which are real: no fake mode may be active.
    with unset_fake_temporarily():
        # Not backward(), which would leave fake gradients in parameters that a function refers to.
        torch.autograd.grad(roots, leaves, gradients, allow_unused=True)


def _leaves(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors whose gradients a backward from ``roots`` would accumulate."""

    def following(function: Any) -> list[Any]:
        return [after for after, _ in function.next_functions if after is not None]

    functions = reach([root.grad_fn for root in roots if root.grad_fn is not None], following)
    return [function.variable for function in functions if hasattr(function, "variable")]
