"""Test whether small graphs gain by being compiled: time each once, compiled and eagerly.

A call of some hundred microseconds may cost more compiled than eagerly: the overhead of launches
decides there. So ``fusec run`` takes its backend from here. A graph's third call, where the program
has also run its backward, is repeated on copies of its arguments, compiled and eagerly in turn,
without an effect on the clock, the random generator and the program's tensors.

Assumes that guards cost what modules do: neither is in these times. Graphs with side effects on
anything but their arguments are not repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fusec.backend import fusec
from fusec.frontend.fx_passes.dynamo_graph import copied
from fusec.tools.clock import Clock, differentiated, time_in_turn
from fusec.torch_interior import HigherOrderOperator, compile_id, tensors_in

SMALL_US = 3000.0
"""In a longer call, the overhead of launches does not decide."""
_CALL, _ROUNDS = 3, 12
_MOST_BYTES = 1 << 24
_LOSES_BY, _LEAST_US = 1.1, 5.0
_PLAIN = ("aten", "prims", "prim")


@dataclass(frozen=True, slots=True)
class Compared:
    """Microseconds of a call, with its backward where the program trains, compiled and eagerly.

    Attributes:
        compile: Dynamo's number of the graph, "0/1".
    """

    compile: str
    fusec_us: float
    eager_us: float

    @property
    def loses(self) -> bool:
        """Whether eager is faster, by more than noise."""
        lost = self.fusec_us - self.eager_us
        return self.fusec_us > _LOSES_BY * self.eager_us and lost > _LEAST_US


@dataclass(slots=True)
class Beside:
    """The backend of a run, and its comparisons.

    Attributes:
        seconds: that comparing took.
    """

    clock: Clock
    compared: list[Compared] = field(default_factory=list)
    seconds: float = 0.0

    def backend(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile a graph of Dynamo as ``fusec.backend.fusec`` does."""
        eager, number = copied(gm), compile_id()
        compiled = fusec(gm, example_inputs, mode=mode, options=options)
        if not _acts_on_nothing(eager):
            return compiled
        watched = _Watched(self, compiled, eager, number)
        return lambda *args: watched.call(*args)  # a function: Dynamo may set attributes on it

    def compare(self, compiled: Any, eager: Any, number: str, args: Sequence[Any]) -> None:
        """Time a call compiled and eagerly, on copies; skip a call that fails."""
        start, state = time.perf_counter(), torch.get_rng_state()
        with suppress(Exception), self.clock.apart() as launches:
            calls = [differentiated(fn, _copies(args)) for fn in (compiled, eager)]
            ours, theirs = time_in_turn(calls, _ROUNDS)
            each = launches() / (_ROUNDS + 2) * self.clock.cost_us()
            self.compared.append(Compared(number, max(ours - each, 0.0), theirs))
        torch.set_rng_state(state)
        self.seconds += time.perf_counter() - start


@dataclass(slots=True)
class _Watched:
    """A compiled graph, of which one call is repeated."""

    beside: Beside
    compiled: Callable[..., Any]
    eager: fx.GraphModule
    number: str
    calls: int = 0

    def call(self, *args: Any) -> Any:
        """Call the graph; one of its calls is also compared."""
        start = time.perf_counter()
        made = self.compiled(*args)
        if self.calls < 0:
            return made
        self.calls += 1
        if self.calls >= _CALL:
            spent = (time.perf_counter() - start) * 1e6
            if spent > SMALL_US or not _are_few(args):
                self.calls = -1
            elif not _trains(made) or self._has_run_backward():
                self.calls = -1
                self.beside.compare(self.compiled, self.eager, self.number, args)
        return made

    def _has_run_backward(self) -> bool:
        return bool(self.beside.clock.totals(f"backward {self.number}"))


def _acts_on_nothing(gm: fx.GraphModule) -> bool:
    """Return True if a graph has no side effects except on its arguments."""

    def is_plain(target: Any) -> bool:
        namespace = getattr(target, "namespace", None) or _namespace(target)
        return not isinstance(target, HigherOrderOperator) and namespace in (None, *_PLAIN)

    kinds = {node.op for node in gm.graph.nodes}
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    return "call_module" not in kinds and all(map(is_plain, targets))


def _namespace(target: Any) -> str | None:
    """Return the namespace of an operator's packet; None for a function of torch's."""
    name = getattr(target, "_qualified_op_name", "")
    return name.partition("::")[0] or None


def _are_few(args: Sequence[Any]) -> bool:
    """Return True for plain tensors on a CPU that are cheap to copy."""
    tensors = tensors_in(args)
    plain = all(type(t) in _TYPES and t.device.type == "cpu" and not t.is_conj() for t in tensors)
    return plain and sum(t.untyped_storage().nbytes() for t in tensors) <= _MOST_BYTES


_TYPES = (torch.Tensor, torch.nn.Parameter)


def _trains(made: Any) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(made))


def _copies(args: Sequence[Any]) -> list[Any]:
    """Return arguments in other memory, with the same strides, offsets and sharing."""
    memories: dict[int, torch.UntypedStorage] = {}
    copies: list[Any] = []
    for one in args:
        made = one
        if isinstance(one, torch.Tensor):
            held = one.untyped_storage()
            if held.data_ptr() not in memories:
                memories[held.data_ptr()] = held.clone()
            memory = memories[held.data_ptr()]
            made = torch.empty(0, dtype=one.dtype)
            made.set_(memory, one.storage_offset(), one.shape, one.stride())
            made.requires_grad_(one.requires_grad)
        copies.append(made)
    return copies
