"""Compare each kernel with eager at run time, under ``options={"verify": True}``.

The statements of a verified graph's wrapper are interpreted (``runtime/calls/executable.py``), and
what each has stored is reported as soon as it has run::

    stored("k0", (("add", None), ("gelu", None)), (add, gelu))

Here the same FX nodes are computed by their eager kernels, from the nearest values that the program
itself has stored before: so an error does not propagate to later kernels, and the first kernel that
is reported is the one at fault. Results are compared by the rule of docs/numerics.md, with an fp64
run of the same nodes where they differ. The program's own tensors are never written, and no random
numbers are drawn: draws are functions of stored seeds, and others are stored themselves.

Left out: buffers that hold no node's value, such as partial sums (the kernel that reads them is
compared instead), the kernels inside a loop over rows (its results are), and nodes that read what
an eager kernel wrote in place. All stored values are kept until the call ends.

Which of equal elements ``topk`` takes is open. A lowering takes the first one
(``Lowering.choice``), eager's kernel another, and whatever follows differs: a token goes to another
expert. Both are right. So a comparison with eager's kernels that finds a difference is made once
more, with the lowerings' choices in the place of eager's in all that it computes. It accepts no
mixture: what is compared together agrees with the one or with the other. Left out is a graph with
several such calls, some lowered and some eager's, all with equal elements.

Worked example, ``x = [3, 5, 5]``, of which eager's kernel takes the last 5::

    topk(x, 1).indices     fusec 1, eager 2: differs;   with the lowering's choice 1: agrees

At exit the process reports how much agreed, and how often each kernel was off.
"""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import fx

from fusec.driver.observers import USER_PASSES
from fusec.errors import WrongKernel
from fusec.frontend.fallbacks import draws_random_numbers
from fusec.frontend.ops.registry import find_lowering
from fusec.frontend.origin import op_name, origin_of
from fusec.runtime.calls.executable import BoxedCall, CallHooks
from fusec.runtime.race.agreement import disagreement
from fusec.torch_interior import TorchDispatchMode, pytree, trace_artifact, written_arguments

# -- results that torch leaves open ----------------------------------------------------------------


_Said = TypeVar("_Said")


class OwnChoices(TorchDispatchMode):
    """Runs eager kernels, with the choices of fusec's lowerings where torch leaves them open.

    Attributes:
        differ: a choice was another than eager's.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.differ = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        lowering = find_lowering(func, alone=False)
        if lowering is not None and lowering.choice is not None:
            for eager, own in zip(made, lowering.choice(*args, **(kwargs or {})), strict=True):
                self.differ |= not torch.equal(eager, own)
                eager.copy_(own)
        return made


def with_either_choice(compared: Callable[[], _Said], is_off: Callable[[_Said], bool]) -> _Said:
    """Compare with eager's kernels; if that is off, once more with ``OwnChoices``.

    Args:
        compared: runs these kernels, and compares.
    """
    said = compared()
    if not is_off(said):
        return said
    with OwnChoices() as own:
        again = compared()
    return again if own.differ and not is_off(again) else said


# -- kernels ---------------------------------------------------------------------------------------


logger = logging.getLogger("fusec.verify")

NodeResult: TypeAlias = tuple[str, int | None]
"""The name of an FX node, and the index of its result; None for a single one."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_COPY = torch.ops.aten.copy_.default


class LeftOut(Exception):
    """A node that cannot be computed again, with the reason."""


@dataclass(slots=True)
class _VerifiedCall:
    """One call: its arguments by placeholder, and the values stored so far."""

    inputs: dict[str, Any]
    stored: dict[NodeResult, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Tally:
    """How much was compared of one graph, and what was off.

    Attributes:
        whole: the graph's results are compared, not its kernels'.
        kernels: kernels with a value that agreed.
        off: (kernel, value) -> how often it was off; (graph, result) if ``whole``.
    """

    graph: str
    whole: bool = False
    agreed: int = 0
    left_out: int = 0
    kernels: set[str] = field(default_factory=set)
    off: Counter[tuple[str, str]] = field(default_factory=Counter)

    @staticmethod
    def begin(graph: str, *, whole: bool = False) -> Tally:
        """Return a new tally of a graph, which is reported at exit."""
        _tallies.append(Tally(graph, whole))
        return _tallies[-1]


_tallies: list[Tally] = []
"""Tallies of all verified graphs of this process, reported at exit."""


def summary(tallies: Iterable[Tally]) -> list[str]:
    """Return a report of tallies, in lines: kernels and graphs that agreed, and that were off."""
    rows = list(tallies)
    kernels = [row for row in rows if not row.whole]
    graphs = [row for row in rows if row.whole]
    lines = []
    if kernels:
        count = sum(len(row.kernels) for row in kernels)
        lines.append(_agreed(kernels, f"results of {count} kernels agree with eager"))
    if any(row.agreed or row.left_out for row in graphs):
        lines.append(_agreed(graphs, "results and gradients of whole graphs, strides included, do"))
    for row in rows:
        for (place, value), count in row.off.items():
            of = "" if row.whole else f"kernel {place} of "
            lines.append(f"{of}graph {row.graph!r} was off in {value}: {count} of its calls")
    return lines


def _agreed(rows: Sequence[Tally], what: str) -> str:
    agreed, out = sum(row.agreed for row in rows), sum(row.left_out for row in rows)
    left = f", {out} left out (logging of fusec.verify says why)" if out else ""
    return f"{agreed} {what}{left}"


def kernels_are_off() -> bool:
    """Return True if a kernel of this process was off, which explains further errors."""
    return any(row.off for row in _tallies if not row.whole)


@atexit.register
def tell_at_exit() -> None:
    """Report at exit what was verified, on stderr and to torch's trace."""
    lines = summary(_tallies)
    for line in lines:
        print(f"fusec: verified: {line}", file=sys.stderr)
    if lines:
        trace_artifact("fusec_verified", lambda: "\n".join(lines))


class Verification:
    """Compares the launches of one graph's wrapper with its FX nodes.

    Args:
        strict: raise for a kernel that is off, in place of a warning.
    """

    def __init__(self, gm: fx.GraphModule, name: str, *, strict: bool) -> None:
        self.gm, self.name, self.strict = gm, name, strict
        self.nodes = {node.name: node for node in gm.graph.nodes}
        self.written = {n for node in self.nodes.values() for n in written_arguments(node)}
        self.unsteady = {
            n
            for node in self.nodes.values()
            if node.target is not _COPY
            for n in written_arguments(node)
        }
        self.tally = Tally.begin(name)
        self.local = threading.local()

    def hooks(self) -> CallHooks:
        """Return the hooks for each call of the graph."""
        return CallHooks(call=self.around, stored=self.stored)

    def around(self, call: BoxedCall) -> BoxedCall:
        """Return a boxed callable that remembers the arguments of each call of a wrapper."""

        def boxed(args: list[Any]) -> Any:
            placeholders = [n for n in self.nodes.values() if n.op == "placeholder"]
            # A written input is copied: the comparison reads its value before the write.
            inputs = {
                node.name: copy_of(arg) if node in self.written else arg
                for node, arg in zip(placeholders, args, strict=True)
            }
            self.local.run = _VerifiedCall(inputs)
            try:
                return call(args)
            finally:
                self.local.run = None

        return boxed

    def stored(
        self, kernel: str | None, held: Sequence[NodeResult], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Compare the values that a launch has stored; with None, keep an eager kernel's results.

        Raises:
            WrongKernel: if a value is off, where the options are strict.
        """
        if kernel is not None:
            self.compare(kernel, held, tensors)
        # After the comparison, so that what one kernel stores is not compared with itself.
        run: _VerifiedCall = self.local.run
        run.stored.update((v, copy_of(t)) for v, t in zip(held, tensors, strict=True))

    @torch.no_grad()
    def compare(
        self, kernel: str, held: Sequence[NodeResult], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Compare values that a launch may have stored, before ``stored`` keeps them.

        Raises:
            WrongKernel: as ``stored`` does.
        """
        for value, tensor in zip(held, tensors, strict=True):
            self._compare(self.local.run, kernel, value, tensor)

    def _compare(
        self, run: _VerifiedCall, kernel: str, held: NodeResult, tensor: torch.Tensor
    ) -> None:
        exact = functools.partial(self._expected, run, held, exact=True)

        def compared() -> tuple[torch.Tensor, str | None]:
            eager = self._expected(run, held)
            return eager, disagreement([tensor], [eager], lambda: [exact()])

        try:
            eager, problem = with_either_choice(compared, lambda said: said[1] is not None)
        except Exception as reason:  # whatever an eager kernel raises is not the program's failure
            self.tally.left_out += 1
            logger.info("%s of kernel %s is left out: %s", held[0], kernel, reason)
            return
        if problem is None:
            self.tally.agreed += 1
            self.tally.kernels.add(kernel)
            logger.debug("%s of kernel %s agrees", held[0], kernel)
            return
        self.tally.off[kernel, held[0]] += 1
        if self.tally.off[kernel, held[0]] == 1:
            said = f"{problem.partition(': ')[2]}{place_of(tensor, eager, exact)}"
            self._tell(kernel, held, said, run)

    def _tell(self, kernel: str, held: NodeResult, what: str, run: _VerifiedCall) -> None:
        node = self.nodes[held[0]]
        if node.target is _COPY and isinstance(node.args[1], fx.Node):
            node = node.args[1]
        lines = origin_of(node).source
        wrong = WrongKernel(kernel, self.name, node.name, op_name(node.target), what, lines)
        wrong.passes = self.gm.meta.get(USER_PASSES, ())
        if self.strict:
            wrong.held, wrong.stored = held, frozenset(run.stored)
            raise wrong
        warnings.warn(f"fusec: {wrong}", stacklevel=3)

    # -- eager values ------------------------------------------------------------------------------

    def _expected(
        self, run: _VerifiedCall, held: NodeResult, *, exact: bool = False
    ) -> torch.Tensor:
        """Return a node's value by eager kernels, from stored ones.

        Args:
            exact: in fp64, without any rounding in between.
        """
        wanted = self.nodes[held[0]]
        known = (Exact if exact else fx.Interpreter)(self.gm, garbage_collect_values=False)
        needed = {wanted}
        for node in reversed(self.gm.graph.nodes):
            needed.update(self._sources(run, node) if node in needed else ())
        for node in filter(needed.__contains__, self.gm.graph.nodes):
            stored = self._stored(run, node)
            if stored is None:
                known.env[node] = self._computed(node, known)
            else:
                known.env[node] = _double(stored) if exact else stored
        value = known.env[wanted]
        return value if held[1] is None else value[held[1]]  # type: ignore[no-any-return]

    def _sources(self, run: _VerifiedCall, node: fx.Node) -> list[fx.Node]:
        if self._stored(run, node) is not None:
            return []
        if node.target is _COPY:  # the tensor that is written gives its type and shape
            return [n for n in node.args[:2] if isinstance(n, fx.Node)]
        return list(node.all_input_nodes)

    def _stored(self, run: _VerifiedCall, node: fx.Node) -> Any:
        """Return a node's value as the program has it, or None."""
        if node in self.unsteady:
            raise LeftOut(f"{node.name} is written by an eager kernel")
        return run.stored.get(_identity(node), run.inputs.get(node.name))

    def _computed(self, node: fx.Node, known: fx.Interpreter) -> Any:
        if node.target is _COPY:
            (into, values, *_), _ = known.fetch_args_kwargs_from_env(node)
            return torch.empty_like(into).copy_(values)
        if draws_random_numbers(node.target):
            raise LeftOut(f"{node.name} draws random numbers")
        if written_arguments(node):
            raise LeftOut(f"{node.name} writes its arguments")
        return known.run_node(node)


class Exact(fx.Interpreter):
    """Runs a graph in fp64, without any rounding in between."""

    def fetch_attr(self, target: str) -> Any:
        """Return a constant of the graph in fp64."""
        return _double(super().fetch_attr(target))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operation, with fp64 in place of shorter float types."""
        args, kwargs = pytree.tree_map_only(torch.dtype, _widened, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return an argument in fp64."""
        return _double(super().placeholder(target, args, kwargs))


def _identity(node: fx.Node) -> NodeResult:
    """Return the key of a node's value; an element of a tuple is a result of its producer."""
    source = node.args[0] if node.args else None
    if getattr(node.target, "__name__", "") == "getitem" and isinstance(source, fx.Node):
        return source.name, node.args[1]  # type: ignore[return-value]
    return node.name, None


def copy_of(value: Any) -> Any:
    """Return a copy of a tensor with its strides; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if any(s == 0 and n > 1 for n, s in zip(value.shape, value.stride(), strict=True)):
        return value.clone()
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=value.device
    ).copy_(value)


def _double(value: Any) -> Any:
    floats = isinstance(value, torch.Tensor) and value.dtype in _FLOATS
    return value.double() if floats else value


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in _FLOATS else dtype


def place_of(tensor: torch.Tensor, eager: torch.Tensor, exact: Callable[[], torch.Tensor]) -> str:
    """Return where two tensors differ most, and the numbers there."""
    if tensor.shape != eager.shape or not tensor.numel():
        return ""
    a, b = tensor.double(), eager.double()
    apart = (a - b).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    apart[(a == b) | (a.isnan() & b.isnan())] = 0.0
    place = tuple(int(i) for i in (apart == apart.max()).nonzero()[0])
    text = f"; at {place}: {tensor[place].item():.9g}, eager {eager[place].item():.9g}"
    try:
        return f"{text}, fp64 {exact()[place].item():.9g}"
    except Exception:  # an operation that has no fp64
        return text
