"""From an AOTAutograd graph to a running callable: cache, pipeline, build, bind, and the way back.

A failure never breaks a model: the graph runs as eager kernels, with one warning that says why (an
error under ``options={"strict": True}``).
"""

from __future__ import annotations

import json
import logging
import threading
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fusec.codegen.targets import Target, find_target
from fusec.errors import EnvironmentProblem, FusecError, Unsupported
from fusec.frontend.key import graph_key
from fusec.options import Options
from fusec.pipeline import (
    Call,
    Compiled,
    compile_to_source,
    cpp_unit,
    graph_device,
    manifest,
)
from fusec.runtime import cpp_kernel, executable
from fusec.runtime.cache import Cache, cpu_features, fingerprint, open_cache
from fusec.trace import Trace

logger = logging.getLogger("fusec.compile")

RECENT: deque[Trace] = deque(maxlen=64)
"""The latest compiles of this process, for ``explain`` and tests."""
_lock = threading.Lock()
_libraries: dict[str, dict[str, Callable[..., None]]] = {}


def compile_graph(
    gm: fx.GraphModule, name: str, options: Options, trace: Trace | None = None
) -> Call:
    """Return a boxed callable that computes what ``gm`` computes.

    Raises:
        FusecError: under ``options.strict``, what went wrong.
    """
    trace = trace if trace is not None else Trace(name)
    RECENT.append(trace)
    try:
        return _compile(gm, name, options, trace)
    except Exception as error:
        if options.strict and not isinstance(error, Unsupported):
            raise
        trace.problem = f"{type(error).__name__}: {error}"
        _explain_fallback(name, error)
        return run_eagerly(gm)


def _explain_fallback(name: str, error: Exception) -> None:
    if isinstance(error, Unsupported):
        logger.info("graph %s runs as eager kernels: %s", name, error.reason)
        return
    if isinstance(error, EnvironmentProblem) and "compiler" in str(error):
        cpp_kernel.warn_no_compiler()
        return
    logger.debug("graph %s failed", name, exc_info=error)
    warnings.warn(
        f"fusec: graph {name!r} runs as eager kernels, because compiling it failed: "
        f'{type(error).__name__}: {error}. Use options={{"strict": True}} to see where.',
        stacklevel=2,
    )


def run_eagerly(gm: fx.GraphModule) -> Call:
    """Return the graph itself as a boxed callable."""

    def call(args: list[Any]) -> Any:
        inputs = list(args)
        args.clear()
        return gm(*inputs)

    return call


def _compile(gm: fx.GraphModule, name: str, options: Options, trace: Trace) -> Call:
    device = graph_device(gm)
    target = find_target(options.target or device_target(device), cpp_kernel.vector_width())
    with trace.timed("key"):
        key = graph_key(gm, fingerprint(), cpu_features(), options.key(), target.name, name)
        cache = open_cache(options)
    with trace.timed("cache"):
        blobs = cache.load(key) if options.cache else None
    if blobs is None or not _complete(blobs):
        blobs = _build(gm, name, target, options, trace)
        if options.cache:
            with trace.timed("cache"):
                cache.store(key, blobs)
    else:
        trace.cached = True
    with trace.timed("bind"):
        kernels = _load(key, blobs, cache, target, device)
        return executable.bind(blobs["wrapper.py"].decode(), kernels, gm, device)


def _complete(blobs: dict[str, bytes]) -> bool:
    return "wrapper.py" in blobs and "manifest.json" in blobs


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


def _build(
    gm: fx.GraphModule, name: str, target: Target, options: Options, trace: Trace
) -> dict[str, bytes]:
    compiled = compile_to_source(gm, name, target, options, trace)
    blobs = {"wrapper.py": compiled.wrapper.encode(), "manifest.json": manifest(compiled)}
    if not compiled.programs:
        return blobs
    with trace.timed("build"):
        if target.language == "cpp":
            unit = cpp_unit(compiled, cpp_kernel.vector_width())
            blobs["kernels.so"] = cpp_kernel.build(unit, options)
        else:
            blobs.update(_triton_blobs(compiled))
    return blobs


def _triton_blobs(compiled: Compiled) -> dict[str, bytes]:
    return {f"{name}.triton.py": text.encode() for name, text in compiled.sources.items()}


def _load(
    key: str, blobs: dict[str, bytes], cache: Cache, target: Target, device: torch.device
) -> dict[str, Callable[..., None]]:
    """Return launchers by kernel name; a process loads each entry once."""
    with _lock:
        loaded = _libraries.get(key)
        if loaded is None:
            loaded = _libraries[key] = _load_once(blobs, target, device)
        return loaded


def _load_once(
    blobs: dict[str, bytes], target: Target, device: torch.device
) -> dict[str, Callable[..., None]]:
    rows = json.loads(blobs["manifest.json"])["kernels"]
    if not rows:
        return {}
    if target.language == "cpp":
        from fusec.runtime.memory_file import as_file

        return dict(cpp_kernel.load(as_file(blobs["kernels.so"]), rows))
    raise FusecError("the Triton loader is not wired in yet")
