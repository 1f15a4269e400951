"""Run graphs compiled for sm_90 over the stand-in driver, and print what reached it as JSON.

For a process of its own, in which the loader finds the stand-in as ``libcuda.so.1``. Triton's own
launcher runs, in C; tensors are those of a CPU, and torch's functions that a CPU's build lacks, or
that would wait for a device, go to the stand-in instead.

Worked example, with the environment that ``test_driver.py`` sets::

    python -m tests.runtime.kernels.driver.process pointwise rows
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import fx
from torch.overrides import TorchFunctionMode
from triton.backends.nvidia.driver import CudaDriver

from fusec.codegen.targets import find_target
from fusec.driver.build import triton_source
from fusec.driver.pipeline import manifest
from fusec.options import Options
from fusec.runtime.calls import executable
from fusec.runtime.calls.outside import of_graph
from fusec.runtime.calls.ranges import Ranges
from fusec.runtime.kernels import triton_kernel
from fusec.runtime.kernels.triton_kernel import TritonKernel, TritonSource
from fusec.tools.clock import Clock
from fusec.tools.report.observe import observe
from fusec.tools.report.profile import Steps, profile_of
from fusec.tools.report.stages import take_through
from fusec.tools.summary import GraphSummary, summarize
from tests.calls import calls_of

DEVICE = 0
STREAM = 7000
LOG = Path(os.environ["STANDIN_CUDA_LOG"])
STANDIN = ctypes.CDLL("libcuda.so.1")

Call = Callable[[list[Any]], Any]


def check(error: int) -> None:
    """Raise what torch raises for an error of the driver."""
    if error:
        raise RuntimeError(f"CUDA error {error}")


class DeviceTensors(TorchFunctionMode):
    """Tensors of a device have a CPU's memory; copies to them are the stand-in's."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        place = args[1] if func is torch.Tensor.to else kwargs.get("device")
        if place is not None and str(place).startswith("cuda"):
            if func in (torch.tensor, torch.Tensor.to):  # from pageable memory
                check(STANDIN.cuMemcpyHtoD_v2(None, None, ctypes.c_size_t(0)))
            if func is torch.Tensor.to:
                return args[0].clone()
            kwargs.pop("device")
        return func(*args, **kwargs)


class Event:
    """A moment of the device, on the stream of all launches."""

    def __init__(self, enable_timing: bool) -> None:
        self.handle = ctypes.c_void_p()
        check(STANDIN.cuEventCreate(ctypes.byref(self.handle), 0 if enable_timing else 2))

    def record(self) -> None:
        check(STANDIN.cuEventRecord(self.handle, ctypes.c_void_p(STREAM)))

    def synchronize(self) -> None:
        check(STANDIN.cuEventSynchronize(self.handle))

    def elapsed_time(self, end: Event) -> float:
        ms = ctypes.c_float()
        check(STANDIN.cuEventElapsedTime(ctypes.byref(ms), self.handle, end.handle))
        return ms.value


class Driver(CudaDriver):
    """Triton's driver over the stand-in, where it would ask torch."""

    def __init__(self) -> None:
        super().__init__()
        self.get_current_device = lambda: DEVICE
        self.get_current_stream = lambda device: STREAM + device
        self.get_device_capability = lambda device: (9, 0)

    def get_device_interface(self) -> Any:
        return SimpleNamespace(
            device=lambda device: contextlib.nullcontext(),
            is_current_stream_capturing=is_capturing,
        )


def install() -> None:
    """Make Triton use the stand-in, and torch time as if it had a device."""
    triton.runtime.driver.set_active(Driver())
    torch.cuda.Event = Event
    torch.cuda.synchronize = lambda device=None: check(STANDIN.cuCtxSynchronize())


def is_capturing() -> bool:
    status = ctypes.c_int()
    check(STANDIN.cuStreamIsCapturing(ctypes.c_void_p(STREAM), ctypes.byref(status)))
    return bool(status.value)


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """Run the body while the stream captures; what it refuses fails the capture."""
    check(STANDIN.cuStreamBeginCapture_v2(ctypes.c_void_p(STREAM), 0))
    try:
        yield
    finally:
        check(STANDIN.cuStreamEndCapture(ctypes.c_void_p(STREAM), None))


def arrived() -> list[dict[str, Any]]:
    """Return what reached the stand-in so far."""
    return [json.loads(line) for line in LOG.read_text().splitlines()] if LOG.exists() else []


# -- graphs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bound:
    """A graph of one compile, loaded: what calls it, and its inputs' shapes."""

    name: str
    call: Call
    graph: fx.GraphModule
    summary: GraphSummary

    def inputs(self) -> list[Any]:
        """Return arguments in memory of their own."""
        return [_argument(n.meta["val"]) for n in self.graph.graph.find_nodes(op="placeholder")]

    def run(self) -> None:
        """Call it with tensors at new addresses."""
        self.call(self.inputs())


_held: list[Any] = []
"""All arguments so far: the next ones shall be elsewhere."""


def _argument(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value.node.hint if isinstance(value, torch.SymInt) else value
    shape, strides = ([int(n) for n in numbers] for numbers in (value.shape, value.stride()))
    made = torch.empty_strided(shape, strides, dtype=value.dtype).zero_()
    _held.append(made)
    return made


def bound(
    fn: Callable[..., Any],
    *inputs: Any,
    how: dict[str, Any],
    clock: Clock | None = None,
    **options: Any,
) -> list[Bound]:
    """Return the graphs of a call, compiled for sm_90 and loaded over the stand-in.

    Args:
        how: of ``observe``: ``train``, ``dynamic``.
        clock: times launches as on a device.
    """
    chosen = Options.from_compile(None, {"race": "fused", **options})
    target = find_target("sm_90")
    found = []
    for one in observe(fn, inputs, target=target, options=chosen, **how):
        made = take_through(one, target, chosen)
        made.check()
        assert made.compiled is not None, made.problem
        sources = [triton_source(made.compiled, name) for name in made.compiled.distinct]
        kernels = triton_kernel.unpack(triton_kernel.pack(sources, target.name), DEVICE)
        made.trace.blobs = {"manifest.json": manifest(made.compiled, target.machine, {})}
        summary, cpu = summarize(one.graph, made.trace), torch.device("cpu")
        call = executable.bind(
            made.compiled.wrapper,
            kernels,
            of_graph(one.graph),
            cpu,
            Ranges(summary.id, made.compiled.statements(), dict),
            [clock.hooks(summary.id, torch.device("cuda", DEVICE))] if clock else [],
        )
        found.append(Bound(one.name, call, one.graph, summary))
    return found


# -- what should arrive ----------------------------------------------------------------------------


def expected(kernel: TritonSource, args: Sequence[Any]) -> list[str]:
    """Return the bytes of each parameter of a launch, in hexadecimal digits."""
    plain = [pair for pair in kernel.signature if not pair[1].startswith("tensordesc")]
    values = {
        name: arg if isinstance(arg, int) else arg.data_ptr()
        for (name, _), arg in zip(plain, args, strict=False)
    }
    found = [struct.pack("<i" if kind == "i32" else "<Q", values[name]) for name, kind in plain]
    for one in kernel.descriptors:
        found.append(struct.pack("<Q120x", values[one.pointer]))
        found += [struct.pack("<i", eval(text, {}, values)) for text in one.shape]
        found += [struct.pack("<q", eval(text, {}, values)) for text in one.strides]
    return [part.hex() for part in (*found, *[bytes(8)] * 2)]  # two kinds of scratch memory


def launched(kernel: TritonKernel, args: Sequence[Any]) -> dict[str, Any]:
    """Return what a launch should pass on, of what it was called with."""
    source, given = kernel.kernel, kernel.kernel.given(args)
    names = [name for name, kind in source.signature if kind == "i32"]
    counts = [] if source.blocks is None else [source.grid[0]]
    sizes = given[len(given) - len(names) - len(counts) :]
    environment = dict(zip([*names, *counts], sizes, strict=True))
    grid = [eval(text, {}, environment) for text in source.grid]
    name = source.function or source.name
    return {"name": name, "parameters": expected(source, given), "grid": grid}


# -- cases -----------------------------------------------------------------------------------------


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * y


def norm(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x + r, w.shape, w, b)


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b))


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def cast(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        for weight in weights:
            x = F.relu(F.linear(x, weight))
    return x


def step() -> Callable[[], None]:
    """Return an optimizer's step over tensors of three shapes."""
    sizes = [(64, 64), (768,), (48, 16)]
    params = [torch.nn.Parameter(torch.zeros(sizes[k % 3])) for k in range(9)]
    for parameter in params:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True)
    optimizer.step()
    return optimizer.step


def grown(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Layers that differ in their channels alone: one code, and a number of each."""
    for weight in weights:
        x = torch.cat((x, torch.relu(F.conv2d(x, weight))), 1)
        x = x - x.mean((0, 2, 3), keepdim=True)
    return x


def once(fn: Callable[..., Any], *inputs: Any, **options: Any) -> Callable[[], None]:
    """Return a case that calls each graph of an inference once."""
    how = options.pop("how", {})
    return lambda: [one.run() for one in bound(fn, *inputs, how=how, **options)]  # type: ignore


TRAIN = {"train": True}
ROWS = (half(64, 4096), half(64, 4096), half(4096), half(4096))
TILES = (half(200, 256), half(512, 256), half(512))
HEADS = (half(2, 3, 200, 64),) * 3


def captured(*graphs: Bound) -> None:
    """Call graphs twice, the second time with the tensors of the first, then in a capture."""
    for graph in graphs:
        same = graph.inputs()
        for _ in range(2):
            graph.call(list(same))
        graph.run()
        with capture():
            graph.run()


def unaligned() -> None:
    """Call a graph in a capture with what no earlier call had: an odd address."""
    (graph,) = bound(gated, half(1000, 256), half(1000, 256), how={})
    graph.run()
    _, y = graph.inputs()
    x = half(1000 * 256 + 1)[1:].view(1000, 256)
    with capture():
        graph.call([x, y])


def refused() -> None:
    """Copy a tensor to the device in a capture."""
    with capture(), contextlib.suppress(RuntimeError):
        torch.zeros(4).to(torch.device("cuda", DEVICE))


def wrong_maps() -> None:
    """Encode maps of a matrix of bf16, 8 by 64, that break one rule each."""
    right = {"address": 4096, "extents": (64, 8), "stride": 128, "box": (64, 8)}
    changes: list[dict[str, Any]] = [
        *({}, {"address": 4104}, {"extents": (64, 0)}, {"stride": 120}),
        *({"box": (64, 512)}, {"box": (128, 8)}, {"box": (4, 8)}),
    ]
    for change in changes:
        given = {**right, **change}
        memory = ctypes.create_string_buffer(192)
        aligned = ctypes.addressof(memory) + -ctypes.addressof(memory) % 64
        STANDIN.cuTensorMapEncodeTiled(
            *(ctypes.c_void_p(aligned), 9, 2, ctypes.c_void_p(given["address"])),
            *((ctypes.c_uint64 * 2)(*given["extents"]), (ctypes.c_uint64 * 1)(given["stride"])),
            *((ctypes.c_uint32 * 2)(*given["box"]), (ctypes.c_uint32 * 2)(1, 1), 0, 3, 0, 0),
        )


def profiled() -> Any:
    """Return the profile of steps that call two graphs, as JSON."""
    clock = Clock()
    graphs = bound(norm, *ROWS, how=TRAIN, clock=clock)
    steps = Steps(clock)
    for _ in range(6):
        for graph in graphs:
            graph.run()
        steps.end()
    summaries = [graph.summary for graph in graphs]
    return json.loads(profile_of("norm", torch.device("cuda", DEVICE), summaries, steps).to_json())


CASES: dict[str, Callable[[], Any]] = {
    "pointwise": once(gated, half(1000, 256), half(1000, 256)),
    "rows": once(norm, *ROWS, how=TRAIN),
    "product": once(linear, *TILES, descriptors="never"),
    "product by descriptors": once(linear, *TILES, descriptors="always"),
    "family": once(
        grown, torch.empty(4, 16, 4, 4), *[torch.empty(16, 16 * c, 1, 1) for c in (1, 2, 3)]
    ),
    "dynamic product": once(linear, *TILES, descriptors="always", how={"dynamic": True}),
    "product with roles": once(linear, *TILES, roles="cooperative", how={"dynamic": True}),
    "attention with roles": once(causal, *HEADS, roles="cooperative"),
    "attention": once(causal, *HEADS, descriptors="always", how=TRAIN),
    "autocast": lambda: captured(
        *bound(cast, torch.empty(32, 64), *[torch.empty(64, 64)] * 4, how=TRAIN, race="library")
    ),
    "optimizer": lambda: captured(*bound(step(), how={})),
    "unaligned": unaligned,
    "refused": refused,
    "profile": profiled,
    "wrong maps": wrong_maps,
}


def main() -> None:
    install()
    report = {}
    with DeviceTensors():
        for name in sys.argv[1:] or CASES:
            before, problem, result = len(arrived()), "", None
            with calls_of(TritonKernel.__call__) as made:
                try:
                    result = CASES[name]()
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
            calls = [launched(call.arguments["self"], call.arguments["args"]) for call in made]
            log = arrived()[before:]
            report[name] = {"calls": calls, "arrived": log, "problem": problem, "result": result}
    json.dump({"triton": triton.__version__, "cases": report}, sys.stdout)


if __name__ == "__main__":
    main()
