"""Return every stage of a graph's compile as text, for a target that need not be present.

The IR has no device, so that a graph traced on the CPU compiles for any row of
``codegen.targets``; Triton compiles down to machine code without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from fusec.codegen.host.wrapper import taken
from fusec.codegen.targets import GPUS, Target, find_target
from fusec.driver.build import triton_source
from fusec.driver.compiler import context_for, device_target, features_of
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import Compiled, compile_to_source
from fusec.driver.stages import all_stages
from fusec.driver.trace import Trace
from fusec.driver.user_passes import chosen_passes
from fusec.errors import Unsupported, UsageError
from fusec.frontend.parts import find_parts
from fusec.options import Options
from fusec.passes.stage import ASSEMBLY, LEVELS
from fusec.runtime.heap import settled_heap
from fusec.tools.assembly import Assembly, assembly_of
from fusec.tools.dumps import BEFORE_CAPTURE, Record, Records
from fusec.tools.report.observe import Observed

REWRITES = tuple(stage.name for stage in all_stages())
TEXT_STAGES = tuple(dict.fromkeys((*LEVELS, *REWRITES)))
STAGES = (*TEXT_STAGES, *ASSEMBLY)


@dataclass(frozen=True, slots=True)
class Staged:
    """One graph taken through the pipeline.

    Attributes:
        compiled: kernels, decisions and sources; None where the whole graph runs as eager kernels.
        problem: why the whole graph runs as eager kernels, or "".
        failure: the error that stopped the compile, or None; earlier stages have records.
        records: the outputs of stages, by name.
        by_rule: rules made each choice (``Options.by_rule``).
        passes: the names of the user's passes.
    """

    observed: Observed
    target: Target
    trace: Trace
    compiled: Compiled | None
    problem: str = ""
    failure: Exception | None = None
    records: Mapping[str, Record] = field(default_factory=dict)
    by_rule: bool = False
    passes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.observed.name

    def text(self, stage: str) -> str:
        """Return the text of a stage up to the wrapper, or a note that this compile has none.

        Raises:
            UsageError: for an unknown stage.
            Unsupported: if the graph never reached the stage, because it runs as eager kernels.
            Exception: the error that stopped the compile before the stage.
        """
        if stage not in (*TEXT_STAGES, *self.passes):
            raise UsageError.unknown("stage", stage, (*TEXT_STAGES, *self.passes))
        made = self.made(stage)
        if made is not None:
            return made.text
        self.check()
        if self.compiled is not None:
            return f"this compile has no stage {stage!r}"
        raise Unsupported(f"graph {self.name} runs as eager kernels: {self.problem}")

    def made(self, stage: str) -> Record | None:
        """Return a stage's record; None if this compile has no such stage, or never reached it."""
        return (self.observed.rewrites if stage in BEFORE_CAPTURE else self.records).get(stage)

    @property
    def called(self) -> Collection[str] | None:
        """The nodes of the FX graph that the wrapper calls; None without one."""
        return None if self.compiled is None else taken(self.compiled.host)["calls"]

    def check(self) -> None:
        """Raise the error that stopped the compile, if there is one."""
        if self.failure is not None:
            raise self.failure


def this_machine() -> str:
    """Return the name of the target that graphs run on here: the GPU's, or "cpu"."""
    return device_target(this_device())


def this_device() -> torch.device:
    """Return the device that models run on here: this machine's GPU, or else its CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_target(name: str | None) -> Target:
    """Return the row of a target; with no name, FUSEC_TARGET's, or else this machine's.

    A CPU has as many threads as torch: kernels with few, long iterations depend on their number.

    Raises:
        UsageError: if there is no such target.
    """
    wanted = name or Options.from_compile(None, None).target
    own = this_device() if wanted is None else None
    return find_target(wanted or this_machine(), **features_of(own))


@settled_heap()
def take_through(
    observed: Observed,
    target: Target,
    options: Options,
    adapt: Callable[[CompileContext], CompileContext] = lambda context: context,
) -> Staged:
    """Compile one graph to source text, keeping the text of each stage that it reaches.

    Args:
        adapt: changes the context of the compile, such as its judges.
    Raises:
        UsageError: for options that name a pass which is not registered.
    """
    chosen_passes(options)
    trace, records = Trace(observed.name), Records()
    try:
        # Nothing is timed for a report, but it shows the verdicts of earlier races.
        untimed = replace(options, race_budget_s=0.0)
        context = adapt(context_for(observed.graph, target, untimed, trace))
        context = replace(context, observe=(records.observe,))
        compiled = compile_to_source(observed.graph, context)
        records.add(compiled)
    except Unsupported as problem:
        made = Staged(observed, target, trace, None, problem.reason)
    except Exception as error:  # a defect: the stages before it help to find it
        made = Staged(observed, target, trace, None, str(error), error)
    else:
        made = Staged(observed, target, trace, compiled, by_rule=options.by_rule)
    return replace(made, records=records.kept, passes=options.pass_names)


def take_each(seen: Iterable[Observed], take: Callable[[Observed], Staged]) -> list[Staged]:
    """Take graphs through, without the subgraphs that are part of others: bodies of loops."""
    staged: list[Staged] = []
    lowered: set[str] = set()
    for one in seen:
        if not any(f"{one.name}.".startswith(f"{part}.") for part in lowered):
            staged.append(take(one))
            left = find_parts(one.graph, staged[-1].called)
            lowered.update(f"{one.name}.{p}" for p in find_parts(one.graph).keys() - left.keys())
    return staged


def check_assembly(stage: str, target: Target) -> None:
    """Raise UsageError for a stage below the source that a target does not have."""
    if stage not in target.assembly:
        raise UsageError(
            f"target {target.name!r} has no stage {stage!r}: its kernels are {target.language}. "
            f"Use --target {'|'.join(GPUS)}, or a stage out of {', '.join(LEVELS)}."
        )


def assemble(staged: Staged, kernel: str) -> Assembly:
    """Compile one kernel of a graph for its target, down to machine code.

    Raises:
        BuildError: if Triton or ptxas rejects it.
    """
    staged.check()
    if staged.compiled is None:
        raise Unsupported(f"graph {staged.name} runs as eager kernels: {staged.problem}")
    code = staged.compiled.code[kernel]  # kernels of one structure share the code of the first
    return assembly_of(triton_source(staged.compiled, code), staged.target.name)
