"""Plans: how each axis of a kernel runs.

Grammar of the printed form::

    plan ::= 'plan' kernel (axis '=' binding) ...   gpu | cpu
    gpu ::= 'warps=' n ['stages=' n] ['descriptors'] ['adds_tiles'] ['registers=' n] ['packed']
            ['cooperative'] ['programs=' n] ['dependent']
    cpu ::= ['peel'] ['prefetch=' iterations]
    binding ::= ('grid' | 'grid*' tile | 'lanes(' width ')' | 'loop' | 'loop*' tile)
                ['by' chunk] ['in' fold] ['transposed']

An axis that is cut, ``grid*16`` or ``loop*16``, has an outer part (grid or loop) and an inner part
that is a lane axis of that width. ``chunk`` cuts the outer part once more: ``chunk`` tiles a grid
point, in a loop, so that only the last of them can be ragged. A tile ``in 8`` is 8 consecutive rows
of lanes, which each iteration folds into one: the loop carries an eighth of a tile. Lanes ``in 4``
are 4 consecutive rows of lanes as well, of which a thread has one element, or vector, each.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, replace

from fusec.ir.dtype import DType
from fusec.ir.graph import Kernel
from fusec.ir.index import Axis
from fusec.ir.program import LaunchSettings
from fusec.ir.verify import check


class LoopKind(enum.Enum):
    """Where the outer part of an axis runs."""

    GRID = "grid"
    LOOP = "loop"
    LANES = "lanes"


@dataclass(frozen=True, slots=True)
class Binding:
    """How one axis runs.

    Attributes:
        kind: where the outer part runs; LANES means that there is no outer part.
        tile: lanes of the inner part; 1 means that the axis has no lanes.
        chunk: tiles that one grid point visits in a loop (GRID), or that the inner of two nested
            loops visits (LOOP); 0 for none.
        fold: rows of lanes that each iteration of a loop folds, before it combines the result with
            its accumulator: contiguous elements are in one row, so that a thread folds its own. Of
            LANES: consecutive rows of lanes, the outermost of all lanes, so that warps are spread
            over the lanes of other axes first.
        transposed: loads are contiguous along this axis, but strided along the lanes: blocks of
            ``chunk`` by the lanes go through a private array (``codegen/cpp/transposed.py``).
    """

    axis: Axis
    kind: LoopKind
    tile: int = 1
    chunk: int = 0
    fold: int = 1
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Plan(LaunchSettings):
    """How a kernel runs.

    Attributes:
        bindings: one for each axis, in nesting order: grid first, then loops, outermost first.
        peel: full tiles run without masks, the ragged rest in a second loop, which is more code;
            else all are masked.
        dots: contractions of tiles are ``Dot``s, for tensor cores.
        tf32: ``Dot``s of f32 round their operands to 10 bits of mantissa.
        promotes: f32 takes the sum of each tile's products of 8 bits, which tensor cores add
            with 14 bits (``COARSE_TERMS``).
        scaled: ``Dot``s have scales of blocks of terms (``ir/scaled.py``).
        online: a sum of exponentials runs in the loop of the maximum it refers to.
        mask_free: tiles on which a mask is all true run in a loop of their own, without it.
        widened: types that ``Dot``s multiply in f32, for want of instructions.
        reloads: loop invariants are loaded again in each iteration, from a cache, instead of taking
            registers that the loop needs.
        kept_cost, kept_bytes: a value of at least so many operations that a later sweep needs is
            stored in a private array of at most so many bytes (in a CPU's cache); 0: none is.
    """

    bindings: tuple[Binding, ...]
    peel: bool = False
    dots: bool = False
    online: bool = False
    mask_free: bool = False
    tf32: bool = False
    promotes: bool = False
    scaled: bool = False
    widened: frozenset[DType] = frozenset()
    reloads: bool = False
    kept_cost: int = 0
    kept_bytes: int = 0


def with_overlap(plans: tuple[Plan, ...], wanted: str, *, raced: bool) -> tuple[Plan, ...]:
    """Return plans whose launches overlap as the option ``dependent_launches`` wants.

    By "auto" the first plan of a kernel that is raced comes once more, behind all others.
    """
    overlapping = tuple(replace(plan, dependent=True) for plan in plans)
    if wanted == "auto":
        return (*plans, overlapping[0]) if raced else plans
    return overlapping if wanted == "always" else plans


def verify_plan(kernel: Kernel, plan: Plan) -> None:
    """Check that a plan binds each axis of a kernel, once.

    Raises:
        InvalidIR: naming axes that are bound twice, or not at all, or that the kernel lacks.
    """
    bound = Counter(binding.axis for binding in plan.bindings)
    wrong = [a.name for a in {*bound, *kernel.axes} if bound[a] != 1 or a not in kernel.axes]
    check(not wrong, f"plan of {kernel.name}", f"axes {', '.join(wrong)} are not bound once")


def print_plan(name: str, plan: Plan) -> str:
    """Return the plan on one line."""
    parts = [f"{b.axis.name}={print_binding(b)}" for b in plan.bindings]
    pipelined = plan.stages > 1
    if not plan.warps:
        tunables = {"peel": plan.peel, f"prefetch={plan.stages}": pipelined}
    else:
        tunables = {
            f"warps={plan.warps}": True,
            f"stages={plan.stages}": plan.dots or pipelined,
            "descriptors": plan.descriptors,
            "adds_tiles": plan.adds_tiles,
            f"registers={plan.registers}": bool(plan.registers),
            "packed": plan.packed,
            plan.roles: bool(plan.roles),
            f"programs={plan.programs}": bool(plan.programs),
            "dependent": plan.dependent,
        }
    shown = " ".join(text for text, is_on in tunables.items() if is_on)
    return "    ".join(filter(None, (f"plan {name}", "  ".join(parts), shown)))


def print_binding(binding: Binding) -> str:
    """Return how an axis runs: "lanes(1024)", "loop*16 by 4"."""
    fold = f" in {binding.fold}" if binding.fold > 1 else ""
    if binding.kind is LoopKind.LANES:
        return f"lanes({binding.tile}){fold}"
    text = str(binding.kind.value) + (f"*{binding.tile}" if binding.tile > 1 else "")
    text += f" by {binding.chunk}" if binding.chunk else ""
    return text + fold + (" transposed" if binding.transposed else "")
