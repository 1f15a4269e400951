"""Compare whole graphs with eager at run time (``verify``): results, writes, gradients, strides.

``kernels.py`` compares kernels with the FX graph that they were compiled from. That graph may
be wrong itself: by a rewrite, or by the partition, whose backward may recompute a value from memory
that the forward has overwritten since. So the graph that AOTAutograd hands over is kept as it came,
forward and backward in one (after ``JOINT`` only if it draws random numbers, because fusec's differ
from eager's), and each call runs it by eager kernels, on copies::

    forward(primals)             its results, and what it wrote to its inputs
    backward(saved, tangents)    the gradients, from copies of that forward's primals

A backward is matched to its forward by the memory of its saved tensors. Results are compared by the
rule of docs/numerics.md, with an fp64 run of the graph where they differ; strides must be equal.

Left out: graphs that communicate with other ranks, or have other effects than writes to inputs.
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from fusec.driver.observers import USER_PASSES
from fusec.errors import WrongGraph
from fusec.frontend.fallbacks import draws_random_numbers, is_impure, talks_to_ranks
from fusec.frontend.origin import op_name, origin_of
from fusec.runtime.calls.executable import BoxedCall, has_strides
from fusec.runtime.race.agreement import disagreement
from fusec.tools.verify.kernels import (
    Exact,
    Tally,
    copy_of,
    kernels_are_off,
    place_of,
    with_either_choice,
)
from fusec.torch_interior import FakeTensor, fake_mode

logger = logging.getLogger("fusec.verify.graphs")

_CALLS = 8
"""Forwards that are kept until their backwards run, at most: each has copies of its inputs."""
_ROUNDINGS = 16
"""Differences of so many roundings of a graph's largest number count as noise."""
_LIKE_INFINITY = 1e4
"""A tensor with such numbers may be a mask, and does not count for the largest number."""
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a forward: copies of its inputs by name, and the states of generators before it."""

    inputs: Mapping[str, Any]
    generators: Sequence[tuple[torch.device, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _PureSlice:
    """The part of a graph that computes some of its results, without any write.

    Attributes:
        names: the results' names in messages.
        made: the node of each result.
    """

    gm: fx.GraphModule
    names: tuple[str, ...]
    made: tuple[Any, ...]

    def run(
        self, call: _Call, tangents: Mapping[str, Any], *, exact: bool = False
    ) -> Sequence[Any]:
        """Return the results by eager kernels, or in fp64."""
        given = {**call.inputs, **tangents}
        inputs = [given[node.name] for node in self.gm.graph.find_nodes(op="placeholder")]
        with torch.random.fork_rng([d for d, _ in call.generators if d.type == "cuda"]):
            for device, state in call.generators:
                _generator(device).set_state(state)
            made: Sequence[Any] = (Exact if exact else fx.Interpreter)(self.gm).run(*inputs)
        return made


class Reference:
    """A graph as AOTAutograd made it, and its forward calls whose backwards have not run yet.

    Args:
        gm: forward and backward in one, or a graph for inference; its nodes are copied.
        outputs: how many of its results are the forward's; None: all.
        names: the program's names of its inputs.
        strict: raise for a result that is off, in place of a warning.
    """

    def __init__(
        self, gm: fx.GraphModule, outputs: int | None, names: Mapping[str, str], *, strict: bool
    ) -> None:
        self.outputs, self.strict = outputs, strict
        self.reason = _why_left_out(gm.graph)
        self.draws = draws(gm)
        if not self.reason:
            self.forward = _forward_of(gm, outputs, names)
            self.backward = None if outputs is None else _backward_of(gm, outputs, names)
        self.calls: OrderedDict[tuple[Any, ...], _Call] = OrderedDict()

    def __deepcopy__(self, memo: Any) -> Reference:
        """Return itself: AOTAutograd copies a backward, which needs the forward's calls."""
        return self

    def around(self, call: BoxedCall, graph: fx.GraphModule, name: str) -> BoxedCall:
        """Return a boxed callable that compares a compiled graph's results with this reference."""
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        judge = _Judge(name, self.strict, graph.meta.get(USER_PASSES, ()))
        if self.reason:
            judge.leave_out(self.reason)
            return call
        run = self._backward if name == "backward" else self._forward

        def boxed(args: list[Any]) -> Any:
            if fake_mode() is not None or any(isinstance(arg, FakeTensor) for arg in args):
                return call(args)
            with torch.no_grad():
                return run(call, dict(zip(names, args, strict=True)), args, judge)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    def _forward(
        self, call: BoxedCall, inputs: Mapping[str, Any], args: list[Any], judge: _Judge
    ) -> Any:
        generators = _generators(inputs.values()) if self.draws else ()
        known = _Call({name: copy_of(value) for name, value in inputs.items()}, generators)
        made = call(args)
        count = len(made) if self.outputs is None else self.outputs
        written = [inputs[node.args[0].name] for node in self.forward.made[count:]]
        judge.compare(self.forward, (*made[:count], *written), known, {})
        if self.outputs is not None:
            self.calls[_saved(made[self.outputs :])] = known
            while len(self.calls) > _CALLS:
                self.calls.popitem(last=False)
        return made

    def _backward(
        self, call: BoxedCall, inputs: Mapping[str, Any], args: list[Any], judge: _Judge
    ) -> Any:
        tangents = {name: copy_of(t) for name, t in inputs.items() if "tangents" in name}
        saved = _saved(value for name, value in inputs.items() if name not in tangents)
        known = self.calls.pop(saved, None)
        made = call(args)
        if known is None:
            judge.leave_out("its forward is not known: it ran long ago, or the backward ran before")
        elif self.backward is not None:
            judge.compare(self.backward, made, known, tangents)
        return made


@dataclass(slots=True)
class _Judge:
    """Compares the results of one compiled graph, which ``passes`` of the user rewrote."""

    graph: str
    strict: bool
    passes: tuple[str, ...]
    tally: Tally = field(init=False)

    def __post_init__(self) -> None:
        self.tally = Tally.begin(self.graph, whole=True)

    def leave_out(self, reason: str) -> None:
        """Log and count a result that is not compared."""
        self.tally.left_out += 1
        logger.info("graph %s is left out: %s", self.graph, reason)

    def compare(
        self, part: _PureSlice, made: Sequence[Any], call: _Call, tangents: Mapping[str, Any]
    ) -> None:
        """Compare results with eager's.

        Raises:
            WrongGraph: if one is off, where the options are strict.
        """
        compared = partial(_problems, part, made, call, tangents)
        try:
            found = with_either_choice(compared, lambda said: any(said.values()))
        except Exception as reason:  # whatever eager raises is not the program's failure
            self.leave_out(f"{type(reason).__name__}: {reason}")
            return
        for k, said in found.items():
            self._judge(part.names[k], part.made[k], said)

    def _judge(self, name: str, node: fx.Node, said: str) -> None:
        if not said:
            self.tally.agreed += 1
            logger.debug("%s of graph %s agrees", name, self.graph)
        elif not kernels_are_off():  # else the kernel was reported
            self.tally.off[self.graph, name] += 1
            if self.tally.off[self.graph, name] == 1:
                self._tell(name, node, said)

    def _tell(self, name: str, node: fx.Node, said: str) -> None:
        wrong = WrongGraph(self.graph, name, op_name(node.target), said, origin_of(node).source)
        wrong.passes = self.passes
        if self.strict:
            raise wrong
        warnings.warn(f"fusec: {wrong}", stacklevel=5)


def _problems(
    part: _PureSlice, made: Sequence[Any], call: _Call, tangents: Mapping[str, Any]
) -> dict[int, str]:
    """Return how each result that is a tensor differs from eager's, or ""."""
    exact: list[Sequence[Any]] = []

    def truth(number: int) -> torch.Tensor:
        if not exact:
            exact.append(part.run(call, tangents, exact=True))
        return exact[0][number]  # type: ignore[no-any-return]

    wanted = part.run(call, tangents)
    most = max(map(_largest, (*tangents.values(), *wanted)), default=0.0)
    return {
        k: _problem(got, eager, most, partial(truth, k))
        for k, (got, eager) in enumerate(zip(made, wanted, strict=True))
        if isinstance(got, torch.Tensor) and isinstance(eager, torch.Tensor)
    }


def _problem(
    got: torch.Tensor, eager: torch.Tensor, most: float, exact: Callable[[], torch.Tensor]
) -> str:
    """Return how a result differs from eager's, or ""."""
    problem = disagreement([got], [eager], lambda: [exact()])
    if problem and not _is_noise(got, eager, most):
        return problem.partition(": ")[2] + place_of(got, eager, exact)
    return _other_strides(got, eager)


# -- parts of a graph ------------------------------------------------------------------------------


def _forward_of(gm: fx.GraphModule, outputs: int | None, names: Mapping[str, str]) -> _PureSlice:
    """Return the slice of the forward's results and, behind them, its writes to inputs."""
    values = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    results = values if outputs is None else values[:outputs]
    writes = {
        n.args[0]: n
        for n in gm.graph.nodes
        if _is_write(n) and (outputs is None or not _is_late(n))
    }
    said = [f"result {k}" for k in range(len(results))]
    said += [f"{names.get(node.name, node.name)} after the call" for node in writes]
    return _part(gm, [*results, *writes.values()], said)


def _backward_of(gm: fx.GraphModule, outputs: int, names: Mapping[str, str]) -> _PureSlice:
    values = list(gm.graph.output_node().args[0])[outputs:]  # type: ignore[arg-type]
    inputs = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    said = [f"the gradient of {names.get(name, name)}" for name in inputs[: len(values)]]
    return _part(gm, values, said)


def _part(gm: fx.GraphModule, results: Sequence[Any], names: Sequence[str]) -> _PureSlice:
    """Return the slice that computes some results; its writes to inputs become copies."""
    needed = {node for node in results if isinstance(node, fx.Node)}
    for node in reversed(gm.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        if node in needed and node.op != "output":
            known[node] = graph.node_copy(node, known.__getitem__)
            if _is_write(node):
                known[node].target = aten.copy.default
    made = tuple(known[node] if isinstance(node, fx.Node) else node for node in results)
    graph.output(made)
    return _PureSlice(fx.GraphModule(gm, graph), tuple(names), made)


def _is_write(node: fx.Node) -> bool:
    target = node.args[0] if node.target is aten.copy_.default else None
    return isinstance(target, fx.Node) and target.op == "placeholder"


def _is_late(node: fx.Node) -> bool:
    """Return True for a write of the backward."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def _why_left_out(graph: fx.Graph) -> str:
    """Return why a graph cannot be run a second time, or ""."""
    for node in graph.nodes:
        harmless = _is_write(node) or draws_random_numbers(node.target) or _asserts(node)
        if node.op == "call_function" and is_impure(node) and not harmless:
            return f"{node.name} has effects"
        if talks_to_ranks(node.target):
            return f"{node.name} talks to other ranks"
    return ""


def _asserts(node: fx.Node) -> bool:
    return "assert" in op_name(node.target) or "sym_constrain" in op_name(node.target)


def draws(gm: fx.GraphModule) -> bool:
    """Return True if a graph draws random numbers."""
    return any(draws_random_numbers(node.target) for node in gm.graph.nodes)


# -- calls -----------------------------------------------------------------------------------------


def _saved(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return a key of saved tensors: their addresses, shapes and strides."""
    return tuple(
        sorted(
            (t.data_ptr(), tuple(t.shape), t.stride())
            for t in values
            if isinstance(t, torch.Tensor)
        )
    )


def _generators(values: Iterable[Any]) -> list[tuple[torch.device, torch.Tensor]]:
    devices = {t.device for t in values if isinstance(t, torch.Tensor) and t.is_cuda}
    everywhere = (torch.device("cpu"), *devices)
    return [(device, _generator(device).get_state()) for device in everywhere]


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index]


def _largest(value: Any) -> float:
    """Return a tensor's largest magnitude; 0 if that may stand for infinity."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return 0.0
    if value.element_size() == 1:  # of 8 bits: eager has no arithmetic on it
        value = value.float()
    largest = float(value.abs().nan_to_num(nan=0.0, posinf=0.0).max())
    return largest if largest < _LIKE_INFINITY else 0.0


def _is_noise(got: torch.Tensor, eager: torch.Tensor, most: float) -> bool:
    """Return True if two tensors differ by a few roundings of a graph's largest number.

    The gradient of a bias before a batch norm is 0, the sum of numbers that are not: it consists of
    rounding errors, in eager, too.
    """
    if got.shape != eager.shape or got.dtype is not eager.dtype or not got.is_floating_point():
        return False
    apart = (got.double() - eager.double()).abs()
    return bool((apart <= _ROUNDINGS * torch.finfo(got.dtype).eps * most).all())


def _other_strides(got: torch.Tensor, eager: torch.Tensor) -> str:
    """Return how strides differ along extents above one, or ""."""
    if got.layout is not torch.strided or eager.layout is not torch.strided or not got.numel():
        return ""
    if has_strides(got, eager.stride()):
        return ""
    return f"strides {list(got.stride())}, eager {list(eager.stride())}"
