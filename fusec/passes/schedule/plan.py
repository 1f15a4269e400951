"""Plans: how each axis of a kernel runs.

Grammar of the printed form::

    plan ::= 'plan' kernel (axis '=' binding) ...   'warps=' n ['stages=' n] ['descriptors']
             ['registers=' n] ['cooperative' | 'pingpong'] ['programs=' n]
    binding ::= ('grid' | 'grid*' tile | 'lanes(' width ')' | 'loop' | 'loop*' tile)
                ['by' chunk] ['in' fold] ['transposed']

An axis that is cut, ``grid*16`` or ``loop*16``, has an outer part (grid or loop) and an inner part
that is a lane axis of that width. ``chunk`` cuts the outer part once more: ``chunk`` tiles a grid
point, in a loop, so that only the last of them can be ragged. A tile ``in 8`` is 8 rows of lanes,
one behind the other, which each iteration folds to one: what the loop carries has a tile's eighth.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

from fusec.ir.graph import Kernel
from fusec.ir.index import Axis
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
        chunk: tiles that one grid point visits in a loop (GRID), or that one of two nested loops
            runs (LOOP); 0 for none.
        fold: rows of lanes that each iteration of a loop folds, before it combines them with what
            it carries: neighbours are in one row, so that one thread folds what it loads.
        transposed: memory is contiguous along this axis where lanes are not: blocks of a chunk by
            the lanes go through a private array (``codegen/cpp/transposed.py``).
    """

    axis: Axis
    kind: LoopKind
    tile: int = 1
    chunk: int = 0
    fold: int = 1
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How a kernel runs.

    Attributes:
        bindings: one for each axis, in nesting order: grid first, then loops, outermost first.
        warps: warps of a program instance (a GPU's tunable).
        peel: full tiles run without masks, the ragged rest in a second loop, which is more code;
            else all are masked.
        stages: iterations of a loop that are under way at once, loads ahead: copies on a GPU; on a
            CPU, prefetches of what each point of the grid loads alone.
        group: rows of tiles that run together along the columns (see ``Program.group``).
        dots: contractions of tiles are ``Dot``s, for tensor cores.
        tf32: ``Dot``s of f32 round their operands to 10 bits of mantissa.
        descriptors: operands of products are copied by tensor descriptors where they can be.
        registers: the most that a thread may have; 0 for as many as the compiler likes.
        roles: "cooperative": one warp loads, and others multiply; "pingpong": so do two groups of
            others, each at a tile of its own, of so many ``warps`` each; "": every warp does both.
        programs: so many programs walk over the grid in turns; 0: one for each of its points.
        online: a sum of exponentials runs in the loop of the maximum it refers to.
        mask_free: tiles that lie wholly inside a mask run in a loop of their own, without it.
        reloads: what a loop does not change is loaded again in each iteration, from a cache: tiles
            would take registers that the loop needs.
        kept_cost, kept_bytes: a value of so many operations that a later loop needs again is kept,
            in an array of at most so many bytes, private to an instance (in a CPU's cache); none
            is where that is 0.
    """

    bindings: tuple[Binding, ...]
    warps: int = 4
    peel: bool = False
    stages: int = 1
    group: int = 0
    dots: bool = False
    online: bool = False
    descriptors: bool = False
    registers: int = 0
    roles: str = ""
    programs: int = 0
    mask_free: bool = False
    tf32: bool = False
    reloads: bool = False
    kept_cost: int = 0
    kept_bytes: int = 0

    def binding(self, axis: Axis) -> Binding:
        """Return how ``axis`` runs."""
        return next(b for b in self.bindings if b.axis is axis)


def verify_plan(kernel: Kernel, plan: Plan) -> None:
    """Check that a plan binds each axis of a kernel, once.

    Raises:
        InvalidIR: naming the axes that are bound twice, or not at all, or are not the kernel's.
    """
    bound = Counter(binding.axis for binding in plan.bindings)
    wrong = [a.name for a in {*bound, *kernel.axes} if bound[a] != 1 or a not in kernel.axes]
    check(not wrong, f"plan of {kernel.name}", f"axes {', '.join(wrong)} are not bound once")


def print_plan(name: str, plan: Plan) -> str:
    """Return the plan on one line."""
    parts = [f"{b.axis.name}={print_binding(b)}" for b in plan.bindings]
    tunables = f"warps={plan.warps}" + (
        f" stages={plan.stages}" if plan.dots or plan.stages > 1 else ""
    )
    tunables += " descriptors" if plan.descriptors else ""
    tunables += f" registers={plan.registers}" if plan.registers else ""
    tunables += f" {plan.roles}" if plan.roles else ""
    tunables += f" programs={plan.programs}" if plan.programs else ""
    return f"plan {name}    {'  '.join(parts)}    {tunables}"


def print_binding(binding: Binding) -> str:
    """Return how an axis runs: "lanes(1024)", "loop*16 by 4"."""
    if binding.kind is LoopKind.LANES:
        return f"lanes({binding.tile})"
    text = str(binding.kind.value) + (f"*{binding.tile}" if binding.tile > 1 else "")
    text += f" by {binding.chunk}" if binding.chunk else ""
    text += f" in {binding.fold}" if binding.fold > 1 else ""
    return text + (" transposed" if binding.transposed else "")
