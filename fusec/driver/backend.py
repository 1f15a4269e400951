"""From a graph of Dynamo's to its callable; ``fusec/backend.py`` is what ``torch.compile`` finds.

Dynamo captures, AOTAutograd makes functional forward and backward graphs, each goes through
``compiler.compile_graph``. The rewrites on the way are listed in ``fusec/driver/stages.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fusec.codegen.targets import find_target
from fusec.driver.compiler import (
    RECENT,
    compile_graph,
    explain_fallback,
    format_judge,
    run_eagerly,
    target_for,
)
from fusec.driver.context import CompileContext
from fusec.driver.invariance import check_named, refuse
from fusec.driver.observers import AROUND, Around, observers_of
from fusec.driver.partition import Joint
from fusec.driver.splitting import SplittingCompiler
from fusec.driver.stages import DYNAMO, INFERENCE, JOINT, PARTITION, WIDEN
from fusec.driver.trace import Trace
from fusec.driver.user_passes import chosen_passes
from fusec.driver.warm import Start
from fusec.errors import FusecError, Unsupported, what_helps
from fusec.frontend.aliasing.overlap import returns_shared_memory
from fusec.frontend.aliasing.results import (
    detach_again,
    own_results,
    separate_gradients,
)
from fusec.frontend.aot import recompiles
from fusec.frontend.aot.decompositions import decompositions
from fusec.frontend.aot.eager_strides import tracing_as_eager
from fusec.frontend.aot.only_eager import only_for_eager, only_for_python
from fusec.frontend.fx_passes.dynamo_graph import copied
from fusec.frontend.fx_passes.freezing import RECIPE
from fusec.frontend.fx_passes.fx_nodes import verify_values
from fusec.frontend.fx_passes.weights import mark_weights
from fusec.frontend.modules import name_in_model
from fusec.frontend.origin import user_name
from fusec.options import Options
from fusec.passes.stage import Stage, fold
from fusec.runtime.cache import artifacts
from fusec.runtime.calls import cuda_graphs
from fusec.runtime.calls.convention import outside_autocast
from fusec.runtime.calls.fake import with_memory_only
from fusec.runtime.calls.frozen import Frozen, refreeze
from fusec.runtime.calls.received import noting_hooks
from fusec.runtime.frames import with_room
from fusec.runtime.heap import settled_heap
from fusec.torch_interior import (
    SkipFrame,
    TorchDynamoException,
    TracingContext,
    compile_phase,
    contiguous_tangents,
    detect_fake_mode,
    is_shipping,
    replay_no_view_twice,
    run_autograd,
    views_without_gradient,
)

__all__ = ["artifacts", "compile_captured", "refreeze", "reset"]

logger = logging.getLogger("fusec.compile")


def compile_captured(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    begin: Callable[..., Callable[..., Any]],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph, as ``fusec.backend.fusec`` says.

    Args:
        begin: compiles a graph that Dynamo's frame can run, as ``start`` does.
    """
    chosen = chosen_options(mode, options)
    name_in_model(gm)
    if chosen.batch_invariant:
        check_named(gm)
    recompiles.warn_of_recompiles(gm)
    if leave_to_eager(gm, chosen):
        return gm.forward
    recorder = cuda_graphs.Recorder() if chosen.cudagraphs and not chosen.verify else None
    compile_one = partial(compile_one_graph, options=chosen, recorder=recorder)
    context = context_of(example_inputs, chosen)
    split = splitting(partial(compile_one_graph, options=chosen), context)
    try:
        with settled_heap():
            whole = partial(begin, gm, example_inputs, compile_one, context)
            call = with_room(split.compile, gm, example_inputs, whole)
    except Unsupported as error:
        if is_shipping():
            raise
        explain_fallback("a graph", error, chosen)
        return gm.forward
    except (FusecError, TorchDynamoException):  # the user's mistake; a message to Dynamo
        raise
    except Exception as error:
        if chosen.strict:
            raise
        explain_fallback("a graph, forward and backward,", error, chosen)
        return gm.forward
    RECENT.extend(tell_kept(split, chosen))
    if chosen.batch_invariant and split.kept:
        refuse(", ".join(kept.op for kept in split.kept))
    return call


def leave_to_eager(gm: fx.GraphModule, options: Options) -> bool:
    """Leave a Dynamo graph that must run uncompiled to eager: tell log and observers, return True.

    Raises:
        SkipFrame: if its frame must run in plain Python.
        UsageError: under ``batch_invariant``.
    """
    in_python = only_for_python(gm)
    reason = in_python or only_for_eager(gm)
    if reason is None:
        return False
    if options.batch_invariant:
        refuse(f"all of a graph ({reason})")
    RECENT.append(_tell_outside(gm, "a whole graph", reason, options))
    if in_python is not None:
        raise SkipFrame(reason)
    return True


def _tell_outside(part: fx.GraphModule, name: str, reason: str, options: Options) -> Trace:
    """Tell log and observers of what PyTorch runs outside of compiled graphs; return its trace."""
    trace = Trace(f"of {name}", outside=name)
    trace.fail(Unsupported(reason))
    logger.info("%s runs as PyTorch runs it: %s", name, reason)
    for observer in observers_of(options):
        observer.kept(part, options, trace)
    return trace


def chosen_options(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """Return the options of a compile, whose passes of the user there are.

    Raises:
        UsageError: for an unknown mode, option or pass.
    """
    chosen = Options.from_compile(mode, options)
    chosen_passes(chosen)
    return chosen


def splitting(compile_one: Callable[..., Any], context: CompileContext) -> SplittingCompiler:
    """Return a compiler that cuts graphs around operations that AOTAutograd does not trace.

    Args:
        compile_one: compiles a graph of AOTAutograd's; it gets (graph, inputs, name=...).
    """
    return SplittingCompiler(
        lambda part, given: compile_with(part, given, compile_one, context),
        lambda part, given: compile_with(part, given, lambda graph, inputs, name: graph, context),
    )


def tell_kept(split: SplittingCompiler, options: Options) -> list[Trace]:
    """Tell log and observers of the operations that run between compiled parts; return traces."""
    traces = []
    for kept in split.kept:
        reason = str(kept.error).strip().partition("\n")[0] or type(kept.error).__name__
        reason = ". ".join(filter(None, (reason.rstrip("."), what_helps(kept.error))))
        reason = f"torch does not trace it: {reason}"
        traces.append(_tell_outside(kept.part, kept.op, reason, options))
    return traces


def start(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_one: Callable[..., Any],
    context: CompileContext,
) -> Callable[..., Any]:
    """Return the callable for Dynamo: from the cache, without AOTAutograd, if possible."""
    known = Start.of(gm, example_inputs, context)
    if known is None:
        return compile_with(gm, example_inputs, compile_one, context)
    call = known.load()
    if call is not None:
        return call
    return known.keep(compile_with(gm, example_inputs, known.noting(compile_one), context))


def compile_with(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_one: Callable[..., Any],
    context: CompileContext,
) -> Callable[..., Any]:
    """Run AOTAutograd over a graph of Dynamo; ``compile_one`` gets (graph, inputs, name=...)."""
    gm = fold(DYNAMO, gm, context)
    names = [user_name(node) for node in gm.graph.find_nodes(op="placeholder")]
    compilers = _Compilers(context, compile_one, names, example_inputs)
    options = context.options
    tangents = contiguous_tangents() if returns_shared_memory(gm) else nullcontext()
    with tracing_as_eager(detect_fake_mode(example_inputs)), tangents:
        call = run_autograd(
            gm,
            list(example_inputs),
            fw_compiler=compilers.forward,
            bw_compiler=partial(compile_one, name="backward"),
            inference_compiler=compilers.inference,
            partition_fn=compilers.partition,
            decompositions=decompositions(
                eager_draws=options.fallback_random, eager_sums=options.precision == "eager"
            ),
            keep_inference_input_mutations=True,
        )
    tracing = TracingContext.try_get()
    metadata = tracing.fw_metadata if tracing is not None else None
    apart = () if metadata is None else views_without_gradient(metadata)
    return _views_without_gradient(call, apart) if apart else call


def _views_without_gradient(
    call: Callable[..., Any], positions: Sequence[int]
) -> Callable[..., Any]:
    """Return ``call`` with some results made views under ``no_grad``, as in the program."""

    def run(*args: Any) -> list[Any]:
        results = list(call(*args))
        with torch.no_grad():
            for k in positions:
                results[k] = results[k].view_as(results[k])
        return results

    return run


@dataclass(frozen=True, slots=True)
class _Compilers:
    """What AOTAutograd calls with the graphs that it makes of one graph of Dynamo.

    Attributes:
        names: the program's names of the inputs.
        given: the inputs.
    """

    context: CompileContext
    compile_one: Callable[..., Any]
    names: Sequence[str]
    given: Sequence[Any]

    def forward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile a forward whose backward may run again (``retain_graph``).

        AOTAutograd builds its wrapper afterwards, from the metadata that are corrected here. They
        list the saved tensors whose memory a backward may overwrite, for which the wrapper refuses
        to run a compiled backward with ``retain_graph``. No kernel of fusec overwrites them.
        """
        context = TracingContext.try_get()
        metadata = context.fw_metadata if context is not None else None
        if metadata is not None:
            replay_no_view_twice(metadata)
            metadata.unsafe_view_out_indices.clear()  # ``own_results`` keeps their version counters
        donated = getattr(metadata, "bw_donated_idxs", None)
        if donated:
            donated.clear()  # the list is shared with the metadata that the backward reads
        detach_again(gm)
        return self.compile_one(gm, inputs, name="forward")

    def inference(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile a graph without a backward."""
        detach_again(gm)
        mark_weights(gm, self.given)
        rewritten, around = self._rewritten(INFERENCE, gm, None)
        own_results(rewritten)
        rewritten.meta[AROUND] = around
        return self.compile_one(rewritten, inputs, name="inference")

    def partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **settings: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Rewrite a joint graph and cut it into forward and backward."""
        rewritten, around = self._rewritten(JOINT, joint, num_fwd_outputs)
        whole = Joint(rewritten, inputs, num_fwd_outputs, settings)
        cut = fold((PARTITION,), whole, self.context)
        forward, backward = (fold((WIDEN,), part, self.context) for part in cut)
        own_results(forward, num_fwd_outputs)
        separate_gradients(backward)
        for part in (forward, backward):
            part.meta[AROUND] = around
        return forward, backward

    def _rewritten(
        self, stages: Sequence[Stage], gm: fx.GraphModule, outputs: int | None
    ) -> tuple[fx.GraphModule, list[Around]]:
        """Return a graph after some stages, and what observers put around its calls.

        Args:
            outputs: how many of its results are the forward's; None: all.
        """
        options = self.context.options
        observers = observers_of(options)
        traced = copied(gm) if observers else gm
        rewritten = fold(stages, gm, self.context)
        asked = (o.watch_trace(traced, rewritten, outputs, self.names, options) for o in observers)
        return rewritten, [around for around in asked if around is not None]


def context_of(inputs: Sequence[Any], options: Options) -> CompileContext:
    """Return the context of the stages before capture, for the target of the inputs' device."""
    devices = (i.device for i in inputs if isinstance(i, torch.Tensor) and i.device.type != "cpu")
    try:
        target = target_for(next(devices, torch.device("cpu")), options)
    except FusecError:  # graphs on it run as eager kernels
        target, options = find_target("cpu"), replace(options, race="library")
    return CompileContext(target, options, Trace("joint"), judge=format_judge(target, options))


def compile_one_graph(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    name: str,
    options: Options,
    recorder: cuda_graphs.Recorder | None = None,
    trace: Trace | None = None,
) -> Callable[[list[Any]], Any]:
    """Compile a graph of AOTAutograd's, and return its callable; called by ``compile_with``."""
    trace = trace if trace is not None else Trace(name, phase=compile_phase)
    if options.verify:
        verify_values(graph)
    with settled_heap():  # a backward may be compiled when it is first needed
        call = with_room(compile_graph, graph, name, options, trace)
    if recorder is not None:
        call = recorder.record(call, graph, name)
    recipe = graph.meta.get(RECIPE)
    if recipe is not None:
        recipe = recipe.read_by(trace.wrapper)
        call = Frozen(call, recipe.compute, recipe.positions, recipe.keep)
    for around in graph.meta.pop(AROUND, ()):
        call = around(call, graph, name)
    if name == "forward":
        call = noting_hooks(call)
    if name == "backward":
        call = outside_autocast(call)
    return with_memory_only(call, run_eagerly(graph))


def reset() -> None:
    """Forget what this process has compiled and recorded; ``torch._dynamo.reset`` calls it."""
    RECENT.clear()
    recompiles.forget()
    cuda_graphs.reset()
