"""The calling convention of a compiled graph: what AOTAutograd's wrapper would do, as plain data.

AOTAutograd splits a graph of Dynamo into a forward and a backward, and puts a wrapper around the
compiled graphs: it saves tensors, marks which results have gradients, gives tangents the strides
that were traced. For most graphs that is a page of facts. A ``Convention`` holds them, and
``around`` builds the function that Dynamo calls. So neither a start from the cache nor a loaded
archive runs AOTAutograd, and a call costs less than through its generic wrapper.

Graphs that need more have no convention (``convention_of`` gives the reason): results that are
views of inputs, inputs that are replaced after the call, subclasses of tensors.

Worked example: for ``y = (x @ w).relu()``, where w has a gradient, the forward returns y and the
saved tensors, and the backward takes these and the tangent of y::

    Convention(outputs=(None,), written=(), training=Training(
        differentiable=(True,), tangents=(Tangent(0, "", (2, 3), (3, 1)),), saved=2, ...))

If the number of x's rows is dynamic, the forward returns it behind the saved tensors, and the
backward takes it before them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version

from fusec.runtime.calls.ranges import BoxedCall
from fusec.runtime.calls.received import note_hooks
from fusec.runtime.from_json import read
from fusec.runtime.interior import (
    is_autocasting,
    switch_gradients,
    transforms,
    untraced,
    without_autocast,
)

FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
"""Memory formats by name; a tangent has one of them, or strides."""


@dataclass(frozen=True, slots=True)
class Tangent:
    """A gradient that a backward takes: the result that it is of, and its memory layout.

    Attributes:
        output: the result's position.
        format: a name of `FORMATS`, or "" where shape and strides are known.
    """

    output: int
    format: str
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    def laid_out(self, value: Any) -> Any:
        """Return a gradient in the layout that the backward was traced with, copied only if needed.

        Raises:
            TypeError: for a tensor of a subclass, for which no convention holds.
        """
        if not isinstance(value, torch.Tensor):
            return value
        if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
            raise TypeError(
                f"the gradient of result {self.output} is a {type(value).__name__}; the compiled "
                "function was traced with plain tensors"
            )
        if self.format:
            return value.contiguous(memory_format=FORMATS[self.format])
        if value.shape == self.shape and value.stride() == self.strides:
            return value
        made = torch.empty_strided(self.shape, self.strides, dtype=value.dtype, device=value.device)
        return made.copy_(value)


@dataclass(frozen=True, slots=True)
class Training:
    """The part of a convention that only a graph with a backward has.

    Attributes:
        differentiable: of each result, whether it has a gradient.
        tangents: the gradients that the backward takes behind the saved tensors.
        saved: how many tensors the forward returns for the backward, behind the results.
        unchecked: how many more, whose version counters autograd does not check.
        sizes: how many sizes the forward returns behind these; the backward takes them first.
        detached: inputs without a gradient, which are detached before the call.
        any_gradient: whether some input requires gradients.
        deterministic: whether the kernels are, as ``Options.deterministic`` says, which
            ``torch.use_deterministic_algorithms`` sets.
    """

    differentiable: tuple[bool, ...]
    tangents: tuple[Tangent, ...]
    saved: int
    unchecked: int
    sizes: int
    detached: tuple[int, ...]
    any_gradient: bool
    deterministic: bool


@dataclass(frozen=True, slots=True)
class Convention:
    """How a compiled graph is called.

    Attributes:
        outputs: for each result the position of the input that it is, or None for a new tensor.
        written: inputs that the graph writes to, whose version counters are incremented.
        training: facts for the backward; None at inference.
    """

    outputs: tuple[int | None, ...]
    written: tuple[int, ...]
    training: Training | None = None

    def around(self, forward: BoxedCall, backward: BoxedCall | None = None) -> Callable[..., Any]:
        """Return the function that Dynamo calls with a graph's inputs; it returns a list.

        Args:
            forward: takes inputs in a list that it empties, returns results and saved values.
            backward: takes saved values and tangents likewise, returns each input's gradient.
        """
        if self.training is None:
            return self._around(_without_gradients(forward))
        assert backward is not None
        return self._around(_with_gradients(self, self.training, forward, backward))

    def _around(self, run: Callable[[list[Any]], Any]) -> Callable[..., Any]:
        written = self.written
        same = tuple((k, given) for k, given in enumerate(self.outputs) if given is not None)
        if not written and not same:
            return lambda *args: run(list(args))

        def call(*args: Any) -> list[Any]:
            if written:
                increment_version(tuple(args[k] for k in written))
            results = list(run(list(args)))
            for k, given in same:
                results[k] = args[given]
            return results

        return call

    def to_json(self) -> bytes:
        """Return the convention as JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(text: bytes) -> Convention:
        """Return the convention that ``to_json`` wrote.

        Raises:
            ValueError: for anything else; each value is checked.
        """
        made: Convention = read(Convention, json.loads(text), "a calling convention")
        if (training := made.training) is not None:
            count, tangents = len(made.outputs), training.tangents
            beyond = any(t.output >= count for t in tangents)
            if len(training.differentiable) != count or beyond:
                raise ValueError("no calling convention: positions beyond the results")
            if unknown := {t.format for t in tangents} - {"", *FORMATS}:
                raise ValueError(f"no memory format: {unknown}")
        return made


def _without_gradients(forward: BoxedCall) -> BoxedCall:
    """Return a compiled graph that runs without gradients and without autocast."""

    def run(args: list[Any]) -> Any:
        if is_autocasting():
            with without_autocast():
                return run(args)
        if not torch.is_grad_enabled():
            return forward(args)
        switch_gradients(False)
        try:
            return forward(args)
        finally:
            switch_gradients(True)

    return run


def outside_autocast(call: BoxedCall) -> BoxedCall:
    """Return a compiled graph that runs without autocast, wherever the user calls it.

    Its casts are in the graph already. No guard covers the call of a backward or a loaded model,
    and under autocast a product returns 16 bits where its consumer expects 32.
    """

    def run(args: list[Any]) -> Any:
        if not is_autocasting():
            return call(args)
        with without_autocast():
            return call(args)

    return run


def _with_gradients(
    convention: Convention, training: Training, forward: BoxedCall, backward: BoxedCall
) -> BoxedCall:
    """Return a call that runs a forward under autograd, with the compiled backward."""
    function = type("CompiledFunction", (torch.autograd.Function,), {
        "forward": staticmethod(_forward(convention, training, forward)),
        "backward": staticmethod(_backward(training, backward)),
    })  # fmt: skip
    apply, detached = function.apply, training.detached  # type: ignore[attr-defined]

    def run(args: list[Any]) -> Any:
        for k in detached:
            args[k] = args[k].detach()
        if torch.is_grad_enabled():
            return apply(*args)
        with torch.enable_grad():  # the graph may enable gradients inside of no_grad
            return apply(*args)

    return run


def _forward(convention: Convention, training: Training, forward: BoxedCall) -> Callable[..., Any]:
    count = len(convention.outputs)
    end = count + training.saved
    behind = end + training.unchecked
    constant = tuple(k for k, needed in enumerate(training.differentiable) if not needed)
    same = tuple(k for k, given in enumerate(convention.outputs) if given is not None)
    call = outside_autocast(forward)

    def run(ctx: Any, *args: Any) -> tuple[Any, ...]:
        note_hooks()
        made = call(list(args))
        ctx.save_for_backward(*map(_own, made[count:end]))
        ctx.unchecked = [*map(_own, made[end:behind])]
        ctx.sizes = made[behind : behind + training.sizes]
        results = list(made[:count])
        for k in same:
            results[k] = None
        ctx.mark_non_differentiable(*(
            results[k] for k in constant if isinstance(results[k], torch.Tensor)
        ))  # fmt: skip
        ctx._materialize_non_diff_grads = False
        return tuple(results)

    return run


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a saved tensor, detached from its base if it is a view."""
    return tensor.detach() if tensor._is_view() else tensor


def _backward(training: Training, backward: BoxedCall) -> Callable[..., Any]:
    tangents, deterministic = training.tangents, training.deterministic
    call = untraced(outside_autocast(backward), "a compiled backward")

    def run(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        _refuse(deterministic)
        args = [*ctx.sizes, *ctx.saved_tensors, *ctx.unchecked]
        args += [t.laid_out(gradients[t.output]) for t in tangents]

        def compute() -> tuple[Any, ...]:
            ctx.maybe_clear_saved_tensors()
            return tuple(call(args))

        if torch.is_grad_enabled() and (training.any_gradient or any(map(_needs_gradient, args))):
            return _once(compute, args)
        return compute()

    return run


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _refuse(deterministic: bool) -> None:
    """Raise RuntimeError where a compiled backward may not run."""
    if transforms() is not None:
        raise RuntimeError(
            "a compiled backward runs inside torch.func's vmap, grad or vjp, which is not "
            "supported: put these inside torch.compile"
        )
    if torch.are_deterministic_algorithms_enabled() and not deterministic:
        raise RuntimeError(
            "this compiled backward runs with torch.use_deterministic_algorithms(True), and its "
            "forward was compiled with False"
        )


def _once(compute: Callable[[], tuple[Any, ...]], args: Sequence[Any]) -> tuple[Any, ...]:
    """Return gradients that cannot be differentiated again: their backward raises."""

    class CompiledFunctionBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *unused: Any) -> Any:
            return compute()

        @staticmethod
        def backward(ctx: Any, *unused: Any) -> Any:
            raise RuntimeError(
                "torch.compile with aot_autograd does not currently support double backward"
            )

    # Saved tensors are detached: an input that requires gradients gives the results a history.
    apply: Callable[..., tuple[Any, ...]] = CompiledFunctionBackward.apply
    return apply(torch.empty(0, requires_grad=True), *args)
