"""From an AOTAutograd graph to a running callable: cache, pipeline, build, bind, and the way back.

A failure never breaks a model: the graph runs as eager kernels, with one warning that says why (an
error under ``options={"strict": True}``).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import fx

from fusec.codegen.targets import Target, find_target, target_of_device
from fusec.driver.blame import blame
from fusec.driver.build import BUILDS
from fusec.driver.contests import (
    GroupContests,
    argument_specs,
    convolution_contest,
    product_contest,
)
from fusec.driver.context import CompileContext
from fusec.driver.invariance import refuse
from fusec.driver.launches import graph_id, launch_titles
from fusec.driver.observers import USER_PASSES, CompileHooks, observers_of
from fusec.driver.pipeline import Compiled, compile_to_source, kernel_rows, manifest
from fusec.driver.race import NewContest, RaceJudge, Races
from fusec.driver.trace import Trace
from fusec.driver.user_passes import may_be_cached, versions_of
from fusec.errors import (
    EnvironmentProblem,
    Unsupported,
    UsageError,
    describe_failure,
    warn_once,
    warn_user,
)
from fusec.frontend import linears
from fusec.frontend.capture import main_device
from fusec.frontend.fallbacks import is_written
from fusec.frontend.key import graph_key
from fusec.frontend.origin import model_name
from fusec.frontend.parts import find_parts, traced_strides
from fusec.ir.choice import Judge, judge_by_rule
from fusec.ir.graph import all_launches
from fusec.options import Options
from fusec.runtime.cache.entry import ABOUT
from fusec.runtime.cache.store import fingerprint, open_cache
from fusec.runtime.calls import executable
from fusec.runtime.calls.executable import BoxedCall
from fusec.runtime.calls.outside import of_graph
from fusec.runtime.calls.ranges import Ranges
from fusec.runtime.calls.stored import Stored, load_kernels
from fusec.runtime.kernels import cpp_kernel
from fusec.runtime.kernels.background import Background, when_ready
from fusec.runtime.kernels.processor import (
    cpu_features,
    cpu_model,
    missing_features,
    needed_features,
)
from fusec.runtime.progress import long_compile, say
from fusec.runtime.race.ranks import find_ranks
from fusec.runtime.race.rehearsal import rehearse
from fusec.torch_interior import compile_phase, keep_versions

logger = logging.getLogger("fusec.compile")

RECENT: deque[Trace] = deque(maxlen=64)
"""The latest compiles of this process, for ``explain`` and tests."""
Entry: TypeAlias = Mapping[str, bytes]
"""What the cache has of a graph, by name."""


@dataclass(frozen=True, slots=True)
class Addition:
    """What an entry has beside the code that Python calls.

    Attributes:
        key: what the addition depends on beside the graph.
        add: takes the target and the generated code; returns the code with ``added``, and blobs.
    """

    key: str
    add: Callable[[Target, Compiled], tuple[Compiled, Entry]]


_lock = threading.Lock()
_libraries: dict[tuple[bytes, torch.device], Mapping[str, Callable[..., None]]] = {}
_built_beside: WeakValueDictionary[str, Background[Entry]] = WeakValueDictionary()
"""By key, what is being built while this process goes on, or was."""


def compile_graph(
    gm: fx.GraphModule, name: str, options: Options, trace: Trace | None = None
) -> BoxedCall:
    """Return a boxed callable that computes what ``gm`` computes.

    Raises:
        FusecError: under ``options.strict``, what went wrong.
    """
    trace = trace if trace is not None else Trace(name, phase=compile_phase)
    RECENT.append(trace)
    call = _or_eagerly(partial(_compile, gm, name, options, trace), gm, options, trace)
    for observer in observers_of(options):
        observer.compiled(gm, options, trace)
    return call


def _or_eagerly(
    compiled: Callable[[], BoxedCall], gm: fx.GraphModule, options: Options, trace: Trace
) -> BoxedCall:
    """Return the result of ``compiled``; if it fails, the graph run eagerly, unless ``strict``."""
    try:
        with long_compile(f"graph {trace.name}"), _telling(trace):
            return compiled()
    except Exception as error:
        if options.strict and not isinstance(error, Unsupported):
            raise
        trace.fail(error)
        explain_fallback(f"graph {trace.name!r}", error, options)
        return run_eagerly(gm)


@contextmanager
def _telling(trace: Trace) -> Iterator[None]:
    """Show each stage as it begins in the terminal's line of progress, if there is one."""
    phase = trace.phase

    def told(stage: str) -> AbstractContextManager[Any]:
        say(stage)
        return phase(stage)

    trace.phase = told
    try:
        yield
    finally:
        trace.phase = phase


def explain_fallback(graph: str, error: Exception, options: Options) -> None:
    """Say why a graph runs as eager kernels: a warning, or a line of the log if it is known.

    Args:
        graph: what to call it, as "graph 'forward'".
    Raises:
        Exception: under ``batch_invariant``, the error itself, or UsageError for Unsupported.
    """
    if options.batch_invariant:
        if isinstance(error, Unsupported):
            refuse(f"{graph} ({error.reason})")
        raise error
    if isinstance(error, Unsupported):
        logger.info("%s runs as eager kernels: %s", graph, error.reason)
        return
    if isinstance(error, EnvironmentProblem):  # the same for all graphs of a process
        warn_once(f"fusec: graphs run as eager kernels: {error}")
        return
    logger.debug("%s failed", graph, exc_info=error)
    place = str(blame(error))
    warn_user(
        f"fusec: {graph} runs as eager kernels, because compiling it failed{' ' * bool(place)}"
        f"{place}: {describe_failure(error)}"
    )


def run_eagerly(gm: fx.GraphModule) -> BoxedCall:
    """Return the graph itself as a boxed callable.

    AOTAutograd counts the writes to inputs, so the versions that eager kernels count are put back.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    written = [k for k, node in enumerate(placeholders) if is_written(node)]

    def call(args: list[Any]) -> Any:
        inputs = list(args)
        args.clear()
        counted = tuple(inputs[k] for k in written if not inputs[k].is_inference())
        with keep_versions(counted):
            return gm(*inputs)

    return call


def compile_entry(
    gm: fx.GraphModule, name: str, options: Options, trace: Trace, addition: Addition | None = None
) -> Entry:
    """Return a graph's cache entry, compiled on a miss; it is noted in ``trace``, too.

    Nothing of it is loaded, so that its device need not be here.
    """
    entry = _begin_entry(gm, name, options, trace, addition, build_async=False)
    return entry.result() if isinstance(entry, Background) else entry


def _begin_entry(
    gm: fx.GraphModule,
    name: str,
    options: Options,
    trace: Trace,
    addition: Addition | None = None,
    *,
    build_async: bool,
) -> Entry | Background[Entry]:
    """Return a graph's entry of the cache; with ``build_async`` before its C++ is compiled."""
    device = main_device(gm)
    target = target_for(device, options)
    trace.target = target.name
    with trace.timed("key"):
        added = "" if addition is None else addition.key
        trace.key = key = graph_key(gm, *salt_of(device, target, options), name, added)
        cache = open_cache(options)
    asked = [observer.watch_compile(options, trace) for observer in observers_of(options)]
    hooks = [hook for hook in asked if hook is not None]
    with trace.timed("cache"):
        kept = options.cache and may_be_cached(options)
        wanted = kept and not any(hook.anew for hook in hooks)
        equal = _built_beside.get(key)
        if wanted and equal is not None:
            equal.wait()
        blobs = cache.load(key) if wanted else None
    trace.cached = blobs is not None
    if blobs is not None:
        if any(hook.code for hook in hooks):
            _tell_cached_code(gm, name, target, options, hooks)
        trace.blobs = blobs
        return blobs
    context = context_for(gm, target, options, trace)
    printed_parts, build = _generate(gm, context, addition, hooks)

    def complete(timed: Callable[[str], AbstractContextManager[None]]) -> Entry:
        with timed("build"):
            entry = {**printed_parts, **build()}
        if kept:
            with timed("cache"):
                cache.store(key, entry)
                _remember_compiler(options)
        return entry

    trace.blobs = printed_parts
    if build_async and target.codegen.async_build:
        _built_beside[key] = built = Background(partial(complete, Trace(name).timed))
        trace.built = built.result
        return built
    trace.blobs = complete(trace.timed)
    return trace.blobs


def _compile(gm: fx.GraphModule, name: str, options: Options, trace: Trace) -> BoxedCall:
    entry = _begin_entry(gm, name, options, trace, build_async=not observers_of(options))
    device, target = main_device(gm), trace.target
    missing = missing_features(needed_features(target)) if device.type == "cpu" else ""
    if missing:  # such kernels would stop this process
        raise UsageError(f"the target {target!r} does not run here: the processor lacks {missing}")
    with trace.timed("bind"):
        bind = _binding(gm, name, options, trace)
        if not isinstance(entry, Background):
            return bind(_load(entry, device))

    def bind_built() -> BoxedCall:
        say("the C++ compiler builds kernels")
        return bind(_load(entry.result(), device))

    return when_ready(partial(_or_eagerly, bind_built, gm, options, trace))


def _binding(
    gm: fx.GraphModule, name: str, options: Options, trace: Trace
) -> Callable[[Mapping[str, Callable[..., None]]], BoxedCall]:
    """Return a function that makes a graph's callable of its kernels."""
    device = main_device(gm)
    called = json.loads(trace.manifest)["taken"]["calls"]
    outside = of_graph(gm, _compile_parts(gm, name, options, called))
    titles = partial(launch_titles, gm, name, trace.manifest)
    ranges = Ranges(f"fusec {graph_id(name)}", trace.blobs["statements.json"].decode(), titles)
    observers = observers_of(options)
    if observers:
        gm.meta[USER_PASSES] = tuple(json.loads(trace.manifest)["passes"])
    asked = [observer.watch_calls(gm, name, options) for observer in observers]
    hooks = [hook for hook in asked if hook is not None]
    return partial(
        executable.bind, trace.wrapper, outside=outside, device=device, ranges=ranges, hooks=hooks
    )


def bind_stored(stored: Stored, options: Options) -> BoxedCall | None:
    """Return the callable of a graph that the cache has; None where it has it no more."""
    blobs = open_cache(options).load(stored.key)
    if blobs is None:
        return None
    name, device = stored.name, stored.device
    trace = Trace(name, phase=compile_phase, cached=True, key=stored.key, blobs=blobs)
    RECENT.append(trace)
    target = target_for(device, options)
    trace.target = target.name
    with trace.timed("bind"):
        kernels = _load(blobs, device)
        statements = blobs["statements.json"].decode()
        ranges = Ranges(f"fusec {graph_id(name)}", statements, lambda: stored.titles)
        return executable.bind(trace.wrapper, kernels, stored.outside, device, ranges=ranges)


def salt_of(device: torch.device, target: Target, options: Options) -> tuple[str, ...]:
    """Return the part of all cache keys that is no graph: versions, options, the machine."""
    versions = (fingerprint(), cpu_features(), _compiler(options))
    raced = _processor(device) if _races(options) else ""
    machine = target.machine
    threads = f"threads={machine.threads} units={machine.units} bytes={machine.bytes_per_us}"
    chosen = f"tf32={allows_tf32()} linears={linears.registered()}"
    passes = versions_of(options)
    return (*versions, options.key(), passes, target.name, chosen, threads, raced)


def _compiler(options: Options) -> str:
    """Return which C++ compiler kernels are from: where there is none, the cache's last one."""
    here = cpp_kernel.compiler_identity(options.cxx)
    if here != cpp_kernel.NO_COMPILER or not options.cache:
        return here
    last = open_cache(options).load(_LAST_COMPILER)
    return here if last is None else last["identity"].decode()


def _remember_compiler(options: Options) -> None:
    """Keep the compiler's identity in the cache, for later processes that have no compiler."""
    about = {"model": "(the C++ compiler that made them)", "graph": "", "target": ""}
    identity = cpp_kernel.compiler_identity(options.cxx).encode()
    blobs, cache = {ABOUT: json.dumps(about).encode(), "identity": identity}, open_cache(options)
    if cache.load(_LAST_COMPILER) != blobs:
        cache.store(_LAST_COMPILER, blobs)


_LAST_COMPILER = "compiler"


def _compile_parts(
    gm: fx.GraphModule, name: str, options: Options, called: Collection[str]
) -> Mapping[str, Callable[..., Any]]:
    """Return the compiled form of each subgraph that the wrapper calls, by attribute.

    Args:
        called: the nodes that the wrapper calls.
    """

    def callable_of(attribute: str, part: fx.GraphModule) -> Callable[..., Any]:
        call = compile_graph(part, f"{name}.{attribute}", options)
        strides = traced_strides(part)
        (returned,) = part.graph.output_node().args
        single = isinstance(returned, fx.Node)

        def run(*args: Any) -> Any:
            if strides is not None:  # a loop hands over slices, or what another iteration made
                args = tuple(
                    arg if expected is None else executable.with_strides(arg, expected)
                    for arg, expected in zip(args, strides, strict=True)
                )
            result = call(list(args))
            return result[0] if single and isinstance(result, tuple) else result

        return run

    return {
        attribute: callable_of(attribute, part)
        for attribute, (part, loops) in find_parts(gm, called).items()
        if traced_strides(part) is not None or not loops
    }


def allows_tf32() -> bool:
    """Return True if torch's setting lets products of f32 round their operands to 10 bits.

    That is ``torch.set_float32_matmul_precision("high")`` or ``"medium"``, or one of the settings
    of ``torch.backends.cuda.matmul``. Dynamo guards it: a change compiles anew.
    """
    own: str = torch.backends.cuda.matmul.fp32_precision
    if own == "none":  # as all backends
        own = torch.backends.fp32_precision  # type: ignore[attr-defined]
    return own == "tf32"


def target_for(device: torch.device, options: Options) -> Target:
    """Return the target of graphs on a device: the one that the options name, or the device's own.

    Raises:
        Unsupported: if kernels cannot be made for the device.
        UsageError: if the options name one, or ask for something, that does not run there.
    """
    if options.batch_invariant and device.type != "cpu":
        raise UsageError(f"batch_invariant is for CPUs, and this graph is on {device}.")
    if options.target is None:
        return target_of_device(device_target(device), **features_of(device, options))
    target = find_target(options.target, **features_of(None, options))
    if target.device != device.type:
        raise UsageError(
            f"the target {target.name!r} is for looking at code of another device than this "
            f"graph's, {device} (fusec dump, explain, check --static); leave it out to run"
        )
    return target


def features_of(device: torch.device | None, options: Options | None = None) -> dict[str, Any]:
    """Return the properties of torch's settings, and of a device, that ``find_target`` takes.

    Args:
        device: whose own target is meant; None for a target that was named.
        options: under ``by_rule`` the number of threads is the machine's, not the process's.
    """
    by_rule = options is not None and options.by_rule
    here = {
        "vector_width": cpp_kernel.vector_width(),
        "bf16": cpp_kernel.bf16_products(),
        "threads": (os.cpu_count() or 1) if by_rule else torch.get_num_threads(),
        "tf32": allows_tf32(),
    }
    if device is None or device.type != "cuda":
        return here
    return {**here, **gpu_features(torch.cuda.get_device_properties(device))}


def gpu_features(facts: Any) -> dict[str, Any]:
    """Return the multiprocessors of a GPU and, on NVIDIA's, the rate of its memory.

    A copy moves 0.90 of the bytes that the memory clocks (H100: 3.02 of 3.35 TB/s, measured
    2026-11-26; H200: 4.3 of 4.8).
    """
    found = {"units": facts.multi_processor_count}
    if torch.version.hip is not None:
        return found
    clocked = 2e-3 * facts.memory_clock_rate * facts.memory_bus_width / 8  # kHz, bits
    return {**found, "bytes_per_us": 0.9 * clocked}


def device_target(device: torch.device) -> str:
    """Return the name of the target that runs on a torch device.

    Raises:
        Unsupported: if there is none.
    """
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    raise Unsupported(f"no target for device {device}")


def _generate(
    gm: fx.GraphModule,
    context: CompileContext,
    addition: Addition | None,
    hooks: Sequence[CompileHooks],
) -> tuple[Entry, Callable[[], Entry]]:
    """Return a graph's entry without its kernels, and a function that builds and adds these."""
    target, compiled = context.target, _observed(gm, context, hooks)
    about = {"model": model_name(gm), "graph": context.trace.name, "target": target.name}
    blobs = {
        ABOUT: json.dumps(about).encode(),
        "wrapper.py": compiled.wrapper.encode(),
        "statements.json": compiled.statements().encode(),
        "manifest.json": manifest(compiled, target.machine, context.trace.passes),
    }
    if addition is not None:
        compiled, more = addition.add(target, compiled)
        blobs |= more
    if not compiled.programs and not compiled.added:
        return blobs, dict
    return blobs, partial(BUILDS[target.language], compiled, target.name, context.options)


def _observed(
    gm: fx.GraphModule, context: CompileContext, hooks: Sequence[CompileHooks]
) -> Compiled:
    stages = tuple(hook.stages for hook in hooks if hook.stages is not None)
    compiled = compile_to_source(gm, replace(context, observe=stages))
    for hook in hooks:
        if hook.code is not None:
            hook.code(compiled)
    return compiled


def _tell_cached_code(
    gm: fx.GraphModule, name: str, target: Target, options: Options, hooks: Sequence[CompileHooks]
) -> None:
    """Give hooks the code of a cached graph, compiled again: an entry has no text of it."""
    try:
        untimed = replace(options, race_budget_s=0.0)
        _observed(gm, context_for(gm, target, untimed, Trace(name)), hooks)
    except Exception:  # the program has its kernels
        logger.debug("no code of %s for the trace", name, exc_info=True)


def context_for(
    gm: fx.GraphModule, target: Target, options: Options, trace: Trace
) -> CompileContext:
    """Return the context of a compile, with a judge that races candidates on this machine.

    With no time for races (``race_budget_s`` 0) it knows the verdicts of earlier ones.
    """
    context = CompileContext(target, options, trace)
    device = main_device(gm)
    if not _races(options) or target.device != device.type:
        return context
    contests: dict[str, NewContest] = {
        "group": _group_contests(gm, target, options, device),
        "product": partial(product_contest, device, target.machine.races),
    }
    return replace(context, judge=RaceJudge(_races_of(device, target, options), contests))


def format_judge(target: Target, options: Options) -> Judge:
    """Return the judge of memory formats: it races convolutions, if they may be timed here."""
    if not _races(options) or not target.formats:
        return judge_by_rule
    device = torch.device(target.device)
    races = _races_of(device, target, options)
    races.keeps_all = races.left_s > 0
    contest = partial(convolution_contest, device, target.machine.races)
    return RaceJudge(races, {"convolution": contest})


def _races_of(device: torch.device, target: Target, options: Options) -> Races:
    salt = f"torch {torch.__version__} {_processor(device)} {target.name} {allows_tf32()}"
    cache = open_cache(options) if options.cache else None
    return Races(device, options.race_seconds(device.type), salt, cache, find_ranks())


def _races(options: Options) -> bool:
    """Return True if candidates may be timed, on the device of this machine."""
    return options.times and options.target is None


def _processor(device: torch.device) -> str:
    """Return the name of a device's processor, and the number of its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()} {cpu_features()} {torch.get_num_threads()} threads"


def _group_contests(
    gm: fx.GraphModule, target: Target, options: Options, device: torch.device
) -> GroupContests:
    build = BUILDS[target.language]

    def prepare(compiled: Compiled) -> Callable[[list[Any]], Any]:
        blobs = dict(build(compiled, target.name, options)) if compiled.programs else {}
        rows = kernel_rows(compiled)
        launches = list(all_launches(compiled.schedule))
        if device.type == "cuda" and len(launches) == len(compiled.schedule.steps):  # all kernels
            arguments = argument_specs(compiled.schedule.graph)
            rehearse(compiled.wrapper, blobs, arguments, device)
        kernels = load_kernels(blobs, rows, device)
        return executable.bind(compiled.wrapper, kernels, of_graph(gm), device)

    return GroupContests(CompileContext(target, options, Trace("race")), prepare, device)


def _load(blobs: Mapping[str, bytes], device: torch.device) -> Mapping[str, Callable[..., None]]:
    """Return launchers by kernel name; a process loads the same bytes once a device.

    The key of an entry does not say them: built again without the cache, a race may end otherwise.
    """
    digest = hashlib.sha256(b"".join(blobs.values())).digest()
    with _lock:
        loaded = _libraries.get((digest, device))
        if loaded is None:
            rows = json.loads(blobs["manifest.json"])["kernels"]
            loaded = load_kernels(blobs, rows, device)
            _libraries[digest, device] = loaded
        return loaded
