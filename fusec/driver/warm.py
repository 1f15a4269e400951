"""Start from the cache without AOTAutograd, by a key of Dynamo's graph and all that it depends on.

Of each such graph the cache has an entry that names the entries of its forward and backward and
holds the calling convention (``runtime/calls/convention.py``). If all of them are there, a graph of
Dynamo is bound at once: nothing is traced, no pass runs. A graph without a key
(``frontend/aot/dynamo_key.py``) or a convention (``driver/aot_metadata.py``), or whose wrapper
takes an object from it that cannot be serialized (``runtime/calls/outside.py``), goes through
AOTAutograd. So does an observed compile (``TORCH_LOGS``, ``TORCH_TRACE``, ``fusec.watch``,
``verify``, ``dump_dir``), because graphs that are not traced cannot be reported; but it leaves an
entry.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from fusec.driver.aot_metadata import NoConvention, convention_of
from fusec.driver.compiler import bind_stored, salt_of
from fusec.driver.context import CompileContext
from fusec.driver.launches import launch_titles
from fusec.driver.observers import observers_of
from fusec.driver.trace import Trace
from fusec.driver.user_passes import may_be_cached
from fusec.frontend.aot.dynamo_key import NoKey, dynamo_key, shares_memory
from fusec.frontend.capture import main_device
from fusec.frontend.origin import op_name, origin_of
from fusec.options import Options
from fusec.runtime.cache.entry import ABOUT
from fusec.runtime.cache.store import open_cache
from fusec.runtime.calls.convention import Convention
from fusec.runtime.calls.executable import BoxedCall
from fusec.runtime.calls.fake import called_with_memory_only, unchecked
from fusec.runtime.calls.outside import describe, unnamed
from fusec.runtime.calls.stored import Stored, read_parts
from fusec.runtime.interior import untraced
from fusec.torch_interior import TracingContext, compile_phase, counters, is_guarded

logger = logging.getLogger("fusec.compile")

_WHAT = "a compiled graph"


@dataclass(frozen=True, slots=True)
class CachedGraph:
    """A graph that was compiled, forward, backward or inference."""

    gm: fx.GraphModule
    call: BoxedCall
    trace: Trace

    def row(self) -> dict[str, Any]:
        """Return the graph's description in an entry."""
        trace, device = self.trace, str(main_device(self.gm))
        titles = launch_titles(self.gm, trace.name, trace.manifest)
        outside = describe(self._taken, self.gm) if trace.blobs else None
        return {"key": trace.key, "device": device, "titles": titles, "outside": outside}

    @property
    def _taken(self) -> Any:
        """The operators and constants that the wrapper takes from the graph (``outside.py``)."""
        return json.loads(self.trace.manifest)["taken"]

    def obstacle(self) -> str:
        """Return why the graph cannot be stored."""
        if self.trace.problem or not self.trace.blobs:
            return self.trace.problem or "its kernels are not kept"
        lines = []
        for node in unnamed(self._taken, self.gm):
            is_tensor = node.op == "get_attr"
            what = "a tensor of the program's own" if is_tensor else op_name(node.target)
            source = origin_of(node).source
            remedy = ": give it to the module by register_buffer" if is_tensor else ""
            lines.append(f"{what}{f', at {source[-1]}' if source else ''}{remedy}")
        return "what no file can name: " + "; ".join(dict.fromkeys(lines))


@dataclass(slots=True)
class Start:
    """One graph of Dynamo, and its entry in the cache.

    Attributes:
        key: of its entry in the cache; "" for one that has none.
        parts: the compiled graphs: "forward" and "backward", or "inference".
        said: returns the convention, given the backward's graph.
        now: what runs where there is a backward: AOTAutograd's wrapper until that is compiled.
        lock: of ``parts``: threads that are first at a backward may each compile it.
    """

    gm: fx.GraphModule
    key: str
    options: Options
    parts: dict[str, CachedGraph] = field(default_factory=dict)
    said: Callable[[fx.GraphModule | None], Convention | None] | None = None
    now: Callable[..., Any] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @staticmethod
    def of(gm: fx.GraphModule, inputs: Sequence[Any], context: CompileContext) -> Start | None:
        """Return a graph's start; None where it needs AOTAutograd's wrapper."""
        options = context.options
        if options.freeze or options.cudagraphs:  # their calls need the graphs
            return None
        if not may_be_cached(options):
            return None
        try:
            key = dynamo_key(gm, inputs)
            if shares_memory(inputs):
                raise NoKey("inputs that share memory")
        except NoKey as reason:
            logger.debug("no start from the cache: %s", reason)
            return None
        if key is None:
            return Start(gm, "", options)
        salt = salt_of(torch.device(context.target.device), context.target, options)
        return Start(gm, " ".join(("start", key, *salt)), options)

    def load(self) -> Callable[..., Any] | None:
        """Return the callable for Dynamo, if the cache has everything that it needs."""
        if not (self.key and self.options.cache) or observers_of(self.options):
            return None
        found = open_cache(self.options).load(self.key)
        if found is None:
            return None
        try:
            convention, parts = _read(found)
        except ValueError as error:
            logger.debug("an entry of another form: %s", error)
            return None
        calls = [bind_stored(part, self.options) for part in parts]
        made = [call for call in calls if call is not None]
        if len(made) < len(calls):
            return None
        for count in ("total", "ok"):  # as AOTAutograd counts
            counters["aot_autograd"][count] += 1
        return self._callable(convention.around(*made))

    def noting(self, compile_one: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``compile_one`` with a record of each compiled graph in ``parts``.

        A backward is compiled when it first runs; the entry is stored then.
        """

        def note(gm: fx.GraphModule, inputs: Sequence[Any], *, name: str) -> Any:
            trace = Trace(name, phase=compile_phase)
            call = compile_one(gm, inputs, name=name, trace=trace)
            part = CachedGraph(gm, call, trace)
            if name == "backward" and self.said is not None:
                self._keep_with(part)
            else:
                self.parts[name] = part
            return call

        return note

    def _keep_with(self, backward: CachedGraph) -> None:
        """Store the graphs with a backward that was compiled as it was called, the first one."""
        assert self.said is not None
        with self.lock:  # the backward's caller keeps `noting`'s function, and so these graphs
            forward = self.parts.pop("forward", None)
        if forward is None:
            return
        parts = {"forward": forward, "backward": backward}
        convention = self.said(backward.gm)
        self._store(convention, parts)
        if convention is not None and self.now is not None:
            made = convention.around(*_calls(parts))
            self.now = called_with_memory_only(made, self.gm.forward)

    def keep(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Store the compiled graphs; return the callable for Dynamo, if need be ``compiled``."""
        context = TracingContext.try_get()
        if context is None or context.fw_metadata is None or is_guarded():
            return compiled
        self.said = partial(_convention, context.fw_metadata, self.options.deterministic)
        if "inference" not in self.parts:
            if "forward" not in self.parts or observers_of(self.options):
                return compiled
            self.now = compiled
            return untraced(lambda *args: self.now(*args), _WHAT)  # type: ignore[misc]
        convention = self.said(None)
        if convention is None:
            return compiled
        self._store(convention, self.parts)
        if observers_of(self.options):
            return compiled
        return self._callable(convention.around(*_calls(self.parts)))

    def _store(self, convention: Convention | None, parts: Mapping[str, CachedGraph]) -> None:
        rows = {name: part.row() for name, part in parts.items()}
        whole = all(row["outside"] is not None for row in rows.values())
        if convention is None or not whole or not (self.key and self.options.cache):
            return
        about = json.loads(next(iter(parts.values())).trace.blobs[ABOUT])
        blobs = {
            ABOUT: json.dumps({**about, "graph": "start"}).encode(),
            "convention.json": convention.to_json(),
            "parts.json": json.dumps(rows).encode(),
        }
        open_cache(self.options).store(self.key, blobs)

    def _callable(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the callable for Dynamo; with fake tensors it runs the graph itself."""
        return untraced(called_with_memory_only(call, self.gm.forward), _WHAT)


def _convention(
    metadata: Any, deterministic: bool, backward: fx.GraphModule | None
) -> Convention | None:
    """Return a graph's calling convention; None if it needs AOTAutograd's wrapper.

    That tells Dynamo which extents of results are symbols, which matters to graphs that take them.
    """
    if getattr(metadata, "dynamic_outputs", True):
        return None
    try:
        return convention_of(metadata, backward, deterministic)
    except NoConvention as reason:
        logger.debug("AOTAutograd's wrapper stays: %s", reason)
        return None


def _read(blobs: Mapping[str, bytes]) -> tuple[Convention, list[Stored]]:
    """Return the convention and the graphs of an entry.

    Raises:
        ValueError: for anything that ``Start`` does not write.
    """
    try:
        convention = Convention.from_json(blobs["convention.json"])
        return convention, read_parts(json.loads(blobs["parts.json"]), convention)
    except KeyError as error:
        raise ValueError(repr(error)) from error


def _calls(parts: Mapping[str, CachedGraph]) -> list[BoxedCall]:
    """Return the compiled graphs, without their checks for fake tensors."""
    return [unchecked(part.call) for part in parts.values()]
