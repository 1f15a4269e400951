"""Random index programs, legal and not: equal to eager, or refused as eager refuses them.

A `Case` is one operation that indexes: a source of elements (an input, positions, ones, one element
for all, a pad, a cat, ...), an index (an input as it is, computed, read by another index, or the
numbers of a program), and its values: once all in range, once one of them out of it. Many cases are
one function, whose compile they share; it is called with every case legal, then with each in turn
illegal. What numbers of a program decide is compiled alone.

Memory is watched from outside: ``sanitize`` builds kernels under AddressSanitizer and UBSan, for a
process in which libasan was loaded first, and ``said`` returns what they have written since. Triton
kernels run in the emulator, which checks each access.

Worked example::

    >>> print(draw(3).source())
    def case(a, i, j, z):
        x = torch.cat([a, a * 2])
        k = i.flip(0) * 1
        return x.index_select(0, k) + 1
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from fusec.codegen.targets import find_target
from fusec.options import Options
from fusec.runtime.calls import executable
from fusec.runtime.calls.outside import of_graph
from fusec.runtime.kernels import cpp_kernel
from fusec.tools.emulator.faults import EmulationError
from fusec.tools.report.emulation import Emulator

SANITIZERS = ("-fsanitize=address,undefined,float-cast-overflow", "-fsanitize-recover=all", "-g1")
"""What kernels are built with: a report is written, and the call goes on."""
CASES = 12
"""Cases of one compile."""

SOURCES = {
    "a": 1,
    "a * 2 + 1": 1,
    "a.t().contiguous().t()": 1,
    "a[:, None].expand(-1, 3, -1).sum(1)": 1,
    "a.flip(0)": 1,
    "a[::2]": 0.5,
    "a[1:]": None,
    "torch.cat([a, a * 2])": 2,
    "F.pad(a, (0, 0, 0, a.shape[0]))": 2,
    "a[:1].expand(a.shape[0], -1)": 1,
    "a[:1].exp().expand(a.shape[0], -1) + 0": 1,
    "torch.ones(a.shape)": 1,
    "torch.arange(a.numel() * 1.0).view(a.shape)": 1,
    "torch.where(a > 0, a, 0.5)": 1,
    "a.softmax(1)": 1,
    "a.cumsum(0)": 1,
    "a[:0]": 0,
}
"""What is indexed, of as many columns as ``a``, by its rows as a multiple of those of ``a``."""

INDICES = (
    "i", "i", "i.flip(0)", "i * 1", "-(-i)", "i + j - j", "i.int()", "i.clamp(max=2**40)",
    "i[j % max(i.numel(), 1)]", "(i.double() + 0.25).floor().long()", "(i / z).round().long()",
    "torch.where(j >= 0, i, 0)", "torch.cat([i, i])[: i.numel()]", "i.view(-1, 1).squeeze(1)",
    "torch.stack([i, j])[0]", "F.pad(i, (1, 1))[1:-1]",
)  # fmt: skip
"""An index of the values of ``i``. ``j`` are positions, ``z`` ones: a zero makes no number."""

OPERATIONS = {
    "x[{k}]": "wraps",
    "x[:, None][{k}, 0]": "wraps",
    "x[{k}, 1:]": "wraps",
    "x[{k}, j % x.shape[1]]": "wraps",
    "x.t()[:, {k}]": "wraps",
    "x[{k}[:, None], (j % x.shape[1])[None]]": "wraps",
    "x[{k}][:, {k} * 0]": "wraps",
    "x[{k}[0]]": "wraps",
    "x.index_select(0, {k})": "",
    "x.gather(0, {k}.long()[:, None].expand(-1, x.shape[1]))": "",
    "x.t().gather(1, {k}.long()[None].expand(x.shape[1], -1))": "",
    "x[:, 0].gather(0, {k}.long())": "",
    "x[:, 0].contiguous().take({k}.long())": "wraps",
    "torch.take_along_dim(x, {k}.long()[:, None] % 100000, 0)": "",
    "F.embedding({k}, x)": "",
    "F.embedding({k}.view(1, -1), x, padding_idx=0).sum(1)": "",
    "F.cross_entropy(x.t()[:1].expand({k}.numel(), -1), {k}.long())": "",
    "F.cross_entropy(x.t()[:1].expand({k}.numel(), -1), {k}.long(), reduction='none')": "",
    "F.nll_loss(x.t()[:1].expand({k}.numel(), -1), {k}.long(), reduction='none')": "",
    "x.scatter(0, {k}.long()[:, None], 2.0)": "",
    "x.scatter(0, {k}.long()[:, None].expand(-1, x.shape[1]), s)": "",
    "x.scatter_add(0, {k}.long()[:, None].expand(-1, x.shape[1]), s)": "",
    "x.scatter_reduce(0, {k}.long()[:, None].expand(-1, x.shape[1]), s, 'amax')": "",
    "x.scatter_reduce(0, {k}.long()[:, None].expand(-1, x.shape[1]), s, 'mean')": "",
    "x.index_add(0, {k}, s)": "",
    "x.index_copy(0, {k}.long(), s)": "",
    "x.index_fill(0, {k}.long(), 2.0)": "wraps",
    "x.index_reduce(0, {k}.long(), s, 'prod')": "",
    "x.index_put(({k}.long(),), s)": "wraps",
    "x.index_put(({k}.long(),), s, accumulate=True)": "wraps",
    "x.index_put(({k}.long(), j % x.shape[1]), s[:, 0])": "wraps",
    "x[:, 0].contiguous().put({k}.long(), s[:, 0])": "wraps",
    "assigned(x, {k}.long(), s)": "wraps",
    "F.one_hot({k}.long().abs(), 40)": "",
    "F.embedding_bag({k}.long()[None], x)": "",
    "x[:, 0].repeat_interleave({k}.long()[:1].clamp(-1, 3))[:1]": "",
    "torch.bincount({k}.long().clamp(-1, 3), minlength=5)[:4]": "",
    "F.max_unpool1d(x.t()[None, :, : {k}.numel()], "
    "{k}.long()[None, None].expand(1, x.shape[1], -1), 2)": "",
}
"""What takes an index ``k`` of rows of ``x``, and whether a negative one counts from the end."""

ENDS = ("+ 1", "* 2 + 1", "+ s.sum()", "+ 0")


def assigned(x: Tensor, k: Tensor, s: Tensor) -> Tensor:
    """Return a copy of which some rows are replaced."""
    y = x.clone()
    y[k] = s
    return y


@dataclass(frozen=True)
class Case:
    """One indexing: lines of a function of ``a, i, j, z, s``, and its tensors, legal and not."""

    seed: int
    x: str
    k: str
    value: str
    rows: int
    columns: int
    legal: tuple[int, ...]
    illegal: tuple[int, ...]
    broken: bool = False

    @property
    def is_literal(self) -> bool:
        """Whether the index are numbers of the program."""
        return self.k == LITERAL

    def source(self, values: Sequence[int] = ()) -> str:
        """Return the function's text; ``values`` are the numbers of a program."""
        k = f"torch.tensor({list(values)}, dtype=torch.long)" if self.is_literal else self.k
        return f"def case(a, i, j, z, s):\n    x = {self.x}\n    k = {k}\n    return {self.value}\n"

    def function(self, values: Sequence[int] = ()) -> Callable[..., Any]:
        """Return the function itself."""
        namespace: dict[str, Any] = {"torch": torch, "F": F, "assigned": assigned}
        exec(compile(self.source(values), f"<case {self.seed}>", "exec"), namespace)
        found: Callable[..., Any] = namespace["case"]
        return found

    def tensors(self, values: Sequence[int], *, broken: bool = False) -> tuple[Tensor, ...]:
        """Return the inputs with the index's values; ``broken``: with a divisor that is 0."""
        made = torch.Generator().manual_seed(self.seed)
        i = torch.tensor(values, dtype=torch.long)
        z = torch.ones(len(values), dtype=torch.double)
        if broken:
            z[0] = 0
        a = torch.randn(self.rows, self.columns, generator=made)
        s = torch.randn(len(values), self.columns, generator=made)
        return a, i, torch.arange(len(values)), z, s


LITERAL = "numbers"


def draw(seed: int) -> Case:
    """Return a case; of each seed the same."""
    dice = random.Random(seed)
    rows, columns = dice.choice((1, 2, 3, 5, 8, 17, 33)), dice.choice((1, 2, 3, 8, 19))
    x, times = dice.choice(list(SOURCES.items()))
    operation, how = dice.choice(list(OPERATIONS.items()))
    extent = rows - 1 if times is None else rows * 1 if times == 1 else int(-(-rows * times // 1))
    if "cross_entropy" in operation or "nll_loss" in operation:
        columns = max(columns, 1)
    k = LITERAL if dice.random() < 0.12 else dice.choice(INDICES)
    count = dice.choice((1, 1, 2, 3, 5, 8, 16, 21))
    if "replace" not in operation and _last_wins(operation):
        count = min(count, extent)
    low = -extent if how else 0
    legal = [dice.randrange(low, extent) for _ in range(count)] if extent else []
    if _last_wins(operation) and extent:
        legal = dice.sample(range(extent), min(count, extent))
    illegal = list(legal) or [0]
    broken = k.startswith("(i / z)") and bool(legal) and dice.random() < 0.5
    wrong = (extent, extent + 1, -extent - 1, extent * 3 + 7, 2**31 + 1, 2**32, -(2**40), -(2**31))
    illegal[dice.randrange(len(illegal))] = dice.choice(wrong)
    if broken:
        illegal = list(legal)
    value = f"{operation.format(k='k')} {dice.choice(ENDS)}"
    return Case(seed, x, k, value, rows, columns, tuple(legal), tuple(illegal), broken)


def _last_wins(operation: str) -> bool:
    """Return True for what replaces: of elements that are named twice, eager promises no one."""
    replaces = ("scatter(", "index_copy", "index_put(", "put(", "assigned", "max_unpool")
    return any(word in operation for word in replaces) and "accumulate" not in operation


# -- what eager says ------------------------------------------------------------------------------


def outcome(call: Callable[[], Any]) -> Any:
    """Return a call's result, or the error that it raises."""
    try:
        return call()
    except Exception as error:
        return error


def compared(wanted: Any, found: Any) -> str | None:
    """Return what is wrong with an outcome beside eager's, or None."""
    if isinstance(wanted, Exception):
        # By operation and by path of its kernels, eager raises the one or the other.
        either = isinstance(wanted, IndexError | RuntimeError) and "out of " in str(wanted)
        kind = (IndexError, RuntimeError) if either else type(wanted)
        if isinstance(found, kind) and not isinstance(found, BackendCompilerFailed):
            return None
        return f"eager raises {wanted!r:.200}, this is {found!r:.200}"
    if isinstance(found, Exception):
        return f"raises {found!r:.300}, eager does not"
    same = wanted.shape == found.shape and wanted.dtype == found.dtype
    if same and torch.allclose(wanted, found, rtol=1e-4, atol=1e-5, equal_nan=True):
        return None
    return f"is {found!r:.200}, eager's {wanted!r:.200}"


@dataclass(frozen=True)
class Fault:
    """A case that is wrong, and how."""

    case: Case
    what: str
    values: tuple[int, ...]

    def __str__(self) -> str:
        return f"seed {self.case.seed}: {self.what}\n  index {self.values}\n" + "".join(
            f"  {line}\n" for line in self.case.source(self.values).splitlines()
        )


Watch = Callable[[], str]
"""Returns what watches over memory have written since they were asked last."""


def check_cases(
    cases: Sequence[Case],
    backend: Any = "fusec",
    watch: Watch = str,
    *,
    train: bool = False,
    dynamic: bool = False,
    refuses: bool = True,
) -> tuple[list[Fault], Counter[str]]:
    """Compare cases with eager; return those that are wrong, and how often what was seen.

    Args:
        train: gradients are compared, too, of all cases together.
        refuses: whether an index out of range is an error; else no memory is touched, no more.
    """
    run = _Run(backend, watch, train, dynamic, refuses)
    sound = [case for case in cases if not case.is_literal and run.is_sound(case)]
    if sound:
        run.together(sound)
    for case in cases:
        if case.is_literal:
            run.alone(case, case.legal)
            run.alone(case, case.illegal)
    return run.faults, run.seen


class _Run:
    def __init__(
        self, backend: Any, watch: Watch, train: bool, dynamic: bool, refuses: bool
    ) -> None:
        self.backend, self.watch, self.refuses = backend, watch, refuses
        self.train, self.dynamic = train, dynamic
        self.faults: list[Fault] = []
        self.seen: Counter[str] = Counter()

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        torch.compiler.reset()
        options = {"strict": True} if self.backend == "fusec" else None
        return torch.compile(function, backend=self.backend, dynamic=self.dynamic, options=options)

    def is_sound(self, case: Case) -> bool:
        """Return True if eager computes the legal case."""
        made = outcome(lambda: case.function()(*case.tensors(case.legal)))
        self.seen["not drawn: eager refuses the legal one"] += isinstance(made, Exception)
        return not isinstance(made, Exception)

    def together(self, cases: Sequence[Case]) -> None:
        """Call one function of all cases: all legal, then each in turn illegal."""
        functions = [case.function() for case in cases]

        def all_of_them(given: list[tuple[Tensor, ...]]) -> list[Tensor]:
            return [fn(*inputs) for fn, inputs in zip(functions, given, strict=True)]

        compiled = self.compiled(all_of_them)
        given = [case.tensors(case.legal) for case in cases]
        self.legal(cases, functions, compiled, given)
        for k, case in enumerate(cases):
            inputs = case.tensors(case.illegal, broken=case.broken)
            if inputs[1].shape != given[k][1].shape:
                continue  # another compile; those with numbers have such lengths
            wanted = outcome(lambda fn=functions[k], inputs=inputs: fn(*inputs))
            together = [copied(inputs if j == k else one) for j, one in enumerate(given)]
            found = outcome(lambda k=k, given=together: compiled(given)[k])
            self.judge(case, case.illegal, wanted, found)

    def legal(self, cases: Any, functions: Any, compiled: Any, given: Any) -> None:
        """Compare all cases, legal, and their gradients."""
        mine, theirs = ([copied(one, self.train) for one in given] for _ in range(2))
        wanted = [fn(*inputs) for fn, inputs in zip(functions, mine, strict=True)]
        found = outcome(lambda: compiled(theirs))
        if isinstance(found, Exception):
            self.faults.append(Fault(cases[0], f"together with others raises {found!r:.400}", ()))
            return
        for case, a, b in zip(cases, wanted, found, strict=True):
            self.judge(case, case.legal, a.detach(), b.detach())
        if self.train:
            for made in (wanted, found):
                sum(v.double().sum() for v in made if v.requires_grad).backward()
            for case, a, b in zip(cases, mine, theirs, strict=True):
                pairs = ((a[0].grad, b[0].grad), (a[4].grad, b[4].grad))
                for x, y in pairs:
                    if x is not None or y is not None:
                        pair = [torch.zeros(()) if v is None else v for v in (x, y)]
                        self.judge(case, case.legal, *pair)

    def alone(self, case: Case, values: tuple[int, ...]) -> None:
        """Call one case, of numbers of the program."""
        function = case.function(values)
        wanted = outcome(lambda: function(*case.tensors(values)))
        compiled = self.compiled(function)
        self.judge(case, values, wanted, outcome(lambda: compiled(*case.tensors(values))))

    def judge(self, case: Case, values: tuple[int, ...], wanted: Any, found: Any) -> None:
        """Note what came of a call, and what watches over memory say of it."""
        refused = isinstance(wanted, Exception)
        self.seen["refused by eager" if refused else "computed by eager"] += 1
        what = compared(wanted, found)
        if refused and not self.refuses and not isinstance(found, EmulationError):
            what = None
        for text in (what, self.watch()):
            if text:
                self.faults.append(Fault(case, text, values))


def copied(inputs: tuple[Tensor, ...], train: bool = False) -> tuple[Tensor, ...]:
    """Return tensors of their own memory, floats with gradients in training."""
    fresh = tuple(t.clone() for t in inputs)
    for t in (fresh[0], fresh[4]):
        t.requires_grad_(train)
    return fresh


# -- what watches over memory ---------------------------------------------------------------------


def sanitize() -> None:
    """Build C++ kernels of this process under the sanitizers."""
    cpp_kernel.FLAGS = (*cpp_kernel.FLAGS, *SANITIZERS)
    cpp_kernel.OPTIMISE = ("-O1",)


def sanitized_environment(log: Path) -> dict[str, str]:
    """Return the environment of a process whose kernels are watched; reports go to ``log.PID``."""
    compiler = cpp_kernel.find_compiler(None)
    # What torch throws passes through libasan, which looks for the C++ library when it starts.
    names = ("libasan.so", "libstdc++.so")
    library = " ".join(os.popen(f"{compiler} -print-file-name={n}").read().strip() for n in names)
    options = f"halt_on_error=0:detect_leaks=0:log_path={log}:verify_asan_link_order=0"
    return {
        **os.environ,
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": options,
        "UBSAN_OPTIONS": f"print_stacktrace=0:log_path={log}",
    }


def written_to(log: Path) -> Watch:
    """Return a watch that returns what was written to this process's log since it was asked."""
    file, read = log.with_name(f"{log.name}.{os.getpid()}"), 0

    def watch() -> str:
        nonlocal read
        if not file.exists():
            return ""
        text = file.read_text(errors="replace")
        new, read = text[read:], len(text)
        return new[:3000]

    return watch


class Unverified(Emulator):
    """The emulator as a backend whose results nobody compares: an illegal call has none."""

    __slots__ = ()

    def _bound(self, graph: Any, name: str, compiled: Any, kernels: Any) -> Any:
        return executable.bind(compiled.wrapper, kernels, of_graph(graph), torch.device("cpu"))


def emulator(target: str = "sm_90") -> Unverified:
    """Return a backend that runs the kernels of a GPU in the emulator."""
    return Unverified(find_target(target), Options.from_compile(None, {"strict": True}), 0)


def run_seeds(
    seeds: range, backend: str = "fusec", watch: Watch = str, *, quiet: bool = True
) -> tuple[list[Fault], Counter[str]]:
    """Check the cases of some seeds, so many in a compile."""
    faults: list[Fault] = []
    seen: Counter[str] = Counter()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for first in range(seeds.start, seeds.stop, CASES):
        cases = [draw(seed) for seed in range(first, min(first + CASES, seeds.stop))]
        chosen = emulator().backend if backend == "emulator" else backend
        turn = first // CASES % 4
        found, counted = check_cases(
            cases,
            chosen,
            watch,
            train=turn == 1 and backend == "fusec",
            dynamic=turn == 2,
            refuses=backend == "fusec",
        )
        faults += found
        seen += counted
        if not quiet:
            print(f"index programs to {cases[-1].seed}, {len(faults)} faults", flush=True)
    return faults, seen


def main(first: int, last: int, backend: str, log: str) -> None:
    """Check some seeds in this process, which `run_watched` started; print each fault."""
    if log:
        sanitize()
    found, seen = run_seeds(range(first, last), backend, written_to(Path(log)) if log else str)
    for fault in found:
        print(fault)
    print(f"{last - first} index programs, {len(found)} faults: {dict(sorted(seen.items()))}")


def run_watched(seeds: range, log: Path) -> str:
    """Return what a process says that checks seeds with its kernels under the sanitizers."""
    arguments = (seeds.start, seeds.stop, "fusec", str(log))
    call = f"from tests.fuzz.indices import main; main(*{arguments!r})"
    made = subprocess.run(
        [sys.executable, "-c", call],
        env=sanitized_environment(log) | {"FUSEC_CACHE_DIR": str(log.parent / "cache")},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    return made.stdout if made.returncode == 0 else f"{made.stdout}{made.stderr[-4000:]}"


if __name__ == "__main__":
    print(run_watched(range(int(sys.argv[1]), int(sys.argv[2])), Path(sys.argv[3]).resolve()))
