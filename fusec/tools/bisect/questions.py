"""``Finding``: the result of a bisection, and what makes the difference for a reduced excerpt.

Options come first: each is one run of the file. If the fault is gone without fusion, a bisection
over ``merge_limit`` finds the merge that introduces it. If results are wrong, the interpreters find
the first stage whose output differs in value from its input.

The JSON form of a finding, schema 1, is stable: fields are added, never renamed or removed::

    {"schema": 1, "found": true, "kind": "wrong", "crash" or "slower",
     "graph", "kernel", "stage", "op", "line", "said", "merge", "helps": [option],
     "source": the file's text, "unshown", "values": [name], "library", "sentence"}

Where nothing is found it is ``{"schema": 1, "found": false}``.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fusec import __version__
from fusec.driver.backend import compile_with, context_of
from fusec.driver.compiler import context_for, target_for
from fusec.driver.pipeline import compile_to_source
from fusec.driver.stages import CompileContext
from fusec.driver.trace import Trace
from fusec.errors import FusecError
from fusec.frontend.capture import main_device
from fusec.options import Options
from fusec.tools.bisect.excerpt import Excerpt, TensorType, alive, static
from fusec.tools.bisect.interpret import differs, record_steps
from fusec.tools.bisect.recorder import Culprit
from fusec.tools.bisect.source import CRASH, SLOWER, WRONG, Fault, as_file, functions, plain_name
from fusec.tools.bisect.trial import AGREES, Died
from fusec.tools.terminal import Report

if TYPE_CHECKING:
    from fusec.tools.bisect.hunt import Hunt


# -- the finding -----------------------------------------------------------------------------------


_VERB = {
    WRONG: "computes something else than eager",
    CRASH: "fails",
    SLOWER: "is slower than eager",
}


WITHOUT_PASSES = "passes=''"
"""The option that helps where the user's passes are at fault."""


@dataclass(frozen=True, slots=True)
class Finding(Report):
    """The fault that a bisection has found.

    Attributes:
        graph, kernel: their names in the user's program.
        stage: the rewrite that is wrong or fails, as ``fusec dump --stage`` has it, or "launch".
        op, line: the operation and the user's source line.
        said: the difference, the exception, the times.
        merge: the fusion decision that introduces the fault, or "".
        helps: options under which the fault is gone.
        source: the file's text.
        unshown: no file shows the fault by itself.
        library: the call in the place of an eager kernel, where it is slower than that, or "".
        values: the tensors that are saved beside the file for it to load; most files draw theirs.
    """

    kind: str
    graph: str
    kernel: str
    stage: str
    op: str
    line: str
    said: str
    merge: str = ""
    helps: tuple[str, ...] = ()
    source: str = ""
    unshown: bool = False
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    library: str = ""

    @classmethod
    def of(cls, kind: str, culprit: Culprit) -> Finding:
        """Return the finding as it is known before the program is reduced."""
        return cls(
            kind,
            culprit.graph,
            culprit.kernel,
            culprit.stage,
            culprit.op,
            culprit.line,
            culprit.said,
            library=culprit.library,
        )

    @property
    def title(self) -> str:
        """One sentence, for the top of the file."""
        return f"fusec {_VERB[self.kind]}: {_first_line(self.said)}"

    @property
    def sentence(self) -> str:
        """What to put into a bug report."""
        parts = [
            f"fusec {__version__} (torch {torch.__version__}, {_device()}) {_VERB[self.kind]}",
            *([f"at {self.op}"] if self.op else []),
            *([f"in {self.library}"] if self.library else []),
            *([f"in stage {self.stage!r}"] if self.stage else []),
            *([f"with the merge of {self.merge}"] if self.merge else []),
        ]
        return f"{' '.join(parts)}: {_first_line(self.said)}"

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(replace(self, values={})) | {"values": sorted(self.values)}
        return {"found": True, **fields, "sentence": self.sentence}

    def text(self, *, whole: bool = False) -> str:
        rows = {
            "graph": self.graph,
            "eager kernel" if self.library else "kernel": self.kernel,
            "library": self.library,
            "stage": self.stage,
            "merge": self.merge,
            "operation": self.op,
            "line": self.line,
            "seen": self.said,
            "gone with": ", ".join(self.helps),
        }
        width = max(map(len, rows))
        table = [f"  {name:<{width}}  {_indented(t, width)}" for name, t in rows.items() if t]
        return "\n".join([f"fusec {_VERB[self.kind]}", *table])


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def _indented(text: str, width: int) -> str:
    return text.strip().replace("\n", "\n" + " " * (width + 4))


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


# -- which options, merge and stage ----------------------------------------------------------------


_MOST_MERGES = 1024
_EXACT = 1e-3
_ROUNDED = 2e-2
"""Relative tolerance of two stages' results; ``_ROUNDED`` where there are 16-bit values."""
BEHIND = "print, build or launch"
"""The stage that is reported where all interpreters agree."""
_FEW = 4
"""Operations that a report names."""

Gone = Callable[[Mapping[str, Any]], bool]
"""Whether a fault is gone under some options."""


def answer(
    hunt: Hunt, finding: Finding, excerpt: Excerpt, fault: Fault, helps: tuple[str, ...] | None
) -> Finding:
    """Complete a finding with the options, the merge and the stage that matter.

    Args:
        helps: the options that help the user's program, where they were tried on that.
    """
    gone = partial(_is_gone, hunt, excerpt, fault)
    helps = helping(gone, excerpt, fault.options) if helps is None else helps
    limit = guilty_merge(gone) if "fusion=False" in helps else 0
    options = {**fault.options, "merge_limit": limit}
    merge = _asked(hunt, last_merge, excerpt, options) if limit else ""
    stage = finding.stage
    if fault.kind == WRONG and not (excerpt.trains or fault.saved):
        stage = _asked(hunt, first_wrong_stage, excerpt, fault.options)
    found = replace(finding, helps=helps, merge=merge, stage=stage)
    if len(excerpt.lines) <= _FEW:
        names = (plain_name(line.target) for line in excerpt.lines)
        op = ", ".join(name for name in names if name != "getitem")
        found = replace(found, op=op, line=excerpt.lines[-1].where or found.line)
    return replace(found, source=as_file(excerpt, replace(fault, title=found.title)))


def _is_gone(hunt: Hunt, excerpt: Excerpt, fault: Fault, more: Mapping[str, Any]) -> bool:
    """Return True if an excerpt's fault is gone under more options."""
    text = as_file(excerpt, replace(fault, options={**fault.options, **more}))
    return hunt.attempt(text).kind == AGREES


def helping(gone: Gone, excerpt: Excerpt, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the options under which the fault is gone, as "fusion=False"."""
    return tuple(f"{n}={v!r}" for n, v in candidates(excerpt, given).items() if gone({n: v}))


def candidates(excerpt: Excerpt, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that may make a difference, the narrowest in effect first."""
    kinds = excerpt.types.values()
    on_gpu = any(isinstance(kind, TensorType) and kind.device != "cpu" for kind in kinds)
    convolves = any("conv" in line.target for line in excerpt.lines)
    asked: dict[str, Any] = {"channels_last": False} if convolves and not on_gpu else {}
    asked |= {"race": "library", "autotune": False, "fusion": False}
    asked |= {"descriptors": "never", "roles": "never"} if on_gpu else {}
    return {name: value for name, value in asked.items() if given.get(name) != value}


def stage_of_options(helps: tuple[str, ...]) -> str:
    """Return the stage that an option which helps leaves out, or ""."""
    return next((_STAGE[name] for name in helps if name in _STAGE), "")


_STAGE = {"channels_last=False": "memory_formats"}


# -- which merge -----------------------------------------------------------------------------------


def guilty_merge(gone: Gone) -> int:
    """Bisect over ``merge_limit``: return the fewest merges with the fault, or 0 if not found."""

    def sound(limit: int) -> bool:
        return gone({"merge_limit": limit})

    if not sound(0):
        return 0
    low, high = 0, 1
    while sound(high):
        low, high = high, 2 * high
        if high > _MOST_MERGES:
            return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sound(middle) else (low, middle)
    return high


def last_merge(excerpt: Excerpt, options: Mapping[str, Any]) -> str:
    """Return the last merge that is taken under some options, as "a with b"."""
    chosen = Options.from_compile(None, options)
    taken: list[str] = []

    def compile_one(gm: fx.GraphModule, _: Any, *, name: str) -> Callable[..., Any]:
        context = context_for(gm, target_for(main_device(gm), chosen), chosen, Trace(name))
        decisions = compile_to_source(gm, context).decisions
        taken.extend(f"{d.a} with {d.b}" for d in decisions if d.taken and d.is_merge)

        def call(args: list[Any]) -> Any:
            return gm(*args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    made = functions(excerpt)
    args = made["inputs"]()
    context = context_of(args, chosen)
    torch.compile(
        made["f"],
        backend=lambda gm, given: compile_with(gm, given, compile_one, context),  # type: ignore
        dynamic=excerpt.dynamic,
    )(*args)
    return taken[-1] if taken else ""


# -- which stage -----------------------------------------------------------------------------------


def first_wrong_stage(excerpt: Excerpt, options: Mapping[str, Any]) -> str:
    """Return the first stage whose output differs in value from its input, by interpreters.

    ``BEHIND`` if all stages agree. Only for excerpts without a backward.
    """
    excerpt = alive(static(excerpt))
    made = functions(excerpt)
    args = made["inputs"]()
    chosen = Options.from_compile(None, options)
    context = CompileContext(context_of(args, chosen).target, chosen, Trace("joint"))
    kinds = excerpt.types.values()
    rounded = any(isinstance(kind, TensorType) and kind.dtype.itemsize < 4 for kind in kinds)
    for step in record_steps(made["f"], args, context):
        if differs(step, step.after, _ROUNDED if rounded else _EXACT) is not None:
            return step.stage
    return BEHIND


def _asked(hunt: Hunt, work: Callable[..., str], *args: Any) -> str:
    """Call a function in a separate process; return its result, or "" if it fails."""
    try:
        said: str = hunt.apart(work, *args)
        return said
    except (Died, FusecError, RuntimeError):
        return ""
